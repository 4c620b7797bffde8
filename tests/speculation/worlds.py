"""Simulated worlds: what sources propose, how often it is right, and what steps take.

The scheduler and the speculator are the real ones. There is no model: the right token at each place
of a text is known beforehand, and a clock goes on by what the world says.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np

from specserve.exchange.messages import Stats
from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
from specserve.speculation.costs import StepCosts
from specserve.speculation.verify import AcceptedPath
from specserve_drafters import ROOT, Draft
from specserve_drafters.base import DraftSource
from specserve_drafters.candidates import CandidateColumns
from tests.scheduling import simulation

LONGEST = 12  # tokens that the lookup source proposes
PLACES, REQUESTS = 4096, 64  # tokens and texts until chance repeats
SPACING = 1 << 16  # between the tokens of two texts
WRONG = 1 << 30  # a token that is right nowhere


@dataclass(frozen=True)
class World:
    """Chances are functions of a request's number and of a place in its text."""

    verify: Callable[[int, float], float]  # rows, tokens of context -> seconds of the target
    lookup: Callable[[int, int], float] = lambda request, place: 0.0  # how often it is right
    covers: float = 1.0  # share of places at which it proposes anything
    score: float = 0.6  # what it says of each token
    host: float = 0.0  # seconds of planning for a request
    model: Callable[[int, int], float] | None = None  # how often a draft model is right
    level: Callable[[int], float] = lambda rows: 0.0  # rows -> seconds of a level
    catching_up: float = 0.0  # seconds of the model for a new request's prompt
    streams: int = 1  # requests at a time
    prompt: int = 64
    output: int = 240
    burst: int = 1  # requests that begin together
    noise: float = 0.02  # relative spread of the target's time
    load: Callable[[int], float] = lambda step: 1.0  # factor of the target's time
    seed: int = 0

    def chance(self, kind: int) -> np.ndarray:
        return chance_of(self.seed, kind)


@cache
def chance_of(seed, kind):
    return np.random.default_rng([seed, kind]).random((REQUESTS, PLACES))


class Text:
    """What is right at each place of a request's text."""

    def __init__(self, world: World, id: int) -> None:
        self.world, self.id, self.first = world, id, id * SPACING

    def is_right(self, kind: int, place: int, p: float) -> bool:
        return self.world.chance(kind)[self.id % REQUESTS, place % PLACES] < p

    def look_up(self, place: int, limit: int = LONGEST) -> list[int]:
        """The tokens from a place on that a lookup proposes, up to the first wrong one."""
        world = self.world
        if self.world.chance(1)[self.id % REQUESTS, place % PLACES] >= world.covers:
            return []
        tokens = []
        for at in range(place, place + min(limit, LONGEST)):
            if not self.is_right(0, at, world.lookup(self.id, at)):
                break
            tokens.append(self.first + at)
        return tokens + [WRONG] * (min(limit, LONGEST) - len(tokens))

    def children(self, place: int) -> list[int]:
        """The draft model's tokens: a second one is right half as often as the first."""
        p = self.world.model(self.id, place)
        if self.is_right(2, place, p):
            return [self.first + place, WRONG]
        return [WRONG, self.first + place if self.is_right(3, place, p / 2) else WRONG + 1]


class LookupSource(DraftSource):
    name, is_estimating = "lookup", True

    def __init__(self, engine):
        self.engine = engine

    def expected_accepted(self, id, text):
        texts = self.engine.texts
        return 1.5 if texts[id].look_up(len(text), 1) else 0.0

    def candidates(self, items):
        found = []
        for item in items:
            tokens = self.engine.texts[item.id].look_up(len(item.known), item.limit)
            self.engine.clock.now += self.engine.world.host
            scores = array("d", [self.engine.world.score] * len(tokens))
            columns = array("i", tokens), array("i", range(len(tokens))), scores
            found.append(CandidateColumns(*columns, self.name))
        return found


class ScriptedModel:
    """A draft model, as executor and source: each level takes what the world says."""

    name, max_depth, width = "model", 8, 2

    def __init__(self, engine):
        self.engine, self.num_rows, self.context = engine, 0, 0
        self.known = set()  # requests whose prompt the model has run
        self.costs, self.first_costs = StepCosts(512), StepCosts(512)
        self.source = self.model = self
        self.begin()

    def begin(self):
        self.seconds = self.catching_up = 0.0
        self.is_trial_alone = False

    def usual_rows(self, request):
        return 1

    def missing(self, request):
        is_new = self.engine.world.catching_up > 0 and request.id not in self.known
        return request.num_prompt if is_new else 0

    def catch_up(self, item):
        """Run a new request's prompt."""
        if self.engine.world.catching_up and item.id not in self.known:
            self.known.add(item.id)
            self.num_rows += len(item.known)
            self.engine.clock.now += self.engine.world.catching_up

    def lend(self, requests):
        pass

    def take_back(self):
        pass

    def is_catching_up(self, item):
        return False

    def grow(self, request_tries, levels, extending):
        reach = [trie.reach(ROOT, self.name) for _, trie, _ in request_tries]
        rows = [(i, ROOT) for i in levels.first(reach)]
        for depth in range(1, self.max_depth + 1):
            if not rows:
                return
            self.engine.clock.now += self.engine.world.level(len(rows))
            self.num_rows += len(rows)
            before, ends = [], []
            for i, node in rows:
                item, trie, proposed = request_tries[i]
                self.catch_up(item)
                place = len(item.known) + trie.depths[node]
                tokens = self.engine.texts[item.id].children(place)
                trie.ask(node, self.name)
                before += trie.branch(node, zip(tokens, (0.75, 0.2), strict=True), self.name)
                proposed[self.name] = proposed.get(self.name, 0) + len(tokens)
                ends += [(i, child) for child in trie.children_of(node)]
            levels.ran([request_tries[i].trie.values[node] for i, node in ends], before)
            ends = [(i, node) for i, node in ends if request_tries[i].item.limit > depth]
            if not ends or depth == self.max_depth:
                return
            scored = [(request_tries[i].trie.reach(node, self.name), i, node) for i, node in ends]
            scored.sort(reverse=True)
            kept = [s for s in scored if s[0] > 0][: self.width * len(request_tries)]
            rows = [(i, node) for _, i, node in kept[: levels.next([s[0] for s in kept])]]


class FixedPlan:
    """Verifies the same number of one source's draft tokens in each step."""

    def __init__(self, engine, source, size):
        self.engine, self.source, self.size = engine, source, size

    def draft(self, scheduled):
        roots = [s for s in scheduled if s.draft_limit]
        self.engine.scheduler.share_draft_rows(roots)
        if self.source == "model" and roots:
            for _ in range(self.size):
                self.engine.clock.now += self.engine.world.level(len(roots))
        for item in roots:
            request, size = item.request, min(self.size, item.draft_limit)
            if self.source == "model" and request.num_output == 1:
                self.engine.clock.now += self.engine.world.catching_up
            text, place = self.engine.texts[request.id], len(request.token_ids)
            if self.source == "lookup":
                tokens = text.look_up(place, size)
            else:
                tokens = [text.children(place + k)[0] for k in range(size)]
            item.draft = Draft.chain(tokens)

    def timed(self, seconds):
        pass

    def learn(self, items, paths):
        pass

    def begin(self, request):
        pass

    forget = begin


class Engine:
    """Steps of requests that arrive when others end, with the plans of a speculator."""

    def __init__(self, world: World, clock) -> None:
        self.world, self.clock, self.texts = world, clock, {}
        self.scheduler = simulation.scheduler(
            1 << 16, max_nodes=16, max_step_nodes=128, max_batched_tokens=512
        )
        self.random = np.random.default_rng(world.seed)
        self.num_steps = self.num_tokens = self.num_requests = 0
        self.speculator = None

    def with_auto(self, *others):
        """Other sources are added to those of the world."""
        models = [] if self.world.model is None else [ScriptedModel(self)]
        sources = [LookupSource(self), *others]
        self.speculator = AdaptiveSpeculator(sources, models, self.scheduler, None, Stats())
        return self

    def with_plan(self, source, size):
        self.speculator = FixedPlan(self, source, size)
        return self

    def admit(self):
        running = len(self.scheduler.running) + len(self.scheduler.waiting)
        if running > self.world.streams - self.world.burst:
            return
        for _ in range(self.world.streams - running):
            id = self.num_requests
            self.num_requests += 1
            self.texts[id] = Text(self.world, id)
            # Texts of one burst end at different places.
            output = int(self.world.output * (0.75 + 0.5 * self.world.chance(4)[id % REQUESTS, 0]))
            request = simulation.request(
                self.scheduler, id, self.world.prompt, output, text=id * SPACING
            )
            self.scheduler.add(request)
            self.speculator.begin(request)

    def step(self):
        self.admit()
        scheduled = self.scheduler.plan()
        self.speculator.draft(scheduled)
        rows = sum(s.end - s.start + len(s.draft) for s in scheduled)
        context = sum(s.end for s in scheduled) / len(scheduled)
        seconds = self.world.verify(rows, context) * self.world.load(self.num_steps)
        seconds *= self.random.lognormal(0, self.world.noise)
        self.clock.now += seconds
        self.scheduler.timed(rows, seconds)
        self.speculator.timed(seconds)
        for item in scheduled:
            item.request.table.num_computed = item.end
        for item in scheduled:
            self.commit(item)
        self.num_steps += 1

    def commit(self, item):
        request = item.request
        if not item.is_sampled:
            request.publish()
            return
        tokens, nodes, node = [], [], ROOT
        right = request.id * SPACING + len(request.token_ids)
        while True:
            tokens.append(right + len(tokens))
            node = item.draft.child(node, tokens[-1]) if len(tokens) < request.num_left else None
            if node is None:
                break
            nodes.append(node)
        request.table.num_computed += len(nodes)
        request.token_ids.extend(tokens)
        request.publish()
        self.num_tokens += len(tokens)
        self.speculator.learn([item], [AcceptedPath(tokens, nodes)])
        if request.num_left <= 0:
            self.scheduler.remove(request)
            self.speculator.forget(request.id)
            del self.texts[request.id]
        else:
            request.table.trim()

    def run(self, num_tokens):
        """Step until so many tokens were emitted; return the time."""
        while self.num_tokens < num_tokens:
            self.step()
        return self.clock.now


class Outcome(SimpleNamespace):
    """Seconds of the adaptive plan, and of each fixed plan, for the same tokens."""

    @property
    def best(self):
        return min(self.fixed, key=self.fixed.get)

    @property
    def regret(self):
        return self.auto / self.fixed[self.best] - 1

    @property
    def over_off(self):
        return self.auto / self.fixed["off", 0] - 1


class BadSource(DraftSource):
    """Says that its tokens are sure, and none is right. It may take long, or raise."""

    name, is_estimating = "bad", True

    def __init__(self, clock, seconds=0.0, error=None):
        self.clock, self.seconds, self.error = clock, seconds, error

    def expected_accepted(self, id, text):
        return 10.0

    def candidates(self, items):
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error
        columns = array("i", [WRONG + 2] * 8), array("i", range(8)), array("d", [0.99] * 8)
        return [CandidateColumns(*columns, self.name) for _ in items]


def outcome(world: World, clock, begin=500, end=5000, sizes=(1, 2, 3, 4, 6, 8, 12)) -> Outcome:
    """Run `auto` from one step to the other, and each fixed plan over the same tokens."""
    engine, passed = Engine(world, clock).with_auto(), {}
    for number in (begin, end):
        while engine.num_steps < number:
            engine.step()
        passed[number] = engine.num_tokens, clock.now
    (first, start), (last, stop) = passed[begin], passed[end]
    plans = [("off", 0), *(("lookup", n) for n in sizes)]
    plans += [("model", n) for n in sizes if n <= 8] if world.model else []
    fixed = {}
    for plan in plans:
        other = Engine(world, clock).with_plan(*plan)
        fixed[plan] = -other.run(first) + other.run(last)
    return Outcome(auto=stop - start, fixed=fixed, tokens=last - first, engine=engine)
