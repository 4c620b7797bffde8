"""A drafter can change how fast text comes, never which text."""

from array import array
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from specserve.exchange.sampling_params import ReasoningBudget, Sampling, SpeculationParams
from specserve.models.eagle_head import load_eagle_head
from specserve.speculation.speculator import UserSource
from specserve.text.tokenizer import load_tokenizer
from specserve_drafters.base import SourceRequest
from specserve_drafters.native import ngram_source
from specserve_drafters.prediction import PredictionSource
from specserve_drafters.recycle import RecycleSource
from specserve_drafters.suffix import SuffixSource
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import (
    SCRIPTS,
    Case,
    Scripted,
    Watch,
    ask_always,
    bush,
    draft_of,
    each_choice,
    engine_for,
    hedge,
    load_small,
    plain,
    plan_by_chance,
    planned,
    wrong_later,
)
from tests.models.eagle_heads import write_head

VOCAB = 320
SEEN = Counter()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random target, and a draft that is the target itself but for one layer."""
    root = tmp_path_factory.mktemp("models")
    return (
        load_small(tiny_checkpoint(root / "target", seed=1, tie_word_embeddings=False)),
        load_small(tiny_checkpoint(root / "draft", seed=1, num_hidden_layers=1)),
    )


@pytest.fixture(scope="module")
def head(pair, tmp_path_factory):
    """A random one of the target, with some of its tokens only."""
    folder = tmp_path_factory.mktemp("models") / "head"
    write_head(folder, eagle_aux_hidden_state_layer_ids=[0, 1])
    return load_eagle_head(folder, pair[0])


PARAMETERS = {  # what changes logits after a text
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.3,
    "logit_bias": {7: 3.0, 40: -1.0},
    "allowed_ids": tuple(range(0, VOCAB, 2)),
    "bad_words": ((14,), (40, 41), (8, 9, 10)),
    "min_tokens": 10,
    "reasoning": ReasoningBudget(3, (14,), (7, 8)),
}
samplings = st.builds(
    lambda asked, **given: Sampling(**given, **{name: PARAMETERS[name] for name in asked}),
    asked=st.just(()) | st.sets(st.sampled_from(sorted(PARAMETERS)), max_size=3),
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(0, 2**53 - 1),
    stop_ids=st.sampled_from([frozenset(), frozenset(range(0, VOCAB, 40))]),
    priority=st.sampled_from([0, 0, 0, -1, 5]),
    cache_salt=st.sampled_from(["", "", "salt"]),
    speculation=st.sampled_from(
        [
            *[SpeculationParams()] * 4,
            SpeculationParams(max_depth=2),
            SpeculationParams(max_nodes=3, sources=("model", "scripted")),
            SpeculationParams(enabled=False),
        ]
    ),
)


@st.composite
def prompts(draw):
    """Random tokens, or a few of them over and over: lookup has to find something at times. Many
    begin alike.
    """
    size = draw(st.sampled_from([1, 2, 15, 17, 40, 70, 100, 200]))
    period = draw(st.sampled_from([3, 200]))
    seed = draw(st.integers(0, 2))
    return [(seed * 31 + (i % period) * 7919) % (VOCAB - 2) + 1 for i in range(size)]


cases = st.builds(
    Case,
    prompt=prompts(),
    sampling=samplings,
    arrives=st.integers(0, 12),
    leaves=st.none() | st.none() | st.integers(1, 40),
    n=st.sampled_from([1, 1, 1, 2, 5]),
)
EVENTS = ["squeeze", "preempt", "drop", "reset", "swap", "evict"]
steps = st.integers(1, 60)
scenarios = {
    "scenario": st.lists(cases, min_size=1, max_size=6),
    "max_nodes": st.sampled_from([1, 2, 3, 5, 8, 16, 31, 63]),
    "prefill_chunk": st.sampled_from([16, 40, 128, 512]),
    "max_batched_tokens": st.sampled_from([16, 48, 128, 512]),
    "block_size": st.sampled_from([1, 16, 17]),
    "events": st.sampled_from([None, *EVENTS]).map(lambda e: dict.fromkeys(range(60), e))
    | st.dictionaries(steps, st.sampled_from(EVENTS), min_size=8),
    "prefix_cache": st.sampled_from([True, True, True, False]),
    "max_running": st.sampled_from([2, 6]),
    "host_bytes": st.sampled_from([0, 1 << 19, 1 << 24]),
}


@pytest.mark.parametrize("script", SCRIPTS)
@settings(max_examples=15)
@given(**scenarios)
def test_text_is_the_targets_own_whatever_a_drafter_does(pair, script, scenario, events, **limits):
    want = plain(pair[0], scenario)
    drafter = Scripted(script, truth_by_id(scenario, want))
    check(engine_for(pair[0], None, drafter, **stretched(limits)), scenario, events, want)


@pytest.mark.parametrize("drafter", ["ngram", "model", "auto"])
@settings(max_examples=15)
@given(**scenarios)
def test_text_is_the_targets_own_with_every_drafter(pair, drafter, scenario, events, **limits):
    target, draft = pair
    engine = engine_for(target, draft_of(draft, drafter), drafter, **stretched(limits))
    check(engine, scenario, events, plain(target, scenario))


@pytest.mark.parametrize("model", [False, True])
@settings(max_examples=22)
@given(seed=st.integers(0, 10**6), **scenarios)
def test_text_is_the_targets_own_whatever_is_planned(pair, model, seed, scenario, events, **limits):
    target, draft = pair
    engine = engine_for(target, draft if model else None, "auto", **stretched(limits))
    plan_by_chance(engine, seed)
    ask_always(engine)
    check(engine, scenario, events, plain(target, scenario))


@settings(max_examples=15)
@given(**scenarios)
def test_text_is_the_targets_own_with_a_head(pair, head, scenario, events, **limits):
    options = {"min_gain": 0.0, "min_value": 0.0}
    engine = engine_for(pair[0], None, "eagle", head=head, options=options, **stretched(limits))
    check(engine, scenario, events, plain(pair[0], scenario))


@pytest.mark.parametrize("has_model", [False, True])
@settings(max_examples=15)
@given(script=st.sampled_from(SCRIPTS), seed=st.integers(0, 10**6), **scenarios)
def test_text_is_the_targets_own_with_a_head_next_to_others(
    pair, head, has_model, script, seed, scenario, events, **limits
):
    """Beside a drafter that knows the text, so that the head's guesses are below right ones."""
    target, draft = pair
    want = plain(target, scenario)
    draft = draft if has_model else None
    engine = engine_for(target, draft, "auto", head=head, **stretched(limits))
    users = UserSource("scripted", Scripted(script, truth_by_id(scenario, want)), VOCAB)
    engine.speculator = planned(engine, users, model_sources=engine.speculator.model_sources)
    plan_by_chance(engine, seed)
    check(engine, scenario, events, want)
    SEEN["proposed by the head"] += engine.stats.sources["eagle"].proposed


@pytest.mark.parametrize("is_random", [False, True])
@settings(max_examples=20)
@given(script=st.sampled_from(SCRIPTS), seed=st.integers(0, 10**6), **scenarios)
def test_text_is_the_targets_own_with_all_sources_in_one_tree(
    pair, is_random, script, seed, scenario, events, **limits
):
    """N-grams, a draft model, what callers predict, earlier outputs, successors from the target's
    logits, and a user's drafter that knows the text and does what it likes.
    """
    target, draft = pair
    want = plain(target, scenario)
    engine = engine_for(target, draft, "auto", **stretched(limits))
    users = UserSource("scripted", Scripted(script, truth_by_id(scenario, want)), VOCAB)
    earlier = SuffixSource()
    for text in want:
        earlier.learn(array("i", text), (0, "", ""))
    sources = ngram_source(), users, PredictionSource(), earlier, recycling(want)
    engine.speculator = planned(engine, *sources, model_sources=engine.speculator.model_sources)
    if is_random:  # drafting for so small a model is not worth its time
        plan_by_chance(engine, seed)
        ask_always(engine)
    check(engine, predicting(scenario, want, seed), events, want)
    SEEN["merged"] += engine.stats.sources["scripted"].accepted
    SEEN["predicted"] += engine.stats.sources["prediction"].accepted
    SEEN["known"] += engine.stats.sources["suffix"].accepted
    SEEN["recycled"] += engine.stats.sources["recycle"].accepted


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("drafter", ["ngram", "model", "auto", bush])
@settings(max_examples=8)
@given(**scenarios)
def test_text_is_the_targets_own_over_kv_of_8_bits(
    pair, kv_dtype, drafter, scenario, events, **limits
):
    target, draft = pair
    want = plain(target, scenario, kv_dtype=kv_dtype)
    if not isinstance(drafter, str):
        drafter = Scripted(drafter, truth_by_id(scenario, want))
    settings = stretched(limits) | {"kv_dtype": kv_dtype}
    engine = engine_for(target, draft_of(draft, drafter), drafter, **settings)
    check(engine, scenario, events, want)


def in_full(test, **more):
    """The same test with three times as many examples, for `make check`."""
    full = settings(max_examples=45)(given(**scenarios, **more)(test.hypothesis.inner_test))
    full.pytestmark = [*test.pytestmark, pytest.mark.slow.mark]
    return full


seeds, scripts = st.integers(0, 10**6), st.sampled_from(SCRIPTS)
test_with_every_drafter_in_full = in_full(test_text_is_the_targets_own_with_every_drafter)
test_whatever_is_planned_in_full = in_full(
    test_text_is_the_targets_own_whatever_is_planned, seed=seeds
)
test_with_all_sources_in_full = in_full(
    test_text_is_the_targets_own_with_all_sources_in_one_tree, script=scripts, seed=seeds
)


def predicting(scenario, want, seed):
    """The cases, most of them with a prediction that is right in most places."""
    chance, texts = Random(seed), iter(want)
    return [
        replace(case, sampling=replace(case.sampling, prediction=edited(each[0], chance)))
        for case in scenario
        if (each := [next(texts) for _ in range(case.n)])
    ]


def edited(tokens, chance):
    """With some tokens left out, doubled or others."""
    changes = {0: lambda t: (), 1: lambda t: (t, t), 2: lambda t: ((t + 1) % VOCAB,)}
    return tuple(
        new for t in tokens for new in changes.get(chance.randrange(20), lambda t: (t,))(t)
    )


def recycling(texts):
    """A source of successors that knows those of the texts, each before the one that came last."""
    source = RecycleSource()
    source.begin(SourceRequest(-1, array("i"), 0))
    for text in texts:
        after = {}
        for token, next_one in pairwise(text):
            after[token] = list(dict.fromkeys([next_one, *after.get(token, [])]))[:4]
        for token, successors in after.items():
            source.enter_successors(
                -1, token, successors, [0.5, 0.3, 0.15, 0.04][: len(successors)]
            )
    return source


def stretched(limits):
    """Room in a step for two trees of full size; a host tier only with a prefix cache."""
    host_bytes = limits["host_bytes"] if limits["prefix_cache"] else 0
    more = {"max_step_nodes": 2 * limits["max_nodes"], "host_bytes": host_bytes}
    return limits | more | {"kv_bytes": 1 << 22}  # of 8,192 tokens; each step checks all blocks


def check(engine, scenario, events, want):
    watch = Watch(engine)
    got = watch.run(scenario, events)
    SEEN.update(watch.seen)
    if (ngrams := engine.stats.sources.get("ngram")) is not None:
        SEEN["repeated"] += ngrams.accepted
    for (_, _, may_leave), request, text in zip(each_choice(scenario), got, want, strict=True):
        said = request.token_ids.tolist()
        assert said == (text[: len(said)] if may_leave else text)


def truth_by_id(scenario, want):
    """Ids are given in order of arrival, and within a step in order of the list."""
    texts = iter(want)
    by_case = [[next(texts) for _ in range(case.n)] for case in scenario]
    order = sorted(range(len(scenario)), key=lambda i: (scenario[i].arrives, i))
    return dict(enumerate(text for i in order for text in by_case[i]))


def test_the_runs_above_met_what_is_hard():
    for what in (
        "moved",
        "crossed",
        "mixed",
        "preempted",
        "caught up",
        "copied",
        "found",
        "loaded",
        "merged",
        "repeated",
        "predicted",
        "known",
        "recycled",
        "proposed by the head",
    ):
        assert SEEN[what] >= 50, (what, SEEN)


@pytest.mark.pairs
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_block_size", [1, 5, 16, None])
@pytest.mark.parametrize("max_nodes", [1, 7, 24])
def test_an_identical_draft_model_is_always_right(pair, temperature, draft_block_size, max_nodes):
    target, _ = pair
    engine = engine_for(
        target,
        target,
        "model",
        max_nodes=max_nodes,
        draft_block_size=draft_block_size,
        options={"width": 1, "min_gain": 0.0, "min_value": 0.0, "max_depth": 63, "ngrams": False},
    )
    prompts = [range(1, n) for n in (2, 20, 150)]
    sampling = Sampling(
        max_tokens=60, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=7
    )
    watch = Watch(engine)
    requests = watch.run([Case([*p], sampling) for p in prompts])
    for total in (watch.emitted[r.id] for r in requests):
        assert total["accepted"] == total["drafted"] > 0


def trained_cases(test_models):
    tokenizer = load_tokenizer(test_models / "code-target")
    texts = [
        "def read_lines(path):\n    with open(path) as f:\n",
        "import os\n" * 20,
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
        "for i in range(10):\n    print(i)\n" * 12,
    ]
    ids = [tokenizer.encode(t) for t in texts]
    return [
        Case(x, greedy_or(t, seed=i), arrives=2 * i)
        for i, (x, t) in enumerate((x, t) for t in (0.0, 1.0) for x in ids)
    ]


def greedy_or(temperature, seed):
    return Sampling(
        max_tokens=48, temperature=temperature, top_k=0, top_p=0.95, min_p=0.0, seed=seed
    )


@pytest.mark.parametrize("drafter", ["ngram", "model", "auto", bush, hedge, wrong_later])
@pytest.mark.parametrize(
    ("max_nodes", "prefill_chunk", "block_size"), [(4, 16, 16), (16, 128, 17), (63, 48, 1)]
)
def test_the_trained_pair_in_bf16_says_what_its_target_says(
    trained, drafter, max_nodes, prefill_chunk, block_size, monkeypatch
):
    Clock(monkeypatch)  # so that auto is sure to guess
    target, draft, cases, want = trained
    engine = engine_for(
        target,
        draft_of(draft, drafter),
        drafter if isinstance(drafter, str) else Scripted(drafter, truth_by_id(cases, want)),
        max_nodes=max_nodes,
        max_step_nodes=100,
        prefill_chunk=prefill_chunk,
        block_size=block_size,
    )
    got = Watch(engine).run(cases, dict.fromkeys((9, 13, 21), "squeeze"))
    assert [r.token_ids.tolist() for r in got] == want
    assert engine.stats.num_accepted > 0


@pytest.fixture(scope="module")
def trained(test_models):
    target = load_small(test_models / "code-target", "bf16")
    cases = trained_cases(test_models)
    draft = load_small(test_models / "code-draft", "bf16")
    return target, draft, cases, plain(target, cases)
