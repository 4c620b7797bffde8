"""Beam search, against transformers' on the same weights: token for token."""

from collections import Counter
from functools import cache
from time import perf_counter

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from specserve.engine.beams import BeamSelection, Likely
from specserve.exchange.messages import TokenLogprobs
from specserve.exchange.sampling_params import BeamSearch, Sampling
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small

PROMPT = [5, 17, 42, 5, 17, 99, 3]
GREEDY = Sampling(max_tokens=24, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def target(folder):
    return load_small(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def started(engine, prompt, width, ends=(), **search):
    sampling = replace(
        GREEDY,
        beam_search=BeamSearch(**{k: v for k, v in search.items() if k != "max_tokens"}),
        max_tokens=search.get("max_tokens", 24),
        stop_ids=frozenset(ends),
    )
    return engine.add_choices(prompt, [sampling] * width)


def finished(engine, others=()):
    """The tokens and the sum of logprobs of each choice, by id."""
    found = {}
    while not engine.is_idle:
        for output in engine.step():
            if output.id in others:
                continue
            assert output.finish_reason in ("stop", "length") and output.id not in found
            found[output.id] = output.tokens, sum(its.logprob for its in output.logprobs)
        engine.check()
    return found


def beams(engine, prompt, width, ends=(), **search):
    choices = started(engine, prompt, width, ends, **search)
    found = finished(engine)
    return [found[choice.id] for choice in choices]


def of_transformers(model, prompt, width, ends=(), max_tokens=24, **search):
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=[*ends] or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **search,
    )
    texts = [sequence[len(prompt) :].tolist() for sequence in found.sequences]
    if width == 1:
        return texts, None
    sizes = (found.beam_indices >= 0).sum(1).tolist()
    scores = found.sequences_scores.tolist()
    return [text[:size] for text, size in zip(texts, sizes, strict=True)], scores


def common_tokens(model, prompt, number):
    """Tokens that likely texts have: as ends they end beams at different times."""
    return [token for token, _ in tokens_of_beams(model, tuple(prompt)).most_common(number)]


@cache
def tokens_of_beams(model, prompt):
    texts, _ = of_transformers(model, [*prompt], 6)
    return Counter(token for text in texts for token in text)


@pytest.mark.pairs
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize(("width", "num_ends"), [(1, 1), (2, 1), (4, 0), (4, 1), (5, 3)])
def test_beams_are_those_of_transformers(
    target, theirs, width, num_ends, length_penalty, early_stopping
):
    search = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    engine, num_ended = engine_for(target), 0
    for prompt in (PROMPT, PROMPT[::-1], [*range(3, 60)]):
        ends = common_tokens(theirs, prompt, num_ends)
        want, scores = of_transformers(theirs, prompt, width, ends, **search)
        found = beams(engine, prompt, width, ends, **search)
        assert [tokens for tokens, _ in found] == want
        ranked = [total / len(tokens) ** length_penalty for tokens, total in found]
        if width > 1:
            assert ranked == pytest.approx(scores, abs=1e-3)
        num_ended += sum(len(tokens) < 24 for tokens in want)
    assert num_ended or not num_ends or length_penalty >= 0, "ended beams win if they are short"


@pytest.mark.parametrize("max_running", [2, 64])
def test_beams_are_the_same_in_a_small_pool_and_next_to_other_requests(target, max_running):
    """Beams are preempted, wait for others, and compute their KV again."""
    search = {"max_tokens": 80, "length_penalty": 0.5}
    cases = [(PROMPT * 4, 4), (PROMPT[::-1] * 4, 3), ([*range(3, 60)], 5)]
    want = [beams(engine_for(target), *case, **search) for case in cases]
    engine = engine_for(target, kv_bytes=180224, max_running=max_running, block_size=4)
    choices = [started(engine, *case, **search) for case in cases]
    other = engine.add(PROMPT * 2, replace(GREEDY, max_tokens=100))
    found = finished(engine, others=[other.id])
    assert [[found[choice.id] for choice in each] for each in choices] == want
    assert engine.scheduler.num_preempted > 0


def test_beams_share_the_kv_of_their_common_prefix(target):
    engine = engine_for(target, block_size=4)
    choices = started(engine, [*range(3, 40)], 4)
    shares = []
    while not engine.is_idle:
        engine.step()
        tables = [choice.table.blocks for choice in choices if choice.table.blocks]
        if len(tables) == 4:
            shares.append(len({b for blocks in tables for b in blocks}) / sum(map(len, tables)))
    assert max(shares) < 0.6, shares


def test_a_search_counts_its_prompt_once_in_the_prefix_cache(target):
    engine, prompt = engine_for(target, block_size=4), [*range(3, 40)]
    for found in (0, 36):
        before = engine.stats.num_looked_up, engine.stats.num_cached
        beams(engine, prompt, 3)
        assert engine.stats.num_looked_up - before[0] == len(prompt)
        assert engine.stats.num_cached - before[1] == found


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_all_beams_report_the_times_of_their_search(target, max_tokens):
    """Also beams that never ran, because the first step was the last one."""
    engine, before = engine_for(target, max_running=2), perf_counter()
    started(engine, PROMPT, 4, max_tokens=max_tokens)
    outputs = []
    while not engine.is_idle:
        outputs += engine.step()
    [times] = {(o.admitted_at, o.first_token_at, o.num_steps, o.num_cached) for o in outputs}
    admitted_at, first_token_at, num_steps, _ = times
    assert before < admitted_at < first_token_at < perf_counter()
    assert num_steps == max_tokens


def test_a_request_that_is_finished_early_ends_all_its_beams(target):
    engine = engine_for(target)
    choices = started(engine, PROMPT, 3)
    for _ in range(4):
        engine.step()
    engine.finish(choices[1].id)
    assert engine.is_idle and engine.pool.is_whole
    assert beams(engine, PROMPT, 3) == beams(engine_for(target), PROMPT, 3)


def test_a_failure_is_reported_for_each_beam(target):
    engine = engine_for(target)
    choices = started(engine, PROMPT, 3)
    engine.step()
    launch = engine.target.launch

    def failing(step):
        raise torch.OutOfMemoryError("out of memory")

    engine.target.launch = failing
    outputs = engine.step()
    assert {o.id for o in outputs} == {c.id for c in choices} and engine.is_idle
    assert all(o.finish_reason == "error" and "memory" in o.failure for o in outputs)
    engine.target.launch = launch
    assert len(beams(engine, PROMPT, 3)) == 3


def test_logits_that_are_not_finite_fail_all_beams_once(target, monkeypatch):
    engine = engine_for(target)
    choices = started(engine, PROMPT, 3)
    engine.step()
    collect = engine.target.collect

    def broken(step, launched):
        launched.logits.fill_(float("nan"))
        return collect(step, launched)

    monkeypatch.setattr(engine.target, "collect", broken)
    outputs = engine.step()
    assert sorted(o.id for o in outputs) == sorted(c.id for c in choices) and engine.is_idle
    assert all(o.finish_reason == "error" for o in outputs)
    assert engine.step() == [] and engine.pool.is_whole


def likely(*logprobs):
    return [Likely(token, TokenLogprobs(p, token + 1, [], [])) for token, p in enumerate(logprobs)]


def test_an_end_counts_only_among_the_best_candidates():
    """As in transformers: other ends leave their place to a beam that goes on."""
    selection = BeamSelection(2, BeamSearch(), end_ids=[3], max_tokens=9)
    assert selection.advance([likely(-1.0, -2.0, -3.0, -2.5)]) == [0, 0]
    assert selection.ended == []
    assert selection.advance([likely(-1, -2, -3, -0.5), likely(-1, -2, -3, -4)]) == [0, 0]
    [ended] = selection.ended
    assert ended.score == pytest.approx(-1.5 / 2) and not selection.is_over
