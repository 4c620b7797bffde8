"""An engine around small real models, watched while it runs a scenario."""

from collections import Counter

import msgspec
import torch

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.models.loader import load_decoder
from specserve.sampling import Sampling
from specserve_drafters import ROOT, Draft
from specserve_kernels import load

MAX_LEN = 288
OPS = load(torch.device("cpu"))
torch.set_num_threads(1)  # steps this small lose to barriers; threads have their own tests


def load_small(folder, dtype="fp32"):
    return load_decoder(folder, dtype, OPS, MAX_LEN)


class Case(msgspec.Struct, frozen=True):
    """One request of a scenario."""

    prompt: list[int]
    sampling: Sampling
    arrives: int = 0  # in this step
    leaves: int | None = None  # given up in this step


def engine_for(target, draft=None, drafter="none", **overrides):
    """An engine with settings like max_nodes=4; drafter is a name, or an object put in place."""
    name = drafter if isinstance(drafter, str) else "ngram"
    sections = {
        "block_size": "memory",
        "draft_block_size": "memory",
        "kv_bytes": "memory",
        "max_nodes": "speculation",
        "max_step_nodes": "speculation",
        "options": "drafter",
    }
    settings = {f"{sections.get(k, 'scheduler')}.{k}": v for k, v in overrides.items()}
    settings = {"memory.kv_bytes": 1 << 26, "drafter.name": name, **settings}
    if draft is not None:
        settings["drafter.model"] = "loaded"
    engine = assemble(load_config(None, settings), target, draft, MAX_LEN)
    if not isinstance(drafter, str):
        engine.drafter = drafter
    return engine


def plain(target, cases, **overrides):
    """What the target says alone: one request at a time, nothing guessed."""
    engine = engine_for(target, max_nodes=0, **overrides)
    out = []
    for case in cases:
        request = engine.add(case.prompt, case.sampling)
        while not engine.is_idle:
            engine.step()
        out.append(request.token_ids.tolist())
    return out


class Watch:
    """Counts what a run has met, by looking at every step from outside."""

    def __init__(self, engine):
        self.engine, self.seen = engine, Counter()
        self.verify, self.move, self.commit = engine.verify, engine.target.move, engine.commit
        engine.verify, engine.target.move = self.on_verify, self.on_move
        engine.commit = self.on_commit
        self.emitted = {}  # by request: what its emissions add up to
        self.behind = set()  # requests whose draft KV had to catch up

    def on_verify(self, works):
        trees = [w for w in works if w.draft.tokens]
        chunks = [w for w in works if w.end - w.start > 1]
        for w in trees:
            size = w.request.table.block_size
            self.seen["crossed"] += w.start // size != (w.start + len(w.draft)) // size
            if w.draft.expanded and w.request.id in self.behind:
                self.seen["caught up"] += 1
                self.behind.discard(w.request.id)
        self.behind |= {w.request.id for w in works if w.draft_limit and not w.draft.expanded}
        self.seen["mixed"] += bool(trees and chunks)
        return self.verify(works)

    def on_move(self, moves):
        self.seen["moved"] += bool(moves)
        return self.move(moves)

    def on_commit(self, works, sampled, paths):
        emissions = self.commit(works, sampled, paths)
        for e in emissions:
            total = self.emitted.setdefault(e.id, Counter())
            total["tokens"] += len(e.tokens)
            total["steps"] += e.is_verified
            total["step_tokens"] += len(e.tokens) * e.is_verified
            total["drafted"] += e.num_drafted
            total["accepted"] += e.num_accepted
        return emissions

    def check_tables(self):
        """Between steps nobody keeps a block for guesses."""
        for r in self.engine.scheduler.running:
            for table in (r.table, r.draft_table):
                assert len(table.blocks) <= -(-len(r.token_ids) // table.block_size)

    def step_squeezed(self):
        """Somebody unseen holds all free blocks for the time of a step."""
        pool, whole = self.engine.pool, self.engine.pool.num_blocks
        taken = pool.try_allocate(pool.num_free)
        pool.num_blocks -= len(taken)
        self.engine.step()
        pool.num_blocks = whole
        pool.release(taken)

    def run(self, cases, squeezed=()):
        """Step until all is said; in the steps `squeezed`, with no free block in the pool."""
        requests, step, pool = {}, 0, self.engine.pool
        while len(requests) < len(cases) or not self.engine.is_idle:
            for i, case in enumerate(cases):
                if case.arrives == step:
                    requests[i] = self.engine.add(case.prompt, case.sampling)
                if case.leaves == step and i in requests:
                    self.engine.finish(requests[i].id)
            if step in squeezed:
                self.step_squeezed()
            else:
                self.engine.step()
            self.engine.check()
            self.check_tables()
            step += 1
        self.seen["preempted"] += self.engine.scheduler.num_preempted
        assert pool.is_whole, "blocks held at idle"
        return [requests[i] for i in range(len(cases))]


class Scripted:
    """Knows what will be said; `script(truth, limit)` makes a draft of it."""

    needs_executor = False

    def __init__(self, script, truth):
        self.script, self.truth = script, truth  # truth: token ids by request id

    def propose(self, items):
        return [self.script(self.truth[i.id][len(i.token_ids) :], i.limit) for i in items]

    def observe(self, id, draft, accepted):
        pass

    def forget(self, id):
        pass


def right(truth, limit):
    return Draft.chain(truth[:limit])


def wrong(truth, limit):
    return Draft.chain([t ^ 1 for t in truth[:limit]])


def wrong_later(truth, limit):
    guess = truth[:limit]
    return Draft.chain([*guess[: limit // 2], *(t ^ 1 for t in guess[limit // 2 :])])


def bush(truth, limit):
    """Right, but every right guess stands behind a wrong sibling: what is kept has to be moved."""
    tokens, parents, node = [], [], ROOT
    for t in truth:
        tokens += [t ^ 1, t]
        parents += [node, node]
        node = len(tokens)
    return Draft(tokens, parents)


def hedge(truth, limit):
    """A wrong chain first, and the right one last of all."""
    half = limit // 2
    lie, guess = [t ^ 1 for t in truth[: limit - half]], truth[:half]
    below = [ROOT, *range(len(lie) + 1, len(lie) + len(guess))][: len(guess)]
    return Draft(lie + guess, [*range(len(lie)), *below])


def too_long(truth, limit):
    return Draft.chain(truth + [0] * 80)


def out_of_range(truth, limit):
    return Draft.chain([*truth[:2], 10**9, *truth[3:]])


def bad_parents(truth, limit):
    return Draft(truth[:4], [0, 1, 7, -1][: len(truth[:4])], [5, 70, -3, 10**9])


def raising(truth, limit):
    raise RuntimeError("a drafter with a bug")


def nonsense(truth, limit):
    return "no draft at all"


SCRIPTS = [
    *(right, wrong, wrong_later, bush, hedge),
    *(too_long, out_of_range, bad_parents, raising, nonsense),
]
