"""LangChain's agent calls a tool of a model whose template shows none: `... URL`."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str, days: int) -> str:
    """Tells the weather."""
    assert (city, days) == ("Rome", 2)
    return "22 degrees"


def turns(messages):
    """The type, text and calls of each message."""
    calls = [[(c["name"], c["args"]) for c in getattr(m, "tool_calls", ())] for m in messages]
    return [(m.type, m.content, its) for m, its in zip(messages, calls, strict=True)]


QUESTION = "What is the weather in Rome?"
WANT = [
    ("human", QUESTION, []),
    ("ai", "Let me see.", [("weather", {"city": "Rome", "days": 2})]),
    ("tool", "22 degrees", []),
    ("ai", "It is 22 degrees.", []),
]
for streaming in (False, True):
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{sys.argv[1]}/v1",
        api_key="none",
        max_retries=0,
        streaming=streaming,
    )
    agent = create_agent(model, tools=[weather], system_prompt="You know the weather.")
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    assert turns(agent.invoke(asked)["messages"]) == WANT
    pieces = [piece.content for piece, _ in agent.stream(asked, stream_mode="messages")]
    assert "".join(pieces) == "".join(text for kind, text, _ in WANT[1:])
