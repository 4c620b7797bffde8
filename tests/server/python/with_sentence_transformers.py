"""Embeddings or scores by sentence-transformers: `... FOLDER BODY`; prints a JSON list."""

import json
import sys

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer

folder, asked = sys.argv[1], json.loads(sys.argv[2])
to = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}}
if "documents" in asked:
    pairs = [(asked["query"], each) for each in asked["documents"]]
    found = CrossEncoder(folder, **to).predict(pairs)
else:
    found = SentenceTransformer(folder, **to).encode(
        asked["input"], prompt_name=asked["prompt_name"]
    )
print(json.dumps(found.tolist()))
