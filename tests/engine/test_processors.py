"""Callers' functions that change logits."""

import pytest
import torch

from specserve.errors import RequestError
from specserve.exchange.sampling_params import Sampling
from specserve.scheduling.processors import LogitsProcessors
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import Case, engine_for, load_small, plain

PROMPT = [5, 9, 9, 7, 120, 9, 9, 7, 31]
BIAS = {9: 4.0, 7: -100.0, 300: 1.0}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    return load_small(tiny_checkpoint(folder, seed=1, tie_word_embeddings=False))


def asks(**given):
    how = {"max_tokens": 20, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    return Sampling(**(how | given))


def finish(engine):
    outputs = []
    while not engine.is_idle:
        outputs += engine.step()
    return outputs


def in_place(output, logits):
    for token, bias in BIAS.items():
        logits[token] += bias
    return logits


def as_a_copy(prompt, output, logits):
    change = torch.zeros_like(logits)
    change[list(BIAS)] = torch.tensor([*BIAS.values()])
    return logits + change


@pytest.mark.parametrize("head_rows", [64, 1])
@pytest.mark.parametrize("processor", [in_place, as_a_copy])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_does_what_a_parameter_would_do(target, processor, temperature, head_rows, monkeypatch):
    """In one step with others, whose tokens and guesses it does not change."""
    monkeypatch.setattr("specserve.engine.runner.HEAD_ROWS", head_rows)
    biased = asks(logit_bias=BIAS, temperature=temperature, logprobs=2)
    other = asks(temperature=1.0, seed=8)
    cases = [Case(PROMPT, biased), Case(PROMPT * 2, other), Case(PROMPT, asks())]
    want = plain(target, cases)
    engine = engine_for(target, target, "model", max_nodes=4)
    [own] = engine.add_choices(
        PROMPT, [asks(temperature=temperature, logprobs=2)], processors=[processor]
    )
    others = [engine.add(case.prompt, case.sampling) for case in cases[1:]]
    outputs = finish(engine)
    assert [r.token_ids.tolist() for r in (own, *others)] == want
    assert {o.num_drafted for o in outputs if o.id == own.id} == {0}
    assert sum(o.num_accepted for o in outputs if o.id != own.id) > 20
    engine = engine_for(target, max_nodes=0)
    engine.add(PROMPT, biased)
    told = [said for o in outputs if o.id == own.id for said in o.logprobs]
    assert told == [said for o in finish(engine) for said in o.logprobs], "of the raw logits"


def test_it_is_reported_the_ids_so_far(target):
    seen = []

    def note(prompt, output, logits):
        seen.append((prompt, output))
        return logits

    engine = engine_for(target)
    [request] = engine.add_choices(PROMPT, [asks(max_tokens=3)], processors=[note])
    finish(engine)
    said = request.token_ids.tolist()[len(PROMPT) :]
    assert seen == [(PROMPT, said[:n]) for n in range(3)]


def test_functions_come_one_after_the_other():
    double = LogitsProcessors([lambda ids, x: x + 1, lambda ids, x: x.mul_(3)], [1])
    given = torch.tensor([1.0, 2.0])
    assert double([], given).tolist() == [6.0, 9.0]
    assert given.tolist() == [1.0, 2.0]


def fails(output, logits):
    raise ValueError("a function with a bug")


class Unspeakable(Exception):
    def __repr__(self):
        raise ValueError("no words")


def unspeakable(output, logits):
    raise Unspeakable


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (fails, "a function with a bug"),
        (unspeakable, "Unspeakable"),
        (lambda ids, x: x[:-1], "of the given shape"),
        (lambda ids, x: None, "of the given shape"),
        (lambda ids, x: x.long(), "of the given shape"),
        (lambda ids, x: x * float("nan"), "maximum nan"),
        (lambda ids, x: x - float("inf"), "maximum -inf"),
    ],
)
def test_one_that_fails_ends_its_own_request_alone(target, processor, message):
    want = plain(target, [Case(PROMPT, asks())])
    engine = engine_for(target, target, "model", max_nodes=4)
    [own] = engine.add_choices(PROMPT[1:], [asks()], processors=[processor])
    other = engine.add(PROMPT, asks())
    outputs = finish(engine)
    assert [other.token_ids.tolist()] == want
    [ended] = [o for o in outputs if o.id == own.id]
    assert ended.finish_reason == "error" and message in ended.failure
    engine.check()


def only(token):
    def processor(output, logits):
        return torch.where(torch.arange(len(logits)) == token, 0.0, float("-inf"))

    return processor


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("parameters", "token"),
    [
        ({"allowed_ids": (5, 6)}, 201),
        ({"allowed_ids": (0, 5)}, 201),  # 0 is drawn where nothing is left
        ({"bad_words": ((288,),)}, 288),
        ({"bad_words": ((31, 288), (288, 288))}, 288),
        ({"min_tokens": 2, "stop_ids": frozenset([288])}, 288),
    ],
)
def test_a_token_that_is_ruled_out_is_never_drawn(target, parameters, token, temperature):
    engine = engine_for(target)
    asked = asks(temperature=temperature, **parameters)
    [request] = engine.add_choices(PROMPT, [asked], processors=[only(token)])
    *_, ended = finish(engine)
    assert "no token is left" in ended.failure
    said = request.token_ids.tolist()[len(PROMPT) :]
    assert said in ([], [token]) and (not said or len(parameters.get("bad_words", ())) == 2)


@pytest.mark.parametrize("parameters", [{"allowed_ids": (5, 31, 63)}, {"min_tokens": 9}])
def test_a_token_that_is_left_is_drawn(target, parameters):
    engine = engine_for(target)
    [request] = engine.add_choices(PROMPT, [asks(**parameters)], processors=[only(63)])
    finish(engine)
    assert request.token_ids.tolist()[len(PROMPT) :] == [63] * 20


@pytest.mark.parametrize("wrong", ["text", lambda: 0, lambda a, b, c, d: 0])
def test_what_is_no_processor_is_refused(target, wrong):
    engine = engine_for(target)
    with pytest.raises(RequestError, match="logits_processors"):
        engine.add_choices(PROMPT, [asks()], processors=[wrong])
    assert engine.is_idle


@pytest.mark.parametrize("drafter", ["model", "auto"])
def test_one_that_ends_the_program_leaves_others_as_they_were(target, drafter):
    want = plain(target, [Case(PROMPT, asks())])
    engine = engine_for(target, target, drafter, max_nodes=4)

    def leave(output, logits):
        raise SystemExit

    other = engine.add(PROMPT, asks())
    for _ in range(2):
        engine.step()
    for _ in range(3):
        [own] = engine.add_choices(PROMPT[1:], [asks()], processors=[leave])
        with pytest.raises(SystemExit):
            for _ in range(9):
                engine.step()
        engine.finish(own.id)
        engine.check()
    finish(engine)
    assert [other.token_ids.tolist()] == want
