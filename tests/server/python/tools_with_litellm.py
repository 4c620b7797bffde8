"""Functions, forms and reasoning by LiteLLM: `tools_with_litellm.py URL SCRIPTED_URL`."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel, ConfigDict, Field

litellm.suppress_debug_info = True  # which it prints


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a random model would write other keys without end

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", Weather.model_json_schema()), tool("now", {})]
NAMED = {"type": "function", "function": {"name": "weather"}}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}
ASKED = {"temperature": 1, "max_tokens": 1000, "seed": 3}


def asking(url):
    to = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}

    def whole(messages, **asked):
        return litellm.completion(**to, messages=messages, **ASKED | asked).choices[0]

    def streamed(messages, **asked):
        chunks = litellm.completion(**to, messages=messages, stream=True, **ASKED | asked)
        return litellm.stream_chunk_builder([*chunks]).choices[0]

    return whole, streamed


def call_of(choice):
    [call] = choice.message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


def test_calls_are_enforced(whole, streamed):
    for tool_choice in ("required", NAMED):
        asked = {"tools": TOOLS, "tool_choice": tool_choice, "parallel_tool_calls": False}
        name, arguments = call_of(whole([QUESTION], **asked))
        assert name == "weather" or tool_choice == "required"
        if name == "weather":
            Weather.model_validate(arguments)
        assert call_of(streamed([QUESTION], **asked)) == (name, arguments)


def test_a_text_has_its_form(whole, streamed):
    schema = {"name": "weather", "schema": Weather.model_json_schema()}
    for form in (Weather, {"type": "json_schema", "json_schema": schema}):
        texts = [ask([QUESTION], response_format=form).message.content for ask in (whole, streamed)]
        assert texts[0] == texts[1]
        Weather.model_validate_json(texts[0])


def test_a_result_is_sent_back(*ways):
    for ask in ways:
        choice = ask([QUESTION], tools=TOOLS)
        message = choice.message
        assert (message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert message.reasoning_content == "I have to look."
        assert call_of(choice) == ("weather", {"city": "Rome", "days": 2})
        id = message.tool_calls[0].id
        result = {"role": "tool", "tool_call_id": id, "content": "22 degrees"}
        last = ask([QUESTION, message, result], tools=TOOLS)
        assert (last.message.content, last.finish_reason) == ("It is 22 degrees.", "stop")


random, scripted = map(asking, sys.argv[1:])
test_calls_are_enforced(*random)
test_a_text_has_its_form(*random)
test_a_result_is_sent_back(*scripted)
