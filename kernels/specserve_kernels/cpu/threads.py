"""Choosing the number of threads by timing steps of requests."""

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from threading import Lock, local

from torch import Tensor

from specserve_kernels.cpu.compiler import cpu_name, source_hash
from specserve_kernels.cpu.kept import keep, kept_file, read_kept
from specserve_kernels.threads import Topology, check_threads, topology
from specserve_kernels.types import FixedThreads, Threads, set_threads

STEPS, RANK = 9, 2  # steps timed per number; index of the compared time, best first
SOON, RARELY = 100, 5000  # steps of a size until its number is searched again
HOPELESS, HOPELESS_STEPS = 1.5, 4  # ratio of best times that ends a duel early, minimum steps


def tune(
    step: Callable[[int], Tensor], most: int, threads: int | None, key: str
) -> tuple[Threads, str]:
    """Start with one thread per core, or with stored measurements of the model `key`.

    This runs no steps: `MeasuredThreads` times the steps of requests.
    """
    if threads is not None:
        return FixedThreads(check_threads(threads)), f"{threads}, as configured"
    machine = topology()
    if machine.cpus == 1:
        return FixedThreads(1), "1, because there is one CPU"
    cpu = cpu_name().decode(errors="replace")
    file = kept_file("threads", key, str(machine), source_hash(), cpu)
    measured = MeasuredThreads(machine, file)
    return measured, measured.words()


class Duel:
    """A comparison of two numbers of threads, which alternate in steps of one size."""

    def __init__(self, holder: int, challenger: int) -> None:
        self.holder, self.challenger = holder, challenger
        self.seconds: dict[int, list[float]] = {holder: [], challenger: []}

    def next(self) -> int:
        """Return the number for the next step. They alternate, so that other load affects both
        equally.
        """
        held, tried = self.seconds[self.holder], self.seconds[self.challenger]
        return self.holder if len(held) <= len(tried) else self.challenger

    def winner(self) -> int | None:
        """Return the faster number, None until it is known. A far slower number loses early."""
        held, tried = self.seconds[self.holder], self.seconds[self.challenger]
        if min(len(tried), len(held)) >= HOPELESS_STEPS:
            for one, other in ((self.holder, self.challenger), (self.challenger, self.holder)):
                if min(self.seconds[other]) > HOPELESS * min(self.seconds[one]):
                    return one
        if len(tried) < STEPS or len(held) < STEPS:
            return None
        # Other load only slows steps down, so a low rank is robust. The best steps may have less
        # work.
        is_better = sorted(tried)[RANK] < sorted(held)[RANK]
        return self.challenger if is_better else self.holder


def duels(start: int, machine: Topology, is_upward: bool) -> Generator[Duel, None, int]:
    """Search the best number by duels from `start` on. Each duel is yielded until it has a winner.

    Challengers are neighbors in the list 1, 2, 4, ..., all cores, all CPUs. The search goes on in
    one direction while they win, and in the other if the first one loses. If all cores are best,
    one less is tried, which leaves a core to other processes.
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
    """Return the next larger or smaller number to try."""
    powers = (1 << bits for bits in range(machine.cores.bit_length()))
    ladder = {*powers, machine.cores, machine.cpus}
    if is_upward:
        return min((n for n in ladder if n > number), default=None)
    return max((n for n in ladder if n < number), default=None)


class MeasuredThreads:
    """The number of threads for each step size, chosen by timing real steps.

    In steps of few rows, barriers can cost more than additional threads gain. Sizes are powers of
    two: steps of up to 1, 2, 4, ... rows. Each size starts with one thread per core against fewer
    threads. While the smaller number wins, it is compared with the next smaller one. `file` stores
    the results for the next start.

    A result may be due to other load, so every search is repeated, larger numbers first. It is
    repeated soon if the result is new or from an earlier process, and rarely after two searches
    agree. The used numbers never decrease from size to size, because threads that pay in a step
    also pay in larger steps (`rising`).
    """

    def __init__(self, machine: Topology, file: Path | None = None) -> None:
        self.machine, self.file = machine, file
        self.settled = read(file, machine.cpus)  # bits of the size -> number
        self.numbers = rising(self.settled, machine.cores)  # by size, the numbers in use
        self.before = dict(self.settled)  # results of the previous searches
        self.searches: dict[int, Generator[Duel, None, int]] = {}  # bits of the size -> search
        self.duels: dict[int, Duel] = {}  # bits of the size -> current duel
        self.lock = Lock()  # engines that share a model's weights share this object
        self.used = local()  # `number`, per stepping thread
        self.num_left = dict.fromkeys(self.settled, SOON)  # steps until the next search, by size

    def use(self, rows: int) -> None:
        size = size_of(rows)
        with self.lock:
            if size not in self.settled and size not in self.duels:
                self.search(size, duels(self.machine.cores, self.machine, is_upward=False))
            number = self.numbers[size] if size in self.settled else self.duels[size].next()
        self.used.number = number
        set_threads(number)

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
            return  # another engine's step ended this step's duel
        duel.seconds[number].append(seconds)
        if duel.winner() is not None:
            self.advance(size)

    def search(self, size: int, course: Generator[Duel, None, int]) -> None:
        self.searches[size] = course
        self.advance(size)

    def advance(self, size: int) -> None:
        """Start the next duel of a size, or settle its number."""
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
            return f"{self.machine.cores} until the first steps are measured"
        up_to = {number: size for size, number in sorted(self.numbers.items())}
        *smaller, last = up_to
        if last != self.machine.cores:  # larger sizes start with all cores
            smaller, last = list(up_to), self.machine.cores
        runs = [f"{n} for up to {1 << up_to[n]} row{'s' if up_to[n] else ''}" for n in smaller]
        runs.append(f"{last} for more" if runs else str(last))
        return f"{', '.join(runs)}, measured at an earlier start"


def rising(settled: Mapping[int, int], cores: int) -> dict[int, int]:
    """Change as few numbers as possible so that they do not decrease from size to size.

    Ties go to the choice closest to one thread per core.
    """
    numbers, sizes = sorted(set(settled.values())), sorted(settled)
    # The best choice for the sizes so far, by its last number: number of changes, total distance
    # from `cores`, and the choice.
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
    """Read an earlier process's numbers; empty if the file is missing or invalid."""
    settled = read_kept(file, dict[int, int]) or {}
    is_ours = all(1 <= n <= allowed for n in settled.values())
    return settled if is_ours and all(0 <= size < 64 for size in settled) else {}
