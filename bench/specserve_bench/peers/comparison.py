"""One model on every engine: sweeps that find each one's best settings, then interleaved rounds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve.models.source import open_source
from specserve_bench.bound import Rates, kv_token_bytes, state_bytes
from specserve_bench.peers.cases import PeerCase, tpot_ms, ttft_ms
from specserve_bench.peers.gguf_file import write_gguf
from specserve_bench.peers.peer import Peer, PeerError, one_line
from specserve_bench.peers.protocol import AUTO, DRAFT, LOOKUP, Setup, Timed
from specserve_bench.peers.systems import PeerChoice, System, drafting_choices, thread_choices

STATES = 4  # room for a request's recurrent states and its checkpoints, in states
# Starts a system with some settings, with room for some cases.
Start = Callable[[System, PeerChoice, Sequence[PeerCase]], AbstractContextManager[Peer]]


class Tried(NamedTuple):
    """One point: its figures, or why there are none."""

    system: str
    choice: PeerChoice
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

    choice: PeerChoice | None
    error: str | None = None


class Sweep:
    """Tries each choice once, and reports each to `tell`. `runs` are measured, after one that warms
    up.
    """

    def __init__(self, start: Start, tell: Callable[[str], object], runs: int = 3) -> None:
        self.start, self.tell, self.runs = start, tell, runs
        self.tried: dict[tuple[str, PeerChoice], Tried] = {}

    def pick(
        self, system: System, choices: Iterable[PeerChoice], case: PeerCase, figure: str
    ) -> Pick:
        """The choice with the least of a figure."""
        tried = [self.result(system, choice, case) for choice in choices]
        ran = [t for t in tried if t.error is None]
        if not ran:
            return Pick(None, tried[-1].error)
        return Pick(min(ran, key=lambda t: float(getattr(t, figure))).choice)

    def result(self, system: System, choice: PeerChoice, case: PeerCase) -> Tried:
        key = system.name, choice
        if key not in self.tried:
            self.tried[key] = self.run(system, choice, case.short(min(self.runs, 2)))
            self.tell(self.tried[key].words())
        return self.tried[key]

    def run(self, system: System, choice: PeerChoice, case: PeerCase) -> Tried:
        try:
            with self.start(system, choice, [case]) as peer:
                runs = [
                    peer.run(case.prompts, case.num_tokens, case.is_batch)
                    for _ in range(1 + self.runs)
                ][1:]  # the first one warms up
        except PeerError as e:
            return Tried(system.name, choice, error=str(e))
        # The least: another process's burst must not cost a system its best setting.
        return Tried(system.name, choice, min(map(tpot_ms, runs)), min(map(ttft_ms, runs)))


class Lane:
    """A case on one system, with the settings that were best: its rounds, until one fails."""

    def __init__(self, system: System, case: PeerCase, pick: Pick) -> None:
        self.system, self.case, self.choice, self.error = system, case, *pick
        self.rounds: list[list[Timed]] = []

    @property
    def key(self) -> tuple[str, PeerChoice | None]:
        """Cases of one key run in one process."""
        return self.system.name, self.choice

    @property
    def responses(self) -> list[list[int]]:
        """The token ids of the last round; [] if the engine does not return all of them."""
        told = [done.token_ids for done in self.rounds[-1]] if self.rounds else []
        return told if all(told) else []

    def run(self, peer: Peer, case: PeerCase) -> list[Timed] | None:
        try:
            return peer.run(case.prompts, case.num_tokens, case.is_batch)
        except PeerError as e:
            self.error = str(e)
            return None


class MeasuredGroup(NamedTuple):
    """Lanes of the same rounds, and the CPU's rates at the beginning of each round."""

    lanes: list[Lane]
    rates: list[Rates]


def measure(
    lanes: Sequence[Lane],
    start: Start,
    num_rounds: int,
    tell: Callable[[str], object],
    gauge: Callable[[], Rates],
) -> MeasuredGroup:
    """`num_rounds` of each lane, interleaved, after one that warms up. Each begins with another."""
    lanes, rates = [*lanes], []
    with ExitStack() as stack:
        peers = start_peers(lanes, start, stack)
        for number in range(1 + num_rounds):
            tell(f"round {number} of {num_rounds}" if number else "warming up")
            if number:
                rates.append(gauge())
            first = number % len(lanes)
            for lane in lanes[first:] + lanes[:first]:
                if lane.error is None:
                    case = lane.case if number else lane.case.warm_up()
                    done = lane.run(peers[lane.key], case)
                    if number and done is not None:
                        lane.rounds.append(done)
    return MeasuredGroup(lanes, rates)


def start_peers(
    lanes: Sequence[Lane], start: Start, stack: ExitStack
) -> dict[tuple[str, PeerChoice | None], Peer]:
    """One for all cases that a system runs with the same settings."""
    peers: dict[tuple[str, PeerChoice | None], Peer] = {}
    for lane in lanes:
        if lane.error is not None or lane.key in peers:
            continue
        assert lane.choice is not None
        alike = [each for each in lanes if each.key == lane.key]
        try:
            cases = [each.case for each in alike]
            peers[lane.key] = stack.enter_context(start(lane.system, lane.choice, cases))
        except PeerError as e:
            for each in alike:
                each.error = str(e)
    return peers


class Series(NamedTuple):
    """A group with drafting has a drafter; `draft` is the draft model that engines may use."""

    group: MeasuredGroup
    drafter: str | None = None
    draft: Path | None = None


class Limits(NamedTuple):
    rounds: int
    cores: int  # threads are tried up to so many
    timeout: float  # seconds to load, and for a case
    threads: int | None = None  # of engines that do not choose them; None: the fastest number


class Comparison:
    """Reports progress to `tell`; `gauge` measures the CPU before each round."""

    def __init__(
        self,
        systems: Sequence[System],
        model: Path,
        scratch: Path,
        limits: Limits,
        tell: Callable[[str], object],
        gauge: Callable[[], Rates],
    ) -> None:
        self.systems, self.model, self.scratch, self.limits = systems, model, scratch, limits
        self.written: dict[Path, Path] = {}  # checkpoints -> their GGUF files in `scratch`
        self.tell, self.gauge = tell, gauge
        self.sweep = Sweep(self.start, tell, 3 if limits.threads is None else 1)
        self.versions: dict[str, str] = {}
        self.decoding: dict[System, Pick] = {}  # best settings for output tokens, and for prompts
        self.prompts: dict[System, Pick] = {}

    @contextmanager
    def start(
        self, system: System, choice: PeerChoice, cases: Sequence[PeerCase]
    ) -> Iterator[Peer]:
        try:
            setup = self.setup(system, choice, cases)
        except ConfigError as e:
            raise PeerError(one_line(str(e))) from e
        with Peer(system, setup, self.limits.timeout) as peer:
            self.versions[system.name] = peer.version
            yield peer

    def run_plain(self, cases: Mapping[str, PeerCase]) -> MeasuredGroup:
        """One request at a time without drafting."""
        plain, fixed = cases["plain"], self.limits.threads
        if fixed is not None:
            chosen = {s: PeerChoice(fixed if s.threads else None, None) for s in self.systems}
            decoding = prompts = {s: Pick(choice) for s, choice in chosen.items()}
        else:
            threads = {s: thread_choices(s, self.limits.cores) for s in self.systems}
            decoding, prompts = (
                {s: self.sweep.pick(s, choices, plain, figure) for s, choices in threads.items()}
                for figure in ("tpot_ms", "ttft_ms")
            )
        self.decoding, self.prompts = decoding, prompts
        return self.measure(
            [
                *(Lane(s, plain, decoding[s]) for s in self.systems),
                *(Lane(s, cases["prompt"], prompts[s]) for s in self.systems),
            ]
        )

    def run(self, cases: Mapping[str, PeerCase], drafts: Sequence[Path | None]) -> list[Series]:
        """Without drafting, then n-gram lookup, then each draft model, and `auto` with each."""
        series = [Series(self.run_plain(cases))]
        batch = [Lane(s, cases["batch"], self.prompts[s]) for s in self.systems]
        series.append(Series(self.measure(batch)))
        case, decoding = cases["drafting"], self.decoding
        kinds: list[tuple[str, Path | None]] = [(LOOKUP, None)]
        kinds += [(kind, draft) for draft in drafts for kind in (DRAFT, AUTO)]
        for kind, draft in kinds:
            picks = {s: self.pick(s, decoding[s], case, kind, draft) for s in self.systems}
            lanes = [Lane(s, case, pick) for s, pick in picks.items() if pick is not None]
            if lanes:
                series.append(Series(self.measure(lanes), kind, draft))
        return series

    def run_gguf(self, cases: Mapping[str, PeerCase], longest: int) -> list[Series]:
        """Without drafting, `longest` rounds of the longest prompt, then n-gram lookup."""
        plain = self.run_plain(cases)
        series = [Series(plain)]
        if longest:
            lanes = [Lane(s, cases["longest"], self.prompts[s]) for s in self.systems]
            series.append(Series(self.measure(lanes, longest)))
        told = {lane.system: lane.responses for lane in plain.lanes if lane.case.name == "plain"}
        lanes = [self.lookup(s, cases["drafting"], told) for s in self.systems]
        return [*series, Series(self.measure(lanes), LOOKUP)]

    def lookup(
        self, system: System, case: PeerCase, told: Mapping[System, list[list[int]]]
    ) -> Lane:
        """The fastest of a peer's limits of draft tokens, or no drafting. Prompts quote the
        engine's own plain responses; otherwise specserve's.
        """
        plain, responses = self.decoding[system], told[system] or told[self.systems[0]]
        if plain.choice is None or not responses:
            return Lane(system, case, plain)
        quoting = case.quoting(responses)
        choices = drafting_choices(system, plain.choice.threads, LOOKUP, None)
        if not choices:
            return Lane(system, case, plain)  # some of these engines take only text
        if not system.has_auto:
            choices.append(plain.choice)
        return Lane(system, quoting, self.sweep.pick(system, choices, quoting, "tpot_ms"))

    def pick(
        self, system: System, plain: Pick, case: PeerCase, drafter: str, draft: Path | None
    ) -> Pick | None:
        """The best limit of draft tokens, with the threads that are best without drafting."""
        if plain.choice is None:
            return plain
        folder = None if draft is None else str(draft)
        choices = drafting_choices(system, plain.choice.threads, drafter, folder)
        return self.sweep.pick(system, choices, case, "tpot_ms") if choices else None

    def measure(self, lanes: Sequence[Lane], rounds: int | None = None) -> MeasuredGroup:
        self.tell(lanes[-1].case.name)
        number = self.limits.rounds if rounds is None else rounds
        return measure(lanes, self.start, number, self.tell, self.gauge)

    def setup(self, system: System, choice: PeerChoice, cases: Iterable[PeerCase]) -> Setup:
        drafting = choice.drafting
        folders = [self.model]
        if drafting is not None and drafting.draft is not None:
            folders.append(Path(drafting.draft))
            drafting = drafting._replace(draft=self.path(system, folders[1]))
        each = list(cases)
        max_requests = max(len(c.prompts) if c.is_batch else 1 for c in each)
        max_len = max(len(c.prompts[0]) + c.num_tokens for c in each)
        configs = [open_source(path).config() for path in folders]
        bytes_a_token = sum(map(kv_token_bytes, configs))
        states = STATES * sum(map(state_bytes, configs))
        return Setup(
            model=self.path(system, self.model),
            max_len=max_len,
            max_requests=max_requests,
            kv_bytes=max_requests * ((max_len + 128) * bytes_a_token + states),
            threads=choice.threads,
            drafting=drafting,
            quantize=system.quantize,
            program=system.program,
            tokenizer=self.tokenizer() if system.has_text else None,
        )

    def tokenizer(self) -> str:
        """The model's tokenizer as a file: engines that take text need the same token ids."""
        file = self.scratch / "tokenizer.json"
        if not file.exists():
            open_source(self.model).tokenizer().backend.save(str(file))
        return str(file)

    def path(self, system: System, folder: Path) -> str:
        if not system.needs_gguf or folder.is_file():
            return str(folder)
        if folder not in self.written:
            file = self.scratch / f"{len(self.written)}-{folder.name}.gguf"
            write_gguf(folder, file)
            self.written[folder] = file
        return str(self.written[folder])
