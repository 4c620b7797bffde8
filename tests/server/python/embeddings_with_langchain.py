"""Embeds texts through LangChain: `... BASE_URL TEXTS MODEL`; prints a JSON list."""

import json
import sys

from langchain_openai import OpenAIEmbeddings

url, texts = sys.argv[1], json.loads(sys.argv[2])
# Otherwise it sends ids of OpenAI's tokenizer.
to = {"base_url": f"{url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
client = OpenAIEmbeddings(model=sys.argv[3], **to)
print(json.dumps([*client.embed_documents(texts[1:]), client.embed_query(texts[0])]))
