"""The draft model in the engine: what it keeps, what it recomputes, and when it drafts nothing."""

import random

import pytest

from specserve.engine.runner import RowGroup
from specserve.exchange.sampling_params import Sampling
from specserve.speculation.draft_model import split
from specserve_drafters import Draft, DraftRequest, Nodes
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import (
    Case,
    Watch,
    engine_for,
    load_small,
    on_launch,
    plain,
    row_counts,
    runners_of,
)

LONG = 2100
CHAIN = {"width": 1, "min_gain": 0.0, "min_value": 0.0, "max_depth": 63, "ngrams": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


def sampling(max_tokens, temperature=0.0):
    return Sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=5
    )


def first_path(draft):
    """The nodes 1, 2, .. for as long as each is the child of the one before."""
    return [k for k in range(1, len(draft) + 1) if draft.parents[:k] == [*range(k)]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_block_size", [1, 7, None])
def test_the_likeliest_path_of_an_identical_draft_is_always_accepted(
    target, temperature, draft_block_size
):
    engine = engine_for(
        target,
        target,
        "model",
        max_nodes=12,
        draft_block_size=draft_block_size,
        options={"min_gain": 0.0, "min_value": 0.0, "ngrams": False},
    )
    moves, seen, watch = [], [], Watch(engine)
    for runner in runners_of(engine):
        on_launch(runner, lambda step: moves.extend(step.updates.moves.get("draft", ())))
    drafter = engine.speculator.drafter
    drafter.observe = lambda id, draft, accepted: seen.append((first_path(draft), accepted))
    watch.run([Case([*range(1, 30)], sampling(100, temperature))])
    assert len(moves) > 10, "no draft KV ever had to move: this test shows nothing"
    assert all(accepted[: len(path)] == path for path, accepted in seen[:-1])


def test_what_was_accepted_is_not_run_again(target):
    engine = engine_for(target, target, "model", max_nodes=6, options=CHAIN)
    counts = row_counts(engine.draft_model.runner)
    watch = Watch(engine)
    (request,) = watch.run([Case([*range(1, 20)], sampling(60))])
    assert counts[0] == [20]  # the prompt and the first token, to catch up
    # Then a node a level, and at the start of a step the last guess and the bonus token.
    assert {tuple(c) for c in counts[1:]} == {(1,), (2,)}
    assert watch.emitted[request.id]["accepted"] == watch.emitted[request.id]["drafted"]


def test_catching_up_takes_no_more_rows_a_step_than_a_chunk(target):
    engine = engine_for(target, target, "model", max_nodes=2, prefill_chunk=16, max_step_nodes=8)
    counts = row_counts(engine.draft_model.runner)
    cases = [Case([*range(1, 60 + i)], sampling(40)) for i in range(3)]
    Watch(engine).run(cases)
    behind = [sum(n for n in c if n > 2) for c in counts]
    assert max(behind) == 16


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory):
    """A target of eight layers and a draft model of one, for long prompts."""
    root, room = tmp_path_factory.mktemp("pair"), {"max_position_embeddings": LONG}
    return [
        load_small(tiny_checkpoint(root / name, num_hidden_layers=n, **room), max_len=LONG)
        for name, n in (("target", 8), ("draft", 1))
    ]


def launches(engine):
    """(model, rows) of each launch, as they come."""
    seen = []
    for name, runner in zip(("target", "draft"), runners_of(engine), strict=True):
        on_launch(runner, lambda step, name=name: seen.append((name, step.num_rows)))
    return seen


def long_prompt(seed, known):
    return random.Random(seed).choices(range(300), k=known)


@pytest.mark.parametrize("known", [640, 2000])
def test_after_a_prompt_alone_every_step_has_draft_tokens_of_the_draft_model(long_pair, known):
    engine = engine_for(*long_pair, "model", max_len=LONG, max_nodes=4)
    seen, watch = launches(engine), Watch(engine)
    (request,) = watch.run([Case(long_prompt(1, known), sampling(20))])
    assert watch.emitted[request.id]["steps"] > 3
    assert watch.emitted[request.id]["fallbacks"] == 0
    assert max(rows for _, rows in seen) == 512
    first = [name for name, _ in seen].index("draft")
    assert sum(rows for _, rows in seen[:first]) == known, "the first token comes before its work"


@pytest.mark.parametrize("known", [1, 97])
def test_a_request_is_not_drafted_for_before_its_first_token(long_pair, known):
    """Of the second request all but the last token is found, or there is nothing else."""
    engine = engine_for(*long_pair, "model", max_len=LONG, max_nodes=4)
    for _ in range(2):
        request, seen = engine.add(long_prompt(1, known), sampling(9)), launches(engine)
        while request.num_output == 0:
            [output] = engine.step()
        assert {name for name, _ in seen} == {"target"} and not output.is_fallback
        while not engine.is_idle:
            engine.step()
        assert "draft" in {name for name, _ in seen}
    assert request.num_cached == known - 1


def test_a_stream_waits_for_few_rows_of_prompts_and_of_their_drafts(long_pair):
    """A row of this target costs what eight of the draft model do."""
    engine = engine_for(*long_pair, "model", max_len=LONG, max_nodes=4, prefill_chunk=64)
    stream, seen = engine.add([7] * 9, sampling(100)), launches(engine)
    for _ in range(3):
        engine.step()
    late = [engine.add(long_prompt(i, 900), sampling(30)) for i in range(2)]
    while stream.id in engine.requests and not all(r.num_output > 20 for r in late):
        begin = len(seen)
        is_computing = any(r.num_output == 0 for r in late)
        assert stream.id in [output.id for output in engine.step()]
        (_, rows), *drafts = sorted(seen[begin:], key=lambda launch: launch[0] == "draft")
        assert rows <= 64 + 3 * (1 + 4)
        limit = 64 if is_computing else 8 * 64
        assert sum(n for _, n in drafts if n > 12) <= limit + 12
    assert all(r.num_output > 20 for r in late)


def test_the_shortest_gap_is_closed_first(target):
    engine = engine_for(target, target, "model", max_nodes=2, prefill_chunk=64)
    counts = row_counts(engine.draft_model.runner)
    Watch(engine).run([Case([*range(1, 50)], sampling(9)), Case([*range(1, 10)], sampling(9))])
    first = next(c for c in counts if max(c) > 2)
    assert first[0] <= 12


def test_beyond_its_own_context_a_draft_model_is_silent(target, tmp_path):
    """vllm#57941: a crash, or the draft's limit for the whole server."""
    short = load_small(tiny_checkpoint(tmp_path, seed=3, max_position_embeddings=48))
    engine = engine_for(target, short, "model", max_nodes=8)
    cases = [Case([*range(1, 30)], sampling(60)), Case([*range(1, 100)], sampling(20))]
    longest = []
    engine.speculator.drafter.observe = lambda id, draft, accepted: longest.append(
        max(r.draft_table.num_computed for r in engine.scheduler.running)
    )
    got = Watch(engine).run(cases)
    assert [r.token_ids.tolist() for r in got] == plain(target, cases)
    assert 40 < max(longest) <= 48
    assert engine.stats.drafter_errors == 0


def test_a_draft_model_asked_for_nonsense_refuses(target):
    engine = engine_for(target, target, "model")
    request = engine.add([1, 2, 3], sampling(4))
    engine.step()
    lent, item = engine.draft_model, DraftRequest(request.id, request.token_ids, 4, 0.0, 0)
    with pytest.raises(KeyError):
        lent.extend([item])  # outside a step
    lent.lend([request])
    with pytest.raises(ValueError, match="twice"):
        lent.extend([item, item])
    assert request.draft_table.num_computed == 0
    # An item with more tokens than the request has is refused.
    assert lent.extend([DraftRequest(request.id, request.token_ids * 500, 4, 0.0, 0)])[0] == [0]
    assert lent.expand([Nodes(request.id, [1] * 64, [0] * 64)])[0] == []
    with pytest.raises(IndexError):
        lent.expand([Nodes(request.id, [10**6], [0])])


def test_no_launch_of_a_draft_model_has_more_rows_than_a_step(target):
    limits = {"max_batched_tokens": 8, "max_running": 4}
    engine = engine_for(target, target, "model", max_nodes=2, **limits)
    seen = launches(engine)
    Watch(engine).run([Case(long_prompt(i, 60), sampling(20)) for i in range(4)])
    assert max(rows for name, rows in seen if name == "draft") == 8
    requests = [engine.add([i, 2, 3], sampling(4)) for i in range(2)]
    engine.step()
    engine.draft_model.lend(requests)
    engine.draft_model.extend([DraftRequest(r.id, r.token_ids, 4, 0.0, 0) for r in requests])
    for n, fit in ((9, []), (5, [0]), (4, [0, 1])):
        nodes = [Nodes(r.id, [1] * n, [0] * n) for r in requests]
        assert engine.draft_model.expand(nodes)[0] == fit


def group(start, known, num_read=1):
    return RowGroup(None, list(range(start, known)), start, num_read)


SPLITS = {  # tokens of each group, the rows of a launch -> those of each launch, by group
    "few": ([2, 1, 5], 8, [[2, 1, 5]]),
    "the largest goes ahead": ([2, 1, 7], 8, [[2], [2, 1, 5]]),
    "but for its last row": ([2, 1, 9, 30], 8, [[8], [8], [8], [5], [5], [2, 1, 4, 1]]),
    "a usual one as well": ([2, 2, 2], 4, [[1], [1], [2, 1, 1]]),
}


@pytest.mark.parametrize(("sizes", "most", "want"), SPLITS.values(), ids=SPLITS)
def test_rows_that_are_read_are_all_in_the_last_launch(sizes, most, want):
    groups = [group(10 * i, 10 * i + size) for i, size in enumerate(sizes)]
    launched = split(groups, most)
    assert [[len(g.token_ids) for g in launch] for launch in launched] == want
    *early, last = launched
    assert [g.num_read for g in last] == [1] * len(groups)
    assert not any(g.num_read for launch in early for g in launch)
    for g in groups:
        parts = [p for launch in launched for p in launch if p.token_ids[0] in g.token_ids]
        assert [t for p in parts for t in p.token_ids] == g.token_ids
        assert [p.start for p in parts] == [p.token_ids[0] for p in parts]


def test_rows_of_which_none_is_read_may_all_go_ahead():
    launched = split([group(0, 2), group(10, 20, num_read=0)], 4)
    assert [[g.token_ids for g in launch] for launch in launched] == [
        [[10, 11, 12, 13]],
        [[14, 15, 16, 17]],
        [[0, 1], [18, 19]],
    ]


@pytest.mark.parametrize("failing", [1, 2], ids=["extend", "expand"])
def test_a_drafter_that_goes_on_after_a_failed_launch_is_refused(target, failing):
    """The slots of its further nodes would not be those that were written."""

    class Stubborn:
        needs_executor = True

        def __init__(self, executor):
            self.executor, self.answers = executor, []

        def propose(self, items):
            nodes = [Nodes(item.id, [7], [0]) for item in items]
            self.answers = [self.answer(self.executor.extend, items)]
            self.answers += [self.answer(self.executor.expand, nodes) for _ in range(2)]
            return [Draft() for _ in items]

        def answer(self, ask, asked):
            try:
                return ask(asked) and "done"
            except (MemoryError, KeyError) as e:
                return type(e).__name__

    engine = engine_for(target, target, "model", max_nodes=4)
    engine.speculator.source.drafter = Stubborn(engine.draft_model)
    request = engine.add([*range(1, 20)], sampling(12))
    engine.step()
    runner, launches = engine.draft_model.runner, []
    compute = runner.compute

    def fail_once(step, residual):
        launches.append(step)
        if len(launches) == failing:
            raise MemoryError
        return compute(step, residual)

    runner.compute = fail_once
    engine.step()
    answers = engine.speculator.drafter.answers
    assert answers == ["done"] * (failing - 1) + ["MemoryError"] + ["KeyError"] * (3 - failing)
    while not engine.is_idle:
        engine.step()
        engine.check()
    assert request.token_ids.tolist() == plain(target, [Case([*range(1, 20)], sampling(12))])[0]
