"""Short runs that find each engine's best settings."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from specserve_bench.peers.cases import Case, tpot_ms, ttft_ms
from specserve_bench.peers.peer import PeerError, Start
from specserve_bench.peers.systems import Choice, System

REPEATS = 3


class Tried(NamedTuple):
    """One point: its figures, or why there are none."""

    system: str
    choice: Choice
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    error: str | None = None

    def words(self) -> str:
        told = self.error
        if self.tpot_ms is not None:
            told = f"TPOT {self.tpot_ms:.1f} ms, TTFT {self.ttft_ms:.0f} ms"
        return f"{self.system}, {self.choice.words()}: {told}"


class Pick(NamedTuple):
    """The best choice, or why there is none."""

    choice: Choice | None
    error: str | None = None


class Sweep:
    """Tries each choice once; `tell` is told of each."""

    def __init__(self, start: Start, tell: Callable[[str], object]) -> None:
        self.start, self.tell = start, tell
        self.tried: dict[tuple[str, Choice], Tried] = {}

    def pick(self, system: System, choices: Iterable[Choice], case: Case, figure: str) -> Pick:
        """The choice with the least of a figure."""
        tried = [self.result(system, choice, case) for choice in choices]
        ran = [t for t in tried if t.error is None]
        if not ran:
            return Pick(None, tried[-1].error)
        return Pick(min(ran, key=lambda t: float(getattr(t, figure))).choice)

    def result(self, system: System, choice: Choice, case: Case) -> Tried:
        key = system.name, choice
        if key not in self.tried:
            self.tried[key] = self.run(system, choice, case.short())
            self.tell(self.tried[key].words())
        return self.tried[key]

    def run(self, system: System, choice: Choice, case: Case) -> Tried:
        try:
            with self.start(system, choice, [case]) as peer:
                runs = [
                    peer.run(case.prompts, case.num_tokens, case.is_batch)
                    for _ in range(1 + REPEATS)
                ][1:]  # the first one warms up
        except PeerError as e:
            return Tried(system.name, choice, error=str(e))
        # The least: another process's burst must not cost a system its best setting.
        return Tried(system.name, choice, min(map(tpot_ms, runs)), min(map(ttft_ms, runs)))
