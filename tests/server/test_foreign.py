"""A server says whose code computes its model, and whether that allows guesses."""

import pytest

from tests.models.transformers_models import CASES, foreign_checkpoint
from tests.server.asking import COMPLETIONS, completion_body
from tests.server.in_process import server_threads


@pytest.mark.parametrize(
    ("kind", "drafter", "is_invariant"),
    [("gpt_oss, sinks", "none", False), ("olmo", "ngram", True)],
)
def test_the_model_and_every_answer_report_of_its_rows(tmp_path, kind, drafter, is_invariant):
    folder = foreign_checkpoint(tmp_path, **CASES[kind])
    settings = {
        "drafter.name": "ngram",
        "model.implementation": "transformers",
        "scheduler.max_batched_tokens": 140,
    }
    with server_threads(folder, **settings) as server:
        [card] = server.get("/v1/models").body["data"]
        assert (card["implementation"], card["drafter"]) == ("transformers", drafter)
        assert card["row_invariant"] is is_invariant
        assert (card["max_nodes"] == 0) is not is_invariant
        guesses = server.get("/v1/speculation").body
        assert (guesses["drafter"], guesses["row_invariant"]) == (drafter, is_invariant)
        assert (guesses["max_nodes"] == 0) is not is_invariant
        answer = server.post(COMPLETIONS, completion_body()).body
        assert answer["metrics"]["row_invariant"] is is_invariant
        assert (answer["metrics"]["speculative_decoding"] is None) is not is_invariant


def test_native_models_have_no_such_field(tmp_path):
    with server_threads(foreign_checkpoint(tmp_path, model_type="llama")) as server:
        [card] = server.get("/v1/models").body["data"]
        assert card["implementation"] == "native" and "row_invariant" not in card
        assert "row_invariant" not in server.get("/v1/speculation").body
        answer = server.post(COMPLETIONS, completion_body()).body
        assert "row_invariant" not in answer["metrics"]
