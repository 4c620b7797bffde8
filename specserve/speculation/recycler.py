"""Collects likely successors of tokens from the target's logits, for sources that want them."""

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

from specserve.engine.runner import TargetTokens
from specserve.scheduling import ScheduledRequest
from specserve.speculation.constants import COLLECTING, MOST_ROWS, SELDOM
from specserve.speculation.planner import AcceptanceStats
from specserve.speculation.verify import AcceptedPath
from specserve_drafters.base import DraftSource


class Row(NamedTuple):
    """A row of the target on an accepted path: its token, and the token after it."""

    row: int  # index among the rows that are read
    token: int
    after: int


class AcceptedRows(NamedTuple):
    """A request's accepted rows, in the order of its text."""

    acceptance: AcceptanceStats
    id: int
    rows: list[Row]


def accepted_rows(
    sampled: Sequence[ScheduledRequest],
    paths: Sequence[AcceptedPath],
    acceptance: Sequence[AcceptanceStats],
) -> list[AcceptedRows]:
    """Return the rows of the roots and of the accepted nodes."""
    roots = accumulate((1 + len(item.draft) for item in sampled), initial=0)
    found = []
    for item, path, root, its in zip(sampled, paths, roots, acceptance, strict=False):
        rows = [root, *(root + node for node in path.nodes)]
        tokens = [item.request.token_ids[-1], *path.tokens]
        each = [*map(Row, rows, tokens, path.tokens)]
        found.append(AcceptedRows(its, item.request.id, each))
    return found


class TokenRecycler:
    """Collects successors within a small share of each tenant scope's part of the target's time."""

    def __init__(self, source: DraftSource) -> None:
        self.source = source

    def has_time(
        self, ids: Sequence[int], acceptance: Sequence[AcceptanceStats], seconds: float
    ) -> bool:
        """Begin a step in which the target took `seconds`; return whether any scope has time for
        collecting. `ids` and `acceptance` are by request.
        """
        part, name = COLLECTING * seconds / max(len(acceptance), 1), self.source.name
        for id, one in zip(ids, acceptance, strict=True):
            share = part if one.account(name, id).may_pay else SELDOM * part
            one.left = min(one.left + share, seconds)
        return any(one.left > 0 for one in acceptance)

    def collect_successors(
        self, accepted_rows: Sequence[AcceptedRows], answers: TargetTokens, start: float
    ) -> None:
        """Learn from a step's rows. All time since `start` is charged to the scopes."""
        wanted = list[tuple[AcceptedRows, Row]]()
        for one in accepted_rows:
            rows = self.wanted(one)
            wanted += [(one, row) for row in rows[:MOST_ROWS] if one.acceptance.left > 0]
        if wanted and answers.has_logits:
            self.enter(wanted, answers)
        each = (perf_counter() - start) / len(accepted_rows)
        for one in accepted_rows:
            one.acceptance.left -= each

    def wanted(self, one: AcceptedRows) -> list[Row]:
        """Return the rows whose successors are missing or old."""
        if not one.rows:
            return []
        tokens = [row.token for row in one.rows] + [one.rows[-1].after]
        return [one.rows[place] for place in self.source.wanted_successors(one.id, tokens)]

    def enter(self, wanted: Sequence[tuple[AcceptedRows, Row]], answers: TargetTokens) -> None:
        """Store successors; they come from the device in one copy."""
        rows, after = [row.row for _, row in wanted], [row.after for _, row in wanted]
        k = min(self.source.num_successors, answers.logits.shape[1])
        logprobs = answers.logprobs(rows, after, k)
        each = zip(wanted, logprobs.ids.tolist(), logprobs.top.exp().tolist(), strict=True)
        for (one, row), ids, p in each:
            self.source.enter_successors(one.id, row.token, ids, p)
