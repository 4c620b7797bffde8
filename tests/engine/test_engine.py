"""What test_promise.py cannot see: right guesses save forwards, and no request stalls another."""

import logging
from types import SimpleNamespace

import pytest
import torch

from specserve.engine import engine as step_loop
from specserve.errors import RequestError
from specserve.exchange.sampling_params import Sampling
from specserve_bench.local import reset_learned
from specserve_drafters import Draft
from specserve_drafters.tenants import DEFAULT_SCOPE
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    Case,
    Scripted,
    Watch,
    bush,
    engine_for,
    in_chunks,
    load_small,
    nonsense,
    plain,
    raising,
    right,
    too_long,
)

PROMPT = [5, 17, 42, 5, 17, 99, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


def greedy(max_tokens, **kw):
    return Sampling(
        max_tokens=max_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **kw
    )


def scripted(target, script, max_tokens=21, **limits):
    case = Case(PROMPT, greedy(max_tokens))
    truth = dict(enumerate(plain(target, [case])))
    return case, engine_for(target, None, Scripted(script, truth), **limits)


@pytest.mark.parametrize(("script", "steps"), [(right, 5), (bush, 9), (raising, 21)])
def test_right_draft_tokens_save_forwards(target, script, steps):
    case, engine = scripted(target, script, max_nodes=4)
    Watch(engine).run([case])
    assert engine.stats.num_steps == steps


def test_what_steps_have_shown_of_costs_and_draft_tokens_can_be_forgotten(target):
    engine, new = engine_for(target, drafter="auto"), engine_for(target, drafter="auto")
    Watch(engine).run([Case(PROMPT * 4, greedy(40))])
    speculator = engine.speculator
    learned = speculator.acceptance.find(DEFAULT_SCOPE)
    unknown = new.speculator.planner.costs.table()
    assert speculator.planner.costs.table() != unknown
    reset_learned(engine)
    assert speculator.planner.costs.table() == unknown
    assert learned.counts() and speculator.acceptance.find(DEFAULT_SCOPE) is None


def test_tokens_after_more_rows_than_the_head_takes_at_once(target, monkeypatch):
    """They are drawn slice by slice, from logits that the next slice overwrites."""
    hot = Sampling(max_tokens=9, temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=3)
    cases = [Case(PROMPT[i:], s) for i in range(4) for s in (greedy(12), hot)]
    want = plain(target, cases)
    monkeypatch.setattr("specserve.engine.runner.HEAD_ROWS", 3)
    got = Watch(engine_for(target, target, "model", max_nodes=4)).run(cases)
    assert [r.token_ids.tolist() for r in got] == want


def test_statistics_count_what_was_drafted_and_what_was_accepted(target):
    case, engine = scripted(target, bush, max_nodes=4)
    watch = Watch(engine)
    (request,) = watch.run([case])
    counts = {"tokens": 21, "steps": 8, "step_tokens": 20, "drafted": 25, "accepted": 12}
    assert watch.emitted == {request.id: counts | {"fallbacks": 0}}
    assert (engine.stats.num_drafted, engine.stats.num_accepted) == (25, 12)


@pytest.mark.parametrize("script", [raising, nonsense])
def test_a_failing_drafter_costs_its_drafts_and_a_log_line(target, script, caplog):
    case, engine = scripted(target, script)
    with caplog.at_level(logging.ERROR, logger="specserve"):
        (request,) = Watch(engine).run([case])
    assert request.num_output == 21
    assert len(caplog.records) == engine.stats.drafter_errors.bit_length() > 2
    assert engine.stats.sources["scripted"].errors == engine.stats.drafter_errors
    assert "drafter scripted failed" in caplog.messages[0]


@pytest.mark.parametrize("where", ["propose", "observe", "forget"])
@pytest.mark.parametrize("what", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nothing_that_a_drafter_raises_loses_a_token(target, where, what):
    def fail(*args):
        raise what

    cases = [Case(PROMPT, greedy(9)), Case(PROMPT[2:], greedy(12))]
    want = plain(target, cases)
    engine = engine_for(target, None, Scripted(right, dict(enumerate(want))))
    setattr(engine.speculator.drafter, where, fail)
    watch = Watch(engine)
    assert [r.token_ids.tolist() for r in watch.run(cases)] == want
    assert {id: total["tokens"] for id, total in watch.emitted.items()} == {0: 9, 1: 12}


def test_a_drafter_that_cannot_be_reported_things_costs_no_text(target):
    case, engine = scripted(target, right)
    drafter = engine.speculator.drafter
    drafter.observe = drafter.forget = raising  # takes no such arguments
    (request,) = Watch(engine).run([case])
    assert request.num_output == 21
    assert engine.stats.drafter_errors > 0


def test_a_drafter_that_spoils_its_items_spoils_no_request(target):
    class Vandal(Scripted):
        def propose(self, items):
            for item in items:
                item.token_ids[:] = item.token_ids[:1]
            return [right(self.truth[i.id], i.limit) for i in items]

    case = Case(PROMPT, greedy(12))
    want = plain(target, [case])
    engine = engine_for(target, None, Vandal(None, dict(enumerate(want))))
    assert [r.token_ids.tolist() for r in Watch(engine).run([case])] == want


@pytest.mark.parametrize("expanded", [[3, 2, 1], [70, 71], [-3, -3], [0, 1, 2], [2, 2, 2], [10**9]])
def test_nonsense_about_the_draft_model_moves_nothing_out_of_place(target, expanded):
    class Confused(Scripted):
        needs_executor = True

        def propose(self, items):
            self.executor.extend(items)
            chains = super().propose(items)
            return [Draft(d.tokens, d.parents, expanded) for d in chains]

    case = Case(PROMPT, greedy(30))
    want = plain(target, [case])
    engine = engine_for(target, target, "model")
    engine.speculator.source.drafter = Confused(right, dict(enumerate(want)))
    engine.speculator.drafter.executor = engine.draft_model
    assert [r.token_ids.tolist() for r in Watch(engine).run([case])] == want
    assert engine.stats.drafter_errors == 0


def test_a_tree_is_no_larger_than_what_may_still_be_said(target):
    case, engine = scripted(target, too_long, max_tokens=6, max_nodes=63, max_step_nodes=63)
    watch = Watch(engine)
    (request,) = watch.run([case])
    # The chunk brings the first token; four guesses and the bonus token are the rest.
    assert (request.num_output, watch.emitted[request.id]["drafted"]) == (6, 4)


def test_a_stop_inside_an_accepted_path_ends_the_text_there(target):
    case, _ = scripted(target, right)
    (said,) = plain(target, [case])
    stop = said[len(PROMPT) + 6]
    first = said.index(stop, len(PROMPT))
    engine = engine_for(target, None, Scripted(right, {0: said}), max_nodes=16)
    (request,) = Watch(engine).run([Case(PROMPT, greedy(21, stop_ids=frozenset({stop})))])
    assert request.token_ids.tolist() == said[: first + 1]


def test_a_long_prompt_stalls_no_stream(target):
    engine = engine_for(target, None, "ngram", prefill_chunk=16)
    stream = engine.add(PROMPT, greedy(60))
    engine.step()
    late = engine.add([*range(1, 200)], greedy(1))
    while late.id in engine.requests:
        assert stream.id in [e.id for e in engine.step()]


def test_a_request_given_up_at_any_moment_leaves_no_block(target):
    for moment in range(8):
        engine = engine_for(target, target, "model", **in_chunks(16))
        request = engine.add([*range(1, 60)], greedy(30))
        for _ in range(moment):
            engine.step()
        engine.finish(request.id)
        engine.check()
        assert engine.is_idle and engine.pool.num_available == engine.pool.num_blocks


def fail_once(scope, name, error):
    """Have the next call of a method raise, and those after it do what they always did."""
    method = getattr(scope, name)

    def failing(*args, **kwargs):
        setattr(scope, name, method)
        raise error

    setattr(scope, name, failing)


SHORTAGES = {
    "the device's": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "torch's on the host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    "Python's": MemoryError(),
}
PLACES = {  # of a step -> whose method, its name
    "build": lambda engine: (engine, "build"),
    "launch": lambda engine: (engine.target, "launch"),
    "collect": lambda engine: (engine.target, "collect"),
    "verify": lambda engine: (step_loop, "accepted_paths"),
}


@pytest.mark.parametrize("shortage", SHORTAGES.values(), ids=SHORTAGES)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_shortage_of_memory_anywhere_in_a_step_ends_its_own_requests_only(
    target, place, shortage, caplog
):
    cases = [Case([*range(i, i + 20)], greedy(9)) for i in range(1, 4)]
    want = plain(target, cases)
    engine = engine_for(target, None, Scripted(bush, dict(enumerate(want))), max_running=2)
    requests = [engine.add(c.prompt, c.sampling) for c in cases]
    engine.step()
    engine.step()
    fail_once(*place(engine), shortage)
    failed = engine.step()
    assert {output.id for output in failed} == {0, 1}
    assert all(o.finish_reason == "error" and "ran out of memory" in o.failure for o in failed)
    assert str(shortage) in caplog.messages[-1]
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert requests[2].token_ids.tolist() == want[2]


def test_a_shortage_of_memory_while_kv_is_moved_ends_all_and_forgets_what_is_cached(target):
    """The arena's content is unknown then: no request may read it."""
    cases = [Case([*range(i, i + 40)], greedy(30)) for i in range(1, 4)]
    want = plain(target, cases)
    engine = engine_for(target, None, Scripted(bush, dict(enumerate(want))), max_running=2)
    for case in cases:
        engine.add(case.prompt, case.sampling)
    while not engine.pool.updates.moves:
        engine.step()
    ops = engine.target.ops
    engine.target.ops = SimpleNamespace(lock=ops.lock, move_kv=lambda *args: raise_(MemoryError()))
    assert {output.id for output in engine.step()} == {0, 1, 2}
    assert engine.is_idle and engine.pool.is_whole and not engine.pool.found
    engine.target.ops = ops
    again = [engine.add(c.prompt, c.sampling) for c in cases]
    engine.speculator.drafter.truth = {r.id: tokens for r, tokens in zip(again, want, strict=True)}
    while not engine.is_idle:
        engine.step()
    assert [r.token_ids.tolist() for r in again] == want


def raise_(error):
    raise error


def test_what_fails_in_a_step_and_is_no_shortage_ends_the_engine(target):
    engine = engine_for(target)
    engine.add(PROMPT, greedy(3))
    fail_once(engine.target, "launch", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()


@pytest.mark.parametrize("ids", [[3, 320], [-1], [2**31], [2**70], []], ids=str)
def test_ids_that_the_model_does_not_know_never_get_in_whoever_made_them(target, ids):
    engine = engine_for(target)
    with pytest.raises(RequestError, match=r"\[0, 320\)|no tokens"):
        engine.add(ids, greedy(3))
    assert engine.is_idle and engine.step() == []
