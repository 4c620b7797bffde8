"""Environments of clients that this one has no room for: one each, as they want other versions."""

import subprocess
import sys
from pathlib import Path

import pytest

PINNED = Path(__file__).parent / "python"
ENVIRONMENTS = Path(__file__).parents[2] / ".clients"


def python_with(name: str) -> str:
    """The Python of an environment with exactly what `python/NAME.txt` names; kept for next time.

    The test is skipped where no package index answers.
    """
    pinned, folder = PINNED / f"{name}.txt", ENVIRONMENTS / name
    python, done = folder / "bin" / "python", folder / "installed.txt"
    if not done.exists() or done.read_text() != pinned.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        # Without dependencies, as all are named: none brings another torch.
        install = [python, "-m", "pip", "install", "--no-deps", "--retries=1", "-r", pinned]
        told = subprocess.run(install, capture_output=True, text=True)
        if told.returncode and "Retrying (Retry(" in told.stderr:
            pytest.skip(f"no package index answers: {name} is NOT checked here")
        assert told.returncode == 0, told.stderr
        done.write_text(pinned.read_text())
    return str(python)
