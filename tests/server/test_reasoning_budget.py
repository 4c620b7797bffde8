"""A budget of reasoning reaches the engine from each route, or is refused or reported."""

import pytest

from specserve.exchange.sampling_params import ReasoningBudget
from tests.server.asking import CHAT, COMPLETIONS, RESPONSES
from tests.server.scripted import scripted, with_template
from tests.server.test_messages import MESSAGES, USER, body_of
from tests.server.test_tools import QWEN, backend

THINKING = {"type": "enabled", "budget_tokens": 7}
ASKED = {
    "vLLM's name": (CHAT, {"messages": [USER], "thinking_token_budget": 7}),
    "another name": (CHAT, {"messages": [USER], "max_thinking_tokens": 7}),
    "a response": (RESPONSES, {"input": "a", "thinking_token_budget": 7}),
    "a completion": (COMPLETIONS, {"prompt": "a", "max_thinking_tokens": 7}),
    "a message": (MESSAGES, {"messages": [USER], "thinking": THINKING}),
}


@pytest.fixture(scope="module")
def thinking():
    with scripted(with_template(backend(["<think>", "</think>"]), QWEN)) as server:
        yield server


@pytest.fixture(scope="module")
def in_pieces():
    """The markers of its reasoning are several tokens."""
    with scripted(with_template(backend(), QWEN)) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
def test_a_budget_reaches_the_engine(thinking, path, body):
    ids = thinking.tokenizer.get_vocab()
    with thinking.saying("<think>Hm.</think>Yes."):
        assert thinking.post(path, body).status == 200
    opening, closing = (ids["<think>"],), (ids["</think>"],)
    assert thinking.last.sampling.reasoning == ReasoningBudget(7, opening, closing)


def test_without_a_budget_nothing_is_limited(thinking):
    with thinking.saying("<think>Hm.</think>Yes."):
        thinking.post(MESSAGES, {"messages": [USER], "thinking": {"type": "adaptive"}})
    assert thinking.last.sampling.reasoning is None


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
def test_a_budget_is_refused_if_the_markers_are_several_tokens(in_pieces, path, body):
    answer = in_pieces.post(path, body)
    assert answer.status == 400 and "several tokens" in answer.body["error"]["message"]


def test_two_names_with_two_values_are_refused(server):
    both = {"thinking_token_budget": 7, "max_thinking_tokens": 8}
    answer = server.post(CHAT, {"messages": [USER]} | both)
    assert answer.status == 400 and answer.body["error"]["param"] == "max_thinking_tokens"


def test_a_budget_of_a_model_that_does_not_reason_is_reported(server):
    answer = server.post(MESSAGES, body_of(thinking=THINKING))
    assert answer.status == 200 and "thinking.budget_tokens" in answer.headers["Warning"]


def test_a_format_of_the_whole_text_leaves_no_reasoning_to_limit(thinking):
    """The forced end of reasoning would not fit the format, and no token would be left."""
    asked = {"messages": [USER], "thinking_token_budget": 0, "structured_outputs": {"regex": "a+"}}
    with thinking.saying("aa"):
        answer = thinking.post(CHAT, asked)
    assert answer.status == 200 and "thinking_token_budget" in answer.headers["Warning"]
    assert thinking.last.sampling.reasoning is None and thinking.last.sampling.grammar
