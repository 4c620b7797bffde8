"""The sampler hands each row its own request's parameters, seed and index."""

import pytest
import torch

from specserve.sampling import Sampler, Sampling
from specserve_kernels import cpu, reference

BUILDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


def asks(**given):
    defaults = {"max_tokens": 9, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Sampling(**(defaults | {"seed": 5} | given))


MIXED = [asks(seed=1), asks(temperature=0.0), asks(top_k=1), asks(top_p=0.1, seed=2), asks(min_p=1)]


@BUILDS
def test_a_token_is_the_same_alone_and_in_company(ops):
    who, rows, index = [0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]
    together = Sampler(ops, LOGITS, MIXED).draw(who, rows, index)
    for i, row, at, token in zip(who, rows, index, together, strict=True):
        assert Sampler(ops, LOGITS, [MIXED[i]]).draw([0], [row], [at]) == [token]


@BUILDS
@pytest.mark.parametrize("sure", [1, 2, 4], ids=["T = 0", "top_k = 1", "min_p = 1"])
def test_who_asks_for_the_likeliest_gets_it_beside_others(ops, sure):
    got = Sampler(ops, LOGITS, MIXED).draw([0, sure, 3], [3, 4, 5], [9, 9, 9])
    assert got[1] == LOGITS[4].argmax()


@BUILDS
def test_greedy_requests_need_no_noise(ops):
    got = Sampler(ops, LOGITS, [asks(temperature=0.0)] * 2).draw([1, 0], [2, 0], [7, 7])
    assert got == LOGITS[[2, 0]].argmax(1).tolist()


@BUILDS
def test_seed_and_index_are_all_that_makes_a_draw_another(ops):
    flat = torch.zeros(3, 1000)
    sampler = Sampler(ops, flat, [asks(seed=1), asks(seed=1), asks(seed=2)])
    a, same, other_seed, other_index = sampler.draw([0, 1, 2, 0], [0, 2, 0, 0], [4, 4, 4, 5])
    assert a == same
    assert len({a, other_seed, other_index}) == 3


@BUILDS
@pytest.mark.parametrize("seed", [0, 2**32, 2**53 - 1])
def test_the_largest_seeds_reach_the_kernel_whole(ops, seed):
    flat = torch.zeros(1, 1000)
    a, b = (Sampler(ops, flat, [asks(seed=s)]).draw([0], [0], [0]) for s in (seed, seed ^ 2**52))
    assert a != b
