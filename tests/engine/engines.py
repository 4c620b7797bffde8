"""An engine around small real models, watched while it runs a scenario."""

from collections import Counter
from functools import partial
from itertools import cycle
from random import Random

import msgspec
import numpy as np
import torch

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.pool_plan import Models
from specserve.engine.runner import build_step_input
from specserve.exchange.sampling_params import Sampling, choices_of
from specserve.memory.blocks import PendingUpdates
from specserve.models.loader import load_decoder
from specserve.models.weight import AS_STORED
from specserve.speculation import planner
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.costs import StepCosts
from specserve.speculation.draft_depth import DraftDepthController
from specserve.speculation.planner import Plan
from specserve.speculation.speculator import FixedSpeculator
from specserve_drafters import ROOT, Draft
from specserve_drafters.candidates import MAX_NODES
from specserve_drafters.ngram import NgramDrafter
from specserve_kernels import load

MAX_LEN = 288
OPS = load(torch.device("cpu"))


def load_small(folder, dtype="fp32", max_len=MAX_LEN, rounding=AS_STORED):
    return load_decoder(folder, dtype, OPS, max_len, rounding=rounding)


class Case(msgspec.Struct, frozen=True):
    """One prompt of a scenario, and its choices."""

    prompt: list[int]
    sampling: Sampling
    arrives: int = 0  # in this step
    leaves: int | None = None  # its last choice is given up in this step
    n: int = 1

    @property
    def choices(self):
        return choices_of(self.sampling, self.n)


def each_choice(cases):
    """(case, sampling, whether it may be given up) of every choice of every case, in order."""
    return [
        (case, sampling, case.leaves is not None and c == case.n - 1)
        for case in cases
        for c, sampling in enumerate(case.choices)
    ]


def in_chunks(rows, max_running=8):
    """Settings with which a prompt gets `rows` rows a step, alone as well as beside streams."""
    return {"max_batched_tokens": rows, "prefill_chunk": rows, "max_running": max_running}


def engine_for(
    target,
    draft=None,
    drafter="none",
    max_len=MAX_LEN,
    head=None,
    grammars=None,
    shards=None,
    **overrides,
):
    """An engine with settings like max_nodes=4; drafter is a name, or an object put in place.

    With `shards` (tests/engine/ranks.py), `target` is the part of rank 0.
    """
    name = drafter if isinstance(drafter, str) else "ngram"
    sections = {
        "block_size": "memory",
        "draft_block_size": "memory",
        "kv_bytes": "memory",
        "prefix_cache": "memory",
        "state_interval": "memory",
        "kv_dtype": "memory",
        "share_prefix_cache": "memory",
        "host_bytes": "memory",
        "disk_path": "memory",
        "disk_bytes": "memory",
        "max_nodes": "speculation",
        "max_step_nodes": "speculation",
        "options": "drafter",
    }
    overrides.setdefault("block_size", 16)  # tests count blocks
    settings = {f"{sections.get(k, 'scheduler')}.{k}": v for k, v in overrides.items()}
    settings = {"memory.kv_bytes": 1 << 26, "drafter.name": name, **settings}
    if draft is not None:
        settings["drafter.model"] = "loaded"
    models = Models(target, draft, head)
    followers = None if shards is None else shards.followers(settings)
    config = load_config(None, settings)
    engine = assemble(config, models, max_len, grammars=grammars, followers=followers)
    if not isinstance(drafter, str):
        engine.speculator = fixed(engine, drafter)
    return engine


def draft_of(draft, drafter):
    """The draft model, for drafters that run it."""
    return draft if drafter in ("model", "auto") else None


def ask_always(engine):
    """Ask sources in every step, however little they are expected to save."""
    engine.speculator.asks_always = True


ALWAYS = 100.0  # share of time that trials may lose: they are due in every step


def let_all_guess(patch):
    """Ask sources in every step, as if drafting took no time: no clock decides about them."""
    patch.setattr(AdaptiveSpeculator, "asks_always", True)
    patch.setattr(planner, "EXPLORATION", ALWAYS)
    patch.setattr(StepCosts, "seconds", lambda *_, **__: 1.0)
    patch.setattr(DraftDepthController, "seconds", lambda *_, **__: 0.0)
    patch.setattr(DraftDepthController, "seconds_by_size", lambda self, again, most: [0.0] * most)


def planned(engine, *sources, model_sources=()):
    """The planner's choice of what these sources say."""
    lent = engine.scheduler, engine.draft_model
    return AdaptiveSpeculator(sources, model_sources, *lent, engine.stats)


def fixed(engine, drafter):
    """The guesses of a drafter, as they are."""
    vocab_size = engine.target.decoder.config.vocab_size
    lent = engine.scheduler, engine.draft_model
    return FixedSpeculator("scripted", drafter, *lent, vocab_size, engine.stats)


def plain(target, cases, **overrides):
    """The target's own text: one choice at a time, without drafts and prefix cache."""
    engine = engine_for(target, max_nodes=0, prefix_cache=False, **overrides)
    out = []
    for case, sampling, _ in each_choice(cases):
        request = engine.add(case.prompt, sampling)
        while not engine.is_idle:
            engine.step()
        out.append(request.token_ids.tolist())
    return out


class RandomGrowth:
    """DraftDepthPolicy by chance."""

    def __init__(self, rng):
        self.rng, self.spent = rng, 0.0

    def size(self, reach, hold, depth, seconds):
        return self.rng.randint(0, len(reach))

    @property
    def least(self):
        return self.rng.random()

    def pays(self, reach, hold, depth, once, level):
        return self.rng.random() < 0.7

    def add(self, values, seconds, before):
        pass


class RandomPlanner:
    """Plans by chance: any candidates whose parents are among them, and any rows of prompts."""

    def __init__(self, speculator, seed):
        scheduler = speculator.scheduler
        self.speculator, self.rng, self.costs = speculator, Random(seed), scheduler.costs
        scheduler.prompt_rows = lambda roots, left: self.rng.randint(1, left) if left else 0

    def choose(self, plans, step, most):
        plans.select(0)
        told, chosen = plans.told, 0
        for place, root in enumerate(self.speculator.roots.values()):
            trie, sampling = root.trie, root.request.sampling
            depth = sampling.speculation.max_depth or MAX_NODES
            closed, limit = [ROOT], min(root.scheduled.draft_limit, most)
            for node in range(1, len(trie) + 1):
                is_fit = trie.parents[node] in closed and len(closed) <= limit
                if is_fit and trie.depths[node] <= depth and self.rng.random() < 0.6:
                    closed.append(node)
            for node in closed[1:]:
                told.values[chosen], told.places[chosen], told.selected[chosen] = 0.5, place, node
                chosen += 1
            most -= len(closed) - 1
        told.sizes[0] = -1  # no draft is cut so far
        return Plan(chosen, step.rows + chosen, 1.0, 1.0)

    def observe(self, plan, step, seconds):
        pass


def plan_by_chance(engine, seed):
    planner = RandomPlanner(engine.speculator, seed)
    engine.speculator.planner = planner
    engine.speculator.depth_policy = lambda: RandomGrowth(planner.rng)


class Watch:
    """Observes every step of an engine, counts what happened, and injects disturbances.

    Slots after the computed ones, and free blocks, are filled with NaN: no step may read them.
    """

    def __init__(self, engine):
        self.engine, self.seen = engine, Counter()
        self.plan, self.build, self.commit = engine.scheduler.plan, engine.build, engine.commit
        engine.scheduler.plan, engine.build = self.on_plan, self.on_build
        engine.commit = self.on_commit
        for runner in runners_of(engine):
            on_launch(runner, partial(self.before_launch, runner))
        self.is_first_launch = False  # of its step
        self.others = cycle([self.of_ngrams, lambda mine=engine.speculator: mine])
        self.emitted = {}  # by request: what its outputs add up to
        self.behind = set()  # requests whose draft KV had to catch up
        self.arena = engine.target.arena
        engine.scheduler.is_load_faster = lambda *_: True  # no clock decides about it
        self.poisoned = set()

    def of_ngrams(self):
        return fixed(self.engine, NgramDrafter(NgramDrafter.Options()))

    def on_plan(self):
        self.is_first_launch = True
        return self.plan()

    def on_build(self, scheduled, sampled):
        trees = [w for w in scheduled if w.draft.tokens]
        chunks = [w for w in scheduled if w.end - w.start > 1]
        for w in scheduled:
            table, nodes = w.request.table, len(w.draft)
            written = range(
                w.start // table.block_size, (w.end + nodes - 1) // table.block_size + 1
            )
            assert all(self.engine.pool.counts[table.blocks[i]] == 1 for i in written)
        for w in trees:
            size = w.request.table.block_size
            self.seen["crossed"] += w.start // size != (w.start + len(w.draft)) // size
            if w.draft.expanded and w.request.id in self.behind:
                self.seen["caught up"] += 1
                self.behind.discard(w.request.id)
        self.behind |= {w.request.id for w in scheduled if w.draft_limit and not w.draft.expanded}
        self.seen["mixed"] += bool(trees and chunks)
        return self.build(scheduled, sampled)

    def before_launch(self, runner, step):
        """Of blocks that were freed since the last step, only pending updates may read."""
        self.seen["moved"] += "target" in step.updates.moves
        self.seen["copied"] += len(step.updates.copies)
        if self.is_first_launch:
            self.is_first_launch = False
            runner.update(step.updates)
            self.poison()
            return step._replace(updates=PendingUpdates().take())
        return step

    def on_commit(self, scheduled, sampled, paths):
        outputs = self.commit(scheduled, sampled, paths)
        for e in outputs:
            total = self.emitted.setdefault(e.id, Counter())
            self.seen["found"] += e.num_cached > 0 and not total
            total["tokens"] += len(e.tokens)
            total["steps"] += e.is_verified
            total["step_tokens"] += len(e.tokens) * e.is_verified
            total["drafted"] += e.num_drafted
            total["accepted"] += e.num_accepted
            total["fallbacks"] += e.is_fallback
        return outputs

    def check_tables(self):
        """Between steps no request holds a block without a token."""
        for r in self.engine.scheduler.running:
            assert len(r.table.blocks) == -(-r.num_computed // r.table.block_size)
            table = r.draft_table
            assert len(table.blocks) <= -(-len(r.token_ids) // table.block_size)

    def poison(self):
        pool, draft = self.engine.pool, self.engine.draft_model
        free = set(pool.free)
        if blocks := [*(free - self.poisoned)]:
            self.arena.blocks[blocks] = 255  # NaN, in any dtype
        self.poisoned = free
        kv = {"target": self.engine.target.kv, "draft": draft.runner.kv if draft else None}
        layers = {scope: each.layers for scope, each in kv.items() if each is not None}
        if self.engine.head is not None:
            layers["target"] += self.engine.head.runner.kv.layers
        for r in self.engine.requests.values():
            for table in (r.table, r.draft_table):
                place, offset = divmod(table.num_computed, table.block_size)
                if place < len(table.blocks) and not table.is_copy_due:
                    for layer in layers[table.owner]:
                        for part in layer.parts:
                            broken = float("nan") if part.is_floating_point() else 99
                            part[table.blocks[place], offset:] = broken

    def disturb(self, event):
        """Something that may happen between two steps."""
        engine, running = self.engine, self.engine.scheduler.running
        if event == "preempt" and running:
            engine.scheduler.preempt(running[-1])
        elif event == "drop":
            while any(r.draft_table.blocks for r in running):
                engine.scheduler.reclaim(running[0])
        elif event == "reset":
            engine.reset_cache()
        elif event == "evict":
            pool = engine.pool
            pool.release(reversed(pool.try_allocate(pool.num_available)))
        elif event == "swap":
            engine.speculator = next(self.others)()

    def step_squeezed(self):
        """Hold all other blocks during one step, as if other requests needed them."""
        pool, whole = self.engine.pool, self.engine.pool.num_blocks
        taken = pool.try_allocate(pool.num_available)
        pool.num_blocks -= len(taken)
        self.engine.step()
        pool.num_blocks = whole
        pool.release(taken)

    def run(self, cases, events=(), is_kept=False):
        """Step until all requests end, with `events` in the given steps. The cache may be kept for
        the next run.
        """
        requests, step, pool, events = {}, 0, self.engine.pool, dict(events)
        while len(requests) < len(cases) or not self.engine.is_idle:
            for i, case in enumerate(cases):
                if case.arrives == step:
                    requests[i] = self.engine.add_choices(case.prompt, case.choices)
                if case.leaves == step and i in requests:
                    self.engine.finish(requests[i][-1].id)
            self.disturb(events.get(step))
            if events.get(step) == "squeeze":
                self.step_squeezed()
            else:
                self.engine.step()
            self.engine.check()
            self.check_tables()
            step += 1
        self.seen["preempted"] += self.engine.scheduler.num_preempted
        if (tiers := self.engine.scheduler.tiers) is not None:
            self.seen["loaded"] += tiers.stats["host"].hits
            assert not tiers.loads, "a load goes on at idle"
        assert pool.is_whole, "blocks held at idle"
        if not is_kept:
            self.engine.reset_cache()
            assert len(pool.free) == pool.num_blocks
        return [request for i in range(len(cases)) for request in requests[i]]


def runners_of(engine):
    return [engine.target, *(model.runner for model in engine.draft_models)]


def on_launch(runner, hear):
    """Let `hear(step)` see every StepInput that is launched, and maybe give another for it."""
    launch = runner.launch
    runner.launch = lambda step, residual=None: launch(hear(step) or step, residual)


def row_counts(runner):
    """The rows of each request in each launch, as they come."""
    counts = []
    on_launch(runner, lambda step: counts.append(np.diff(step.columns.qo_indptr).tolist()))
    return counts


def logits_of(runner, groups):
    """Of the rows that are read; nothing is pending."""
    return runner.launch(build_step_input(groups, PendingUpdates())).logits


class Scripted:
    """A drafter that knows the target's text; `script(truth, limit)` makes a draft of it."""

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
