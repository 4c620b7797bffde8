"""Records the CPU's name and the commit of the code with each measurement.

Needs nothing but the standard library, as `make gpu-check` starts without an environment.
"""

import argparse
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

NO_GIT = "no git tree"  # recorded in place of a commit by an installed wheel
DIRTY = "-dirty"  # end of a commit with uncommitted changes
OUTPUTS = ":(exclude)bench/results", ":(exclude)docs"  # their changes change no measurement


CPU_FILE = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The CPU's name. Virtual machines may hide which model it is: then with its family and model,
    because generations differ in their arithmetic.
    """
    try:
        lines = CPU_FILE.read_text().splitlines()
    except OSError:
        lines = []  # only Linux has this file
    fields = {key.strip(): value for key, _, value in (line.partition(": ") for line in lines)}
    name = fields.get("model name") or platform.processor() or "unknown"
    if "cpu family" not in fields or any(map(str.isdigit, name)):
        return name
    return f"{name} (family {fields['cpu family']}, model {fields['model']})"


@cache  # the commit at the start: the process runs the code that it read then
def commit() -> str:
    """The commit of this file's repository, with -dirty if tracked files differ from it.

    Results and documents do not count: a command that writes results would make its own tree dirty.
    """
    here = Path(__file__)
    if git("ls-files", "--error-unmatch", here.name) is None:
        return NO_GIT
    top = git("rev-parse", "--show-toplevel")
    known = git("rev-parse", "--short=12", "HEAD")
    if top is None or known is None:
        return NO_GIT
    changed = git("-C", top, "status", "--porcelain", "--untracked-files=no", "--", ".", *OUTPUTS)
    return known if changed == "" else f"{known}{DIRTY}"


def git(*words: str) -> str | None:
    """The output of a git command in this file's folder; None if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def add_allow_dirty(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--allow-dirty",
        action="store_true",
        help="write results although the git tree has uncommitted changes; the results record it",
    )


def refusal(output: str, allow_dirty: bool) -> str | None:
    """Why results must not be written, if the git tree has uncommitted changes; else None."""
    if allow_dirty or not commit().endswith(DIRTY):
        return None
    return (
        f"{output}: the git tree has uncommitted changes, so the result would belong to no commit. "
        "Commit or stash the changes, or add --allow-dirty."
    )


def exit_if_dirty(output: str, allow_dirty: bool) -> None:
    """End the process with the reason, for programs without a parser of their own errors."""
    refused = refusal(output, allow_dirty)
    if refused is not None:
        raise SystemExit(refused)


def measured(machine: Mapping[str, Any]) -> str:
    """How, when and on what a result was measured, for captions."""
    hardware = f"{machine['cores']} cores of an {machine['cpu']}"
    if "gpu" in machine:
        hardware = f"{machine['gpu']}, {hardware}"
    known = commit_words(str(machine.get("commit", NO_GIT)))
    return f"measured {known}, on {machine['date']}, on {hardware}"


def commit_words(known: str) -> str:
    if known == NO_GIT:
        return "with an installed package (no git tree)"
    if known.endswith(DIRTY):
        return f"on an uncommitted tree after commit {known.removesuffix(DIRTY)}"
    return f"at commit {known}"
