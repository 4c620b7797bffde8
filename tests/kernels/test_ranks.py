"""What ranks exchange, as threads of this process: over sockets, and through shared memory."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, combinations
from socket import socketpair
from types import SimpleNamespace

import pytest
import torch

from specserve_kernels import Gathering, RankLost, Ranks, cpu
from specserve_kernels.ranks import shared_memory
from tests.kernels.builds import BUILDS, CPU_BUILDS, ON_GPU, placed
from tests.kernels.test_experts import Mixture

BEGINS = 0, 5, 5, 16  # rank 1 has no columns
SLOT = 256  # bytes, so that a tensor takes several pieces


def run_ranks(run, shares_memory=False):
    """What `run(ranks)` returns in each of three threads, or the error that it raises. Connections
    close after all have returned.
    """
    pairs = {pair: socketpair() for pair in combinations(range(3), 2)}
    memory = shared_memory(SLOT) if shares_memory else None

    def rank(number):
        torch.set_num_threads(1)
        sockets = {
            pair[1 - pair.index(number)]: ends[pair.index(number)]
            for pair, ends in pairs.items()
            if number in pair
        }
        try:
            return run(Ranks(number, 3, sockets, memory))
        except RankLost as e:
            return e

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(rank, range(3)))
    for sock in chain(*pairs.values()):
        sock.close()
    if memory is not None:
        os.close(memory)
    return found


@BUILDS
@pytest.mark.parametrize("shares_memory", [False, True])
def test_columns_are_gathered_in_the_order_of_ranks(ops, shares_memory):
    whole = torch.arange(70 * 16.0).view(70, 16).bfloat16()

    def run(ranks):
        gathering, found = Gathering(ranks, BEGINS), []
        for rows in (1, 70, 3):  # slots alternate
            own = ops.take_columns(whole[:rows].clone(), *gathering.own)
            found.append(ops.all_gather(own, gathering).clone())
            found.append(ops.all_gather(own, gathering, 2).clone())
        return found

    each = run_ranks(run, shares_memory)
    for found in each:
        assert [torch.equal(x, whole[: len(x)]) for x in found[::2]] == [True] * 3
    assert [torch.equal(x, whole[: len(x)]) for x in each[2][1::2]] == [True] * 3


@BUILDS
def test_columns_may_be_replaced(ops):
    x = torch.arange(12.0).view(3, 4)
    found = ops.put_columns(x, 1, torch.full((3, 2), -1.0))
    assert found.tolist() == [[0, -1, -1, 3], [4, -1, -1, 7], [8, -1, -1, 11]]


FORM = pytest.mark.parametrize("form", [None, (4, False)], ids=["plain", "4 bits"])


def run_holder(mixture, given, ranks):
    """What a rank with some experts of a mixture adds to the residual."""
    holders, (x, logits, residual), ops = Gathering(ranks, (0, 1, 4, 6)), given, mixture.ops
    own = slice(*holders.own)
    each = zip(mixture.weights, (True, False), mixture.biases, strict=True)
    maps = (ops.prepack_experts(w[own], is_gated, bias[own]) for w, is_gated, bias in each)
    routing = ops.route(logits, 3, True)
    return ops.experts(x, routing, *maps, residual.clone(), mixture.limit, None, holders)


@CPU_BUILDS
@FORM
def test_the_outputs_of_experts_are_gathered_from_the_ranks_that_hold_them(ops, form):
    """The order of sums shows in the bits of whole models, in tests/models/test_shards.py."""
    mixture = Mixture(ops, form=form, limit=7.0)
    given = mixture.rows(9)
    for found in run_ranks(partial(run_holder, mixture, given)):
        torch.testing.assert_close(found, mixture.run(*given), rtol=1e-5, atol=1e-5)


class Reducer:
    """In place of NCCL: collects what each rank sends, and then returns the sum."""

    def __init__(self):
        self.parts, self.is_complete = [], False

    def allreduce(self, tensors):
        (x,) = tensors
        if self.is_complete:
            x.copy_(sum(self.parts))
        else:
            self.parts.append(x.clone())
        return SimpleNamespace(wait=lambda: None)


@ON_GPU
@FORM
def test_ranks_on_gpus_add_the_outputs_of_other_ranks_experts(form):
    """One rank after the other, because Triton's interpreter has one thread."""
    sizes = {"K": 60, "F": 60, "N": 32}  # the interpreter is slow
    mixture, reducer = Mixture(placed, **sizes, form=form, limit=7.0), Reducer()
    given = mixture.rows(4)
    want = mixture.run(*given)
    for rank in range(3):
        run_holder(mixture, given, Ranks(rank, 3, {}, device=reducer))
    reducer.is_complete = True
    assert (torch.stack(reducer.parts) != 0).sum(0).amax() == 1  # of all ranks, one has a number
    for rank in range(3):
        found = run_holder(mixture, given, Ranks(rank, 3, {}, device=reducer))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@BUILDS
def test_a_tensor_goes_from_rank_to_rank(ops):
    sent = torch.arange(300 * 700.0).view(300, 700)  # more than a socket holds

    def run(ranks):
        if ranks.rank == 0:
            return ops.send(sent.clone(), ranks, 2)
        rows = torch.empty(300, 1)
        return ops.receive(rows, 700, torch.float32, ranks, 0).clone() if ranks.rank == 2 else None

    first, _, last = run_ranks(run)
    assert torch.equal(first, sent) and torch.equal(last, sent)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_the_loss_of_a_rank_is_an_error_in_all_others(shares_memory):
    x = torch.ones(2, 5)

    def run(ranks):
        if ranks.rank == 2:
            return ranks.close()
        return cpu.all_gather(x[:, : (5, 0)[ranks.rank]].contiguous(), Gathering(ranks, BEGINS))

    first, second, _ = run_ranks(run, shares_memory)
    assert isinstance(first, RankLost) and isinstance(second, RankLost)
