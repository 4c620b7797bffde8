"""What the target's logits show of tokens that follow others, for the source that guesses by it."""

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from specserve.engine.runner import TargetTokens
from specserve.scheduling import ScheduledRequest
from specserve.speculation.verify import AcceptanceStats, AcceptedPath
from specserve_drafters.recycle import NUM_SUCCESSORS, RecycleSource

SHARE = 0.005  # of the target's time: what this may take
MOST_ROWS = 4  # of a request, in a step


class Row(NamedTuple):
    """A row of the target that a path came through: the token there, and the one after it."""

    row: int  # of those that are read
    token: int
    after: int


class AcceptedRows(NamedTuple):
    """A request's rows, in the order of its text."""

    acceptance: AcceptanceStats
    id: int
    rows: list[Row]


def accepted_rows(
    sampled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    acceptance: Sequence[AcceptanceStats],
) -> list[AcceptedRows]:
    """The rows of the roots and of the accepted nodes."""
    roots = accumulate((1 + len(item.draft) for item in sampled), initial=0)
    found = []
    for item, path, root, its in zip(sampled, paths, roots, acceptance, strict=False):
        rows = [root, *(root + node for node in path.nodes)]
        tokens = [item.request.token_ids[-1], *path.tokens]
        each = [*map(Row, rows, tokens, path.tokens)]
        found.append(AcceptedRows(its, item.request.id, each))
    return found


class TokenRecycler:
    """Has a small share of each owner's part of the target's time."""

    def __init__(self, source: RecycleSource) -> None:
        self.source = source

    def collect_successors(
        self, accepted_rows: Sequence[AcceptedRows], answers: TargetTokens, seconds: float
    ) -> None:
        """Learn from a step for which the target took so many seconds."""
        start, part = perf_counter(), seconds / max(len(accepted_rows), 1)
        wanted = list[tuple[AcceptedRows, Row]]()
        for one in accepted_rows:
            acceptance = one.acceptance
            acceptance.left = min(acceptance.left + SHARE * part, part)
            rows = self.wanted(one)
            wanted += [(one, row) for row in rows[:MOST_ROWS] if acceptance.left > 0]
        if not wanted or not answers.has_logits:
            return
        self.enter(wanted, answers)
        each = (perf_counter() - start) / len(wanted)
        for one, _ in wanted:
            one.acceptance.left = max(one.acceptance.left - each, -part)

    def wanted(self, one: AcceptedRows) -> list[Row]:
        """The rows whose successors are missing or old."""
        if not one.rows:
            return []
        tokens = [row.token for row in one.rows] + [one.rows[-1].after]
        return [one.rows[place] for place in self.source.follow(one.id, tokens)]

    def enter(self, wanted: Sequence[tuple[AcceptedRows, Row]], answers: TargetTokens) -> None:
        """Enter successors, which come from the device in one copy."""
        rows, after = [row.row for _, row in wanted], [row.after for _, row in wanted]
        k = min(NUM_SUCCESSORS, answers.logits.shape[1])
        said = answers.logprobs(rows, after, k)
        each = zip(wanted, said.ids.tolist(), said.top.exp().tolist(), strict=True)
        for (one, row), ids, p in each:
            self.source.enter(one.id, row.token, ids, p)
