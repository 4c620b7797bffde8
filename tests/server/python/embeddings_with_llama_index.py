"""Embeds texts through LlamaIndex: `... BASE_URL TEXTS MODEL`; prints a JSON list."""

import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

url, texts = sys.argv[1], json.loads(sys.argv[2])
client = OpenAILikeEmbedding(model_name=sys.argv[3], api_base=f"{url}/v1", api_key="none")
found = client.get_text_embedding_batch(texts[1:])
print(json.dumps([*found, client.get_query_embedding(texts[0])]))
