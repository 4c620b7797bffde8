"""Asks a server through LlamaIndex: `with_llama_index.py BASE_URL BODY`; prints a JSON object."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, asked = sys.argv[1], json.loads(sys.argv[2])
messages = [ChatMessage(**message) for message in asked.pop("messages")]
prompt, seed = asked.pop("prompt"), asked.pop("seed")
to = {"model": "tiny", "api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
asked |= {"additional_kwargs": {"seed": seed}}
logprobs = {"logprobs": True, "top_logprobs": 2}
told = {}

chat = OpenAILike(**to, **asked, is_chat_model=True)
answer = OpenAILike(**to, **asked, **logprobs, is_chat_model=True).chat(messages)
told["chat"] = {
    "text": answer.message.content,
    "likeliest": [[one.logprob for one in each] for each in answer.logprobs],
    "usage": answer.raw.usage.total_tokens,
}
chunks = chat.stream_chat(messages)
told["chat, streamed"] = {"text": "".join(chunk.delta or "" for chunk in chunks)}
answer = OpenAILike(**to, **asked, **logprobs).complete(prompt)
told["completion"] = {
    "text": answer.text,
    "likeliest": [[one.logprob for one in each] for each in answer.logprobs],
}
chunks = OpenAILike(**to, **asked).stream_complete(prompt)
told["completion, streamed"] = {"text": "".join(chunk.delta or "" for chunk in chunks)}
told["defaults"] = OpenAILike(**to, is_chat_model=True).chat(messages).message.content
print(json.dumps(told))
