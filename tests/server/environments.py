"""Environments of clients that this one has no room for: one each, as they want other versions."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PINNED = Path(__file__).parent / "python"
ENVIRONMENTS = Path(__file__).parents[2] / ".clients"


def python_with(name: str, borrows_torch: bool = False) -> str:
    """The Python of an environment with exactly what `python/NAME.txt` names; kept for next time.

    With `borrows_torch` it sees the packages of this environment behind its own: a torch of its own
    may be another build, of some gigabytes. The test is skipped where no package index answers.
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
        if borrows_torch:
            packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
            (Path(packages) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
        done.write_text(pinned.read_text())
    return str(python)


if __name__ == "__main__":
    print(python_with(sys.argv[1]))
