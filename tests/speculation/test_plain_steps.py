"""Measured steps without draft tokens."""

import pytest

from specserve.exchange.messages import PlainStep
from specserve.speculation.constants import LATEST
from specserve.speculation.costs import PlainSteps, Step


def plain(context):
    return Step(1, context, 1, 1)


def test_steps_of_about_the_same_context_are_counted_together():
    steps = PlainSteps()
    for context, seconds in ((70, 0.002), (90, 0.004), (100, 0.003), (900, 0.01)):
        steps.observe(plain(context), 1, seconds)
    assert steps.state == [PlainStep(90, 0.003, 3), PlainStep(900, 0.01, 1)]
    steps.reset()
    assert steps.state == []


def test_only_the_latest_steps_count():
    steps = PlainSteps()
    for seconds in [9.0] * LATEST + [0.1] * LATEST:
        steps.observe(plain(100), 1, seconds)
    assert steps.state == [PlainStep(100, 0.1, LATEST)]


OTHERS = {
    "a step with draft tokens": (plain(90), 3),
    "a step of a prompt": (Step(20, 90, 1, 0, prompt_rows=20), 20),
    "a row of a prompt that has more": (Step(1, 90, 1, 0, prompt_rows=1), 1),
    "a step of two requests": (Step(2, 170, 2, 2), 2),
}


@pytest.mark.parametrize(("step", "rows"), OTHERS.values(), ids=OTHERS)
def test_other_steps_are_not_counted(step, rows):
    steps = PlainSteps()
    steps.observe(step, rows, 0.1)
    assert steps.state == []
