"""How the rows of a step are shared: evenly, or between the tenants and calls with prompts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import inf

from specserve.scheduling.request import Request


def share(total: int, caps: Sequence[int], step: int) -> list[int]:
    """Split a total evenly under caps; the remainder goes one each, rotating by step."""
    got = [0] * len(caps)
    start = step % len(caps) if caps else 0
    below = [i for i in [*range(start, len(caps)), *range(start)] if caps[i] > 0]
    while total > 0 and below:
        each, extra = divmod(total, len(below))
        for place, i in enumerate(below):
            more = min(caps[i] - got[i], each + (place < extra))
            got[i] += more
            total -= more
        below = [i for i in below if got[i] < caps[i]]
    return got


def prefill_rows(
    computing: Sequence[Request], rows: int, step: int, slack: Mapping[int, float] | None = None
) -> dict[int, int]:
    """Each prompt's rows, by request id; `computing` is in order of rank.

    A smaller priority takes all rows that it can use. Within a priority, tenants share evenly.
    `slack` has the seconds that requests near to missing their targets have left.
    """
    given: dict[int, int] = {}
    for _, equals in groupby(computing, key=lambda r: r.sampling.priority):
        tenants: dict[int, list[Request]] = {}
        for request in equals:
            tenants.setdefault(request.caller.tenant, []).append(request)
        wanted = [sum(r.num_uncomputed for r in prompts) for prompts in tenants.values()]
        for prompts, some in zip(tenants.values(), share(rows, wanted, step), strict=True):
            given |= tenant_rows(prompts, some, step, slack or {})
            rows -= some
    return given


def tenant_rows(
    prompts: Sequence[Request], rows: int, step: int, slack: Mapping[int, float]
) -> dict[int, int]:
    """Split a tenant's rows: half go to its prompts by rank, so that the earliest takes at most
    twice as long as it would alone; half to the prompts that are nearest to missing their targets,
    then to the calls with the least left to compute, so that they need not wait for long prompts.
    """
    left = Counter[int]()
    for request in prompts:
        left[request.caller.call] += request.num_uncomputed

    def urgency(request: Request) -> tuple[float, int, tuple[int, int]]:
        return slack.get(request.id, inf), left[request.caller.call], request.rank

    first = sorted(prompts, key=urgency)
    half = (rows + step % 2) // 2  # a single row goes to each half in turn
    given = Counter[int]()
    fill(given, first, half)
    fill(given, prompts, rows - given.total())
    return given


def fill(given: Counter[int], prompts: Iterable[Request], rows: int) -> None:
    """Give each prompt in turn as many rows as it can use, until none is left."""
    for request in prompts:
        some = min(rows, request.num_uncomputed - given[request.id])
        given[request.id] += some
        rows -= some
