"""A simulated engine: scripted sources, a given cost of rows, and no model."""

from random import Random

from specserve.scheduling.cost import Step, StepCosts
from specserve.scheduling.planner import ExplorationSchedule, Planner, choose
from specserve_drafters.candidates import ROOT
from specserve_drafters.trie import Calibration, RequestCandidates, Trie
from tests.drafters.paths import path_value

NGRAMS, WIDTH, DEPTH = (
    12,
    2,
    6,
)  # guesses of the n-grams' path; children of a node, levels of a model
HOLD = 0.7  # of a level's reach that the next one has, as far as is known beforehand


class World:
    """How often sources are right, and what steps cost.

    The right token at depth d is d. A node is right if its whole path is.
    """

    def __init__(self, ngram, model, verify, draft, seed=0):
        self.ngram, self.model = ngram, model  # how often right, given that the parent was
        self.verify, self.draft = verify, draft  # rows -> seconds
        self.random = Random(seed)
        self.num_wrong = 0

    def token(self, depth, p):
        """The right one with probability p; else one that no other source guesses."""
        if self.random.random() < p:
            return depth
        self.num_wrong += 1
        return -self.num_wrong

    def look_up(self, trie):
        node = ROOT
        for depth in range(1, NGRAMS + 1):
            node = trie.add(node, self.token(depth, self.ngram), 0.6, "ngram")

    def expand(self, trie, node):
        """The model's children of a node: a second one is right half as often as the first."""
        depth, found = trie.depths[node] + 1, []
        first = self.token(depth, self.model)
        second = self.token(depth, self.model / 2) if first != depth else self.token(depth, 0)
        for token, p in ((first, 0.75), (second, 0.2)):
            found.append(trie.add(node, token, p, "model"))
        return found

    def walk(self, trie, nodes):
        """The tokens of a step in which these nodes are verified."""
        node, tokens, chosen = ROOT, [1], set(nodes)
        while (child := trie.children[node].get(tokens[-1])) in chosen:
            node = child
            tokens.append(tokens[-1] + 1)
        return tokens


def sources_of(trie, token):
    node = trie.children[ROOT].get(token)
    return [] if node is None else trie.sources(node)


class Engine:
    """Steps of a number of requests that never end."""

    def __init__(self, world, load):
        self.world, self.load = world, load
        self.calibration = Calibration()
        self.seconds = self.tokens = 0.0
        self.num_steps = 0

    def run(self, num_steps):
        """Tokens a second in these steps."""
        self.seconds = self.tokens = 0.0
        for _ in range(num_steps):
            tries = [Trie(self.calibration, i) for i in range(self.load)]
            drafting, nodes = self.guess(tries)
            self.right = []  # by request: the sources that had the next token
            verifying = self.world.verify(self.load + sum(map(len, nodes)))
            self.seconds += drafting + verifying
            for trie, chosen in zip(tries, nodes, strict=True):
                tokens = self.world.walk(trie, chosen)
                self.tokens += len(tokens)
                trie.observe(tokens)
                self.right.append(sources_of(trie, tokens[0]))
            self.learn(self.load + sum(map(len, nodes)), verifying)
            self.num_steps += 1
        return self.tokens / self.seconds

    def learn(self, rows, seconds):
        pass


class FixedEngine(Engine):
    """The sources, levels and guesses of a request are always the same."""

    def __init__(self, world, load, ngrams, levels, draft_tokens):
        super().__init__(world, load)
        self.ngrams, self.levels, self.draft_tokens = ngrams, levels, draft_tokens

    def guess(self, tries):
        seconds = 0.0
        for trie in tries:
            if self.ngrams:
                self.world.look_up(trie)
        frontier = [(trie, ROOT) for trie in tries]
        for _ in range(self.levels):
            seconds += self.world.draft(len(frontier))
            request_tries = [
                (t, child) for t, node in frontier for child in self.world.expand(t, node)
            ]
            frontier = []
            for trie in tries:
                own = [node for t, node in request_tries if t is trie]
                best = sorted(own, key=lambda node: path_value(trie, node), reverse=True)[:WIDTH]
                frontier += [(trie, node) for node in best]
        free = StepCosts(1)  # all rows at one price: as many guesses as there may be
        asks = [RequestCandidates(trie, self.draft_tokens) for trie in tries]
        step = Step(self.load, 0, self.load, self.load)
        return seconds, choose(asks, step, free, self.load * self.draft_tokens).nodes


class AutoEngine(Engine):
    """The planner decides."""

    def __init__(self, world, load, most=2048):
        super().__init__(world, load)
        self.verify_costs, self.draft_costs = StepCosts(most), StepCosts(most)
        self.planner, self.exploration = Planner(self.verify_costs), ExplorationSchedule()
        self.most = most  # guesses of a step
        self.num_drafted = 0  # steps in which the draft model ran

    def guess(self, tries):
        step = Step(self.load, 0, self.load, self.load)
        for trie in tries:
            self.world.look_up(trie)
        spent = self.draft(tries, step)
        step = Step(self.load, 0, self.load, self.load, spent=spent)
        asks = [RequestCandidates(trie, 16) for trie in tries]
        self.step, self.plan = step, self.planner.choose(asks, step, self.most)
        self.num_drafted += spent > 0
        return spent, self.plan.nodes

    def draft(self, tries, step):
        growth = self.planner.growth(
            [RequestCandidates(trie, 16) for trie in tries], step, self.most
        )
        reach = self.reach([(i, ROOT) for i in range(len(tries))], tries)
        gains = [gain for gain, _, _ in reach]
        size = growth.first_size(gains, HOLD, DEPTH, self.level_seconds)
        for _, i, _ in reach[:size]:
            self.exploration.worked(i)
        self.tried = [r for r in reach[size:] if self.exploration.is_due(r[1])]
        chosen = reach[:size] + self.tried
        for left in reversed(range(DEPTH)):
            if not chosen:
                break
            took = self.world.draft(len(chosen))
            self.draft_costs.observe(len(chosen), 0, 1, took)
            below, before = [], []
            for _, i, node in chosen:
                before += [
                    path_value(tries[i], child) for child in tries[i].children[node].values()
                ]
                tries[i].ask(node, "model")
                self.world.expand(tries[i], node)
                below += [(i, child) for child in tries[i].children[node].values()]
            growth.add([path_value(tries[i], node) for i, node in below], took, before)
            reach = self.reach(below, tries)
            size = growth.size([g for g, _, _ in reach], HOLD, left, self.level_seconds)
            chosen = reach[:size]
        return growth.spent

    def reach(self, nodes, tries):
        """(what running it adds, request, node), the best first."""
        return sorted(((tries[i].reach(node, "model"), i, node) for i, node in nodes), reverse=True)

    def level_seconds(self, rows):
        return self.draft_costs.seconds(rows, 0, 1, is_hopeful=True)

    def learn(self, rows, seconds):
        self.verify_costs.observe(rows, 0, self.load, seconds)
        self.planner.observe(self.plan, self.step, seconds)
        for _, i, _ in self.tried:
            if "model" in self.right[i]:
                self.exploration.worked(i)  # so try it again soon
