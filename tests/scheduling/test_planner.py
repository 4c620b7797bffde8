"""Plans of single steps. What they do over many steps is in tests/speculation/test_regret.py."""

from itertools import accumulate, pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.scheduling.scheduler import LEAST_CHUNK, allowed_seconds, prompt_rows
from specserve.speculation.constants import KNOWN, LONG_AGO
from specserve.speculation.costs import Step, StepCosts
from specserve.speculation.draft_depth import DraftDepthPolicy
from specserve.speculation.planner import ExplorationSchedule, Planner, tokens_behind
from specserve_drafters import ROOT
from tests.drafters.asks import Asks, RequestCandidates
from tests.drafters.native_tries import OpenCalibration
from tests.drafters.oracle_trie import Calibration, Trie
from tests.drafters.paths import path_value
from tests.speculation.oracle_depth import OracleDepthPolicy


def costs_of(seconds, most=256):
    """Costs whose edges are all known."""
    costs = StepCosts(most)
    for edge in costs.edges:
        for _ in range(KNOWN):
            costs.observe(edge, 0, 1, seconds(edge))
    return costs


def tiles(size):
    return costs_of(lambda rows: 0.01 * (1 + -(-rows // size)))


FREE, LINEAR, TILES = costs_of(lambda rows: 0.03), costs_of(lambda rows: 0.01 * rows), tiles(8)


def trie_of(draft_tokens):
    """A trie of (parent, probability): nodes are numbered as listed."""
    trie = Trie(Calibration(), 0)
    for token, (parent, p) in enumerate(draft_tokens):
        trie.add(parent, token, p, "a")
    return trie


def chain(*p):
    return trie_of(enumerate(p))


def planner_of(costs, tries=False):
    """A planner that tries rows of unknown cost, or not."""
    planner = Planner(costs)
    planner.is_tried = lambda rows: tries
    return planner


def plan_of(tries, costs, limit=16, most=64, **step):
    roots = len(tries)
    step = {"rows": roots, "context": 0, "requests": roots, "num_roots": roots} | step
    asks = Asks(RequestCandidates(trie, limit) for trie in tries)
    plan = planner_of(costs).choose(asks, Step(**step), most)
    return SimpleNamespace(found=asks.found, rate=plan.rate, **msgspec.structs.asdict(plan))


def nodes_of(plan, requests=1):
    return plan.found.by_request(plan.size, requests)


@st.composite
def tries(draw, most=4):
    found = []
    for _ in range(draw(st.integers(1, most))):
        size = draw(st.integers(0, 10))
        found.append([(draw(st.integers(0, k)), draw(st.floats(0.01, 0.99))) for k in range(size)])
    return found


@st.composite
def buckets(draw):
    """Costs that rise by any amounts, zero included; a bit at least with every row, as roots do."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.1]), min_size=10, max_size=10))
    base = draw(st.sampled_from([0.001, 0.03, 1.0]))
    costs = StepCosts(48)
    for edge, total in zip(costs.edges, accumulate(rises, initial=base), strict=True):
        for _ in range(KNOWN):
            costs.observe(edge, 0, 1, total)
    return costs


@given(tries(), buckets(), st.integers(0, 8), st.integers(0, 40))
def test_a_plan_keeps_its_limits_and_has_no_child_without_its_parent(tries, costs, limit, most):
    tries = [trie_of(draft_tokens) for draft_tokens in tries]
    plan = plan_of(tries, costs, limit, most)
    assert plan.rows - len(tries) == sum(map(len, nodes_of(plan, len(tries)))) <= most
    for trie, nodes in zip(tries, nodes_of(plan, len(tries)), strict=True):
        assert len(nodes) <= limit and len(set(nodes)) == len(nodes)
        assert all(trie.parents[node] in (ROOT, *nodes[:i]) for i, node in enumerate(nodes))


@given(tries(), buckets(), st.floats(0, 0.1), st.integers(0, 40))
def test_no_plan_is_expected_to_be_slower_than_no_guess(tries, costs, spent, prompts):
    tries = [trie_of(draft_tokens) for draft_tokens in tries]
    rows = len(tries) + prompts
    plan = plan_of(tries, costs, spent=spent, rows=rows, prompt_rows=prompts)
    none = plan_of(tries, costs, most=0, spent=spent, rows=rows, prompt_rows=prompts)
    assert plan.rate >= none.rate * (1 - 1e-9)
    nodes = nodes_of(plan, len(tries))
    expected = sum(path_value(trie, n) for t, trie in enumerate(tries) for n in nodes[t])
    assert plan.tokens == pytest.approx(len(tries) + expected)
    step = Step(rows, 0, len(tries), len(tries), prompts)
    assert plan.seconds == pytest.approx(spent + costs.of(step, plan.rows - rows))


@given(tries(), buckets())
def test_no_other_number_of_the_likeliest_draft_tokens_has_a_higher_rate(tries, costs):
    tries = [trie_of(draft_tokens) for draft_tokens in tries]
    values = sorted((path_value(t, n) for t in tries for n in range(1, len(t) + 1)), reverse=True)
    values = [v for v in values if v >= 1e-3]
    roots = len(tries)
    rates = [
        (roots + gain) / costs.seconds(roots + n, 0, roots)
        for n, gain in enumerate(accumulate(values, initial=0.0))
    ]
    assert plan_of(tries, costs).rate == pytest.approx(max(rates))


@given(tries(), buckets(), st.data())
def test_a_draft_that_gets_likelier_is_not_dropped(tries, costs, data):
    before = plan_of([trie_of(draft_tokens) for draft_tokens in tries], costs)
    chosen = [(i, node) for i, own in enumerate(nodes_of(before, len(tries))) for node in own]
    if not chosen:
        return
    i, node = data.draw(st.sampled_from(chosen))
    parent, p = tries[i][node - 1]
    tries[i][node - 1] = parent, data.draw(st.floats(p, 0.99))
    after = plan_of([trie_of(draft_tokens) for draft_tokens in tries], costs)
    assert after.rate >= before.rate * (1 - 1e-9)
    if after.rate > before.rate * (1 + 1e-9):  # of equal rates either plan will do
        assert node in nodes_of(after, len(tries))[i]


@given(tries(), st.data())
def test_plans_of_tries_in_cpp_are_the_same_as_in_python(candidates, data):
    """Costs may be unknown, prompts may be in the step, and requests may have targets."""
    costs, number = StepCosts(200, 1e-6), st.integers(0, 100)
    for _ in range(data.draw(st.integers(0, 12))):
        rows, context = data.draw(st.integers(1, 100)), data.draw(st.integers(0, 5000))
        seconds = data.draw(st.floats(1e-3, 0.1))
        for _ in range(data.draw(st.integers(1, KNOWN))):
            costs.observe(rows, context, min(rows, 4), seconds)
    roots, prompts = len(candidates), data.draw(st.sampled_from([0, 0, 5, 90]))
    context, more = data.draw(number), data.draw(number)
    step = Step(
        roots + prompts,
        context + more,
        roots + (prompts > 0),
        roots,
        prompts,
        context + prompts * more,
        context,
        data.draw(st.sampled_from([0.0, 0.01])),
        data.draw(st.sampled_from([float("inf"), 0.02])),
        data.draw(st.floats(0.5, 1.25)),
    )
    limit, behind, most = (
        data.draw(st.integers(0, 8)),
        data.draw(st.floats(0, 2)),
        data.draw(number),
    )
    found = []
    for calibration in (Calibration(), OpenCalibration()):
        asks = Asks()
        for id, draft_tokens in enumerate(candidates):
            trie = calibration.trie(id)
            for token, (parent, p) in enumerate(draft_tokens):
                trie.add(parent, token, p, "ab"[token % 2])
            asks.append(RequestCandidates(trie, limit, 5, behind * (id % 2)))
        each = []
        for tried in (False, True):
            plan = planner_of(costs, tried).choose(asks, step, most)
            numbers = plan.size, plan.rows, plan.tokens, plan.seconds, plan.rival
            each.append((*asks.found, *numbers, *asks.cut(plan.size)))
        found.append(each)
    assert found[0] == found[1]


def test_where_rows_are_free_all_draft_tokens_are_taken():
    assert nodes_of(plan_of([chain(0.1, 0.1), chain(0.9)], FREE), 2) == [[1, 2], [1]]


def test_where_a_row_costs_what_a_root_does_no_draft_is_taken():
    assert nodes_of(plan_of([chain(0.95, 0.95)], LINEAR)) == [[]]


def test_rows_up_to_the_edge_are_filled():
    """Seven rows beside the root are free; with twelve, a fifth stair of eight rows would begin."""
    assert plan_of([chain(*[0.5] * 12)], TILES).rows == 8


def test_the_likeliest_draft_tokens_of_all_requests_are_taken():
    plan = plan_of([chain(0.9, 0.9, 0.9, 0.9), chain(0.2, 0.2), chain(0.5)], TILES)
    assert nodes_of(plan, 3) == [[1, 2, 3, 4], [], [1]]


def test_a_step_that_took_long_to_draft_verifies_more():
    draft_tokens = [chain(*[0.8] * 15)]
    assert plan_of(draft_tokens, TILES, spent=1.0).rows > plan_of(draft_tokens, TILES).rows


def test_draft_tokens_keep_the_step_within_the_tightest_target():
    draft_tokens = [chain(*[0.95] * 15)]
    assert plan_of(draft_tokens, TILES).rows > 8
    assert plan_of(draft_tokens, TILES, allowed=0.025).rows == 8
    assert plan_of(draft_tokens, TILES, allowed=0.021, spent=0.005).rows == 1


def test_a_target_that_no_step_can_keep_forbids_no_guess():
    """It would forbid them for all requests of the step; and only guesses can meet it."""
    draft_tokens, quiet = [chain(*[0.95] * 15)], TILES.seconds(1, 0, 1)
    free = plan_of(draft_tokens, TILES)
    assert nodes_of(plan_of(draft_tokens, TILES, allowed=0.5 * quiet)) == nodes_of(free)
    beside = {"rows": 33, "prompt_rows": 32}
    assert plan_of(draft_tokens, TILES, allowed=0.9 * quiet, **beside).rows > 33
    assert plan_of(draft_tokens, TILES, allowed=1.1 * quiet, **beside).rows == 33


def test_a_prompt_makes_time_no_cheaper():
    """The step is ten times as long with its prompt, but a guess costs the same seconds."""
    costs = costs_of(lambda rows: 0.01 + 0.002 * rows)
    alone = plan_of([chain(*[0.6] * 8)], costs)
    beside = plan_of([chain(*[0.6] * 8)], costs, rows=64, prompt_rows=63)
    assert beside.rows - 64 <= alone.rows - 1


def rows_for(waiting, most=200, allowed=float("inf"), roots=2, costs=LINEAR, spent=0.0):
    step = Step(roots, 0, roots, roots, allowed=allowed, spent=spent)
    return prompt_rows(step, costs, waiting, most)


def test_prompts_get_the_most_rows_that_keep_the_target():
    assert rows_for(500, allowed=0.64) == 62, "64 rows take 0.64 seconds"
    assert rows_for(500, allowed=0.74, spent=0.1) == 62, "making guesses takes its part"
    assert rows_for(500, allowed=1e9) == 200
    assert rows_for(30, allowed=1e9) == 30
    assert rows_for(500, roots=0, allowed=0.0) == 200, "there is no stream to wait for them"


def test_prompts_get_a_few_rows_whatever_the_target():
    assert rows_for(500, allowed=0.0) == LEAST_CHUNK
    assert rows_for(5, allowed=0.0) == 5


@given(st.integers(0, 300), st.integers(0, 300), st.floats(0, 3))
def test_rows_for_prompts_keep_their_bounds(waiting, most, allowed):
    rows = rows_for(waiting, most, allowed)
    assert 0 <= rows <= min(waiting, most)
    if rows > LEAST_CHUNK:
        assert LINEAR.seconds(rows + 2, 0, 2) <= allowed


def test_a_request_that_is_ahead_lets_a_step_take_longer():
    assert allowed_seconds(0.1, since_first=1.0, num_output=10) == pytest.approx(0.1)
    assert allowed_seconds(0.1, since_first=0.95, num_output=10) == pytest.approx(0.15)
    assert allowed_seconds(0.1, since_first=0.0, num_output=10) == pytest.approx(0.15)
    assert allowed_seconds(0.1, since_first=9.0, num_output=10) == pytest.approx(0.1)


def test_a_request_behind_its_target_needs_more_than_one_token():
    assert tokens_behind(0.1, since_first=0.9, num_output=10, seconds=0.1) == 0
    assert tokens_behind(0.1, since_first=1.0, num_output=10, seconds=0.15) == pytest.approx(0.5)
    assert tokens_behind(0.1, since_first=9.0, num_output=10, seconds=0.1) == pytest.approx(2.0)


def tries_of(seconds, *p):
    """Steps of 40 in which more than 16 rows are tried; 4, 8 and 16 are known to take 0.03."""
    costs = StepCosts(64)
    for edge in 4, 8, 16:
        for _ in range(KNOWN):
            costs.observe(edge, 0, 1, 0.03)
    planner, step, tried = Planner(costs), Step(4, 0, 4, 4), []
    for n in range(40):
        plan = planner.choose(Asks(RequestCandidates(chain(*p), 5) for _ in range(4)), step, 64)
        tried += [n] if plan.rival is not None and plan.rows > 16 else []
        took = 0.03 if plan.rows <= 16 else seconds
        costs.observe(plan.rows, 0, 4, took)
        planner.observe(plan, step, took)
    return tried


def test_rows_of_unknown_cost_are_tried_at_once_and_if_they_fail_more_rarely_until_known():
    tried = tries_of(0.05, 0.8, 0.8, 0.8, 0.8, 0.8)
    assert len(tried) == KNOWN
    assert [b - a for a, b in pairwise(tried)] == [2, 4]


def test_rows_of_unknown_cost_that_are_better_are_tried_until_known():
    assert tries_of(0.0301, 0.8, 0.8, 0.8, 0.8, 0.8) == [*range(KNOWN)]


def test_rows_of_unknown_cost_are_not_tried_for_little():
    assert tries_of(0.0301, 0.9, 0.9, 0.9, 0.02) == []


def test_steps_without_drafts_are_run_again_if_they_may_have_become_faster():
    """They took as long as steps with drafts, and nothing shows that they no longer do."""
    costs, step = StepCosts(64), Step(4, 0, 4, 4)
    for edge in 4, 16:
        for _ in range(KNOWN):
            costs.observe(edge, 0, 1, 0.03)
    planner, plain = Planner(costs), []
    for n in range(2 * LONG_AGO):
        plan = planner.choose(Asks(RequestCandidates(chain(0.15), 1) for _ in range(4)), step, 64)
        plain += [n] if plan.rows == 4 else []
        took = 0.02 if plan.rows == 4 else 0.03
        costs.observe(plan.rows, 0, 4, took)
        planner.observe(plan, step, took)
    assert LONG_AGO / 2 < plain[0] <= LONG_AGO
    assert len(plain) > 0.95 * (2 * LONG_AGO - plain[0]), "nearly always from the first trial on"


def growth(values, costs=TILES, roots=1, cls=DraftDepthPolicy):
    return cls(costs, Step(roots, 0, roots, roots), values)


def size(policy, reach, hold, depth, seconds):
    return policy.size(reach, hold, depth, [seconds(n) for n in range(1, len(reach) + 1)])


VALUES = st.lists(st.floats(0, 1), max_size=12)
TIME = st.sampled_from([0.0, 0.001, 0.003, 0.02, 0.1])


@given(buckets(), VALUES, st.data())
def test_levels_in_cpp_are_the_same_as_in_python(costs, values, data):
    roots, prompts = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 0, 5, 60]))
    step = Step(
        roots + prompts,
        100,
        roots + (prompts > 0),
        roots,
        prompts,
        allowed=data.draw(st.sampled_from([float("inf"), 0.05, 0.002])),
        kept=data.draw(st.floats(0.5, 1.25)),
    )
    both = OracleDepthPolicy(costs, step, values), DraftDepthPolicy(costs, step, values)
    for _ in range(3):
        assert both[1].least == both[0].least
        reach = sorted(data.draw(VALUES), reverse=True)
        level, more, depth = data.draw(TIME), data.draw(TIME), data.draw(st.integers(1, 8))
        seconds = [level + more * n for n in range(1, len(reach) + 1)]
        hold, once = data.draw(st.sampled_from([0.1, 0.7, 0.9])), data.draw(TIME)
        want, found = (policy.size(reach, hold, depth, seconds) for policy in both)
        assert found == want
        pays = [bool(policy.pays(reach, hold, depth, once, level)) for policy in both]
        assert pays[1] == pays[0]
        before = data.draw(st.lists(st.sampled_from(values or [0.5]), max_size=3))
        children = data.draw(VALUES)
        for policy in both:
            policy.add(children, level, before)


def test_a_level_is_run_if_its_draft_tokens_are_worth_its_time():
    assert size(growth([]), [0.9], 0.7, 1, lambda rows: 0.002) == 1
    assert size(growth([]), [0.9], 0.7, 1, lambda rows: 0.02) == 0
    assert size(growth([]), [0.05], 0.7, 1, lambda rows: 0.002) == 0
    assert size(growth([]), [], 0.7, 1, lambda rows: 0.0) == 0


def test_a_level_that_takes_longer_than_a_target_allows_is_not_run():
    step = Step(1, 0, 1, 1, allowed=TILES.seconds(1, 0, 1) + 0.002)
    assert size(DraftDepthPolicy(TILES, step, []), [0.9], 0.7, 1, lambda rows: 0.001) == 1
    assert size(DraftDepthPolicy(TILES, step, []), [0.9], 0.7, 1, lambda rows: 0.003) == 0
    hopeless = Step(1, 0, 1, 1, allowed=TILES.seconds(1, 0, 1) / 2)
    assert size(DraftDepthPolicy(TILES, hopeless, []), [0.9], 0.7, 1, lambda rows: 0.003) == 1


def test_only_nodes_that_are_worth_their_rows_are_run():
    assert size(growth([], roots=4), [0.9, 0.8, 0.01], 0.7, 1, lambda rows: 0.002 * rows) == 2


def test_a_level_whose_draft_tokens_would_not_be_verified_is_not_run():
    full = growth([0.9] * 7)
    assert size(growth([]), [0.5], 0.7, 1, lambda rows: 0.001) == 1
    assert size(full, [0.5], 0.7, 1, lambda rows: 0.001) == 0


def test_a_node_is_run_only_if_its_child_would_take_the_place_of_another():
    assert size(growth([0.5] * 9), [0.9, 0.3], 0.7, 1, lambda rows: 1e-5 * rows) == 1
    assert size(growth([0.5] * 3), [0.9, 0.3], 0.7, 1, lambda rows: 1e-5 * rows) == 2


def test_a_prompt_makes_no_level_cheaper():
    costs = costs_of(lambda rows: 0.01 + 0.002 * rows)
    beside = DraftDepthPolicy(costs, Step(63, 0, 2, 1, prompt_rows=62), [])
    assert size(growth([], costs), [0.9], 0.7, 1, lambda rows: 0.02) == 0
    assert size(beside, [0.9], 0.7, 1, lambda rows: 0.02) == 0
    assert size(beside, [0.9], 0.7, 1, lambda rows: 0.001) == 1


def test_a_level_that_does_not_pay_is_run_where_more_of_them_do():
    def seconds(rows):
        return 0.001

    buckets = costs_of(lambda rows: 0.03 if rows == 1 else 0.06)
    assert size(growth([], buckets), [0.9], 0.9, 1, seconds) == 0
    assert size(growth([], buckets), [0.9], 0.9, 2, seconds) == 1
    assert size(growth([], buckets), [0.9], 0.1, 6, seconds) == 0, "they reach little"


def test_catching_up_is_worth_it_if_later_levels_pay_for_it():
    once, level = 0.025, 0.0005
    assert not growth([]).pays([0.9], 0.9, 1, once, level)
    assert growth([]).pays([0.9], 0.9, 6, once, level)
    assert not growth([]).pays([0.9], 0.9, 6, once + 1.0, level)
    assert not growth([]).pays([0.9], 0.1, 6, once, level), "they reach little"
    assert not growth([]).pays([], 0.9, 6, once, level)


def test_after_a_level_its_time_is_spent_and_its_draft_tokens_count():
    request_tries = growth([], cls=OracleDepthPolicy)
    before = request_tries.rate
    request_tries.add([0.9], 0.0001)
    assert request_tries.rate > before and request_tries.spent == 0.0001
    more = request_tries.rate
    request_tries.add([], 0.01)
    assert request_tries.rate < more


def rate_of(values):
    return growth(values, cls=OracleDepthPolicy).rate


def test_a_draft_that_a_level_agrees_with_counts_once():
    request_tries = growth([0.5, 0.6, 0.5], cls=OracleDepthPolicy)
    request_tries.add([0.8, 0.3], 0.0, before=[0.5])
    assert request_tries.rate == pytest.approx(rate_of([0.8, 0.6, 0.5, 0.3]))
    request_tries.add([0.2], 0.0, before=[0.7])
    wanted = rate_of([0.8, 0.6, 0.5, 0.3, 0.2])
    assert request_tries.rate == pytest.approx(wanted), "0.7 was not there"


@given(st.lists(st.tuples(VALUES, st.floats(0, 0.1)), max_size=5), buckets(), st.integers(1, 3))
def test_a_growths_rate_is_that_of_the_best_number_of_all_its_draft_tokens(levels, costs, roots):
    request_tries = growth([], costs, roots, OracleDepthPolicy)
    for values, seconds in levels:
        held, rate = sorted([*request_tries.values, *values], reverse=True), request_tries.rate
        rates = [
            (roots + gain) / (request_tries.spent + seconds + costs.seconds(roots + n, 0, roots))
            for n, gain in enumerate(accumulate(held, initial=0.0))
        ]
        best = max(rates)
        if abs(best - rate) > 1e-9 * rate:
            assert request_tries.is_better(values, seconds) == (best > rate)
        request_tries.add(values, seconds)
        assert request_tries.rate == pytest.approx(best)
        ends = [0, *(edge - roots for edge in costs.edges if roots < edge < roots + len(held))]
        lefts = [
            ([*held, 0.0])[n] for n in (*ends, len(held)) if rates[n] >= best * (1 - 1e-9)
        ]  # of equally good numbers any may be taken
        assert request_tries.least in lefts, "the likeliest guess that the best plan leaves out"


def test_what_fails_is_tried_ever_more_rarely_but_always_again():
    exploration, tried = ExplorationSchedule(first=2, last=16), []
    for step in range(80):
        if exploration.is_due("a"):
            tried.append(step)
    assert [b - a for a, b in pairwise(tried)] == [4, 8, 16, 16, 16, 16]
    exploration.worked("a")
    assert [exploration.is_due("a"), exploration.is_due("a")] == [False, True]
    assert not exploration.is_due("b"), "each has a turn of its own"
    assert exploration.is_due("a", steps=4), "steps that nobody counted are counted together"


@given(
    values=st.lists(st.floats(0.01, 1), max_size=3),
    reach=st.lists(st.floats(0.5, 1), min_size=1, max_size=2),
    hold=st.floats(0.5, 0.95),
    level=st.floats(1e-4, 0.02),
    once=st.floats(0, 0.05),
    depth=st.integers(1, 16),
)
def test_levels_that_pay_together_are_found_wherever_they_are(
    values, reach, hold, level, once, depth
):
    """By trying every number of levels, each with what is left of the reach of the first."""
    found, native = growth(values, cls=OracleDepthPolicy), growth(values)
    counted = [gain for gain in reach if gain > found.least]
    pays = any(
        found.is_better([g * hold**k for k in range(n) for g in counted], once + n * level)
        for n in range(1, depth + 1)
    )
    assert native.pays(counted, hold, depth, once, level) == (bool(counted) and pays)


def test_rows_of_unknown_cost_are_tried_by_powers_of_two():
    planner = Planner(StepCosts(256))
    assert planner.is_tried(130) and not planner.is_tried(150), "the second waits"
    assert planner.is_tried(100), "of another power of two"
