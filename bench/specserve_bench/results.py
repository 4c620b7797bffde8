"""The results of a run, as the JSON keeps them, and every figure that is computed from them.

Tables and plots read these types and nothing else, so a kept JSON can be shown again.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist, mean, median, stdev
from typing import Any

import msgspec
import numpy as np

from specserve.errors import ConfigError
from specserve.models.folder import Scaled

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571)  # see `student`


class MeasuredRequest(msgspec.Struct, kw_only=True):
    """One request. Seconds count from the start of its round.

    arrived_at         when it was due; a client that is late sends it later
    completion_tokens  as `usage` counts them; an event may carry several
    """

    number: int  # of the workload's requests
    arrived_at: float
    first_at: float | None = None
    last_at: float | None = None
    num_events: int = 0
    longest_stall_ms: float | None = None  # between two events
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_at is None else 1e3 * (self.first_at - self.arrived_at)

    @property
    def end_to_end_ms(self) -> float | None:
        return None if self.last_at is None else 1e3 * (self.last_at - self.arrived_at)

    @property
    def tpot_ms(self) -> float | None:
        """(end - first) / (tokens - 1); None for a single token."""
        if self.first_at is None or self.last_at is None or self.completion_tokens < 2:
            return None
        return 1e3 * (self.last_at - self.first_at) / (self.completion_tokens - 1)


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float


class Speculation(msgspec.Struct, frozen=True):
    """Sums over all requests of a round."""

    steps: int  # of the target, with a root
    tokens: int  # that those steps emitted
    drafted: int  # draft tokens that they verified
    accepted: list[int]  # steps that accepted 0, 1, 2, ... draft tokens

    @property
    def num_accepted(self) -> int:
        return sum(n * count for n, count in enumerate(self.accepted))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a verified step, its bonus token included."""
        return self.tokens / self.steps if self.steps else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of verified steps whose accepted path reaches depth 1, 2, ..."""
        depths = range(1, len(self.accepted) if self.steps else 0)
        return [sum(self.accepted[n:]) / self.steps for n in depths]

    @property
    def wasted_rows(self) -> float | None:
        """Share of verified rows that were rejected draft tokens."""
        rows = self.steps + self.drafted
        return (self.drafted - self.num_accepted) / rows if rows else None


class Round(msgspec.Struct, kw_only=True):
    """All requests of a workload, once. None is what was not reported."""

    seconds: float  # from the first arrival to the last token
    requests: list[MeasuredRequest] = msgspec.field(name="answers")  # as in kept files
    itl_ms: Spread | None  # gaps between events, of all requests together
    output_hash: str
    speculation: Speculation | None = None
    draft_seconds: float | None = None  # of all steps
    verify_seconds: float | None = None
    step_seconds: float | None = None


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A subject: a config in this process, or a server."""

    url: str | None = None
    model: str
    draft_model: str | None = None
    drafter: str | None = None
    max_nodes: int | None = None
    is_warm: bool = False  # rounds begin with what was learnt in earlier ones
    config: dict[str, Any] = {}  # settings of an engine of ours that are not the default
    threads: dict[str, str] = {}  # of the models' steps, in words
    scaled: list[Scaled] = []  # its models that `scale-model` wrote


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests arrive: a fixed number at a time, or at random at a rate (open loop)."""

    concurrency: int | None = None
    rate: float | None = None  # requests a second
    burstiness: float = 1.0  # coefficient of variation of the gaps; 1 is Poisson
    seed: int = 0

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        kind = "Poisson" if self.burstiness == 1 else f"bursty (cv {self.burstiness:g})"
        return f"{self.rate:g}/s, {kind}"

    def due_times(self, size: int) -> list[float]:
        """Seconds from the start at which `size` requests are due: all at once under a concurrency.

        In an open loop, gaps follow a gamma distribution with mean 1 / rate and coefficient of
        variation `burstiness` (1: exponential). A slow server gets requests at the same rate.
        """
        if self.rate is None:
            return [0.0] * size
        shape = 1 / self.burstiness**2
        gaps = np.random.default_rng(self.seed).gamma(shape, 1 / (self.rate * shape), size - 1)
        return list(accumulate(gaps.tolist(), initial=0.0))


class Run(msgspec.Struct, kw_only=True):
    """A subject under a load on a workload; rounds of all runs are interleaved."""

    subject: str
    workload: str
    load: Load
    rounds: list[Round]


class Goals(msgspec.Struct, frozen=True):
    """Upper bounds for a request that counts as goodput."""

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0


class Result(msgspec.Struct, kw_only=True):
    """A whole JSON file."""

    kind: str  # latency, load, drafters or compare
    machine: dict[str, Any]
    subjects: dict[str, Subject]  # by label; the others are compared with the first
    workloads: dict[str, dict[str, Any]]
    runs: list[Run]
    goals: Goals = Goals()


def read(path: Path) -> Result:
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        check(result)
        return result
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}): check the path") from e
    except (msgspec.MsgspecError, ValueError) as e:
        raise ConfigError(
            f"{path}: no results of `specserve bench` ({e}); name a file that --out of latency, "
            "load, drafters or compare wrote"
        ) from e


def check(result: Result) -> None:
    """Raise ValueError for values that no measurement produces."""
    if any(not isinstance(about.get("about"), str) for about in result.workloads.values()):
        raise ValueError("a workload says nothing of itself")
    places: dict[tuple[str, Load], list[str]] = {}
    for run in result.runs:
        places.setdefault((run.workload, run.load), []).append(run.subject)
        if (run.load.concurrency is None) == (run.load.rate is None):
            raise ValueError("a load has either a concurrency or a rate")
        if not run.rounds or any(r.seconds < 0 for r in run.rounds):
            raise ValueError("a run has no rounds, or one that ended before it began")
        if run.workload not in result.workloads:
            raise ValueError(f"the workload {run.workload} is not described")
    if any(names != [*result.subjects] for names in places.values()):
        raise ValueError("every workload and load has a run of every subject, in order")


def spread(values: Sequence[float]) -> Spread | None:
    """Percentiles are interpolated linearly; None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return Spread(float(np.mean(values)), p50, p90, p99)


def spread_of(requests: Sequence[MeasuredRequest], name: str) -> Spread | None:
    """The spread of the attribute `name` over requests that have it."""
    values = [getattr(a, name) for a in requests]
    return spread([v for v in values if v is not None])


def gaps(events: Sequence[float]) -> list[float]:
    """Milliseconds between events that came at these seconds."""
    return [1e3 * (b - a) for a, b in pairwise(events)]


def output_hash(texts: Sequence[tuple[str, str | None]]) -> str:
    """A hash of all (text, finish reason), in the workload's order."""
    return hashlib.sha256(msgspec.json.encode(texts)).hexdigest()[:16]


def goodput(round: Round, goals: Goals) -> float:
    """Requests per second within both goals; a single token has no TPOT and is within that goal."""
    good = sum(
        a.error is None
        and (a.ttft_ms is not None and a.ttft_ms <= goals.ttft_ms)
        and (a.tpot_ms is None or a.tpot_ms <= goals.tpot_ms)
        for a in round.requests
    )
    return per_second(good, round)


def per_second(count: int, round: Round) -> float:
    return count / round.seconds if round.seconds else 0.0  # no request was answered


def figures(round: Round, goals: Goals) -> dict[str, Any]:
    """All figures of a round, by name; None where it cannot be computed."""
    requests, speculation = round.requests, round.speculation
    drafting, verifying, steps = round.draft_seconds, round.verify_seconds, round.step_seconds
    other = (
        None
        if steps is None or drafting is None or verifying is None
        else steps - drafting - verifying
    )
    return {
        "ttft_ms": spread_of(requests, "ttft_ms"),
        "tpot_ms": spread_of(requests, "tpot_ms"),
        "itl_ms": round.itl_ms,
        "stall_ms": spread_of(requests, "longest_stall_ms"),
        "end_to_end_ms": spread_of(requests, "end_to_end_ms"),
        "tokens_per_s": per_second(sum(a.completion_tokens for a in requests), round),
        "acceptance_length": speculation and speculation.acceptance_length,
        "acceptance_by_depth": speculation.acceptance_by_depth if speculation else [],
        "wasted_rows": speculation and speculation.wasted_rows,
        "draft_s": drafting,
        "verify_s": verifying,
        "other_s": other,
        "goodput": goodput(round, goals),
        "errors": sum(a.error is not None for a in requests),
        "output_hash": round.output_hash,
    }


class Ratio(msgspec.Struct, frozen=True):
    """The ratio of a figure to another subject's in the same round: median and extremes.

    interval   as `interval` gives it for the rounds; None for a single round
    """

    median: float
    low: float
    high: float
    interval: tuple[float, float] | None = None


def ratio(rounds: Sequence[float | None], base: Sequence[float | None]) -> Ratio | None:
    ratios = [a / b for a, b in zip(rounds, base, strict=False) if a is not None and b]
    if not ratios:
        return None
    return Ratio(median(ratios), min(ratios), max(ratios), interval(ratios))


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the geometric mean, by Student's t of the logarithms
    ("The probable error of a mean", Biometrika 6, 1908). None for fewer than two ratios, or if one
    is 0.
    """
    if len(ratios) < 2 or min(ratios) <= 0:
        return None
    logs = [log(each) for each in ratios]
    center, width = mean(logs), student(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return exp(center - width), exp(center + width)


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution, to 0.1 %."""
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    # Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def extremes(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The rounded median, lowest and highest value, as kept figures have them."""
    each = {"median": median(values), "low": min(values), "high": max(values)}
    return {name: round(value, digits) for name, value in each.items()}


def extremes_over(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Extremes of the ratios within rounds."""
    return extremes([a / b for a, b in zip(values, base, strict=True)])


def middle(values: Sequence[float | None]) -> float | None:
    """The median over the rounds that have a value."""
    told = [v for v in values if v is not None]
    return median(told) if told else None
