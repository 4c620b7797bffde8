"""A request that has begun in one engine goes on in another, with the same text."""

import pytest

from specserve.engine.grammars import Grammars
from specserve.exchange.messages import NOT_RESUMED, ResumeState
from specserve.exchange.sampling_params import Sampling
from specserve.text.tokenizer import load_tokenizer
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small
from tests.engine.test_grammars import GRAMMARS, end_of, read_vocabulary

PROMPT = [5, 17, 42, 5, 17, 9, 33]
DRAWN = {"temperature": 0.9, "seed": 11, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PAIRS = tuple((a, b) for a in range(8) for b in range(8) if a % 3 != b % 3)  # two of them in a row
ASKED = {
    "greedy": {**DRAWN, "temperature": 0.0},
    "drawn": DRAWN,
    "penalties": {**DRAWN, "presence_penalty": -2.0, "frequency_penalty": -0.4},
    "repetition": {**DRAWN, "temperature": 0.0, "repetition_penalty": 0.6},
    "bad words": {**DRAWN, "bad_words": PAIRS, "allowed_ids": (*range(8),)},
    "an end that is early": {**DRAWN, "min_tokens": 12, "stop_ids": frozenset(range(0, 320, 5))},
    "logprobs": {**DRAWN, "logprobs": 3, "prompt_logprobs": 2},
    "grammar": {**DRAWN, "grammar": GRAMMARS["json"]},
}
ASKED["grammar and penalties"] = {**ASKED["grammar"], "frequency_penalty": 0.5}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = tiny_checkpoint(root / "target", seed=1, tie_word_embeddings=False)
    draft = tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1)
    tokenizer = load_tokenizer(target)
    vocabulary = read_vocabulary(tokenizer), end_of(tokenizer)
    return load_small(target), load_small(draft), *vocabulary


@pytest.fixture(scope="module", params=["none", "auto"])
def engine(request, models):
    target, draft, vocabulary, _ = models
    draft = draft if request.param == "auto" else None
    engine = engine_for(target, draft, request.param, grammars=Grammars(lambda: vocabulary))
    yield engine
    engine.grammars.close()


@pytest.fixture
def asked(models):
    *_, end = models
    return lambda name, n: Sampling(max_tokens=n, **({"stop_ids": frozenset([end])} | ASKED[name]))


def texts(engine, sampling, resume=NOT_RESUMED):
    """All outputs of a request, joined: tokens, logprobs, the prompt's logprobs, how it ended."""
    [request] = engine.add_choices(PROMPT, [sampling], resume=resume)
    tokens, logprobs, of_prompt, reason = [], [], [], None
    while reason is None:
        for output in engine.step():
            assert output.id == request.id and not output.failure
            tokens += output.tokens
            logprobs += output.logprobs
            of_prompt += output.prompt_logprobs
            reason = output.finish_reason
        engine.check()
    assert engine.is_idle and engine.pool.is_whole
    return tokens, logprobs, of_prompt, reason


@pytest.mark.parametrize("name", ASKED)
def test_the_rest_is_that_of_the_whole_after_any_number_of_tokens(engine, asked, name):
    sampling = asked(name, 24)
    tokens, logprobs, of_prompt, reason = texts(engine, sampling)
    assert len(tokens) > 3
    for k in range(1, len(tokens)):
        engine.reset_cache()
        rest = texts(engine, sampling, ResumeState(tokens[:k], len(of_prompt)))
        assert rest == (tokens[k:], logprobs[k:], [], reason), k


def test_what_was_reported_of_a_prompt_in_part_is_reported_to_its_end(engine, asked):
    sampling = asked("logprobs", 4)
    tokens, logprobs, of_prompt, reason = texts(engine, sampling)
    for k in range(len(of_prompt)):
        rest = texts(engine, sampling, ResumeState([], k))
        assert rest == (tokens, logprobs, of_prompt[k:], reason)


def test_a_token_that_no_model_has_is_refused_as_in_a_prompt(engine, asked):
    with pytest.raises(ValueError, match="320"):
        engine.add_choices(PROMPT, [asked("greedy", 4)], resume=ResumeState([320]))
