"""A step as plain arrays, against a builder that goes row by row, and what a runner makes of it."""

import random
from array import array
from itertools import pairwise

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from specserve.engine.runner import (
    KVLost,
    RowGroup,
    build_step_input,
    greedy_draws,
    is_plain,
    step_input_of,
)
from specserve.exchange.messages import Caller
from specserve.exchange.sampling_params import Sampling
from specserve.memory.blocks import BlockPool, BlockTable, PendingUpdates
from specserve.models.decoder import Decoder
from specserve.scheduling import Request, ScheduledRequest
from specserve_drafters import Draft
from specserve_kernels import StepColumns, tensor_of
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small, logits_of


def random_tree(rng, n):
    masks = [1]
    for k in range(1, n):
        masks.append(masks[rng.randrange(k)] | 1 << k)
    return masks


def random_groups(seed):
    """Chunks, decode rows and trees over tables whose blocks lie anywhere."""
    rng = random.Random(seed)
    block_size, pool = rng.choice([1, 3, 16]), BlockPool(3000)
    rng.shuffle(pool.free)
    groups = []
    for kind in rng.choices(["chunk", "decode", "tree"], k=rng.randint(1, 9)):
        table, start = BlockTable(pool, block_size), rng.choice([0, 1, 15, 16, 200, 300])
        n = {"chunk": rng.randint(1, 40), "decode": 1, "tree": rng.randint(2, 64)}[kind]
        assert table.try_reserve(start + n + rng.randrange(20))
        tokens, read = [rng.randrange(1 << 17) for _ in range(n)], rng.randint(0, n)
        if kind == "tree":
            groups.append(RowGroup(table, tokens, start, n, start, random_tree(rng, n)))
        else:
            groups.append(RowGroup(table, tokens, start, read))
    return groups


def row_by_row(groups):
    """The same step, built row by row."""
    out = {name: [] for name in StepColumns._fields}
    out["qo_indptr"], out["indptr"] = [0], [0]
    for g in groups:
        size, end = g.table.block_size, g.start + len(g.token_ids)
        out["indices"] += g.table.blocks[: -(-end // size)]
        out["indptr"].append(len(out["indices"]))
        out["last_page_len"].append((end - 1) % size + 1)
        for i, token in enumerate(g.token_ids):
            slot, mask = g.start + i, g.masks[i] if g.masks else 0
            out["token_ids"].append(token)
            out["slots"].append(g.table.blocks[slot // size] * size + slot % size)
            out["mask"].append(mask - (1 << 64) * (mask >> 63))
            out["prefix"].append(g.prefix if g.masks else slot + 1)
            out["positions"].append(g.prefix + mask.bit_count() - 1 if g.masks else slot)
            if i >= len(g.token_ids) - g.num_read:
                out["read"].append(len(out["token_ids"]) - 1)
        out["qo_indptr"].append(len(out["token_ids"]))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_listed_by_the_slot_of_their_request_s_adapter(seed):
    rng = random.Random(seed)
    groups = [g._replace(slot=rng.randrange(-1, 3)) for g in random_groups(seed)]
    told = build_step_input(groups, PendingUpdates(), num_slots=3).rows().adapters
    slots = [g.slot for g in groups for _ in g.token_ids]
    want = [[row for row, own in enumerate(slots) if own == slot] for slot in range(3)]
    if max(slots) < 0:
        assert told is None
        return
    begins = told.begins.tolist()
    assert [told.order[a:b].tolist() for a, b in pairwise(begins)] == want
    places = [told.order.tolist().index(i) if slot >= 0 else -1 for i, slot in enumerate(slots)]
    assert told.places.tolist() == places


@pytest.mark.parametrize("seed", range(40))
def test_a_step_has_the_rows_of_its_requests(seed):
    groups = random_groups(seed)
    step = build_step_input(groups, PendingUpdates())
    for name, want in row_by_row(groups).items():
        got = tensor_of(getattr(step.columns, name))
        assert got.tolist() == want, name
        is_long = name in ("token_ids", "slots", "mask", "read")
        assert got.dtype == (torch.int64 if is_long else torch.int32)


def test_a_step_takes_the_pending_updates_once_and_moves_come_in_order():
    pending, groups = PendingUpdates(), random_groups(0)
    pending.move("target", [(9, 7), (8, 9)])
    pending.move("draft", [(3, 2)])
    pending.copy(5, 6)
    first, second = (build_step_input(groups, pending).updates for _ in range(2))
    assert first.moves == {
        "target": [(9, 7), (8, 9)],
        "draft": [(3, 2)],
    }
    assert first.copies == [(5, 6)] and first and not second


def test_a_step_that_cannot_be_built_leaves_the_updates_pending():
    pending = PendingUpdates()
    pending.copy(1, 2)
    [group] = random_groups(3)[:1]
    with pytest.raises(TypeError):
        build_step_input([group._replace(token_ids=["no id"] * len(group.token_ids))], pending)
    assert pending.take().copies == [(1, 2)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


@torch.inference_mode()
def test_a_launch_moves_then_copies_then_computes(target):
    """The last row reads a token that was moved into a block, of which it has a copy."""
    engine = engine_for(target)
    pool, size = engine.pool, engine.target.kv.block_size
    plain, spread, copy = (BlockTable(pool, size) for _ in range(3))
    assert all(table.try_reserve(size) for table in (plain, spread, copy))
    logits_of(engine.target, [RowGroup(plain, [5, 6], 0, 0), RowGroup(spread, [5], 0, 0)])
    want = logits_of(engine.target, [RowGroup(plain, [7], 2, 1)])
    # Token 6 at position 1, but in slot 2: the mask leaves slot 1 out.
    logits_of(engine.target, [RowGroup(spread, [9, 6], 1, 0, 1, [0b1, 0b10])])
    pool.updates.move("target", [(spread.slot(2), spread.slot(1))])
    pool.updates.copy(spread.blocks[0], copy.blocks[0])
    step = build_step_input([RowGroup(copy, [7], 2, 1)], pool.updates)
    assert torch.equal(engine.target.launch(step).logits, want)


def test_updates_that_fail_are_distinguished_from_a_step_that_fails(target, monkeypatch):
    engine = engine_for(target)
    table = BlockTable(engine.pool, 16)
    table.try_reserve(1)
    engine.pool.updates.move("target", [(1, 0)])
    monkeypatch.setattr(engine.target.ops, "move_kv", lambda *args: 1 / 0)
    with pytest.raises(KVLost, match="division by zero"):
        engine.target.launch(build_step_input([RowGroup(table, [3], 0, 1)], engine.pool.updates))


def test_a_step_without_rows_to_read_has_no_logits(target):
    engine = engine_for(target)
    table = BlockTable(engine.pool, 16)
    table.try_reserve(4)
    step = build_step_input([RowGroup(table, [3, 4], 0, 0)], PendingUpdates(), greedy_draws(0))
    with torch.inference_mode():
        assert engine.target.launch(step).logits.shape == (0, 0)


class Handle:
    """Stands for a tensor whose content may not be read."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows


class HandleOps:
    """Ops that give handles for handles, and note what was called."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        def op(first, *rest):
            self.called.append(name)
            rows = rest[0] if name in ("embed", "take_rows") else first
            return Handle(len(rows))

        return op


def test_a_forward_calls_nothing_but_ops(target):
    ops, layers = HandleOps(), len(target.weights.layers)
    decoder = Decoder(target.config, ops, target.rotary, target.weights)
    kv = engine_for(target).target.kv
    residual, _ = decoder.forward(decoder.embed(Handle(5)), kv, plan=None)
    assert len(decoder.logits(residual, Handle(2))) == 2
    assert ops.called[0] == "embed" and ops.called.count("attention") == layers
    assert ops.called[-4:] == ["linear_add", "take_rows", "rms_norm", "lm_head"]


GREEDY = Sampling(max_tokens=9, temperature=0, top_k=0, top_p=1, min_p=0, seed=0)


def scheduled_roots(seed, samplings):
    """A root for each of these parameters, over tables whose blocks lie anywhere."""
    rng, pool = random.Random(seed), BlockPool(1000)
    rng.shuffle(pool.free)
    for id, sampling in enumerate(samplings):
        table, known = BlockTable(pool, rng.choice([16, 64])), rng.randint(1, 300)
        assert table.try_reserve(known + rng.randrange(100))
        table.num_computed = known - 1
        token_ids = array("i", (rng.randrange(1 << 17) for _ in range(known)))
        request = Request(id, token_ids, sampling, table, BlockTable(pool, 16), Caller(id))
        yield ScheduledRequest(request, known - 1, known)


@pytest.mark.parametrize("temperatures", [[0.0], [0.0] * 9, [0.0, 0.7, 1.0]])
def test_a_step_of_roots_only_is_the_step_of_their_groups(temperatures):
    samplings = [replace(GREEDY, temperature=t, seed=i) for i, t in enumerate(temperatures)]
    roots = [*scheduled_roots(len(temperatures), samplings)]
    requests = [root.request for root in roots]
    assert is_plain(roots, requests, 0) and not is_plain(roots, requests, num_slots=1)
    plain = step_input_of(roots, roots, PendingUpdates(), 1 << 17, 0)
    for request in requests:
        request.is_plain = False
    grouped = step_input_of(roots, roots, PendingUpdates(), 1 << 17, 0)
    assert plain.columns == grouped.columns
    for ours, theirs in zip(plain.draws, grouped.draws, strict=True):
        assert np.array_equal(ours, theirs), (ours, theirs)


CHANGES = {"logit_bias": ((3, 1.0),), "logprobs": 2, "prompt_logprobs": 0, "min_tokens": 4}


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_step_is_not_plain_if_a_request_changes_logits_or_asks_for_logprobs(change):
    changed = replace(GREEDY, **{change: CHANGES[change]})
    roots = [*scheduled_roots(0, [GREEDY, changed])]
    assert is_plain(roots[:1], [roots[0].request], 0)
    assert not is_plain(roots, [root.request for root in roots], 0)


def test_a_step_with_a_prompt_or_draft_tokens_is_not_plain():
    first, second = scheduled_roots(0, [GREEDY, GREEDY])
    requests = [first.request, second.request]
    assert not is_plain([first, second], requests[:1], 0), "a prompt samples nothing"
    second.draft = Draft.chain([5])
    assert not is_plain([first, second], requests, 0)
    second.draft, second.start = Draft(), second.start - 1
    assert not is_plain([first, second], requests, 0), "the end of a prompt has several rows"
