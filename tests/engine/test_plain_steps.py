"""Measured steps without draft tokens."""

from types import SimpleNamespace

import pytest

from specserve.engine.plain_steps import LATEST, PlainSteps
from specserve.exchange.speculation_state import PlainStep
from specserve.scheduling import ScheduledRequest
from specserve_drafters import Draft


def scheduled(end, rows=1, known=None, draft=()):
    request = SimpleNamespace(token_ids=[0] * (end if known is None else known))
    return ScheduledRequest(request, end - rows, end, draft=Draft.chain([*draft]))


def test_steps_of_about_the_same_context_are_counted_together():
    plain = PlainSteps()
    for context, seconds in ((70, 0.002), (90, 0.004), (100, 0.003), (900, 0.01)):
        plain.observe([scheduled(context)], seconds)
    assert plain.state == [PlainStep(90, 0.003, 3), PlainStep(900, 0.01, 1)]
    plain.reset()
    assert plain.state == []


def test_only_the_latest_steps_count():
    plain = PlainSteps()
    for seconds in [9.0] * LATEST + [0.1] * LATEST:
        plain.observe([scheduled(100)], seconds)
    assert plain.state == [PlainStep(100, 0.1, LATEST)]


OTHERS = {
    "a step with draft tokens": [scheduled(90, draft=(1, 2))],
    "a step of a prompt": [scheduled(90, rows=20)],
    "a row of a prompt that has more": [scheduled(90, known=200)],
    "a step of two requests": [scheduled(90), scheduled(80)],
    "a step without requests": [],
}


@pytest.mark.parametrize("each", OTHERS.values(), ids=OTHERS)
def test_other_steps_are_not_counted(each):
    plain = PlainSteps()
    plain.observe(each, 0.1)
    assert plain.state == []
