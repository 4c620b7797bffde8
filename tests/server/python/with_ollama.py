"""Asks a server through Ollama's client: `with_ollama.py BASE_URL BODY`; prints a JSON object."""

import json
import sys

from ollama import Client, ResponseError

url, asked = sys.argv[1], json.loads(sys.argv[2])
messages, prompt, options = asked["messages"], asked["prompt"], asked["options"]
client = Client(host=url)
to = {"model": "tiny"}
told = {}
answer = client.chat(**to, messages=messages, options=options)
told["chat"] = {"text": answer.message.content, "count": answer.eval_count}
parts = client.chat(**to, messages=messages, options=options, stream=True)
told["chat, streamed"] = "".join(part.message.content or "" for part in parts)
told["prompt"] = client.generate(**to, prompt=prompt, raw=True, options=options).response
parts = client.generate(**to, prompt=prompt, raw=True, options=options, stream=True)
told["prompt, streamed"] = "".join(part.response for part in parts)


def weather(city: str) -> str:
    """The weather.

    Args:
        city: where
    """
    return city


options |= {"num_predict": 200}
form = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
told["form"] = client.chat(**to, messages=messages, format=form, options=options).message.content
told["models"] = [each.model for each in client.list().models]
told["running"] = [each.context_length for each in client.ps().models]
told["shown"] = client.show("tiny").modelinfo["general.architecture"]
told["loaded"] = client.generate("tiny", "").done_reason
if asked["calls"]:
    calling = Client(host=asked["calls"])
    asking = [{"role": "user", "content": "weather Rome"}]
    answer = calling.chat("tiny", messages=asking, tools=[weather]).message
    [call] = answer.tool_calls
    told["call"] = call.function.model_dump()
    asking += [answer, {"role": "tool", "tool_name": "weather", "content": "22 degrees"}]
    told["answer"] = calling.chat("tiny", messages=asking, tools=[weather]).message.content
try:
    client.chat("other", messages=messages)
except ResponseError as e:
    told["error"] = e.error
if asked["embedder"]:
    embedder = Client(host=asked["embedder"])
    name = embedder.list().models[0].model
    told["embeddings"] = embedder.embed(name, ["a cat", "mats"]).embeddings
print(json.dumps(told))
