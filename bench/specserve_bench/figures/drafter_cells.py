"""TPOT of drafter settings on a workload, which several figures measure."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from specserve_bench import suite
from specserve_bench.results import Result, Round, spread_of
from specserve_bench.workloads import EDIT, WORKLOADS, workload

NAMES = [name for name in WORKLOADS if name != EDIT]  # fixed settings have no use for predictions
KV_BYTES = 3 << 29  # of each subject: all of them are in memory at once
HOT = 0.8


class Place(NamedTuple):
    """The models, workload and load of a cell."""

    pair: str
    workload: str
    concurrency: int
    temperature: float | None  # None: the workload's
    is_warm: bool = False  # rounds start with learned costs and acceptance rates


class Cell(msgspec.Struct, kw_only=True):
    """A cell's figures by subject, of each round; rounds are paired."""

    pair: str
    workload: str
    concurrency: int
    temperature: float | None
    is_warm: bool = False
    requests: int
    tpot_ms: dict[str, list[float]]  # means over the requests of a round
    acceptance_length: dict[str, float]
    draft_tokens: dict[str, float]  # verified per step
    is_same: bool  # all texts of all subjects and rounds
    machine: dict[str, object]


def measured(place: Place, size: int, contenders: Sequence[suite.Contender], rounds: int) -> Cell:
    asked = workload(place.workload, size, 0, place.temperature)
    command = "python -m specserve_bench.figures"
    result = suite.measure_drafters(contenders, [asked], rounds, command, place.concurrency)
    return cell(place, result)


def cell(place: Place, result: Result) -> Cell:
    """The cell's figures from a Result of its own."""
    by_subject = {run.subject: run.rounds for run in result.runs}
    every = [round for rounds in by_subject.values() for round in rounds]
    speculation = {
        name: [r.speculation for r in rounds if r.speculation]
        for name, rounds in by_subject.items()
    }
    return Cell(
        **place._asdict(),
        requests=len(every[0].requests),
        tpot_ms={name: [tpot(r) for r in rounds] for name, rounds in by_subject.items()},
        acceptance_length={name: tokens_a_step(rounds) for name, rounds in by_subject.items()},
        draft_tokens={
            name: sum(s.drafted for s in told) / max(1, sum(s.steps for s in told))
            for name, told in speculation.items()
        },
        is_same=len({round.output_hash for round in every}) == 1,
        machine=result.machine,
    )


def tpot(round: Round) -> float:
    found = spread_of(round.requests, "tpot_ms")
    assert found is not None, "no request of the workload has two tokens"
    return found.mean


def tokens_a_step(rounds: Sequence[Round]) -> float:
    return fmean(r.speculation.acceptance_length or 1.0 for r in rounds if r.speculation)
