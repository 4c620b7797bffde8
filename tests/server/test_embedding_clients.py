"""Clients of embeddings get what sentence-transformers computes from the same folder."""

import json

import numpy as np
import pytest

from tests.checkpoints import tiny_checkpoint
from tests.server.environments import python_with
from tests.server.in_process import server_threads
from tests.server.test_embeddings import (
    RERANKING,
    TEXTS,
    embedded,
    vectors,
    with_log_odds,
    with_pooling,
)
from tests.server.test_python_clients import run

pytestmark = pytest.mark.slow
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=["pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
def served(request, tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("embedder"), seed=3)
    with_pooling(folder, request.param)
    with server_threads(folder) as server:
        yield folder, server


def computed(tmp_path, folder, **asked):
    """What sentence-transformers computes."""
    python = python_with("sentence_transformers", borrows_torch=True)
    given = str(folder), json.dumps(asked)
    return json.loads(run(tmp_path, python, "with_sentence_transformers.py", *given))


@pytest.mark.parametrize("prompt", ["query", "document"])
def test_embeddings_are_those_of_sentence_transformers(served, tmp_path, prompt):
    folder, server = served
    want = computed(tmp_path, folder, input=TEXTS, prompt_name=prompt)
    found = vectors(embedded(server, input=TEXTS, prompt_name=prompt))
    np.testing.assert_allclose(found, want, **CLOSE)


@pytest.mark.parametrize("squashes", [True, False])
def test_scores_are_those_of_sentence_transformers(tmp_path, squashes):
    folder = with_log_odds(tiny_checkpoint(tmp_path / "ranker", seed=5), squashes=squashes)
    asked = {"query": "a cat", "documents": TEXTS}
    with server_threads(folder) as server:
        results = server.post(RERANKING, asked).body["results"]
    want = computed(tmp_path, folder, **asked)
    found = {each["index"]: each["relevance_score"] for each in results}
    np.testing.assert_allclose([found[i] for i in range(len(TEXTS))], want, **CLOSE)


@pytest.mark.parametrize("name", ["langchain", "llama_index"])
def test_a_client_embeds_documents_and_a_query(served, tmp_path, name):
    _, server = served
    model = server.get("/v1/models").body["data"][0]["id"]
    script, given = f"embeddings_with_{name}.py", (server.url, json.dumps(TEXTS), model)
    *documents, query = json.loads(run(tmp_path, python_with(name), script, *given))
    want = vectors(embedded(server, input=TEXTS))
    np.testing.assert_allclose([query, *documents], want, **CLOSE)
