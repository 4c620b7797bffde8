"""Logprobs of drawn tokens and of prompts: the model's own, and the same bits whatever happens."""

from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from specserve.exchange.sampling_params import Sampling
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    ask_always,
    bush,
    draft_of,
    engine_for,
    hedge,
    in_chunks,
    load_small,
    plain,
)
from tests.engine.test_promise import truth_by_id

PROMPT = [5, 9, 9, 7, 120, 9, 9, 7, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "target", seed=1, tie_word_embeddings=False
    )


@pytest.fixture(scope="module")
def target(folder):
    return load_small(folder)


def asks(seed=5, **given):
    how = {"max_tokens": 24, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Sampling(**(how | {"seed": seed} | given))


def run(engine, cases, **how):
    """(token_ids, logprobs, prompt_logprobs) of every choice, as they were told."""
    told, step = defaultdict(lambda: ([], [])), engine.step

    def listening():
        outputs = step()
        for output in outputs:
            tokens, prompts = told[output.id]
            tokens.extend(output.logprobs)
            prompts.extend(output.prompt_logprobs)
        return outputs

    engine.step = listening
    requests = Watch(engine).run(cases, **how)
    return [(r.token_ids.tolist(), *told[r.id]) for r in requests]


def alone(target, cases, **settings):
    """Each case by an engine of its own, without guesses."""
    settings = {"max_nodes": 0, "prefix_cache": False} | settings
    each = [run(engine_for(target, **settings), [Case(c.prompt, c.sampling, n=c.n)]) for c in cases]
    return [choice for choices in each for choice in choices]


def cases():
    """Some ask for nothing; parameters change what is drawn, not what is told."""
    return [
        Case(PROMPT, asks(logprobs=0)),
        Case(PROMPT[2:] * 3, asks(logprobs=3, temperature=1.0, top_p=0.9), arrives=1),
        Case(PROMPT[1:], asks(), arrives=2),
        Case(PROMPT[:4] * 5, asks(logprobs=5, prompt_logprobs=2, temperature=0.8), n=3, arrives=3),
        Case(PROMPT * 4, asks(prompt_logprobs=1, max_tokens=4), arrives=5),
        Case(PROMPT * 2, asks(logprobs=20, presence_penalty=1.0, repetition_penalty=1.2)),
        Case(PROMPT[:1], asks(prompt_logprobs=0, logprobs=1, bad_words=((9,),)), arrives=6),
    ]


def by_transformers(folder, token_ids):
    """Log-probabilities after each token, [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].double().log_softmax(1)


def check(told, law, tokens):
    """What is told of tokens, by the rows of the law from the one before the first token on."""
    assert len(told) == len(tokens)
    for said, row, token in zip(told, law, tokens, strict=False):
        assert said.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert said.rank == 1 + int((row > row[token]).sum())
        assert said.ids == row.sort(descending=True, stable=True).indices[: len(said.ids)].tolist()
        assert said.top == pytest.approx(row[said.ids].tolist(), abs=1e-4)


def test_they_are_those_of_transformers(target, folder):
    at = iter(alone(target, cases()))
    for case in cases():
        for choice in range(case.n):
            token_ids, drawn, prompts = next(at)
            law, begin = by_transformers(folder, token_ids), len(case.prompt)
            asked = case.sampling
            if asked.logprobs is not None:
                check(drawn, law[begin - 1 :], token_ids[begin:])
                assert {len(said.ids) for said in drawn} == {asked.logprobs}
            else:
                assert not drawn
            if asked.prompt_logprobs is not None and choice == 0:
                check(prompts, law, token_ids[1:begin])
                assert {len(said.ids) for said in prompts} <= {asked.prompt_logprobs}
            else:
                assert not prompts
    assert next(at, None) is None


@pytest.mark.parametrize("head_rows", [64, 3])
@pytest.mark.parametrize("drafter", ["none", "model", "auto", bush, hedge])
def test_they_are_the_same_bits_with_draft_tokens_and_in_batches(
    target, drafter, head_rows, monkeypatch
):
    want = alone(target, cases())
    monkeypatch.setattr("specserve.engine.runner.HEAD_ROWS", head_rows)
    if not isinstance(drafter, str):
        truth = truth_by_id(cases(), plain(target, cases()))
        drafter = Scripted(drafter, truth)
    draft = draft_of(target, drafter) if isinstance(drafter, str) else None
    engine = engine_for(target, draft, drafter, max_nodes=8, **in_chunks(24))
    if drafter == "auto":
        ask_always(engine)
    assert run(engine, cases()) == want
    assert drafter == "none" or engine.stats.num_accepted


def test_a_scored_prompt_is_computed_though_it_is_cached(target):
    """Also in blocks that another request computes meanwhile, and again once it was preempted."""
    prompt = PROMPT * 6
    filling = Case(prompt, asks(max_tokens=2))
    scored = Case(prompt, asks(prompt_logprobs=1, logprobs=1, max_tokens=6), arrives=1)
    [want] = alone(target, [scored])
    engine = engine_for(target, max_nodes=0, block_size=4, **in_chunks(8, max_running=4))
    [_, beside] = run(engine, [filling, scored])
    assert beside == want
    engine = engine_for(target, max_nodes=0, block_size=4, **in_chunks(8, max_running=4))
    Watch(engine).run([filling], is_kept=True)
    events = [(4, "preempt"), (14, "preempt")]
    assert run(engine, [scored], events=events) == [want]
    assert engine.scheduler.num_preempted == 2
    assert engine.stats.num_cached == 0


def test_a_scored_prompt_waits_for_no_block_of_another(target):
    engine = engine_for(target, max_nodes=0, block_size=4, **in_chunks(8, max_running=4))
    [_, scored] = [engine.add(PROMPT * 6, asks(prompt_logprobs=k)) for k in (None, 1)]
    engine.step()
    assert scored in engine.scheduler.running


def test_steps_that_score_prompts_do_not_count_as_slow_ones(target, monkeypatch):
    """The table of costs is that of other requests' steps, too."""
    engine = engine_for(target, max_nodes=0)
    clock, seconds, score = Clock(monkeypatch), [], engine.target.score
    monkeypatch.setattr(engine.scheduler, "timed", lambda rows, took: seconds.append(took))

    def slow(asked):
        clock.now += 5.0
        return score(asked)

    monkeypatch.setattr(engine.target, "score", slow)
    before = clock.now
    run(engine, [Case(PROMPT, asks(prompt_logprobs=0, max_tokens=1))])
    assert clock.now - before > 5 and seconds and max(seconds) < 1


def test_a_long_prompts_logprobs_come_step_by_step(target):
    """None of them stays in the engine, and no message has more than a step's rows."""
    engine = engine_for(target, max_nodes=0, **in_chunks(24))
    request = engine.add(PROMPT * 20, asks(prompt_logprobs=2, max_tokens=2))
    outputs = []
    while not engine.is_idle:
        outputs += engine.step()
    parts = [len(output.prompt_logprobs) for output in outputs]
    assert max(parts) == 24 and sum(parts) == request.num_prompt - 1 == request.num_scored
    assert [o.is_of_prompt for o in outputs] == [True] * (len(outputs) - 2) + [False] * 2


def test_a_step_costs_its_commit_but_not_its_drafting(target, monkeypatch):
    clock, seconds = Clock(monkeypatch), []
    engine = engine_for(target, max_nodes=0)
    monkeypatch.setattr(engine.scheduler, "timed", lambda rows, took: seconds.append(took))
    commit, draft = engine.commit, engine.draft

    def slow(run, takes):
        def ran(*args):
            clock.now += takes
            return run(*args)

        return ran

    monkeypatch.setattr(engine, "commit", slow(commit, 3.0))
    monkeypatch.setattr(engine, "draft", slow(draft, 50.0))
    run(engine, [Case(PROMPT, asks(max_tokens=3))])
    assert len(seconds) == 3 and all(3 < took < 4 for took in seconds)


def test_greedy_tokens_of_a_tree_take_one_call(target, monkeypatch):
    case = Case(PROMPT, asks(max_tokens=12, temperature=0.0))
    drafter = Scripted(bush, truth_by_id([case], plain(target, [case])))
    engine, calls = engine_for(target, None, drafter, max_nodes=8), []
    ops, sample = engine.target.ops, engine.target.ops.sample
    monkeypatch.setattr(ops, "sample", lambda *given: (calls.append(1), sample(*given))[1])
    run(engine, [case])
    assert engine.stats.num_accepted > 3 and len(calls) == engine.stats.num_steps
