"""Choosing the number of threads by timing the steps that requests need."""

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from threading import Lock, local

import torch
from torch import Tensor

from specserve_kernels.cpu.compiler import cpu_name, source_hash
from specserve_kernels.cpu.kept import keep, kept_file, read_kept
from specserve_kernels.threads import Topology, check_threads, topology
from specserve_kernels.types import FixedThreads, Threads

STEPS, RANK = 9, 2  # steps timed with each of two numbers; their third best times are compared
SOON, RARELY = 100, 5000  # steps of a size after which what is settled is compared again
HOPELESS, HOPELESS_STEPS = 1.5, 4  # a number is dropped if its best of 4 steps is 1.5 times slower


def tune(
    step: Callable[[int], Tensor], most: int, threads: int | None, key: str
) -> tuple[Threads, str]:
    """A thread for each core at first, unless earlier measurements of the model `key` were kept.

    No step is run here: `MeasuredThreads` times those that requests need.
    """
    if threads is not None:
        return FixedThreads(check_threads(threads)), f"{threads}, as configured"
    machine = topology()
    if machine.cpus == 1:
        return FixedThreads(1), "1, as there is one CPU"
    cpu = cpu_name().decode(errors="replace")
    file = kept_file("threads", key, str(machine), source_hash(), cpu)  # of these kernels, too
    measured = MeasuredThreads(machine, file)
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
        """The faster number; None until it is known. A far slower one is dropped early."""
        held, tried = self.seconds[self.holder], self.seconds[self.challenger]
        if min(len(tried), len(held)) >= HOPELESS_STEPS:
            for one, other in ((self.holder, self.challenger), (self.challenger, self.holder)):
                if min(self.seconds[other]) > HOPELESS * min(self.seconds[one]):
                    return one
        if len(tried) < STEPS or len(held) < STEPS:
            return None
        # Other load makes some steps slower and none faster; the very best may have had less to do.
        is_better = sorted(tried)[RANK] < sorted(held)[RANK]
        return self.challenger if is_better else self.holder


def duels(start: int, machine: Topology, is_upward: bool) -> Generator[Duel, None, int]:
    """The best number, found by duels from `start` on; each is yielded until it has a winner.

    The challengers are the next of 1, 2, 4, ..., all cores, all CPUs: in one direction as long as
    they win, in the other one if the first of them loses. Where all cores are best, one less is
    tried as well: the core that is left can be another process's.
    """
    best = start
    for upward in (is_upward, not is_upward):
        while (challenger := neighbor(best, machine, upward)) is not None:
            yield (duel := Duel(best, challenger))
            if duel.winner() == best:
                break
            best = challenger
        if best != start:
            break
    if best == machine.cores > 2:
        yield (duel := Duel(best, best - 1))
        best = duel.winner() or best
    return best


def neighbor(number: int, machine: Topology, is_upward: bool) -> int | None:
    """The next larger or smaller number to try."""
    powers = (1 << bits for bits in range(machine.cores.bit_length()))
    ladder = {*powers, machine.cores, machine.cpus}
    if is_upward:
        return min((n for n in ladder if n > number), default=None)
    return max((n for n in ladder if n < number), default=None)


class MeasuredThreads:
    """A number of threads for each size of a step, settled by timing real steps.

    In steps of few rows, barriers can cost more than further threads gain. Sizes are powers of two:
    steps of up to 1, 2, 4, ... rows. Each size starts with a thread a core against fewer; as long
    as the smaller number wins, it is compared with a smaller one, so that no step is ever much
    slower than it need be. The numbers that are settled are kept in `file`, for the next start.

    A neighbor that was busy may have decided, so what is settled is compared again: soon if it is
    new or an earlier process settled it, rarely once two searches agree. Then larger numbers come
    first. And as more threads that pay in a step pay in one of more rows, the numbers that are used
    never fall from size to size: what contradicts most of the others is not used (`rising`).
    """

    def __init__(self, machine: Topology, file: Path | None = None) -> None:
        self.machine, self.file = machine, file
        self.settled = read(file, machine.cpus)  # bits of the size -> number
        self.numbers = rising(self.settled, machine.cores)  # those that are used
        self.before = dict(self.settled)  # what the search before the latest one found
        self.searches: dict[int, Generator[Duel, None, int]] = {}  # bits of the size -> its duels
        self.duels: dict[int, Duel] = {}  # bits of the size -> the one that is going on
        self.lock = Lock()  # engines that share a model's weights share this, too
        self.used = local()  # `number`, by the thread that steps
        self.num_left = dict.fromkeys(self.settled, SOON)  # steps until a size is compared again

    def use(self, rows: int) -> None:
        size = size_of(rows)
        with self.lock:
            if size not in self.settled and size not in self.duels:
                self.search(size, duels(self.machine.cores, self.machine, is_upward=False))
            number = self.numbers[size] if size in self.settled else self.duels[size].next()
        self.used.number = number
        torch.set_num_threads(number)

    def observe(self, rows: int, seconds: float) -> None:
        with self.lock:
            self.count(size_of(rows), self.used.number, seconds)

    def count(self, size: int, number: int, seconds: float) -> None:
        if size in self.settled:
            self.num_left[size] -= 1
            if self.num_left[size] == 0:
                start = self.settled.pop(size)
                self.search(size, duels(start, self.machine, is_upward=True))
            return
        duel = self.duels[size]
        if number not in duel.seconds:
            return  # another engine's step has ended the duel that this step began in
        duel.seconds[number].append(seconds)
        if duel.winner() is not None:
            self.advance(size)

    def search(self, size: int, course: Generator[Duel, None, int]) -> None:
        self.searches[size] = course
        self.advance(size)

    def advance(self, size: int) -> None:
        """Begin the size's next duel, or settle its number."""
        try:
            self.duels[size] = next(self.searches[size])
        except StopIteration as end:
            self.settle(size, end.value)

    def settle(self, size: int, number: int) -> None:
        self.num_left[size] = RARELY if self.before.get(size) == number else SOON
        self.settled[size] = self.before[size] = number
        self.numbers = rising(self.settled, self.machine.cores)
        self.searches.pop(size, None)
        self.duels.pop(size, None)
        if self.file is not None:
            keep(self.file, self.settled)

    def is_settled(self, rows: int) -> bool:
        return size_of(rows) in self.settled

    def words(self) -> str:
        if not self.settled:
            return f"{self.machine.cores}, until steps have been timed"
        up_to = {number: size for size, number in sorted(self.numbers.items())}
        *smaller, last = up_to
        if last != self.machine.cores:  # with which larger steps begin
            smaller, last = list(up_to), self.machine.cores
        runs = [f"{n} for up to {1 << up_to[n]} row{'s' if up_to[n] else ''}" for n in smaller]
        runs.append(f"{last} for more" if runs else str(last))
        return f"{', '.join(runs)}, as timed before"


def rising(settled: Mapping[int, int], cores: int) -> dict[int, int]:
    """The numbers by size, changed where one is less than that of a smaller size: as few of them as
    possible, and rather towards a thread a core.
    """
    numbers, sizes = sorted(set(settled.values())), sorted(settled)
    # Of the choices for the sizes so far that end with a number, the best: how many are changed,
    # how far they are from `cores`, and the choice.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {n: (0, 0, ()) for n in numbers}
    for size in sizes:
        for n in reversed(numbers):
            changed, distance, chosen = min(best[smaller] for smaller in numbers if smaller <= n)
            best[n] = changed + (settled[size] != n), distance + abs(cores - n), (*chosen, n)
    _, _, chosen = min(best.values(), default=(0, 0, ()))
    return dict(zip(sizes, chosen, strict=True))


def size_of(rows: int) -> int:
    return (rows - 1).bit_length()


def read(file: Path | None, allowed: int) -> dict[int, int]:
    """The numbers that an earlier process settled; empty if the file is missing or not valid."""
    settled = read_kept(file, dict[int, int]) or {}
    is_ours = all(1 <= n <= allowed for n in settled.values())
    return settled if is_ours and all(0 <= size < 64 for size in settled) else {}
