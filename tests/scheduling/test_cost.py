"""What steps cost, learnt from steps on a simulated machine: its noise only ever slows it down."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.constants import KNOWN, STALE, WINDOW
from specserve.speculation.costs import KnownCosts, Sample, Step, StepCosts, edges
from tests.speculation.oracle_costs import OracleCosts, are_known, without_prompts


def true_seconds(rows, context=0, requests=1):
    return 0.03 * (1 + max(0, -(-rows // 8) - 1) / 3) + 2e-6 * context + 1e-4 * requests


SIZES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64  # edges, to which steps are filled


class Machine:
    """Steps of random sizes; a neighbor makes them `slowed` times as long."""

    def __init__(self, costs, seed=0):
        self.costs, self.random = costs, Random(seed)

    def run(self, steps, slowed=1.0, sizes=SIZES, contexts=(1000,)):
        for _ in range(steps):
            rows, context = self.random.choice(sizes), self.random.choice(contexts)
            noise = 1 + self.random.expovariate(20)
            seconds = true_seconds(rows, context) * noise * slowed
            self.costs.observe(rows, context, 1, seconds)


def ratios(costs, sizes=(1, 4, 8, 16, 24, 32, 48, 64), context=1000):
    """Of the estimates at right edges to the truth."""
    return [costs.seconds(n, context, 1) / true_seconds(n, context) for n in sizes]


def learnt(steps=400, **kwargs):
    costs = StepCosts(64, 1e-6)
    Machine(costs).run(steps, **kwargs)
    return costs


def test_edges_are_powers_of_two_and_halfway_between():
    assert edges(1) == [1]
    assert edges(20) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


def test_many_rows_have_an_edge_for_every_tile_or_eighth():
    assert [edge for edge in edges(300) if edge >= 64] == [*range(64, 256, 16), 256, 288, 320]
    assert [b - a for a, b in pairwise(edges(4096)) if 1024 <= a < 2048] == [128] * 8


def test_what_roots_alone_take_is_known_from_their_first_step():
    """Steps of prompts come first, and have many more rows."""
    costs = StepCosts(512)
    for _ in range(KNOWN):
        costs.observe(131, 0, 4, 0.18)
    assert costs.seconds(4, 0, 4) < 0.03
    costs.observe(4, 0, 4, 0.034)
    assert costs.seconds(4, 0, 4) == pytest.approx(0.034)
    costs.observe(4, 0, 4, 0.5)
    assert costs.seconds(4, 0, 4) == pytest.approx(0.034), "a slow step shows nothing"
    assert costs.seconds(64, 0, 4) < 0.18


def test_between_known_edges_rows_are_hoped_to_be_free_next_to_those_of_their_tile():
    costs = StepCosts(512)
    for rows, seconds in ((4, 0.03), (64, 0.09)):
        for _ in range(KNOWN):
            costs.observe(rows, 0, 1, seconds)
    assert costs.seconds(16, 0, 1, is_hopeful=True) == pytest.approx(0.03)
    assert costs.seconds(16, 0, 1) == pytest.approx(0.042)
    assert costs.seconds(34, 0, 1, is_hopeful=True) == pytest.approx((0.03 + 0.074) / 2)


def test_it_learns_what_rows_cost():
    assert ratios(learnt()) == pytest.approx([1.0] * 8, abs=0.12)


def test_first_steps_that_are_slow_do_not_make_an_edge_expensive():
    costs = StepCosts(64, 1e-6)
    for slowed in (5, 3, 1):
        costs.observe(8, 1000, 1, true_seconds(8, 1000) * slowed)
    assert costs.is_known(8)
    assert ratios(costs, (8,)) == pytest.approx([1.0], abs=0.1)


def test_what_was_learnt_can_be_forgotten():
    costs, new = learnt(), StepCosts(64, 1e-6)
    assert costs.table() != new.table()
    costs.reset()
    assert (costs.table(), costs.added, costs.known()) == (new.table(), new.added, new.known())


def test_it_learns_what_context_costs():
    costs = StepCosts(64, 1e-6)
    Machine(costs).run(1500, contexts=(100, 2000, 4000, 8000))
    for context in (100, 4000, 8000):
        assert ratios(costs, context=context) == pytest.approx([1.0] * 8, abs=0.2)


def test_the_first_slow_steps_are_not_taken_for_costs_of_context():
    costs = StepCosts(64)
    for seconds in (0.03, 0.03, 0.03, 0.12, 0.12):
        costs.observe(8, 1000, 1, seconds)
    assert costs.seconds(8, 1000, 1) == pytest.approx(0.03, rel=0.02)
    assert costs.seconds(8, 0, 1) == pytest.approx(0.03, rel=0.02)


def test_rows_up_to_an_edge_cost_the_same():
    costs = learnt()
    assert costs.seconds(17, 0, 1) == costs.seconds(24, 0, 1) > costs.seconds(16, 0, 1)


def test_a_neighbor_that_takes_half_the_machine_is_seen_soon_and_leaves_no_trace():
    costs = learnt()
    before = costs.table()
    machine = Machine(costs, seed=1)
    machine.run(12, slowed=2.0)
    assert ratios(costs) == pytest.approx([2.0] * 8, abs=0.4), "as long as it is there"
    machine.run(500, slowed=2.0)
    during = costs.table()
    machine.run(1)
    assert ratios(costs) == pytest.approx([1.0] * 8, abs=0.25), "one fast step shows that it left"
    for table in during, costs.table():
        assert [*table.values()] == pytest.approx([*before.values()], rel=0.1)


def test_a_neighbor_from_the_start_leaves_no_trace_once_it_is_gone():
    costs = learnt(slowed=2.0)
    assert min(ratios(costs)) > 1.7
    Machine(costs, seed=1).run(30, sizes=(8, 16))
    assert max(ratios(costs)) < 1.3, "also of sizes that have not been run since"


def test_one_fast_step_promises_nothing():
    costs = learnt(600)
    before = costs.table()
    costs.observe(16, 1000, 1, 1e-4)
    assert costs.table() == before
    costs = StepCosts(64)
    for _ in range(KNOWN):
        costs.observe(8, 0, 1, 0.03)
    costs.observe(16, 0, 1, 1e-4)
    assert not costs.is_known(16) and costs.seconds(16, 0, 1) > 0.03


def test_one_slow_step_forbids_nothing():
    costs = learnt(sizes=(1, 2, 4, 8))
    costs.observe(16, 1000, 1, 10.0)
    assert costs.seconds(16, 1000, 1) < 0.1
    Machine(costs).run(KNOWN, sizes=(16,))
    assert costs.seconds(16, 1000, 1) < 0.06


def test_an_edge_that_was_slow_by_chance_is_tried_again():
    """Its first steps were slow, so that no plan takes it: what was seen of it is forgotten."""
    costs = learnt(sizes=(1,))
    for _ in range(KNOWN):
        costs.observe(4, 1000, 1, 1.0)
    assert costs.is_known(4) and costs.seconds(4, 1000, 1) > 0.5
    Machine(costs).run(2 * STALE, sizes=(1,))
    assert not costs.is_known(4) and costs.seconds(4, 1000, 1) < 0.1
    full = learnt()
    Machine(full).run(2 * STALE, sizes=(1,))
    assert full.is_known(4), "what many steps have shown is kept"


def test_a_stale_estimate_above_that_of_more_rows_is_lowered_to_its_fastest_step():
    costs = StepCosts(64)
    for rows, each in ((8, [0.06, 0.06, 0.05, 0.06]), (16, [0.04] * KNOWN)):
        for seconds in each:
            costs.observe(rows, 0, 1, seconds)
    assert [costs.table()[rows] for rows in (8, 16)] == [0.05, 0.05]


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_no_later_steps_of_more_rows_lower_a_bucket_below_its_fastest_step(rows):
    costs = StepCosts(64)
    for _ in range(WINDOW):
        costs.observe(rows, 0, 1, 0.03)
    for larger in (16, 32):
        for _ in range(2 * WINDOW):
            costs.observe(larger, 0, 1, 0.01)
            assert costs.table()[rows] >= 0.03 * 0.999
    assert costs.slowdown == 1


def test_steps_that_take_as_long_as_they_did_lower_no_other_estimate():
    """Though steps of fewer rows took longer, as on kernels that suit tiles only."""
    costs = StepCosts(64)
    for _ in range(WINDOW):
        for rows, seconds in ((1, 0.01), (8, 0.06), (16, 0.04)):
            costs.observe(rows, 0, 1, seconds)
    for _ in range(4 * WINDOW):
        costs.observe(16, 0, 1, 0.04)
    assert costs.table()[1] == pytest.approx(0.01)
    assert costs.table()[8] == costs.table()[16] == pytest.approx(0.06)


def test_where_edges_contradict_each_other_the_one_measured_last_is_right():
    costs = StepCosts(64)
    for rows, seconds in ((16, 0.02), (32, 0.03), (8, 0.04)):
        for _ in range(KNOWN):
            costs.observe(rows, 0, 1, seconds)
    assert [costs.seconds(rows, 0, 1) for rows in (8, 16, 32)] == [0.04] * 3


def test_rows_are_taken_to_share_the_reading_of_context_until_steps_distinguish_them():
    costs = StepCosts(64)
    for context in (300, 5000):
        for _ in range(KNOWN):
            costs.observe(1, context, 1, 0.002 + 1e-7 * context)
    reading, attending, _ = costs.added
    assert reading + attending == pytest.approx(1e-7, rel=0.05)
    assert 0 < attending < reading / 10


steps = st.lists(
    st.tuples(st.integers(1, 100), st.integers(0, 9000), st.floats(1e-4, 10.0)), max_size=60
)


@given(steps, st.integers(0, 9000))
def test_more_rows_never_cost_less(steps, context):
    costs = StepCosts(64, 1e-6)
    for rows, length, seconds in steps:
        costs.observe(rows, length, 1, seconds)
    for is_hopeful in False, True:
        found = [costs.seconds(rows, context, 1, is_hopeful) for rows in range(1, 80)]
        assert all(0 < a <= b * (1 + 1e-9) for a, b in pairwise(found))
    assert costs.seconds(9, context, 1) <= costs.seconds(9, context + 1, 1)
    assert costs.seconds(9, context, 1) <= costs.seconds(9, 2 * context, 2)
    for rows in 1, 8, 64:
        assert costs.seconds(rows, 0, 1, True) <= costs.seconds(rows, 0, 1) * (1 + 1e-9)


def test_what_is_not_known_is_hoped_to_be_cheap_step_by_step():
    costs = StepCosts(512)
    for _ in range(KNOWN):
        costs.observe(8, 0, 1, 0.03)
    assert costs.seconds(16, 0, 1, is_hopeful=True) == costs.seconds(8, 0, 1)
    assert costs.seconds(16, 0, 1) > costs.seconds(8, 0, 1)
    assert costs.seconds(24, 0, 1, is_hopeful=True) == costs.seconds(24, 0, 1), "too far"
    assert costs.seconds(4, 0, 1, is_hopeful=True) == pytest.approx(0.015)
    costs.observe(16, 0, 1, 0.09)
    assert costs.seconds(16, 0, 1, is_hopeful=True) == costs.seconds(16, 0, 1), "as it was tried"


def test_rows_beyond_two_known_edges_are_hoped_to_cost_half_as_much_as_those_between():
    costs = StepCosts(512)
    for rows, seconds in ((8, 0.03), (16, 0.05)):
        for _ in range(KNOWN):
            costs.observe(rows, 0, 1, seconds)
    assert costs.seconds(24, 0, 1, is_hopeful=True) == pytest.approx(0.06)


def test_what_was_known_is_known_at_the_next_start():
    costs = learnt()
    again = StepCosts(64, known=costs.known())
    assert ratios(again) == pytest.approx(ratios(costs), rel=0.05)
    assert again.is_known(8)
    Machine(again).run(200)
    assert ratios(again) == pytest.approx([1.0] * 8, abs=0.12)


def test_absurd_numbers_of_an_earlier_start_are_ignored():
    absurd = {8: -1.0, 9: 0.1, 16: 1e9, 24: float("nan"), 32: float("inf"), 48: 1e-200}
    samples = {
        edge: [Sample(0, 0, 1, seconds), Sample(9000, 9000, 1, seconds)]
        for edge, seconds in absurd.items()
    }
    samples[12] = [Sample(-5.0, 0, 1, 0.1), Sample(0, float("nan"), 1, 0.1)]
    costs = StepCosts(64, 1e-6, KnownCosts(samples))
    assert not any(costs.is_known(edge) for edge in costs.edges)
    assert costs.added == [1e-6, 0.0, 0.0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-200, float("nan"), float("inf")])
def test_a_step_that_no_machine_can_have_measured_is_ignored(seconds):
    costs, same = learnt(), learnt()
    for context in (1000, 9000):
        costs.observe(8, context, 1, seconds)
    assert costs.table() == same.table() and costs.known() == same.known()


def test_measured_steps_never_shrink_to_nothing(monkeypatch):
    """However far all estimates are off: without a bound, the scaled seconds would reach 0."""
    costs = learnt()
    monkeypatch.setattr(StepCosts, "seconds", lambda *_, **__: 1e3)
    Machine(costs).run(1000, contexts=(100, 9000))
    assert all(value > 0 for value in costs.table().values())


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 4])
def test_kept_costs_that_the_first_steps_contradict_are_forgotten(factor):
    kept = learnt().known()
    costs = StepCosts(64, 1e-6, kept)
    for _ in range(KNOWN):
        costs.observe(8, 1000, 1, true_seconds(8, 1000) / factor)
    assert costs.is_known(64) == (1 / 3 < factor < 3)
    Machine(costs, seed=1).run(400, slowed=1 / factor)
    assert [factor * r for r in ratios(costs)] == pytest.approx([1.0] * 8, abs=0.15)


def test_one_first_step_that_is_slow_contradicts_nothing():
    costs = StepCosts(64, 1e-6, learnt().known())
    for slowed in (20, 1, 20, 20, 20):
        costs.observe(8, 1000, 1, true_seconds(8, 1000) * slowed)
    assert costs.is_known(64)


class Decoder:
    """A machine whose steps read the KV of each request once, and whose rows attend to it."""

    def __init__(self, seed=0, known=None, row=2e-3, width=24, reading=1e-7, attending=4e-8):
        self.costs, self.random = StepCosts(512, known=known), Random(seed)
        self.row, self.width, self.reading, self.attending = row, width, reading, attending
        self.slowed = lambda: 1.0

    def true(self, rows, context):
        more = self.reading * context + self.attending * rows * context
        return self.row * (1 + max(0, rows - 4) / self.width) + more

    def step(self, rows, context):
        seconds = self.true(rows, context) * (1 + self.random.expovariate(20)) * self.slowed()
        self.costs.observe(rows, context, 1, seconds)

    def respond(self, prompt, tokens, sizes=(1, 1, 1, 8)):
        for end in range(512, prompt, 512):
            self.step(512, end)
        self.step((prompt - 1) % 512 + 1, prompt)
        for i in range(tokens):
            self.step(self.random.choice(sizes), prompt + i)

    def loaded(self, least, most):
        self.slowed = lambda: self.random.uniform(least, most)

    def ratios(self, *steps):
        return [self.costs.seconds(*step, 1) / self.true(*step) for step in steps]


SHORT, LONG = ((1, 400), (8, 400)), ((1, 6000), (8, 6000))
EXACT = pytest.approx([1.0] * 2, abs=0.15)


@pytest.mark.parametrize("seed", range(3))
def test_long_prompts_leave_no_trace_in_the_costs_of_rows(seed):
    """The attention of a prompt's many rows is no cost of each token of context."""
    machine = Decoder(seed)
    for prompt in (4100, 7300, 5600):
        machine.respond(prompt, 100)
        assert machine.ratios((1, prompt), (8, prompt)) == EXACT
        table = machine.costs.table()
        assert table[1] > machine.row and table[8] > table[1]
        assert min(machine.ratios(*SHORT)) > 0.9
    machine.respond(400, 20)
    assert machine.ratios(*SHORT) == EXACT and machine.ratios(*LONG) == EXACT


def test_each_row_of_a_draft_costs_more_at_a_long_context():
    machine = Decoder()
    for prompt in (400, 6000):
        machine.respond(prompt, 100)
    costs = machine.costs
    assert costs.added[:2] == pytest.approx([machine.reading, machine.attending], rel=0.3)
    short, long = (Step(1, n, 1, 1, attended=n, root_context=n) for n in (100, 16_000))
    more = [costs.of(step, 15) - costs.of(step, 7) for step in (short, long)]
    assert more[1] - more[0] == pytest.approx(8 * machine.attending * 15_900, rel=0.3)


def test_rows_are_priced_by_the_context_that_each_attends_to():
    """A chunk of a short prompt beside a stream of long context attends to little."""
    costs = StepCosts(512)
    costs.native.per_row = 1e-7
    step = Step(101, 8200, 2, 1, prompt_rows=100, attended=8000 + 100 * 200, root_context=8000)
    assert costs.of(step) - costs.seconds(101, 0, 2) == pytest.approx(1e-7 * 28_000)
    more = costs.of(step, 3) - costs.seconds(104, 0, 2)
    assert more == pytest.approx(1e-7 * (28_000 + 3 * 8000))
    assert costs.of(without_prompts(step)) == costs.seconds(1, 8000, 1)
    wider = Step(1, 8000, 1, 1, attended=8000, root_context=8000).with_prompt(100, 200)
    assert costs.of(wider) == pytest.approx(costs.of(step))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("least", "most"), [(2, 2.2), (1.5, 4), (3, 9)])
def test_the_table_recovers_in_20_steps_when_other_load_ends_or_begins(least, most, seed):
    machine = Decoder(seed)
    machine.respond(400, 100)
    machine.loaded(least, most)
    for _ in range(15):
        machine.respond(400, 150)
        machine.respond(6000, 50)
    assert min(machine.ratios(*LONG)) > 0.8 * least
    machine.loaded(1, 1)
    machine.respond(6000, 20)
    assert machine.ratios(*LONG) == EXACT
    machine.respond(400, 20)
    assert machine.ratios(*SHORT) == EXACT
    machine.loaded(least, most)
    machine.respond(400, 20)
    assert all(0.7 * least < ratio < most for ratio in machine.ratios(*SHORT))


OTHERS = {
    "faster": {"row": 1e-3, "reading": 5e-8, "attending": 2e-8},
    "slower": {"row": 5e-3, "reading": 2.5e-7, "attending": 1e-7},
    "far slower": {"row": 20e-3, "reading": 1e-6, "attending": 4e-7},
    "rows are dearer": {"width": 6},
    "context is dearer": {"reading": 5e-7, "attending": 2e-7},
    "context is free": {"reading": 0.0, "attending": 0.0},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_kept_costs_of_another_state_of_the_machine_are_corrected_in_20_steps(other):
    before = Decoder(1, **other)
    for prompt in (400, 6000, 400, 6000):
        before.respond(prompt, 100)
    machine = Decoder(2, known=before.costs.known())
    machine.respond(400, 20)
    assert machine.ratios(*SHORT) == EXACT
    machine.respond(6000, 20)
    assert machine.ratios(*LONG) == EXACT
    assert min(machine.ratios(*SHORT)) > 0.7


def test_no_estimate_is_below_the_fastest_measured_steps_of_its_bucket():
    """Whatever other steps showed, and however unlike any machine they are."""
    random = Random(5)
    for _ in range(50):
        costs = StepCosts(64)
        for _ in range(random.randrange(10, 200)):
            costs.observe(random.choice(SIZES), random.choice((50, 900, 7000)), 1, random.random())
        rows, context = random.choice(SIZES), random.choice((50, 900, 7000))
        seconds = [random.uniform(0.1, 0.2) for _ in range(8)]
        for each in seconds:
            costs.observe(rows, context, 1, each)
        assert costs.seconds(rows, context, 1) >= min(seconds) * 0.999 / 1.02


@pytest.mark.parametrize("seed", range(5))
def test_several_sizes_at_once_cost_what_each_costs_alone(seed):
    chance, costs = Random(seed), learnt(100, contexts=(100, 1000), sizes=SIZES[:-2])
    for _ in range(50):
        roots, prompt = chance.randint(1, 5), chance.choice((0, 0, 30))
        context = chance.randrange(4000)
        step = Step(roots + prompt, context, roots, roots, prompt, context + prompt, context)
        sizes = sorted(chance.sample(range(100), 6))
        for is_hopeful in (False, True):
            want = [costs.of(step, size, is_hopeful) for size in sizes]
            assert costs.of_each(step, sizes, is_hopeful) == want
        known = [costs.is_known(step.rows + size) for size in sizes]
        assert are_known(costs, step, sizes) == all(known)


def test_beside_prompts_draft_tokens_add_at_least_what_they_add_without_them():
    """Prompt rows are cheap: nobody reads their logits."""
    costs = StepCosts(256)
    for rows in (1, 4, 8, 100, 104, 108, 200):
        for _ in range(KNOWN):
            costs.observe(rows, 0, 1, 0.01 * rows if rows < 10 else 0.1 + 1e-5 * rows)
    mixed, plain = Step(104, 0, 4, 4, prompt_rows=100), Step(4, 0, 4, 4)
    for size in (1, 4):
        added = costs.of(mixed, size) - costs.of(mixed)
        assert added == pytest.approx(costs.of(plain, size) - costs.of(plain)) and added > 0.01
    prompt = Step(104, 0, 1, 0, prompt_rows=104)
    assert costs.of(prompt, 4) - costs.of(prompt) < 1e-3, "there is no root to have a draft token"


def test_the_fastest_step_of_a_bucket_is_that_of_all_its_samples():
    costs = OracleCosts(64, 1e-6)
    machine = Machine(costs)
    for _ in range(60):
        machine.run(20, contexts=(100, 3000), slowed=machine.random.choice((0.5, 1.0, 1.0)))
        for bucket in costs.buckets.values():
            samples = [s for cell in bucket.cells.values() for s in cell.samples]
            want = min((s.of_rows(costs.added) for s in samples), default=0.0)
            assert bucket.least(costs.added) == want


@pytest.mark.parametrize("seed", range(12))
def test_noise_of_similar_contexts_takes_no_time_from_rows(seed):
    """Most of a step's time would be due to context if a small difference had to explain noise."""
    costs, random = StepCosts(64), Random(seed)
    for number in range(400):
        context = 240 + number % 32  # on both sides of a boundary between cells
        costs.observe(1, context, 1, 0.01 * random.lognormvariate(0, 0.03))
    assert 0.008 < costs.table()[1] <= 0.0105
