"""Agents of pydantic-ai, with functions and forms: `tools_with_pydantic_ai.py URL SCRIPTED_URL`."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Rome?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)


def agent(url, **kw):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = {"temperature": 1, "seed": 3, "max_tokens": 1000, "parallel_tool_calls": False}
    return Agent(OpenAIChatModel("tiny", provider=provider), model_settings=settings, **kw)


def weather(city: Literal["Rome", "Paris"], days: int) -> str:
    """Tells the weather."""
    assert (city, days) == ("Rome", 2)
    return "22 degrees"


async def streamed(agent, asked=QUESTION):
    """`run_stream` would end with the text before a call."""
    kinds = set()

    async def read(context, events):
        kinds.update([event.event_kind async for event in events])

    output = (await agent.run(asked, event_stream_handler=read)).output
    assert "part_delta" in kinds
    return output


def test_a_text_has_its_form(url):
    for output_type in (Weather, NativeOutput(Weather)):
        shaped = agent(url, output_type=output_type)
        found = shaped.run_sync(QUESTION).output
        assert isinstance(found, Weather)
        assert asyncio.run(streamed(shaped)) == found


def test_an_agent_calls_and_answers(url):
    answer = agent(url, tools=[weather]).run_sync(QUESTION)
    assert answer.output == "It is 22 degrees."
    assert asyncio.run(streamed(agent(url, tools=[weather]))) == answer.output
    parts = [part for message in answer.all_messages() for part in message.parts]
    thoughts = [part.content for part in parts if isinstance(part, ThinkingPart)]
    assert thoughts == ["I have to look.", "It is warm."]


def test_an_agent_calls_and_answers_in_a_form(url):
    for output_type, asked in ((Weather, QUESTION), (NativeOutput(Weather), f"{QUESTION} as JSON")):
        both = agent(url, tools=[weather], output_type=output_type)
        assert both.run_sync(asked).output == Weather(city="Rome", days=9)
        assert asyncio.run(streamed(both, asked)) == Weather(city="Rome", days=9)


random, scripted = sys.argv[1:]
test_a_text_has_its_form(random)
test_an_agent_calls_and_answers(scripted)
test_an_agent_calls_and_answers_in_a_form(scripted)
