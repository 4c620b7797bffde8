"""Rounds in which every engine runs each case once, in its turn, while the others are stopped."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from specserve_bench.bound import Rates
from specserve_bench.peers.cases import Case
from specserve_bench.peers.peer import Peer, PeerError, Start
from specserve_bench.peers.protocol import Timed
from specserve_bench.peers.sweep import Pick
from specserve_bench.peers.systems import Choice, System


class Job(NamedTuple):
    """A case on one system, with the settings that were best."""

    system: System
    case: Case
    pick: Pick


class Lane:
    """A job's rounds, until one fails."""

    def __init__(self, job: Job) -> None:
        self.job, self.error = job, job.pick.error
        self.rounds: list[list[Timed]] = []

    def run(self, peer: Peer) -> list[Timed] | None:
        case = self.job.case
        try:
            return peer.run(case.prompts, case.num_tokens, case.is_batch)
        except PeerError as e:
            self.error = str(e)
            return None


class Group(NamedTuple):
    """What was measured in the same rounds; what the CPU could do at the beginning of each."""

    lanes: list[Lane]
    rates: list[Rates]


def measure(
    jobs: Sequence[Job],
    start: Start,
    num_rounds: int,
    tell: Callable[[str], object],
    gauge: Callable[[], Rates],
) -> Group:
    """`num_rounds` of each job, interleaved, after one that warms up. Each begins with another."""
    lanes, rates = [Lane(job) for job in jobs], []
    with ExitStack() as stack:
        peers = start_peers(lanes, start, stack)
        for number in range(1 + num_rounds):
            tell(f"round {number} of {num_rounds}" if number else "warming up")
            if number:
                rates.append(gauge())
            first = number % len(lanes)
            for lane in lanes[first:] + lanes[:first]:
                if lane.error is None:
                    done = lane.run(peers[key(lane)])
                    if number and done is not None:
                        lane.rounds.append(done)
    return Group(lanes, rates)


def start_peers(
    lanes: Sequence[Lane], start: Start, stack: ExitStack
) -> dict[tuple[str, Choice | None], Peer]:
    """One for all cases that a system runs with the same settings."""
    peers: dict[tuple[str, Choice | None], Peer] = {}
    for lane in lanes:
        if lane.error is not None or key(lane) in peers:
            continue
        system, choice = lane.job.system, lane.job.pick.choice
        assert choice is not None
        alike = [each for each in lanes if key(each) == key(lane)]
        try:
            cases = [each.job.case for each in alike]
            peers[key(lane)] = stack.enter_context(start(system, choice, cases))
        except PeerError as e:
            for each in alike:
                each.error = str(e)
    return peers


def key(lane: Lane) -> tuple[str, Choice | None]:
    return lane.job.system.name, lane.job.pick.choice
