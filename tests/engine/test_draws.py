"""Each row is drawn with its own request's parameters and seed, and its own place in the text."""

import pytest
import torch

from specserve.engine.runner import Launched, TargetTokens, draws_of
from specserve.exchange.sampling_params import Sampling
from specserve_drafters import Draft
from specserve_kernels import cpu, reference

BUILDS = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


def asks(**given):
    defaults = {"max_tokens": 9, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Sampling(**(defaults | {"seed": 5} | given))


MIXED = [asks(seed=1), asks(temperature=0.0), asks(top_k=1), asks(top_p=0.1, seed=2), asks(min_p=1)]


def draw(ops, logits, requests, lengths, drafts=None):
    """One token of every request, or of every node of their trees, one row of the logits each."""
    draws = draws_of(requests, lengths, drafts or [Draft()] * len(requests))
    return TargetTokens(ops, draws, Launched(logits, None)).after([*range(len(draws.seeds))])


@BUILDS
def test_a_token_is_the_same_alone_and_in_company(ops):
    together = draw(ops, LOGITS, MIXED, [10, 11, 12, 13, 14])
    for i, token in enumerate(together):
        assert draw(ops, LOGITS[[i]], [MIXED[i]], [10 + i]) == [token]


@BUILDS
def test_a_node_is_drawn_as_the_next_token_of_its_path(ops):
    """Its index counts the guesses above it, however they are numbered."""
    bush = Draft([1, 2, 3, 4], [0, 0, 1, 3])  # depths 0 | 1 1 2 3
    got = draw(ops, LOGITS, [asks(seed=8), asks(seed=9)], [20, 70], [bush, Draft()])
    for row, (seed, at) in enumerate([(8, 20), (8, 21), (8, 21), (8, 22), (8, 23), (9, 70)]):
        assert draw(ops, LOGITS[[row]], [asks(seed=seed)], [at]) == [got[row]]


@BUILDS
@pytest.mark.parametrize("requests", [MIXED[2:], [asks(temperature=0.0)] * 3], ids=["T", "greedy"])
def test_rows_may_be_drawn_one_by_one_or_looked_up(ops, requests):
    drafts = [Draft([5, 6], [0, 0]), Draft(), Draft([7], [0])]
    draws = draws_of(requests, [4, 9, 30], drafts)
    drawn = TargetTokens(ops, draws, Launched(LOGITS, None))
    at_once = ops.sample(LOGITS, torch.arange(6), draws.params())
    looked_up = TargetTokens(ops, draws, Launched(LOGITS, at_once))
    for at in ([0, 3, 4], [5, 2], [1], [*range(6)]):
        assert drawn.after(at) == looked_up.after(at)


@BUILDS
@pytest.mark.parametrize("sure", [1, 2, 4], ids=["T = 0", "top_k = 1", "min_p = 1"])
def test_who_asks_for_the_likeliest_gets_it_next_to_others(ops, sure):
    got = draw(ops, LOGITS[3:], [MIXED[0], MIXED[sure], MIXED[3]], [9, 9, 9])
    assert got[1] == LOGITS[4].argmax()


@BUILDS
def test_greedy_requests_need_no_noise(ops):
    got = draw(ops, LOGITS[:2], [asks(temperature=0.0)] * 2, [7, 7])
    assert got == LOGITS[:2].argmax(1).tolist()


@BUILDS
def test_seed_and_index_are_all_that_makes_a_draw_another(ops):
    requests = [asks(seed=1), asks(seed=1), asks(seed=2), asks(seed=1)]
    a, same, other_seed, other_index = draw(ops, torch.zeros(4, 1000), requests, [4, 4, 4, 5])
    assert a == same
    assert len({a, other_seed, other_index}) == 3


@BUILDS
@pytest.mark.parametrize("seed", [0, 2**32, 2**53 - 1, 2**63 - 1, -(2**63), -2])
def test_the_largest_seeds_reach_the_kernel_whole(ops, seed):
    others = seed ^ 2**52, ~seed
    a, *bs = draw(ops, torch.zeros(3, 1000), [asks(seed=s) for s in (seed, *others)], [0, 0, 0])
    assert a not in bs
