"""Fields that clients send for other servers, and the effort that some templates read."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from specserve.server.body import drop_ignored
from specserve.server.chat import ChatBody, fit_to_template
from specserve.server.messages import MessagesBody, OutputConfig, Thinking
from specserve.server.responses import ReasoningOptions, ResponsesBody
from specserve.text.answer.formats import Formats
from specserve.text.chat_template import ChatTemplate

READS = "{{ reasoning_effort }}{{ messages[0].content }}"
NOTED = {"role": "user", "content": "a", "ts": 1}
CONVERSATIONS = {  # messages -> the paths that are told
    "an empty value": ([{"role": "user", "content": "a", "annotations": [], "refusal": None}], ()),
    "a field with a value twice": ([NOTED, NOTED | {}], ("messages.ts",)),
    "a text for a message": (["a", 5, None], ()),
    "a text for messages": ("a", ()),
    "lists in lists": ([[[{"id": "x"}]]], ()),
    "calls that are no list": ([{"tool_calls": {"function": {"signature": 1}}}],
        ("messages.tool_calls.function.signature",)),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "paths"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_only_fields_with_a_value_are_reported(messages, paths):
    body = {"messages": messages}
    assert drop_ignored(body) == paths
    assert not any(name in json.dumps(body) for name in ("annotations", "signature", "ts"))


def test_what_belongs_to_a_call_or_a_schema_stays():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parameters = {"type": "object", "properties": {"id": {}, "cache_control": {}}}
    function = {"name": "f", "parameters": parameters}
    body = {
        "messages": [{"role": "assistant", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": function}],
        "input": [{"type": "reasoning", "id": "rs_1", "status": "completed"}],
    }
    before = json.dumps(body)
    assert (drop_ignored(body), json.dumps(body)) == ((), before)


def effort(source, body, **formats):
    """The body as the template gets it."""
    return fitted(fit_to_template, source, body, body.chat_template_kwargs, **formats)


def fitted(fit, source, *args, **formats):
    """What `fit` makes of a body for a template with this source."""

    async def in_thread(do, *args):
        return do(*args)

    template = None if source is None else ChatTemplate(source, {})
    processor = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))
    prompts = SimpleNamespace(processor=processor, in_thread=in_thread)
    served = SimpleNamespace(formats=Formats(**formats))
    service = SimpleNamespace(prompts=prompts, served=served, ignored_fields=lambda model: ())
    return asyncio.run(fit(service, *args))


@pytest.mark.parametrize("value", ["none", "low", "max"])
def test_a_template_that_reads_the_effort_gets_it(value):
    chat = effort(READS, ChatBody(reasoning_effort=value))
    response = effort(READS, ResponsesBody(reasoning=ReasoningOptions(effort=value)))
    for body in (chat, response):
        assert (body.chat_template_kwargs, body.read_past) == ({"reasoning_effort": value}, ())


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{% broken", None])
def test_an_effort_that_a_template_does_not_read_is_reported(source):
    body = effort(source, ChatBody(reasoning_effort="low", read_past=("id",)))
    assert (body.chat_template_kwargs, body.read_past) == (None, ("id", "reasoning_effort"))


def test_the_effort_of_a_templates_own_values_wins_and_the_other_is_reported():
    own = {"reasoning_effort": "high", "mood": 1}
    body = effort(READS, ChatBody(reasoning_effort="low", chat_template_kwargs=own))
    assert (body.chat_template_kwargs, body.read_past) == (own, ("reasoning_effort",))


SWITCH = "{{ enable_thinking }}{{ messages[0].content }}"


@pytest.mark.parametrize(("value", "thinks"), [("none", False), ("low", True), ("max", True)])
def test_an_effort_turns_reasoning_on_or_off_if_the_template_can(value, thinks):
    body = effort(SWITCH, ChatBody(reasoning_effort=value))
    assert (body.chat_template_kwargs, body.read_past) == ({"enable_thinking": thinks}, ())
    kept = ChatBody(reasoning_effort=value, chat_template_kwargs={"enable_thinking": True})
    assert effort(SWITCH, kept).chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("given", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)]
)
def test_thinking_of_messages_turns_reasoning_on_or_off(given, thinks):
    thinking = Thinking(type=given, budget_tokens=9 if given == "enabled" else None)
    body = MessagesBody(thinking=thinking, output_config=OutputConfig(effort="high"))
    told = effort(SWITCH + READS, body).chat_template_kwargs
    assert told == {"enable_thinking": thinks, "reasoning_effort": "high"}
    assert effort(SWITCH, MessagesBody()).chat_template_kwargs is None


@pytest.mark.parametrize(
    ("value", "level"), [("minimal", "low"), ("medium", "medium"), ("max", "high")]
)
def test_a_model_of_channels_gets_an_effort_that_it_has(value, level):
    body = effort(READS, ChatBody(reasoning_effort=value), family="harmony")
    assert body.chat_template_kwargs == {"reasoning_effort": level}


def test_a_budget_of_a_model_that_does_not_reason_is_reported():
    for body, field in (
        (ChatBody(thinking_token_budget=5), "thinking_token_budget"),
        (MessagesBody(thinking_token_budget=5), "thinking.budget_tokens"),
    ):
        told = effort(None, body)
        assert (told.thinking_token_budget, told.read_past) == (None, (field,))
        assert effort(None, body, reasoning="think") == body
