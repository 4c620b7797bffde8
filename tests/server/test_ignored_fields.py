"""Fields that clients send for other servers, and the effort that some templates read."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from specserve.server.body import drop_ignored
from specserve.server.chat import ChatBody, fit_to_template
from specserve.server.responses import ReasoningOptions, ResponsesBody
from specserve.server.tools import NO_TOOLS, ToolsAsked
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


def effort(source, body, tools=NO_TOOLS):
    """The body as the template gets it."""
    return fitted(fit_to_template, source, body, body.chat_template_kwargs, tools)


def fitted(fit, source, *args):
    """What `fit` makes of a body for a template with this source."""

    async def in_thread(do, *args):
        return do(*args)

    template = None if source is None else ChatTemplate(source, {})
    processor = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template))
    prompts = SimpleNamespace(processor=processor, in_thread=in_thread)
    service = SimpleNamespace(prompts=prompts)
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


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("source", ["{{ messages }}", "{% for tools in [1] %}{% endfor %}"])
def test_tools_that_a_template_does_not_show_are_reported(source, choice):
    tools = ToolsAsked(({"type": "function", "function": {"name": "f"}},), choice=choice)
    assert effort(source, ChatBody(), tools).read_past == ("tools",)
    assert effort(source, ResponsesBody(), tools).read_past == ("tools",)
    assert effort(source, ChatBody()).read_past == ()
    for reads in ("{{ tools }}", "{% if not tools is defined %}{% set tools = 0 %}{% endif %}"):
        assert effort(reads, ChatBody(), tools).read_past == ()


def test_the_effort_of_a_templates_own_values_wins_and_the_other_is_reported():
    own = {"reasoning_effort": "high", "mood": 1}
    body = effort(READS, ChatBody(reasoning_effort="low", chat_template_kwargs=own))
    assert (body.chat_template_kwargs, body.read_past) == (own, ("reasoning_effort",))
