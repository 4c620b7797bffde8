"""Functions, forms and reasoning by the openai package: `tools_with_openai.py URL SCRIPTED_URL`."""

import json
import sys
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field


class Weather(BaseModel):
    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)


class Now(BaseModel):
    zone: Literal["local", "utc"]


TOOLS = [pydantic_function_tool(Weather, name="weather"), pydantic_function_tool(Now, name="now")]
NAMED = {"type": "function", "function": {"name": "weather"}}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
ASKED = {"model": "tiny", "messages": [QUESTION], "temperature": 1, "max_tokens": 1000}
FORCED = {"seed": 3, "tools": TOOLS, "parallel_tool_calls": False}


def chats(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).chat.completions


def calls_of(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


def streamed(completions, **asked):
    """What the helper for streams puts together, and the kinds of its events."""
    with completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        return stream.get_final_completion().choices[0], kinds


def test_calls_are_enforced(completions):
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        asked = ASKED | FORCED | {"tool_choice": choice}
        [whole] = completions.parse(**asked).choices
        [call] = whole.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather | Now)
        assert choice == "required" or call.function.name == "weather"
        pieces, kinds = streamed(completions, **asked)
        assert calls_of(pieces.message) == calls_of(whole.message)
        assert whole.finish_reason == pieces.finish_reason == reason
        assert {
            "tool_calls.function.arguments.delta",
            "tool_calls.function.arguments.done",
        } <= kinds


def test_a_random_model_that_may_call_writes_text(completions):
    asked = ASKED | FORCED | {"tool_choice": "auto", "max_tokens": 20}
    [choice] = completions.create(**asked).choices
    assert choice.message.content and not choice.message.tool_calls


def test_a_text_has_its_form(completions):
    asked = ASKED | {"response_format": Weather}
    for seed in range(3):
        [whole] = completions.parse(**asked, seed=seed).choices
        assert isinstance(whole.message.parsed, Weather) and whole.finish_reason == "stop"
        pieces, kinds = streamed(completions, **asked, seed=seed)
        assert pieces.message.parsed == whole.message.parsed
        assert "content.done" in kinds
        for message in (whole.message, pieces.message):
            completions.parse(**asked | {"messages": [QUESTION, message, QUESTION]})


def test_a_result_is_sent_back(completions):
    """With the message as it came, of each of the three ways to ask."""
    asked = ASKED | {"tools": TOOLS}
    for message in (
        completions.create(**asked).choices[0].message,
        completions.parse(**asked).choices[0].message,
        streamed(completions, **asked)[0].message,
    ):
        assert message.content == "Let me see."
        assert message.reasoning_content == message.reasoning == "I have to look."
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
        result = {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}
        [last] = completions.create(**asked | {"messages": [QUESTION, message, result]}).choices
        assert (last.message.content, last.finish_reason) == ("It is 22 degrees.", "stop")
        assert last.message.reasoning_content == "It is warm."


def test_deltas_are_of_one_kind_each(completions):
    chunks = [*completions.create(**ASKED, tools=TOOLS, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "I have to look."
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}
    assert [(bool(call.id), call.function.name) for call in calls[:2]] == [
        (True, "weather"),
        (False, None),
    ]
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments) == {"city": "Rome", "days": 2}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


random, scripted = map(chats, sys.argv[1:])
test_calls_are_enforced(random)
test_a_random_model_that_may_call_writes_text(random)
test_a_text_has_its_form(random)
test_a_result_is_sent_back(scripted)
test_deltas_are_of_one_kind_each(scripted)
