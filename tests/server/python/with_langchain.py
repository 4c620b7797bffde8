"""Asks a server through LangChain: `with_langchain.py BASE_URL BODY`; prints a JSON object."""

import json
import sys

from langchain_openai import ChatOpenAI

url, asked = sys.argv[1], json.loads(sys.argv[2])
messages, _ = asked.pop("messages"), asked.pop("prompt")
to = {"model": "tiny", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
told = {}


def read(answer):
    return {
        "text": answer.content,
        "logprobs": [each["logprob"] for each in answer.response_metadata["logprobs"]["content"]],
        "usage": answer.usage_metadata["total_tokens"],
    }


client = ChatOpenAI(**to, **asked, logprobs=True, top_logprobs=2, stream_usage=True)
told["chat"] = read(client.invoke(messages))
chunks = list(client.stream(messages))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
told["chat, streamed"] = read(whole)
told["batch"] = [each.content for each in client.batch([messages] * 3)]
told["defaults"] = ChatOpenAI(**to).invoke(messages).content
print(json.dumps(told))
