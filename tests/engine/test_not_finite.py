"""Rows whose logits are not finite, or that every parameter rules out: no token, but an error."""

import pytest
import torch

from specserve.errors import WEIGHTS
from specserve.exchange.sampling_params import Sampling
from specserve.scheduling.request import ALL_RULED_OUT, LOGITS_NOT_FINITE
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, engine_for, load_small, plain

PROMPT, OTHER = [5, 9, 9, 7, 120, 9, 9, 7, 31], [40, 41, 42, 43]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    return load_small(tiny_checkpoint(folder, seed=1, tie_word_embeddings=False))


def asks(**given):
    how = {"max_tokens": 20, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    return Sampling(**(how | given))


def damaged(target, token):
    """The same model, but rows that see this token have no finite number."""
    embedding = target.weights.embedding.clone()
    embedding[token] = torch.nan
    weights = target.weights._replace(embedding=embedding)
    return type(target)(target.config, target.ops, target.rotary, weights)


def run(engine, *cases):
    """The output and the error of each."""
    requests = [engine.add(case.prompt, case.sampling) for case in cases]
    errors = dict.fromkeys((r.id for r in requests), ("", ""))
    while not engine.is_idle:
        for out in engine.step():
            errors[out.id] = out.failure, out.blamed
    engine.check()
    return [(r.output.tolist(), errors[r.id]) for r in requests]


def texts(target, *cases):
    """What is generated without drafting, after each prompt."""
    outputs = plain(target, cases)
    return [ids[len(case.prompt) :] for ids, case in zip(outputs, cases, strict=True)]


@pytest.mark.pairs
@pytest.mark.parametrize("drafter", ["none", "model", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("others", "head_rows"),
    [({}, 64), ({"allowed_ids": tuple(range(300))}, 1), ({"logprobs": 2}, 64)],
)
def test_a_request_ends_at_the_first_row_without_finite_logits(
    target, temperature, drafter, others, head_rows, monkeypatch
):
    """The draft model is sound: it proposes tokens behind the one that the target cannot read."""
    monkeypatch.setattr("specserve.engine.runner.HEAD_ROWS", head_rows)
    broken = Case(PROMPT, asks(temperature=temperature, **others))
    sound = Case(OTHER, asks(temperature=temperature, seed=8))
    text, other = texts(target, broken, sound)
    at = next(n for n in range(3, 20) if text[n] not in {*text[:n], *other, *PROMPT, *OTHER})
    draft = None if drafter == "none" else target
    engine = engine_for(damaged(target, text[at]), draft, drafter, max_nodes=4)
    assert run(engine, broken, sound) == [
        (text[: at + 1], (LOGITS_NOT_FINITE, WEIGHTS)),
        (other, ("", "")),
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("allowed", [(7,), (7, 8, 9)])
def test_a_request_ends_if_its_parameters_rule_out_every_token(target, allowed, temperature):
    words = tuple((token,) for token in allowed)
    ruled_out = asks(allowed_ids=allowed, bad_words=words, temperature=temperature)
    engine = engine_for(target, target, "model", max_nodes=4)
    [got] = run(engine, Case(PROMPT, ruled_out))
    assert got == ([], (ALL_RULED_OUT, "allowed_token_ids"))
