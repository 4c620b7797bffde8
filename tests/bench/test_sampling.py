"""How the share of sampling in a step is taken."""

from collections import Counter

import pytest

from specserve.engine import runner
from specserve.engine.runner import Draws
from specserve.scheduling.text_state import TextState
from specserve_bench.figures import sampling
from specserve_bench.figures.sampling import Bush, SamplingCase
from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    small = {"REQUESTS": 2, "PROMPT": 60, "NODES": 3, "STEPS": 2, "WARM_UP": 1}
    small["SUBJECTS"] = [SamplingCase(3, *how) for how in (("none",), ("none", True), ("all",))]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(sampling, name, value)
        patched = runner.draws_of, Draws.params, TextState.extend
        yield sampling.measure(tiny_checkpoint(tmp_path_factory.mktemp("m")), rounds=2)
        assert patched == (runner.draws_of, Draws.params, TextState.extend)


def test_all_parameters_are_measured_next_to_none(figures):
    none, every = figures["rows"]
    assert (none["asked"], every["asked"], every["guesses"]) == ("none", "all", 3)
    assert 0 < none["host_ms"] < every["host_ms"] < every["step_ms"]["median"]
    assert every["sample_ms"] > 0 and 0 < every["share"]["low"] <= every["share"]["high"] < 1
    (over,) = figures["none_over_without"]
    low, high = over["interval"]
    assert over["guesses"] == 3 and low <= over["median"] <= high


def test_the_table_has_a_row_for_each_and_the_interval(figures):
    *rows, over = sampling.table(figures).splitlines()
    assert [row.split(" | ")[:2] for row in rows[2:]] == [["| none", "3"], ["| all", "3"]]
    assert f"[{figures['none_over_without'][0]['interval'][0]:.4f}, " in over


def test_a_share_is_of_the_whole_step():
    steps = [Counter(host=n, sample=2 * n, logprobs=1, rest=n) for n in (10, 20, 30)]
    each = sampling.typical(steps)
    assert each == {"host": 20, "sample": 40, "logprobs": 1, "step": 81}
    assert sampling.row(SamplingCase(0, "all"), [each])["share"]["median"] == round(61 / 81, 5)


def test_a_tree_has_two_draft_tokens_below_each_and_none_twice():
    tree = Bush(Bush.Options()).tree([7, 8, 7, 9, 10])
    assert (tree.tokens, tree.parents) == ([7, 8, 9, 10], [0, 0, 1, 1])
