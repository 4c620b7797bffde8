"""Functions and forms by LangChain's ChatOpenAI: `tools_with_langchain.py URL SCRIPTED_URL`."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)


@tool(args_schema=Weather)
def weather(city, days):
    """Tells the weather."""
    assert (city, days) == ("Rome", 2)
    return "22 degrees"


@tool
def now(zone: Literal["local", "utc"]):
    """Tells the time."""


TOOLS = [weather, now]
QUESTION = HumanMessage("What is the weather in Rome?")


def model(url):
    to = {"model": "tiny", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**to, seed=3, temperature=1, max_tokens=1000)


def called(answer):
    return [(call["name"], call["args"]) for call in answer.tool_calls]


def streamed(client, messages):
    first, *rest = client.stream(messages)
    return sum(rest, first)


def test_calls_are_enforced(client):
    for choice in ("any", "weather"):
        for strict in (None, True):
            bound = client.bind_tools(
                TOOLS, tool_choice=choice, parallel_tool_calls=False, strict=strict
            )
            whole = bound.invoke([QUESTION])
            [(name, arguments)] = called(whole)
            chosen = next(tool for tool in TOOLS if tool.name == name)
            chosen.args_schema.model_validate(arguments)
            assert choice in ("any", name) and not whole.invalid_tool_calls
            assert called(streamed(bound, [QUESTION])) == called(whole)


def test_a_text_has_its_form(client):
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            shaped = client.with_structured_output(Weather, method=method, strict=strict)
            assert isinstance(shaped.invoke([QUESTION]), Weather)
            assert isinstance([*shaped.stream([QUESTION])][-1], Weather)


def test_a_result_is_sent_back(client):
    bound = client.bind_tools(TOOLS)
    for ask in (bound.invoke, lambda messages: streamed(bound, messages)):
        answer = ask([QUESTION])
        assert answer.content == "Let me see."
        assert called(answer) == [("weather", {"city": "Rome", "days": 2})]
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        result = weather.invoke(answer.tool_calls[0])
        assert isinstance(result, ToolMessage)
        last = ask([QUESTION, answer, result])
        assert last.content == "It is 22 degrees." and not last.tool_calls


random, scripted = map(model, sys.argv[1:])
test_calls_are_enforced(random)
test_a_text_has_its_form(random)
test_a_result_is_sent_back(scripted)
