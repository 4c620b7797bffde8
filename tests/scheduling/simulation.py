"""A scheduler without an engine: requests made by hand, and steps that compute what is planned."""

from array import array

from specserve.exchange.messages import Caller
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import BlockHasher, BlockPool, BlockTable
from specserve.scheduling import Request, Scheduler
from specserve.scheduling.scheduler import StepBudget
from specserve_drafters import Draft


def scheduler(num_blocks=1000, **budget):
    return Scheduler(StepBudget(**budget), BlockPool(num_blocks))


def request(s, id, known, max_tokens=100, block_size=16, priority=0, text=0, call=None, tenant=0):
    """Of a call of its own, where none is given."""
    greedy = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0}
    sampling = Sampling(max_tokens=max_tokens, priority=priority, **greedy)
    tables = [
        BlockTable(s.pool, block_size, scope, BlockHasher(scope.encode(), block_size))
        for scope in ("target", "draft")
    ]
    caller = Caller(id if call is None else call, tenant)
    return Request(id, array("i", range(text, text + known)), sampling, *tables, caller)


def run(s, states, **kwargs):
    """Requests 0, 1, .. that run already, each with (known, computed) tokens."""
    for id, (known, computed) in enumerate(states):
        s.running.append(r := request(s, id, known, **kwargs))
        assert r.table.try_reserve(known)
        r.table.num_computed = computed
    return s.running[:]


def filled(s):
    """A plan in which guesses fill all rows that they may have."""
    scheduled = s.plan()
    roots = [w for w in scheduled if w.draft_limit]
    s.share_draft_rows(roots)
    for w in roots:
        w.draft = Draft.chain([0] * w.draft_limit)
    s.reserve_draft_slots(roots)
    return scheduled


def rows(scheduled):
    """Request -> (rows of known tokens, guesses)."""
    return {w.request.id: (w.end - w.start, len(w.draft)) for w in scheduled}


def ids(requests):
    return [r.id for r in requests]


class Simulation:
    """Steps in which no guess is right: every sampled request gets one token, until it ends."""

    def __init__(self, num_blocks=3000, **budget):
        self.scheduler = scheduler(
            num_blocks, **({"max_nodes": 0, "max_batched_tokens": 192} | budget)
        )
        self.requests = {}  # all that have not ended
        self.num_asked = self.num_steps = 0
        self.arrived, self.waited = {}, {}  # by id: the step; steps until the first token

    def ask(self, known, max_tokens=10, n=1, call=None, tenant=0, priority=0, is_alike=False):
        """A prompt of a text of its own, unless it is alike, and its choices; their ids."""
        ids = [*range(self.num_asked, self.num_asked + n)]
        self.num_asked += n
        more = {"text": 0 if is_alike else 10_000 * (1 + ids[0]), "priority": priority}
        more |= {"call": ids[0] if call is None else call, "tenant": tenant}
        choices = [request(self.scheduler, id, known, max_tokens, **more) for id in ids]
        leader, *leader.followers = choices
        for r in choices:
            r.leader = None if r is leader else leader
            self.requests[r.id], self.arrived[r.id] = r, self.num_steps
            self.scheduler.add(r)
        return ids

    def end(self, id):
        self.scheduler.remove(self.requests.pop(id))

    def step(self):
        scheduled = self.scheduler.plan()
        self.num_steps += 1
        for w in scheduled:
            w.request.table.num_computed = w.end
        for w in scheduled:
            self.commit(w)
        self.scheduler.pool.check(r.table.blocks for r in self.requests.values())
        return scheduled

    def commit(self, w):
        r, is_sampled = w.request, w.is_sampled
        if is_sampled:
            self.waited.setdefault(r.id, self.num_steps - self.arrived[r.id])
            r.token_ids.append(r.id)
        r.publish()
        if is_sampled:
            self.scheduler.share_prompt(r)
            r.table.trim()
        if r.num_left == 0:
            self.end(r.id)

    def finish(self):
        """Step until all have ended; how many steps that took."""
        before = self.num_steps
        while self.requests:
            assert self.step(), "a step with someone waiting serves someone"
            assert self.num_steps < 5000, "somebody does not get on"
        return self.num_steps - before
