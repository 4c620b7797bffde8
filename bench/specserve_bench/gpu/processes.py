"""A process with a time limit that leaves nothing behind, whatever it has started itself."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def run(
    command: Sequence[str],
    seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int | None:
    """The exit status; None where the process was killed at its limit.

    On the way out, an exception's included, everything it has started is killed: orphans and those
    in a session of their own, too.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # a descendant whose parent ends becomes a child of ours
    before = descendants()
    process = subprocess.Popen(
        command, env=env, cwd=cwd, start_new_session=True, preexec_fn=die_with_parent
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(before)
        process.poll()  # not `wait`: an interrupted one may have left its lock taken for good


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Have the system end the process when its parent is killed, and so cannot end it itself."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill(spared: set[int]) -> None:
    """All descendants but the spared ones; they are gone when this returns."""
    while rest := descendants() - spared:
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in rest:
            with suppress(ChildProcessError):  # a child's child becomes ours once that one is gone
                os.waitpid(pid, 0)
        time.sleep(0.01)


def descendants() -> set[int]:
    """Descendants of this process, by number."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name) state parent ..; a name may have spaces and brackets
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    new = children.get(os.getpid(), [])
    while new:
        found.update(new)
        new = [child for pid in new for child in children.get(pid, [])]
    return found
