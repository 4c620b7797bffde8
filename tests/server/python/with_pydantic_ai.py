"""Asks a server through pydantic-ai: `with_pydantic_ai.py BASE_URL BODY`; prints a JSON object."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, asked = sys.argv[1], json.loads(sys.argv[2])
[message], _ = asked.pop("messages"), asked.pop("prompt")
prompt = message["content"]
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
agent = Agent(model, model_settings=asked)


async def streamed():
    async with agent.run_stream(prompt) as answer:
        text = "".join([piece async for piece in answer.stream_text(delta=True)])
        return {"text": text, "usage": answer.usage().total_tokens}


logprobs = {"openai_logprobs": True, "openai_top_logprobs": 2}
answer = agent.run_sync(prompt, model_settings=logprobs)
told = {
    "chat": {
        "text": answer.output,
        "logprobs": [each["logprob"] for each in answer.response.provider_details["logprobs"]],
        "usage": answer.usage().total_tokens,
    },
    "chat, streamed": asyncio.run(streamed()),
    "defaults": Agent(model).run_sync(prompt).output,
}
print(json.dumps(told))
