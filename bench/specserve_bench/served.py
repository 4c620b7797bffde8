"""A server in a process of its own, and its CPU time and memory."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

READY = re.compile(r"ready in [\d.]+ s at http://([\d.]+):(\d+)")
TICK = os.sysconf("SC_CLK_TCK")


class Served:
    """`specserve serve` with these arguments, at any free port; ended when the block ends."""

    def __init__(self, *args: object, is_quiet: bool = True) -> None:
        """`is_quiet` drops the server's log."""
        started_at = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specserve", "serve", *map(str, args), "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := READY.search(line):
                self.host, self.port = found[1], int(found[2])
                self.ready_seconds = time.perf_counter() - started_at
                return
        raise RuntimeError(f"the server did not start: exit code {self.process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def cpu_seconds(self) -> float:
        """CPU time of the HTTP process, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def resident_bytes(self) -> int:
        """Resident memory of the HTTP process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def settings(**values: object) -> Sequence[str]:
    """section__key=value -> the flags."""
    return [f"--set={key.replace('__', '.')}={value}" for key, value in values.items()]
