"""Asks a server through LiteLLM: `with_litellm.py BASE_URL BODY`; prints a JSON object."""

import json
import sys

import litellm

litellm.suppress_debug_info = True  # which it prints
url, asked = sys.argv[1], json.loads(sys.argv[2])
to = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
chat = to | {"model": "openai/tiny", "messages": asked.pop("messages")}
completion = to | {"model": "text-completion-openai/tiny", "prompt": asked.pop("prompt")}
told = {}

answer = litellm.completion(**chat, **asked, logprobs=True, top_logprobs=2)
[choice] = answer.choices
told["chat"] = {
    "text": choice.message.content,
    "logprobs": [each.logprob for each in choice.logprobs.content],
    "usage": answer.usage.total_tokens,
}
chunks = litellm.completion(**chat, **asked, stream=True, stream_options={"include_usage": True})
whole = litellm.stream_chunk_builder(list(chunks))
told["chat, streamed"] = {
    "text": whole.choices[0].message.content,
    "usage": whole.usage.total_tokens,
}
[choice] = litellm.text_completion(**completion, **asked, logprobs=2).choices
told["completion"] = {"text": choice.text, "logprobs": choice.logprobs.token_logprobs}
chunks = litellm.text_completion(**completion, **asked, stream=True)
told["completion, streamed"] = {"text": "".join(c.choices[0].text or "" for c in chunks)}
told["defaults"] = litellm.completion(**chat).choices[0].message.content
print(json.dumps(told))
