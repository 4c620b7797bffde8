import msgspec
import pytest

from specserve.errors import RequestError
from specserve.exchange.sampling_params import (
    Sampling,
    SamplingParams,
    Slo,
    SpeculationParams,
    for_prompt,
    resolve,
)
from specserve.text.defaults import GenerationDefaults

NAN, INF = float("nan"), float("inf")
PLAIN = GenerationDefaults(eos_token_ids=(7,))


def resolved(defaults=PLAIN, room=100, **given):
    return resolve(SamplingParams(**given), defaults, room)


WRONG = {  # a parameter's value -> words of the refusal
    "no token at all": ({"max_tokens": 0}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "a negative temperature": ({"temperature": -0.1}, "temperature"),
    "a temperature that overflows": ({"temperature": float("inf")}, "temperature"),
    "a temperature that is no number": ({"temperature": float("nan")}, "temperature"),
    "a temperature in words": ({"temperature": "hot"}, "temperature"),
    "a yes for a temperature": ({"temperature": True}, "temperature"),
    "a temperature float32 cannot divide by": ({"temperature": 1e-5}, "neither 0 nor at least"),
    "a negative top_k": ({"top_k": -2}, "top_k"),
    "a top_k that no int32 holds": ({"top_k": 2**31}, "top_k"),
    "an empty top_p": ({"top_p": 0.0}, "top_p"),
    "a top_p above one": ({"top_p": 1.1}, "top_p"),
    "a top_p that is no number": ({"top_p": float("nan")}, "top_p"),
    "a negative min_p": ({"min_p": -0.1}, "min_p"),
    "a min_p above one": ({"min_p": 1.5}, "min_p"),
    "a min_p that is no number": ({"min_p": float("nan")}, "min_p"),
    "a presence penalty below -2": ({"presence_penalty": -2.1}, "presence_penalty"),
    "a presence penalty that is no number": ({"presence_penalty": NAN}, "presence_penalty"),
    "a frequency penalty above 2": ({"frequency_penalty": 2.1}, "frequency_penalty"),
    "a frequency penalty that is no number": ({"frequency_penalty": NAN}, "frequency_penalty"),
    "no repetition penalty at all": ({"repetition_penalty": 0}, "repetition_penalty"),
    "a repetition penalty that overflows": ({"repetition_penalty": 1e30}, "repetition_penalty"),
    "a repetition penalty without end": ({"repetition_penalty": INF}, "repetition_penalty"),
    "a repetition penalty that is no number": ({"repetition_penalty": NAN}, "repetition_penalty"),
    "a bias above 100": ({"logit_bias": {5: 100.1}}, "logit_bias"),
    "a bias that is no number": ({"logit_bias": {5: NAN}}, "logit_bias"),
    "a bias of a word": ({"logit_bias": {"cat": 1}}, "logit_bias: .* as a key"),
    "a bias of no id": ({"logit_bias": {-1: 1}}, "logit_bias: .* as a key"),
    "a bias in words": ({"logit_bias": {5: "much"}}, "logit_bias"),
    "biases in a list": ({"logit_bias": [[5, 1]]}, "logit_bias"),
    "too many biases": ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
    "no id allowed": ({"allowed_token_ids": ()}, "allowed_token_ids"),
    "too many ids allowed": ({"allowed_token_ids": (1,) * 4097}, "allowed_token_ids"),
    "an allowed id in words": ({"allowed_token_ids": ("5",)}, "allowed_token_ids"),
    "an empty bad word": ({"bad_words": ("a", "")}, "bad_words"),
    "too many bad words": ({"bad_words": ("a",) * 257}, "bad_words"),
    "a bad word of a page": ({"bad_words": ("a" * 257,)}, "bad_words"),
    "a bad word for several": ({"bad_words": "cat"}, "bad_words"),
    "fewer tokens than none": ({"min_tokens": -1}, "min_tokens"),
    "more tokens at least than at most": ({"min_tokens": 6, "max_tokens": 5}, "min_tokens = 6"),
    "a seed of 65 bits": ({"seed": 2**63}, "seed"),
    "a negative seed of 65 bits": ({"seed": -(2**63) - 1}, "seed"),
    "a yes for a seed": ({"seed": True}, "seed"),
    "an empty stop": ({"stop": ""}, "stop"),
    "an empty stop among others": ({"stop": ("a", "")}, "stop"),
    "a stop that is no string": ({"stop": 5}, "stop"),
    "too many bytes of stops": ({"stop": ("é" * 1024,) * 9}, "stop: 9 strings have 18432 bytes"),
    "a stop longer than a page": ({"stop": "a" * 1025}, "stop"),
    "a stop id in words": ({"stop_token_ids": ("3",)}, "stop_token_ids"),
    "a stop kept by a number": ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    "tokens skipped in words": ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    "an ignore_eos that is no bool": ({"ignore_eos": 1}, "ignore_eos"),
    "fewer guesses than none": (
        {"speculation": SpeculationParams(max_nodes=-1)},
        "speculation.max_nodes",
    ),
    "a path of half a guess": ({"speculation": {"max_depth": 0.5}}, "speculation.max_depth"),
    "a source that is no list": ({"speculation": {"sources": "ngram"}}, "speculation.sources"),
    "a misspelt limit of guesses": ({"speculation": {"max_node": 1}}, "max_node`"),
    "a target of no time": ({"slo": Slo(tpot_ms=0.0)}, "slo.tpot_ms"),
    "a target that is no number": ({"slo": Slo(ttft_ms=float("nan"))}, "slo.ttft_ms"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_refused_by_name(given, words):
    with pytest.raises(RequestError, match=f"sampling parameters: .*{words}"):
        resolved(**given)


def test_what_is_unset_falls_to_the_fields_own_defaults():
    got = msgspec.structs.replace(resolved(), seed=0)
    want = Sampling(max_tokens=100, temperature=1, top_k=0, top_p=1, min_p=0, seed=0)
    assert got == msgspec.structs.replace(want, stop_ids=frozenset({7}), eos_ids=frozenset({7}))


@pytest.mark.parametrize("wrap", [msgspec.structs.asdict, lambda given: given])
def test_speculation_and_targets_come_as_structs_or_as_plain_data(wrap):
    asked = SpeculationParams(sources=("ngram",), max_nodes=3)
    got = resolved(speculation=wrap(asked), slo=wrap(Slo(tpot_ms=5)))
    assert (got.speculation, got.slo) == (asked, Slo(tpot_ms=5))


def test_what_is_unset_falls_to_the_models_generation_config_first():
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    written["repetition_penalty"] = 1.1
    got = resolved(GenerationDefaults(**written))
    assert {name: getattr(got, name) for name in written} == written


def test_what_is_given_wins_even_where_it_is_zero():
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    got = resolved(defaults, temperature=0, top_k=0, top_p=1, min_p=0, seed=0)
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.seed) == (0, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("own", "asked", "room", "got"), [(5, None, 9, 5), (5, 7, 9, 7), (9, None, 5, 5)]
)
def test_the_models_own_limit_holds_where_none_is_given(own, asked, room, got):
    defaults, params = GenerationDefaults(max_new_tokens=own), SamplingParams(max_tokens=asked)
    first = resolve(params, defaults, room)
    assert first.max_tokens == got == for_prompt(first, None, room).max_tokens


def test_more_tokens_at_least_than_the_models_own_limit_are_refused():
    defaults = GenerationDefaults(max_new_tokens=5)
    assert resolved(defaults, min_tokens=6, max_tokens=6).min_tokens == 6
    with pytest.raises(RequestError, match="min_tokens = 6 is more than 5, the model's default"):
        resolved(defaults, min_tokens=6)


def test_a_repetition_penalty_that_is_given_wins_over_the_models():
    defaults = GenerationDefaults(repetition_penalty=1.1)
    assert resolved(defaults, repetition_penalty=1).repetition_penalty == 1


def test_a_top_k_that_others_call_off_is_off_also_where_the_model_has_one():
    assert resolved(GenerationDefaults(top_k=20), top_k=-1).top_k == 0


@pytest.mark.parametrize("seed", [0, 1, 2**53, 2**63 - 1, -2, -(2**63)])
def test_a_seed_is_kept_as_given(seed):
    assert resolved(seed=seed).seed == seed


def test_a_seed_of_minus_one_is_drawn():
    seeds = {resolved(seed=-1).seed for _ in range(9)}
    assert len(seeds) == 9 and min(seeds) >= 0


def test_many_stop_strings_are_kept_as_given():
    stop = tuple(f"<{i}>" for i in range(1000))
    assert resolved(stop=stop).stop == stop


def test_a_drawn_seed_is_new_every_time_and_a_valid_one():
    seeds = {resolved().seed for _ in range(100)}
    assert len(seeds) == 100
    assert all(resolved(seed=seed).seed == seed for seed in seeds)
    assert max(seeds) > 2**48, "drawn from all of [0, 2^53)"


@pytest.mark.parametrize(("asked", "room", "got"), [(5, 9, 5), (9, 5, 5), (None, 5, 5)])
def test_the_context_limits_the_tokens(asked, room, got):
    assert resolved(room=room, max_tokens=asked).max_tokens == got


@pytest.mark.parametrize(
    ("given", "stop"),
    [("ab", ("ab",)), (("a", "b"), ("a", "b")), (["a", "b"], ("a", "b")), ((), ())],
    ids=["a string is one stop, not its letters", "a tuple", "a list", "none"],
)
def test_stops_come_as_a_string_or_as_several(given, stop):
    assert resolved(stop=given).stop == stop


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ({}, {7}),
        ({"stop_token_ids": (3, 319, 0)}, {0, 3, 7, 319}),
        ({"stop_token_ids": (3,), "ignore_eos": True}, {3}),
        ({"stop_token_ids": (7,), "ignore_eos": True}, {7}),
    ],
    ids=["the model's end", "and the caller's", "the caller's alone", "asked for by name"],
)
def test_these_ids_end_a_request(given, ids):
    assert resolved(**given).stop_ids == ids


def test_these_reach_the_engine_as_they_are():
    given = {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5}
    given |= {"logit_bias": {5: 1.5, 6: -100}, "min_tokens": 3}
    got = resolved(**given, allowed_token_ids=[5, 6])
    assert {name: getattr(got, name) for name in given} == given
    assert got.allowed_ids == (5, 6)


def test_ids_of_a_bias_may_be_written_as_json_writes_them():
    assert resolved(logit_bias={"5": 1, "0": -1}).logit_bias == {5: 1, 0: -1}


def test_as_many_tokens_at_least_as_at_most_are_a_length():
    assert resolved(min_tokens=5, max_tokens=5).min_tokens == 5
    assert resolved(room=5, min_tokens=5).max_tokens == 5, "unset, it is what fits"


@pytest.mark.parametrize("most", [None, 9])
def test_more_tokens_at_least_than_fit_are_refused(most):
    with pytest.raises(RequestError, match=r"min_tokens = 6 is more than the 5 tokens") as e:
        resolved(room=5, min_tokens=6, max_tokens=most)
    assert e.value.param == "min_tokens"
