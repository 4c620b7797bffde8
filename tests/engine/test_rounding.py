"""Models whose weights are rounded at load: the target's own text, whatever a drafter does."""

import pytest
import torch

from specserve.models.loader import load_decoder
from specserve.models.weight import Rounding
from specserve.speculation import planner
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import (
    ALWAYS,
    MAX_LEN,
    OPS,
    Scripted,
    Watch,
    bush,
    draft_of,
    engine_for,
    plain,
)
from tests.engine.test_formats import cases
from tests.models.forward import recorded_and_eager

W4, W8, W8A8 = Rounding(4, 8), Rounding(8, 8), Rounding(8, 8, True)
EMBEDDING = Rounding(8, 8, embedding=8)
ROUNDINGS = {"w4": W4, "w8": W8, "w8a8": W8A8, "the embedding too": EMBEDDING}


def load_rounded(folder, rounding, dtype="bf16"):
    return load_decoder(folder, dtype, OPS, MAX_LEN, rounding=rounding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", hidden_size=128, seed=1)


@pytest.fixture(scope="module")
def texts(folder):
    return {r: plain(load_rounded(folder, r), cases()) for r in ROUNDINGS.values()}


@pytest.mark.parametrize("drafter", ["ngram", "model", "auto", bush])
@pytest.mark.parametrize(
    ("rounding", "of_draft"),
    [(W4, W8), (W8, W8A8), (W8A8, W4), (EMBEDDING, EMBEDDING)],
    ids=ROUNDINGS,
)
def test_a_drafter_changes_no_text(folder, texts, rounding, of_draft, drafter, monkeypatch):
    """Beside other requests, in chunks, after prefix hits and preemption."""
    Clock(monkeypatch)
    monkeypatch.setattr(planner, "EXPLORATION", ALWAYS)  # so that auto is sure to guess
    target, want = load_rounded(folder, rounding), texts[rounding]
    engine = engine_for(
        target,
        draft_of(load_rounded(folder, of_draft), drafter),
        drafter if isinstance(drafter, str) else Scripted(drafter, dict(enumerate(want))),
        max_nodes=6,
        prefill_chunk=16,
        block_size=16,
    )
    watch = Watch(engine)
    got = watch.run(cases(), {8: "preempt", 11: "squeeze", 15: "preempt"})
    assert [r.token_ids.tolist() for r in got] == want
    assert watch.seen["found"] and watch.seen["preempted"]
    assert drafter == "ngram" or engine.stats.num_accepted > 0


@pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS)
def test_a_recorded_forward_has_the_bits_of_the_eager_one(folder, rounding):
    decoder = load_rounded(folder, rounding)
    program, recorded, eager = recorded_and_eager(decoder, torch.arange(37), (23, 24))
    assert all(torch.equal(a, b) for a, b in zip(recorded, eager, strict=True))
    assert program.host_ops == []


def test_the_texts_differ(texts):
    """So that the tests above do compare what codes of the given bits compute."""
    assert len({str(text) for text in texts.values()}) == len(ROUNDINGS)
