"""One model on every engine: sweeps, then interleaved rounds of every case."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve_bench.bound import Rates
from specserve_bench.peers import rounds
from specserve_bench.peers.cases import Case
from specserve_bench.peers.peer import Peer, PeerError, one_line, started
from specserve_bench.peers.rounds import Group, Job
from specserve_bench.peers.setups import Setups
from specserve_bench.peers.sweep import Pick, Sweep
from specserve_bench.peers.systems import Choice, System, guess_choices, thread_choices


class Limits(NamedTuple):
    rounds: int
    cores: int  # threads are tried up to so many
    timeout: float  # seconds to load, and for a case


class Comparison:
    """`tell` is told what goes on, `gauge` measures the CPU before each round."""

    def __init__(
        self,
        systems: Sequence[System],
        setups: Setups,
        limits: Limits,
        tell: Callable[[str], object],
        gauge: Callable[[], Rates],
    ) -> None:
        self.systems, self.setups, self.limits = systems, setups, limits
        self.tell, self.gauge = tell, gauge
        self.sweep = Sweep(self.start, tell)
        self.versions: dict[str, str] = {}

    @contextmanager
    def start(self, system: System, choice: Choice, cases: Sequence[Case]) -> Iterator[Peer]:
        try:
            setup = self.setups.setup(system, choice, cases)
        except ConfigError as e:
            raise PeerError(one_line(str(e))) from e
        with started(system, setup, self.limits.timeout) as peer:
            self.versions[system.name] = peer.version
            yield peer

    def run(self, cases: Mapping[str, Case], drafts: Sequence[Path | None]) -> list[Group]:
        """The last groups are those of guesses, one for each draft."""
        plain = cases["plain"]
        decoding, prompts = (
            {s: self.sweep.pick(s, self.threads(s), plain, figure) for s in self.systems}
            for figure in ("tpot_ms", "ttft_ms")
        )
        groups = [
            [
                *(Job(s, plain, decoding[s]) for s in self.systems),
                *(Job(s, cases["prompt"], prompts[s]) for s in self.systems),
            ],
            [Job(s, cases["batch"], prompts[s]) for s in self.systems],
        ]
        for draft in drafts:
            picks = {s: self.guesses(s, decoding[s], cases["guessed"], draft) for s in self.systems}
            groups.append([Job(s, cases["guessed"], picks[s]) for s in self.systems])
        return [self.measure(jobs) for jobs in groups]

    def threads(self, system: System) -> list[Choice]:
        return thread_choices(system, self.limits.cores)

    def guesses(self, system: System, plain: Pick, case: Case, draft: Path | None) -> Pick:
        """The best guesses on the number of threads that is best without."""
        if plain.choice is None:
            return plain
        folder = None if draft is None else str(draft)
        choices = guess_choices(system, plain.choice.threads, folder)
        return self.sweep.pick(system, choices, case, "tpot_ms")

    def measure(self, jobs: Sequence[Job]) -> Group:
        self.tell(jobs[-1].case.name)
        return rounds.measure(jobs, self.start, self.limits.rounds, self.tell, self.gauge)
