"""Continuous batching: admission, preemption, and the distribution of a step's rows."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from time import perf_counter
from typing import NamedTuple

import msgspec

from specserve.memory.blocks import BlockPool, PendingUpdates
from specserve.memory.checkpoints import (
    advance_state,
    begin_snapshot,
    chunk_end,
    due_checkpoints,
    ends_block,
)
from specserve.memory.sessions import Sessions
from specserve.memory.tiers import Load, Tiers, loadable
from specserve.scheduling.request import Request, ScheduledRequest
from specserve.speculation.constants import FINE
from specserve.speculation.costs import Step, StepCosts


class RunningCounts:
    """Number of running requests by tenant and by call."""

    def __init__(self, running: Sequence[Request]) -> None:
        self.running = running
        self.of_tenant = Counter(r.caller.tenant for r in running)
        self.of_call = Counter(r.caller.call for r in running)

    def victim(self, request: Request) -> Request | None:
        """Return the request to preempt for one whose call has no place. It is the last request of
        the largest call of the tenant with the most places. None if the call has a place, or no
        request can go.

        A tenant loses a place only to a tenant that then has no more places. A call never loses its
        last place to another call of its tenant. So places do not move back and forth, and a
        tenant's longest running request is never preempted.
        """
        caller = request.caller
        if self.of_call[caller.call] > 0:
            return None

        def can_give(other: Request) -> bool:
            if other.sampling.priority < request.sampling.priority:
                return False
            if other.caller.tenant == caller.tenant:
                return self.of_call[other.caller.call] > 1
            return self.of_tenant[other.caller.tenant] > self.of_tenant[caller.tenant] + 1

        def held(other: Request) -> tuple[int, int, tuple[int, int]]:
            tenant, call = other.caller.tenant, other.caller.call
            return self.of_tenant[tenant], self.of_call[call], other.rank

        return max(filter(can_give, self.running), key=held, default=None)


class TenantQueue:
    """One tenant's waiting requests of one priority, by call, in order of arrival."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.requests: dict[int, list[Request]] = {}  # by call; no list is empty
        self.due: list[Request] = []  # requests with a TTFT target, the earliest due first
        self.num_left = 0  # requests that have left the queue

    def add(self, request: Request) -> None:
        call = request.caller.call
        if call not in self.requests:
            insort(self.calls, call)
            self.requests[call] = []
        insort(self.requests[call], request, key=lambda r: r.id)
        if request.ttft is not None:
            insort(self.due, request, key=lambda r: r.due_at)

    def remove(self, request: Request) -> None:
        self.num_left += 1
        if request in self.due:
            self.due.remove(request)
        call = request.caller.call
        self.requests[call].remove(request)
        if not self.requests[call]:
            self.calls.remove(call)
            del self.requests[call]

    def next(self, places: RunningCounts, now: float = 0.0) -> Request:
        """Return the first request of the call with the fewest places; of equal calls, the
        earliest.

        Every second time it is the request that is nearest to missing its target instead, if its
        call has no place. So other requests do not wait forever behind targets.
        """
        held = places.of_call
        while self.due and self.due[0].due_at < now:
            self.due.pop(0)
        nearest = next((r for r in self.due if not held[r.caller.call]), None)
        if nearest is not None and self.num_left % 2 == 0:
            return nearest
        # Few calls have a place, so the search for a call without places is short.
        idle = next((call for call in self.calls if not held[call]), None)
        call = idle if idle is not None else min(self.calls, key=lambda c: (held[c], c))
        return self.requests[call][0]


class Waiter(NamedTuple):
    """A request that is set aside until its leader has published `num_blocks` blocks."""

    num_blocks: int
    request: Request


class Queue:
    """Waiting requests: in lines, or set aside while a running request computes blocks that they
    need, or while these blocks are loaded.

    The next request has the smallest priority. Within a priority, the order is: the tenant with the
    fewest places, the call with the fewest places, the earliest request. The time to find it
    depends on the number of places, not on the length of the queue.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # all requests, by id
        self.loading: dict[int, Request] = {}  # requests that wait for a load, by id
        self.lines: dict[int, dict[int, TenantQueue]] = {}  # by priority and tenant; none is empty
        self.aside: dict[int, tuple[Request, list[Waiter]]] = {}  # by the leader's id

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.id in self.requests

    def add(self, request: Request) -> None:
        """Queue a request; a follower joins a line later, once its prompt is computed."""
        self.requests[request.id] = request
        if not request.is_following:
            self.line_up(request)

    def line_up(self, request: Request) -> None:
        lines = self.lines.setdefault(request.sampling.priority, {})
        lines.setdefault(request.caller.tenant, TenantQueue()).add(request)

    def leave_line(self, request: Request) -> None:
        priority, tenant = request.sampling.priority, request.caller.tenant
        lines = self.lines[priority]
        lines[tenant].remove(request)
        if not lines[tenant].calls:
            del lines[tenant]
        if not lines:
            del self.lines[priority]

    def remove(self, request: Request) -> None:
        del self.requests[request.id]
        if self.loading.pop(request.id, None) is not None:
            return
        for _, waiters in self.aside.values():
            for waiter in waiters:
                if waiter.request is request:
                    waiters.remove(waiter)
                    return
        if not request.is_following:
            self.leave_line(request)

    def next(self, places: RunningCounts, now: float = 0.0) -> Request | None:
        """Return the request to admit first; None if no request is in a line."""
        if not self.lines:
            return None
        firsts = (line.next(places, now) for line in self.lines[min(self.lines)].values())
        held = places.of_tenant
        return min(firsts, key=lambda r: (held[r.caller.tenant], r.caller.call, r.id))

    def set_aside(self, request: Request, leader: Request, num_blocks: int) -> None:
        """Take a request out of its line until the leader has published `num_blocks` blocks."""
        self.leave_line(request)
        _, waiters = self.aside.setdefault(leader.id, (leader, []))
        insort(waiters, Waiter(num_blocks, request), key=lambda w: -w.num_blocks)

    def wait_for(self, request: Request, load: Load) -> None:
        """Take a request out of its line until `loaded` is called for this load."""
        self.leave_line(request)
        self.loading[request.id] = request
        load.waiting.add(request.id)

    def loaded(self, load: Load) -> None:
        """Put the requests that wait for a load back in line."""
        for id in sorted(load.waiting & self.loading.keys()):
            self.line_up(self.loading.pop(id))

    def resume(self, running: Collection[Request]) -> None:
        """Put requests back in line if their leader has published the blocks, or cannot publish
        them.
        """
        for leader, waiters in [*self.aside.values()]:
            is_lost = leader not in running or not leader.table.is_publishing
            num_blocks = leader.table.num_published
            while waiters and (is_lost or waiters[-1].num_blocks <= num_blocks):
                self.line_up(waiters.pop().request)
            if not waiters:
                del self.aside[leader.id]


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
    """Return each prompt's rows, by request id; `computing` is in order of rank.

    A smaller priority takes all rows that it can use. Within a priority, tenants share evenly.
    `slack` holds the seconds left of requests that are near to missing their targets.
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
    """Split a tenant's rows in two halves.

    One half goes to its prompts by rank, so the earliest takes at most twice as long as without the
    others. The other half goes to the prompts that are nearest to missing their targets. Next
    come the calls with the least left to compute, so that short prompts do not wait for long ones.
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
    """Give each prompt in turn as many rows as it can use, until no rows are left."""
    for request in prompts:
        some = min(rows, request.num_uncomputed - given[request.id])
        given[request.id] += some
        rows -= some


FADE = 0.9  # factor per step on the largest recent drafting time
ALONE = 0.05  # seconds of loads in a launch without rows: then new requests are considered
LOADING = 0.1  # share of a step's time that loads may add while streams run
PRESSED = 3.0  # slack below this multiple of its prompt's time makes a request urgent


class StepBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a step."""

    max_running: int = 64
    max_batched_tokens: int = 512
    prefill_chunk: int = 128  # most prompt rows in steps with streams
    max_nodes: int = 16  # most draft tokens per request
    max_step_nodes: int = 32  # most draft tokens per step
    draft_rows_per_row: int = 1  # rows of the draft model in the time of a row of the target
    ttft: float | None = None  # seconds; targets of requests that set none
    tpot: float | None = None


def seconds(asked_ms: float | None, usual: float | None) -> float | None:
    """Return a request's target in seconds; the server's if the request sets none."""
    return usual if asked_ms is None else asked_ms / 1000


class Scheduler:
    """Plans steps. Planning changes integers only, and uses no device.

    `running` is in order of rank; if blocks run out, the last request is preempted first.
    """

    def __init__(
        self,
        budget: StepBudget,
        pool: BlockPool,
        costs: StepCosts | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """`costs` holds the known costs of the target's steps. `sessions` has the tiers with
        evicted blocks.
        """
        self.budget, self.pool, self.sessions = budget, pool, sessions
        self.tiers = None if sessions is None else sessions.tiers
        self.costs = costs or StepCosts(budget.max_batched_tokens)
        self.waiting = Queue()
        self.running: list[Request] = []
        self.num_preempted = 0
        self.has_head = False  # the target has a draft head
        self.num_plans = 0  # rotates the remainders of shared rows
        self.catch_up_rows = 0  # most rows of the draft model in this step, see `max_catch_up`
        self.draft_rows = 0  # most draft tokens in this step
        self.step = Step(0, 0, 0, 0)  # without draft tokens
        self.drafting = 0.0  # seconds of drafting in the slowest recent steps

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request, running, waiting or not added so far, and release its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if self.sessions is not None:
            self.sessions.tiers.leave(request.id)
            if request.caller.session:
                keys = [t.published_keys for t in (request.table, request.draft_table)]
                self.sessions.record(request.caller.session, request.caller.tenant, *keys)
        leader = request.detach()
        if leader is not None and leader in self.waiting:
            self.waiting.line_up(leader)
        request.release()

    def reset_cache(self) -> None:
        """Drop the keys of all blocks, and all blocks of the tiers. Requests stop waiting for
        loads.
        """
        if self.sessions is not None:
            for load in self.sessions.tiers.reset():
                self.waiting.loaded(load)
            self.sessions.reset()
        self.pool.reset_cache()

    def forget_kv(self) -> None:
        """Drop the keys of all blocks in memory, after KV updates were lost. The disk stays."""
        for load in () if self.tiers is None else self.tiers.forget():
            self.waiting.loaded(load)
        self.pool.reset_cache()

    @property
    def is_busy(self) -> bool:
        """Return whether sessions are being saved or loaded."""
        return self.sessions is not None and self.sessions.is_busy

    def close(self, run_updates: Callable[[PendingUpdates], object]) -> None:
        """Write the blocks of pinned sessions to disk, and close the tiers."""
        if self.tiers is not None and self.sessions is not None:
            self.sessions.write()
            self.save(self.sessions.pinned_keys, run_updates)
            self.tiers.close()

    def save(self, keys: Sequence[bytes], run_updates: Callable[[PendingUpdates], object]) -> None:
        """Write these blocks to disk, from the pool or host memory, and wait until they are there.
        No step may run meanwhile.
        """
        tiers = self.tiers
        assert tiers is not None, "the config has tiers"
        tiers.save(keys)
        while tiers.saving:
            run_updates(self.pool.updates)
            tiers.advance()
            tiers.wait(1.0)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert the invariants of pool and tiers; `tables` are the blocks of all tables."""
        if self.tiers is not None:
            self.tiers.check()
            tables = [*tables, *self.tiers.tables]
        self.pool.check(tables)

    def share_prompt(self, request: Request) -> None:
        """Share a request's computed prompt with its followers, and put them in line."""
        for follower in request.fork_followers():
            self.waiting.line_up(follower)

    def plan(self) -> list[ScheduledRequest]:
        """Distribute the step's rows: a root for every request that is due, then prompts, then
        draft tokens. Without a root, prompts get all rows.
        """
        self.num_plans += 1
        self.admit()
        roots = self.plan_roots()
        left = self.budget.max_batched_tokens - len(roots)
        chunks = self.plan_chunks(self.prompt_rows(roots, left)) if self.computing else []
        left -= sum(chunk.end - chunk.start for chunk in chunks)
        self.step = self.step_of([*roots, *chunks])
        self.catch_up_rows = self.max_catch_up(roots, chunks)
        self.draft_rows = min(left, self.budget.max_step_nodes)
        if self.draft_rows > 0:
            for root in roots:
                root.draft_limit = self.max_draft_tokens(root)
        # Only prompts run, and none of them gets a block. Or beams wait for others without a place.
        if self.running and not roots and not chunks:
            beams = [request for request in self.running if request.num_uncomputed == 0]
            self.preempt((beams or self.running)[-1])
            return self.plan()
        if self.tiers is not None:
            self.tiers.issue(LOADING * self.costs.of(self.step) if roots or chunks else ALONE)
        return roots + chunks

    def prompt_rows(self, roots: Sequence[ScheduledRequest], left: int) -> int:
        """Return the most rows that prompts may have next to these roots, of those `left`."""
        if not roots:
            return left
        most = left if all(r.request.tpot for r in roots) else min(self.budget.prefill_chunk, left)
        computing = self.computing
        waiting = sum(r.num_uncomputed for r in computing)
        context = max((len(r.token_ids) - r.num_uncomputed for r in computing), default=0)
        return prompt_rows(self.step_of(roots), self.costs, waiting, most, context)

    def slack(self, computing: Sequence[Request]) -> dict[int, float]:
        """Return the seconds that prompts have left beyond their computing time, by request id.
        Only requests that are close to missing their TTFT target, but can still meet it, are
        listed.
        """
        with_target = [r for r in computing if r.ttft is not None and r.num_output == 0]
        if not with_target:
            return {}
        now, most = perf_counter(), self.budget.prefill_chunk
        takes = {r.id: r.num_uncomputed * self.prompt_row(r, most) for r in with_target}
        left = {r.id: r.due_at - now - takes[r.id] for r in with_target}
        return {id: seconds for id, seconds in left.items() if 0 <= seconds < PRESSED * takes[id]}

    def prompt_row(self, request: Request, rows: int) -> float:
        """Return the average seconds per row of a prompt's uncomputed part, in steps of `rows`
        rows.
        """
        context = len(request.token_ids) - request.num_uncomputed // 2
        return self.costs.seconds(rows, context, 1) / rows

    def step_of(self, scheduled: Sequence[ScheduledRequest]) -> Step:
        """Return the step without draft tokens, and its allowed time."""
        step = step_of(scheduled)
        with_target = [s for s in scheduled if s.request.tpot and s.is_root]
        requests = [s.request for s in with_target if s.request.num_output > 0]
        if not requests:
            return step
        now = perf_counter()
        targets = [(r.tpot or 0.0, now - r.first_token_at, r.num_output) for r in requests]
        allowed = min(allowed_seconds(*target) for target in targets)
        return msgspec.structs.replace(step, allowed=allowed, spent=self.drafting)

    def drafted(self, seconds: float) -> None:
        """Record the seconds of drafting in the step."""
        self.drafting = max(seconds, FADE * self.drafting)

    def timed(self, rows: int, seconds: float) -> None:
        """Record the seconds of the planned step with so many rows. Few rows with a prompt's among
        them show nothing about draft tokens: of a prompt's rows, no logits are read.
        """
        step = self.step
        if step.prompt_rows and rows <= FINE:
            return
        attended = step.attended_with(rows - step.rows)
        self.costs.observe(rows, step.context, step.requests, seconds, attended)

    def max_catch_up(
        self, roots: Sequence[ScheduledRequest], chunks: Sequence[ScheduledRequest]
    ) -> int:
        """Return the most rows in which the draft model may compute older known tokens in this
        step.

        While a request of the step waits for its first token, it is a prompt chunk. Otherwise, it
        is the rows that take as long as the prompt rows that the step could have had under the
        streams' targets.
        """
        budget = self.budget
        if self.step.allowed < float("inf"):
            rows = prompt_rows(self.step, self.costs, budget.prefill_chunk, budget.prefill_chunk)
            return rows * budget.draft_rows_per_row
        if chunks or any([root.end == root.request.num_prompt for root in roots]):
            return budget.prefill_chunk
        rows = budget.prefill_chunk if len(roots) > 1 else budget.max_batched_tokens
        return rows * budget.draft_rows_per_row

    @property
    def num_unreserved(self) -> int:
        """Return the available blocks, less the blocks that running requests need for known
        tokens.
        """
        reserved = sum([r.table.missing(len(r.token_ids)) for r in self.running])
        return self.pool.num_available - reserved

    @property
    def num_spare(self) -> int:
        """Return the blocks that checkpoints may use: unreserved blocks, less one per running
        request.
        """
        return max(0, self.num_unreserved - len(self.running))

    @property
    def computing(self) -> list[Request]:
        return [r for r in self.running if r.is_computing]

    def admit(self) -> None:
        """Admit requests in the queue's order, and reserve blocks for their known tokens.

        A request that does not fit blocks all later ones, so that large requests do not starve. A
        request is set aside instead if it needs a block that a running request computes.
        """
        now = perf_counter()
        self.waiting.resume(self.running)
        for load in () if self.tiers is None else self.tiers.advance():
            self.waiting.loaded(load)
        while self.waiting.lines and (
            request := self.waiting.next(RunningCounts(self.running), now)
        ):
            if self.set_aside(request):
                continue
            if not self.make_place(request):
                return
            if self.begin_load(request):
                continue
            request.find_prefix()
            request.num_found = -1
            if request.admitted_at == 0.0:
                request.num_cached = request.num_computed
                request.admitted_at = perf_counter()
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: r.rank)

    def set_aside(self, request: Request) -> bool:
        """Set a request aside if a running one computes a block that it needs; return whether it
        did.
        """
        for leader in self.computing:
            num_blocks = leader.num_blocks_to_share(request)
            if num_blocks > 0:
                leader.table.state.wanted.add(num_blocks)
                self.waiting.set_aside(request, leader, num_blocks)
                return True
        return False

    def begin_load(self, request: Request) -> bool:
        """Load the blocks of a request's known tokens that the pool lacks and the tiers have, if
        this takes less time than computing them. Return whether the request waits for a load.

        A request loads again only if the pool has more of its blocks than at the last load. So it
        does not wait forever if its loads are cancelled, or their blocks are evicted.
        """
        tiers, table = self.tiers, request.table
        if tiers is None or table.blocks or request.is_scoring:
            return False
        num_found = len(table.find(request.token_ids))
        if num_found <= request.num_found:
            return False
        prefix = loadable(table, request.token_ids, num_found, tiers)
        if prefix is None:
            return False
        load = tiers.loading.get(prefix.keys[0])
        if load is None:
            tokens = prefix.num_blocks * table.block_size
            rows, seconds = tokens - num_found * table.block_size, tiers.seconds(prefix.keys)
            if not self.is_load_faster(rows, tokens, seconds, self.costs):
                return False
            load = tiers.begin("target", prefix.found, prefix.keys, prefix.state)
        if load is None:
            return False
        request.num_found = num_found
        self.waiting.wait_for(request, load)
        return True

    def is_load_faster(self, rows: int, context: int, seconds: float, costs: StepCosts) -> bool:
        """Return whether a load takes less time than computing its `rows`, which end at `context`.
        While requests run, a load takes another step, and a share of each step. Without measured
        steps, loads are assumed to be faster.
        """
        if not costs.has_steps:
            return True
        most = self.budget.max_batched_tokens
        if self.running:
            seconds = seconds / LOADING + self.costs.of(self.step)
            most = self.budget.prefill_chunk
        num_steps = -(-rows // most)
        return seconds < num_steps * costs.seconds(-(-rows // num_steps), context, 1)

    def begin_draft_load(self, request: Request, spare: int, costs: StepCosts) -> bool:
        """Load the draft KV of a request's known tokens as `begin_load`, into at most `spare`
        blocks. Return whether a load of it runs. `costs` are those of the draft model.
        """
        tiers, table = self.tiers, request.draft_table
        if tiers is None or table.num_computed % table.block_size:
            return False
        if any(request.id in load.waiting for load in tiers.loads):
            return True
        if table.state.size:
            return self.begin_draft_state_load(request, tiers, spare, costs)
        keys = table.keys_after(request.token_ids, len(table.blocks))
        keys = keys[: min(tiers.count(keys), spare)]
        if not keys or keys[0] in tiers.loading:
            return bool(keys)
        rows = len(keys) * table.block_size
        context = table.num_computed + rows
        if not self.is_load_faster(rows, context, tiers.seconds(keys), costs):
            return False
        load = tiers.begin("draft", [], keys)
        if load is not None:
            load.waiting.add(request.id)
        return load is not None

    def begin_draft_state_load(
        self, request: Request, tiers: Tiers, spare: int, costs: StepCosts
    ) -> bool:
        """Do the same for a draft model with recurrent layers, whose prefixes end at checkpoints.
        Without one in the pool, all blocks of the longest prefix are loaded or none.
        """
        table, pool = request.draft_table, self.pool
        if table.num_computed:
            return False
        num_found = len(table.find(request.token_ids))
        prefix = loadable(table, request.token_ids, num_found, tiers)
        if prefix is None:
            return False
        if any(key in tiers.loading for key in prefix.keys):
            return True
        num_cached = sum(pool.counts[block] == 0 for block in prefix.found)
        if len(prefix.keys) + num_cached > spare:
            return False
        tokens = prefix.num_blocks * table.block_size
        rows, seconds = tokens - num_found * table.block_size, tiers.seconds(prefix.keys)
        if not self.is_load_faster(rows, tokens, seconds, costs):
            return False
        load = tiers.begin("draft", prefix.found, prefix.keys, prefix.state)
        if load is not None:
            load.waiting.add(request.id)
        return load is not None

    def make_place(self, request: Request) -> bool:
        """Make room for a request, with preemption if necessary; return False if that is not
        possible.

        One block per running request stays free, so that the admission does not cause a preemption
        at once.
        """
        found = [] if request.table.blocks else request.table.find(request.token_ids)
        needed = request.table.missing(len(request.token_ids)) - len(found)

        def is_full() -> bool:
            return len(self.running) >= self.budget.max_running

        def is_short() -> bool:
            cached = sum(self.pool.counts[block] == 0 for block in found)
            return needed + cached + len(self.running) > self.num_unreserved

        if not is_full() and not is_short():
            return True
        victims = self.victims(request)
        if not self.fits_without(victims, request, needed, found):
            return False
        while is_full() or is_short():
            if is_full() or not self.reclaim(request):
                self.preempt(victims.pop(0))
        return True

    def victims(self, request: Request) -> list[Request]:
        """Return the requests that may be preempted to admit this one, in order. These are all
        of a larger priority value, then one of a tenant or call with more places.
        """
        larger = [r for r in self.running if r.sampling.priority > request.sampling.priority]
        peers = self.running[: len(self.running) - len(larger)]
        victim = RunningCounts(peers).victim(request)
        return [*reversed(larger), *([] if victim is None else [victim])]

    def fits_without(
        self, victims: Sequence[Request], request: Request, needed: int, found: Sequence[int]
    ) -> bool:
        """Return whether a request would fit without the victims, all draft KV, and the KV of all
        waiting completions.
        """
        kept = [r for r in self.running if r not in victims]
        if len(kept) >= self.budget.max_running:
            return False
        tables: list[Sequence[int]] = [r.draft_table.held for r in self.running]
        tables += [r.table.held for r in (*self.waiting, *victims) if r is not request]
        holders = Counter(block for blocks in tables for block in blocks)
        usable = sum(count == self.pool.counts[block] for block, count in holders.items())
        usable += self.pool.num_available
        usable -= sum(self.pool.counts[block] == holders[block] for block in found)
        reserved = sum(r.table.missing(len(r.token_ids)) for r in kept)
        return needed + len(kept) + reserved <= usable

    def reclaim(self, keeper: Request) -> bool:
        """Release the draft KV of the last running request that has some. Otherwise release the
        prompt KV of the last waiting completion other than `keeper`. Return False if there is
        neither. Both are computed again later.
        """
        for request in reversed(self.running):
            if request.draft_table.blocks:
                request.draft_table.clear()
                return True
        holding = [r for r in self.waiting if r.table.blocks and r is not keeper]
        if not holding:
            return False
        max(holding, key=lambda r: r.rank).release()
        return True

    def cancel_load(self) -> bool:
        """Cancel a load, if any, so that a running request gets its blocks. Admission never does
        this: two waiting requests could cancel each other's loads forever.
        """
        if self.tiers is None or not self.tiers.loads:
            return False
        load = self.tiers.loads[-1]
        self.tiers.cancel(load)
        self.waiting.loaded(load)
        return True

    def make_room(self, request: Request) -> bool:
        """Reserve the root's slot; return False if the request was the last and is preempted."""
        while not request.table.try_reserve(request.num_computed + 1):
            if self.cancel_load() or self.reclaim(request):
                continue
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Free a request's blocks and queue it again; it finds or computes all of its KV again. A
        beam that waits for other beams is not queued: they give it its next text.
        """
        is_waiting = request.num_uncomputed == 0
        self.running.remove(request)
        if not self.has_head:  # the head drops its rows of the last block
            request.publish_end()
        request.release()
        if not is_waiting:
            self.add(request)
        self.num_preempted += 1

    def release_kv(self) -> None:
        """Free all blocks. Running requests are queued again, and the tiers get cached blocks."""
        while self.cancel_load():
            pass
        while self.running:
            self.preempt(self.running[-1])
        for request in self.waiting:
            request.release()
        if self.tiers is not None:
            self.pool.evict_all()

    def plan_roots(self) -> list[ScheduledRequest]:
        """Plan a row for every running request that is due; the last are preempted for the
        first.
        """
        roots: list[ScheduledRequest] = []
        place = 0
        while place < len(self.running):  # the list shrinks from the end
            request = self.running[place]
            if request.is_due and self.make_room(request):
                roots.append(
                    ScheduledRequest(request, request.num_computed, request.num_computed + 1)
                )
            place += 1
        return roots

    def max_draft_tokens(self, root: ScheduledRequest) -> int:
        """Return the most draft tokens of a root: together with the bonus token they are the tokens
        left.
        """
        request = root.request
        most = request.sampling.speculation.most_nodes(self.budget.max_nodes)
        return max(0, min(most, request.num_left - 1))

    def plan_chunks(self, rows: int) -> list[ScheduledRequest]:
        """Plan parts of prompts; in a step a request has causal rows or a tree, never both."""
        computing = self.computing
        given = prefill_rows(computing, rows, self.num_plans, self.slack(computing))
        chunks = [ScheduledRequest(r, r.num_computed, r.num_computed) for r in computing]
        for chunk in chunks:
            rows -= self.grow(chunk, given[chunk.request.id])
        for chunk in chunks:  # rows that other chunks had no blocks for
            rows -= self.grow(chunk, rows)
        chunks = [chunk for chunk in chunks if chunk.end > chunk.start]
        for chunk in chunks:
            table, tokens = chunk.request.table, chunk.request.token_ids
            if table.state.size and due_checkpoints(table, tokens, chunk.end):
                begin_snapshot(table, tokens, chunk.end, self.num_spare)
        return chunks

    def publish(self, item: ScheduledRequest, nodes: Sequence[int]) -> None:
        """Publish a request's full blocks after its tokens were appended. The next launch advances
        its recurrent state, if there is one, by the accepted nodes.
        """
        item.request.publish()
        table = item.request.table
        if table.state.size == 0:
            return
        places = [item.first_kept + node - 1 for node in nodes]
        spare = self.num_spare if ends_block(table, item.end) else 0
        advance_state(table, item.request.token_ids, item.end, places, spare)

    def grow(self, chunk: ScheduledRequest, rows: int) -> int:
        """Add rows to a chunk if tokens and blocks suffice; return how many were added."""
        request, table = chunk.request, chunk.request.table
        begin, end = chunk.end, min(chunk.end + rows, len(chunk.request.token_ids))
        if table.state.size:
            end = max(begin, chunk_end(table, request.token_ids, end))
        if end == begin:
            return 0
        while table.missing(end) > self.pool.num_available:
            if not (self.cancel_load() or self.reclaim(request)):
                break
        chunk.end = max(begin, table.reserve_some(end, self.pool.num_available))
        return chunk.end - begin

    def share_draft_rows(self, roots: Sequence[ScheduledRequest]) -> None:
        """Limit roots to even shares of the step's rows for draft tokens."""
        limits = share(self.draft_rows, [root.draft_limit for root in roots], self.num_plans)
        for root, limit in zip(roots, limits, strict=True):
            root.draft_limit = limit

    def reserve_draft_slots(self, roots: Iterable[ScheduledRequest]) -> None:
        """Reserve the slots of draft tokens; if blocks are missing, a draft loses its last
        nodes.
        """
        spare: int | None = None  # it takes a look at all running requests
        for root in roots:
            table, size = root.request.table, len(root.draft.tokens)
            if table.missing(root.end + size) == 0:
                continue
            held, spare = len(table.blocks), self.num_unreserved if spare is None else spare
            fit = table.reserve_some(root.end + size, spare) - root.end
            spare -= len(table.blocks) - held
            if fit < size:
                root.draft = root.draft.head(fit)


def step_of(scheduled: Sequence[ScheduledRequest]) -> Step:
    """Return the step without draft tokens."""
    rows = context = attended = num_roots = root_context = 0
    for item in scheduled:
        size, end = item.end - item.start, item.end
        rows += size
        context += end
        attended += size * end
        if size == 1 and item.is_sampled:
            num_roots += 1
            root_context += end
    return Step(
        rows=rows,
        context=context,
        requests=len(scheduled),
        num_roots=num_roots,
        prompt_rows=rows - num_roots,
        attended=attended,
        root_context=root_context,
    )


# Largest reserve that a step may use, in times of the target: a gap of two targets is too long
AHEAD = 0.5
LEAST_CHUNK = 16  # rows that waiting prompts get whatever the targets are: they must not starve


def prompt_rows(step: Step, costs: StepCosts, waiting: int, most: int, context: int = 0) -> int:
    """Return the rows for waiting prompts next to the step's roots: the most that fit `allowed`.

    `most` always limits the rows; without a root, nothing else does. `context` counts the tokens
    before a prompt's rows.
    """
    most = min(waiting, most)
    if not step.num_roots or most <= LEAST_CHUNK:
        return most
    found = min(LEAST_CHUNK, most)
    ends = [edge - step.rows for edge in costs.edges if found < edge - step.rows < most]
    for rows in (*ends, most):
        if step.spent + costs.of(step.with_prompt(rows, context + rows)) > step.allowed:
            break
        found = rows
    return found


def allowed_seconds(target: float, since_first: float, num_output: int) -> float:
    """Return how long a step may take so that a request's tokens stay `target` apart on average.

    The request's lead may be spent, up to AHEAD of a target's time. A step may always take one
    target.
    """
    ahead = target * num_output - since_first
    return target + min(max(ahead, 0.0), AHEAD * target)
