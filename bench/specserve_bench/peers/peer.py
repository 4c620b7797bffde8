"""An engine in a process of its own, which is stopped whenever it is not asked."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import monotonic
from typing import Any

import specserve_bench
from specserve_bench.peers.cases import Case
from specserve_bench.peers.protocol import Setup, Timed, write_setup
from specserve_bench.peers.systems import Choice, System

READ_BYTES = 1 << 16
NOISE = ("Warning", "WARNING", "INFO", "^", "~")  # of a log's lines, none of which is an error


class PeerError(RuntimeError):
    """An engine is absent, has failed or takes too long."""


class Peer:
    """Answers one question at a time. Close it, whatever happens: its process may be stopped."""

    def __init__(self, system: System, setup: Setup, timeout: float) -> None:
        self.system, self.timeout = system, timeout
        self.buffer = b""
        self.log = TemporaryFile()  # noqa: SIM115, closed with the peer
        # A folder with nothing but this package, so that the engine finds its own packages alone.
        self.folder = TemporaryDirectory(prefix="specserve-peer-")
        package = Path(specserve_bench.__file__).parent
        Path(self.folder.name, package.name).symlink_to(package)
        module = f"specserve_bench.peers.adapters.{system.adapter}"
        command = [system.python, "-m", module, json.dumps(write_setup(setup))]
        try:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder.name,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends all
            )
        except OSError as e:
            self.log.close()
            self.folder.cleanup()
            raise PeerError(f"{system.python}: {e.strerror}") from e
        try:
            self.version: str = self.answer()["version"]
        except BaseException:
            self.close()
            raise
        self.signal(signal.SIGSTOP)

    def run(self, prompts: Sequence[list[int]], num_tokens: int, is_batch: bool) -> list[Timed]:
        """Every prompt's tokens, one request after the other or all at once."""
        asked = {"prompts": prompts, "num_tokens": num_tokens, "is_batch": is_batch}
        self.signal(signal.SIGCONT)
        try:
            self.send(asked)
            return [read_timed(fields, num_tokens) for fields in self.answer()]
        finally:
            self.signal(signal.SIGSTOP)

    def send(self, asked: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as e:
            raise PeerError(self.last_words()) from e

    def answer(self) -> Any:
        line = self.line(monotonic() + self.timeout)
        told = json.loads(line)
        if "error" in told:
            raise PeerError(one_line(told["error"]))
        return told["ok"]

    def line(self, deadline: float) -> bytes:
        """The next line of its stdout; PeerError where none comes in time."""
        assert self.process.stdout is not None
        number = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([number], [], [], max(0, deadline - monotonic()))
            if not ready:
                raise PeerError(f"no answer within {self.timeout:g} s")
            read = os.read(number, READ_BYTES)
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
        told = [line for line in lines if line and not any(word in line for word in NOISE)]
        return told[-1] if told else f"ended with exit code {self.process.returncode}"

    def signal(self, number: int) -> None:
        """To the engine and all processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, with all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what was not sent does not matter any more
                pipe.close()
        self.folder.cleanup()


# Starts a system with some settings, with room for some cases.
Start = Callable[[System, Choice, Sequence[Case]], AbstractContextManager[Peer]]


@contextmanager
def started(system: System, setup: Setup, timeout: float) -> Iterator[Peer]:
    peer = Peer(system, setup, timeout)
    try:
        yield peer
    finally:
        peer.close()


def environment() -> dict[str, str]:
    """This process's, without what would show our packages, or our OpenMP settings, to others."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_WAIT_POLICY")
    return {name: value for name, value in os.environ.items() if name not in ours}


def read_timed(fields: dict[str, Any], num_tokens: int) -> Timed:
    timed = Timed(0.0)
    timed.token_ids, timed.times, timed.counts = (
        fields[name] for name in ("token_ids", "times", "counts")
    )
    if len(timed.token_ids) != num_tokens or sum(timed.counts) != num_tokens:
        raise PeerError(f"{len(timed.token_ids)} tokens came where {num_tokens} were asked for")
    return timed


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]
