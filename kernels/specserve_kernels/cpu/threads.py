"""Choosing the number of threads by timing the steps that requests need."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from specserve_kernels.cpu.compiler import BuildError, cache_folder, cpu_name
from specserve_kernels.threads import FixedThreads, Threads, allowed_threads, check_threads

STEPS, RANK = 9, 2  # steps timed with each of two numbers; their third best times are compared
SOON, RARELY = 100, 5000  # steps of a size after which what is settled is compared again
HOPELESS, HOPELESS_STEPS = 1.5, 4  # a number is dropped if its best of 4 steps is 1.5 times slower

log = logging.getLogger("specserve")


def tune(
    step: Callable[[int], Tensor], most: int, threads: int | None, key: str
) -> tuple[Threads, str]:
    """All threads at first, unless earlier measurements of the model `key` have been kept.

    No step is run here: `MeasuredThreads` times those that requests need.
    """
    if threads is not None:
        return FixedThreads(check_threads(threads)), f"{threads}, as configured"
    allowed = allowed_threads()
    if allowed == 1:
        return FixedThreads(1), "1, as there is one CPU"
    measured = MeasuredThreads(allowed, cache_file(key, allowed))
    return measured, measured.words()


class Duel:
    """Two numbers of threads, used in turns for steps of one size."""

    def __init__(self, holder: int, challenger: int) -> None:
        self.holder, self.challenger = holder, challenger
        self.seconds: dict[int, list[float]] = {holder: [], challenger: []}

    def next(self) -> int:
        """The number for the next step: in turns, so that other load affects both alike."""
        held, tried = self.seconds[self.holder], self.seconds[self.challenger]
        return self.holder if len(held) <= len(tried) else self.challenger

    def winner(self) -> int | None:
        """The faster number; None until it is known. A far slower challenger is dropped early."""
        held, tried = self.seconds[self.holder], self.seconds[self.challenger]
        if len(tried) >= HOPELESS_STEPS and min(tried) > HOPELESS * min(held):
            return self.holder
        if len(tried) < STEPS:
            return None
        # Other load makes some steps slower and none faster; the very best may have had less to do.
        is_better = sorted(tried)[RANK] < sorted(held)[RANK]
        return self.challenger if is_better else self.holder


class MeasuredThreads:
    """A number of threads for each size of a step, settled by timing real steps.

    In steps of few rows, barriers can cost more than further threads gain. Sizes are powers of two:
    steps of up to 1, 2, 4, ... rows. Each size starts with all CPUs against half as many; as long
    as the smaller number wins, it is compared with its half, so that no step is ever much slower
    than it need be. The numbers that are settled are kept in `file`, for the next start.

    A neighbor that was busy may have decided, so what is settled is compared again: soon if an
    earlier process settled it, else rarely. Then twice as many threads come first, where allowed.
    """

    def __init__(self, allowed: int, file: Path | None = None) -> None:
        self.allowed, self.file = allowed, file
        self.settled = read(file, allowed)  # bits of the size -> number
        self.duels: dict[int, Duel] = {}  # bits of the size -> the numbers that are compared
        self.used = allowed
        self.num_left = dict.fromkeys(self.settled, SOON)  # steps until a size is compared again

    def use(self, rows: int) -> None:
        size = size_of(rows)
        self.used = self.settled[size] if size in self.settled else self.duel(size).next()
        torch.set_num_threads(self.used)

    def observe(self, rows: int, seconds: float) -> None:
        size = size_of(rows)
        if size in self.settled:
            self.num_left[size] -= 1
            if self.num_left[size] == 0:
                self.reopen(size)
            return
        duel = self.duel(size)
        duel.seconds[self.used].append(seconds)
        winner = duel.winner()
        if winner is not None:
            challenger = self.next_challenger(duel, winner)
            if challenger is None:
                self.settle(size, winner)
            else:
                self.duels[size] = Duel(winner, challenger)

    def next_challenger(self, duel: Duel, winner: int) -> int | None:
        """Further in the direction that won; half as many where twice as many have lost."""
        is_upward = duel.challenger > duel.holder
        if winner == duel.challenger:
            further = min(2 * winner, self.allowed) if is_upward else winner // 2
            return further if further not in (0, winner) else None
        return winner // 2 or None if is_upward else None

    def reopen(self, size: int) -> None:
        number = self.settled.pop(size)
        twice = min(2 * number, self.allowed)
        self.duels[size] = Duel(number, twice if twice > number else number // 2)

    def is_settled(self, rows: int) -> bool:
        return size_of(rows) in self.settled

    def duel(self, size: int) -> Duel:
        return self.duels.setdefault(size, Duel(self.allowed, self.allowed // 2))

    def settle(self, size: int, number: int) -> None:
        self.settled[size], self.num_left[size] = number, RARELY
        self.duels.pop(size, None)
        if self.file is not None:
            write(self.file, self.settled)

    def words(self) -> str:
        if not self.settled:
            return f"{self.allowed}, until steps have been timed"
        sizes = sorted(self.settled)
        runs = [
            f"{self.settled[size]} for up to {1 << size} row{'s' if size else ''}"
            for size, larger in zip_longest(sizes, sizes[1:])
            if larger is None or self.settled[larger] != self.settled[size]
        ]
        return f"{', '.join(runs)}, as timed before"


def size_of(rows: int) -> int:
    return (rows - 1).bit_length()


def cache_file(key: str, allowed: int) -> Path | None:
    """The file for one model on one kind of machine; None if the cache cannot be written to."""
    parts = key, str(allowed), torch.__version__, cpu_name().decode(errors="replace")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    try:
        return cache_folder() / f"threads-{digest}.json"
    except (BuildError, OSError):
        return None


def read(file: Path | None, allowed: int) -> dict[int, int]:
    """The numbers that an earlier process settled; empty if the file is missing or not valid."""
    try:
        found = json.loads(file.read_text()) if file is not None else {}
        settled = {int(size): number for size, number in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    is_ours = all(type(n) is int and 1 <= n <= allowed for n in settled.values())
    return settled if is_ours and all(0 <= size < 64 for size in settled) else {}


def write(file: Path, settled: Mapping[int, int]) -> None:
    """Replace the file in one piece: another process may read it at any time."""
    try:
        handle, temporary = tempfile.mkstemp(suffix=".json", dir=file.parent)
        with os.fdopen(handle, "w") as out:
            json.dump(dict(settled), out)
        os.replace(temporary, file)
    except OSError as e:
        log.debug("%s: the numbers of threads could not be kept: %s", file, e)
