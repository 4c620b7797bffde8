"""A head that reads other layers than it was trained on is told of, once."""

import pytest

from specserve.models.eagle_head import load_eagle_head
from specserve.speculation.head_model import LEAST, TOKENS, AuxLayerWatch, aux_layer_words
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, Watch, engine_for, load_small
from tests.models.eagle_heads import write_head
from tests.speculation.test_head_model import PROMPT, sampling


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = load_small(tiny_checkpoint(root / "target", seed=1, num_hidden_layers=4))
    write_head(root / "head")
    return target, load_eagle_head(root / "head", target)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


CASES = [Case(PROMPT[i:], sampling(80, seed=i)) for i in range(3)]


@pytest.mark.parametrize("num_together", [1, 3])
@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_a_head_that_is_never_right_is_warned_about_once(models, caplog, drafter, num_together):
    """Whoever guesses: tokens of several requests count alike, and those of a request alone, whose
    rows may wait until it has ended.
    """
    target, head = models
    engine = engine_for(target, head=head, drafter=drafter)
    Watch(engine).run(CASES[:2])
    assert warnings(caplog) == [] and engine.head.watch is not None, "there were 160 tokens at most"
    for first in range(0, 6, num_together):
        Watch(engine).run((2 * CASES)[first : first + num_together])
        engine.rest()
    [words] = warnings(caplog)
    assert "token matched" in words and f"of {TOKENS} tokens" in words
    assert "reads the inputs of the target's layers 1, 2, 3. Check" in words
    assert engine.head.watch is None


def test_a_head_that_is_right_is_not_reported_of(models, caplog, monkeypatch):
    """It expects what the target says, before and after that."""
    target, head = models
    engine = engine_for(target, head=head, drafter="eagle")
    truth = [request.token_ids.tolist() for request in Watch(engine_for(target)).run(CASES)]
    texts = {tuple(text[: len(case.prompt)]): text for text, case in zip(truth, CASES, strict=True)}

    def next_token(id):
        known = engine.requests[id].token_ids.tolist()
        [text] = [text for text in texts.values() if text[: len(known)] == known]
        return text[len(known)]

    watch, seen = engine.head.watch, []
    expect, compare = watch.expect, watch.compare

    def right(ids, tokens):
        ids = [id for id in ids if id in engine.requests]
        seen.extend(ids)
        expect(ids, map(next_token, ids))

    monkeypatch.setattr(watch, "expect", right)
    monkeypatch.setattr(watch, "compare", lambda expected, tokens: compare(tokens, tokens))
    Watch(engine).run(CASES)
    assert len(seen) > 9 and engine.head.watch is None
    assert warnings(caplog) == [] and watch.num_right == TOKENS


@pytest.mark.parametrize(
    ("num_right", "is_reported"),
    [(0, True), (round(LEAST * TOKENS) - 1, True), (LEAST * TOKENS, False)],
)
def test_the_share_that_is_right_decides(caplog, num_right, is_reported):
    watch = AuxLayerWatch("its layers")
    for token in range(TOKENS):
        assert not watch.is_over and warnings(caplog) == []
        watch.expect([1], [7])
        watch.see(2, 7)  # of which nothing was expected
        watch.see(1, 7 if token < num_right else 8)
        watch.see(1, 7)  # of the next step, of which nothing was expected
    assert watch.is_over and len(warnings(caplog)) == is_reported
    watch.expect([1], [7])
    watch.see(1, 8)
    watch.compare([7, 7], [8, 8])
    assert len(warnings(caplog)) == is_reported


@pytest.mark.parametrize("num_right", [0, TOKENS])
def test_tokens_are_compared_together_as_one_by_one(caplog, num_right):
    watch = AuxLayerWatch("its layers")
    watch.compare([1] * (TOKENS + 5), [1] * num_right + [2] * (TOKENS + 5 - num_right))
    assert watch.is_over and watch.num_tokens == TOKENS and watch.num_right == num_right
    assert len(warnings(caplog)) == (num_right == 0)


def test_what_is_read_is_reported_in_words():
    assert aux_layer_words([0, 2, 3], 4) == "the inputs of the target's layers 0, 2, 3"
    assert aux_layer_words([4], 4) == "the output of the target's last layer"
