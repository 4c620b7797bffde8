"""Filters and choices: the reference by hand, the C++ build by the reference."""

import itertools

import pytest
import torch

from specserve_kernels import NO_TOKEN, NOT_FINITE, SampleParams, cpu, reference
from specserve_kernels.reference.sampling import transform
from tests.kernels.builds import BUILDS, CPU_BUILDS
from tests.kernels.levels import EVERY_LEVEL_AND_ARM
from tests.kernels.random_steps import random_tensor

INF, NAN = torch.inf, torch.nan
EVERY_FILTER = {"min_p": 0.1, "top_k": 2, "top_p": 0.5}
P = [0.4, 0.3, 0.2, 0.1]  # the law of some of the rows below


def asked(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """n rows with these parameters; a seed and an index for each."""
    floats = [torch.full((n,), float(x)) for x in (temperature, top_p, min_p)]
    seeds, index = 7919 * torch.arange(n), 3 + torch.arange(n)
    top_k = torch.full((n,), top_k, dtype=torch.int32)
    return SampleParams(floats[0], top_k, floats[1], floats[2], seeds, index)


FILTERS = {  # probabilities at T = 1, the parameters -> the ids that are left
    "nothing asked": (P, {}, {0, 1, 2, 3}),
    "top_k": (P, {"top_k": 2}, {0, 1}),
    "top_k beyond the vocabulary": (P, {"top_k": 9}, {0, 1, 2, 3}),
    "top_k cuts ties at the lowest ids": ([1, 2, 1, 1], {"top_k": 3}, {0, 1, 2}),
    "top_p keeps what first reaches it": (P, {"top_p": 0.6}, {0, 1}),
    "top_p reached exactly is enough": ([1, 1, 1, 1], {"top_p": 0.5}, {0, 1}),
    "a tiny top_p keeps the likeliest": (P, {"top_p": 1e-6}, {0}),
    "a top_p of zero keeps the likeliest": (P[::-1], {"top_p": 0.0}, {3}),
    "a top_p that is zero in float32, too": (P[::-1], {"top_p": 1e-60}, {3}),
    "min_p is relative to the likeliest": (P, {"min_p": 0.6}, {0, 1}),
    "min_p reached exactly is enough": ([1, 1, 1, 1], {"min_p": 1.0}, {0, 1, 2, 3}),
    "temperature comes before min_p": (P, {"temperature": 2, "min_p": 0.6}, {0, 1, 2}),
    "temperature comes before top_p": (P, {"temperature": 0.5, "top_p": 0.6}, {0, 1}),
    "a high temperature, and top_p keeps more": (P, {"temperature": 9, "top_p": 0.6}, {0, 1, 2}),
    "min_p comes before top_p": (P, {"min_p": 0.3, "top_p": 0.75}, {0, 1}),
    "top_k comes before top_p": (P, {"top_k": 2, "top_p": 0.5}, {0}),
    "many that are far behind have mass, too": (
        [1, 0.1] + [2.4e-5] * 4097,
        {"top_p": 0.9},
        {0, 1},
    ),
    "ids need not be in order": (P[::-1], {"top_k": 3, "top_p": 0.7}, {3, 2}),
}


@pytest.mark.parametrize(("p", "params", "left"), FILTERS.values(), ids=FILTERS)
def test_filters_leave(p, params, left):
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    z = torch.tensor(p).log()
    kept = transform(z, **given)
    assert set(kept.isfinite().nonzero().flatten().tolist()) == left
    torch.testing.assert_close(kept[list(left)], (z / given["temperature"])[list(left)])


@CPU_BUILDS
@pytest.mark.parametrize(("p", "params", "left"), FILTERS.values(), ids=FILTERS)
def test_what_is_left_is_drawn_and_nothing_else(ops, p, params, left):
    n = 96
    tokens = ops.sample(torch.tensor([p]).log(), torch.zeros(n).long(), asked(n, **params))
    assert set(tokens.tolist()) == left


CHOICES = {  # logits, the parameters -> the token, whatever the noise
    "T = 0 is argmax": ([0.0, 2, 1], {"temperature": 0}, 1),
    "T = 0 heeds no filter": ([0.0, 2, 1], {"temperature": 0, "top_k": 2, "top_p": 0.1}, 1),
    "a tie goes to the lowest id": ([0.0, 2, 2, 2], {"temperature": 0}, 1),
    "in the first vector's tail, too": ([0.0] * 18 + [1.0, 1.0], {"temperature": 0}, 18),
    "and across vectors": ([0.0] * 15 + [1.0] * 40, {"temperature": 0}, 15),
    "all ids are ruled out": ([-INF] * 3, {"temperature": 0}, NO_TOKEN),
    "all ids are ruled out, with noise": ([-INF] * 70, {}, NO_TOKEN),
    "all ids are ruled out, with filters": ([-INF] * 70, EVERY_FILTER, NO_TOKEN),
    "a NaN at T = 0": ([1.0] * 20 + [NAN, 2.0], {"temperature": 0}, NOT_FINITE),
    "a NaN that vectors of greater numbers surround": (
        [3.0] * 70 + [NAN] + [9.0] * 90,
        {"temperature": 0},
        NOT_FINITE,
    ),
    "a NaN of the other sign": ([1.0, -NAN, 2.0], {}, NOT_FINITE),
    "a NaN, with noise": ([1.0] * 99 + [NAN], {}, NOT_FINITE),
    "a NaN, with filters": ([1.0, 2.0, NAN, 1.0], EVERY_FILTER, NOT_FINITE),
    "only NaN": ([NAN] * 65, {"top_k": 1}, NOT_FINITE),
    "an infinite logit": ([1.0] * 64 + [INF, 1.0], {"temperature": 0}, NOT_FINITE),
    "an infinite logit, with noise": ([INF, 2.0, INF], {}, NOT_FINITE),
    "an infinite logit, with filters": ([1.0, INF, 2.0], EVERY_FILTER, NOT_FINITE),
    "a negative row": ([-9.0] * 16 + [-8.0] * 20, {"temperature": 0}, 16),
    "top_k = 1 is argmax": ([0.0, 2, 1, 2], {"top_k": 1}, 1),
    "min_p = 1 is argmax": ([0.0, 2, 1], {"min_p": 1.0}, 1),
    "a tiny temperature is argmax": ([0.0, 2, 1], {"temperature": 1e-4}, 1),
    "what is ruled out stays out": ([-INF, -99.0, -INF], {}, 1),
}


# The interpreter's numpy warns of what a GPU computes in silence.
NO_NUMBERS = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@BUILDS
@NO_NUMBERS
@pytest.mark.parametrize(("logits", "params", "token"), CHOICES.values(), ids=CHOICES)
def test_the_choice_is(ops, logits, params, token):
    rows = torch.zeros(32).long()
    got = ops.sample(torch.tensor([logits]), rows, asked(32, **params))
    assert got.tolist() == [token] * 32


@BUILDS
def test_each_token_is_chosen_from_its_own_row(ops):
    logits, rows = 5.0 * torch.eye(4), torch.tensor([2, 0, 2, 3])
    assert ops.sample(logits, rows, SampleParams.greedy(4)).tolist() == [2, 0, 2, 3]


MIXES = list(itertools.product([0, 0.3, 1, 2], [0, 1, 5, 300], [1, 0.9, 0.3], [0, 0.02, 0.5]))


def mixed():
    """A row for every mix of temperature, top_k, top_p and min_p."""
    temperature, top_k, top_p, min_p = (torch.tensor(x) for x in zip(*MIXES, strict=True))
    each = temperature.float(), top_k.int(), top_p.float(), min_p.float()
    return SampleParams(*each, *asked(len(MIXES)).columns[4:])


@pytest.mark.pairs
@EVERY_LEVEL_AND_ARM
@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("V", [1, 5, 64, 300, 1000, 4099])
def test_the_build_chooses_as_the_reference(V, spread):
    logits = spread * random_tensor(7, V)
    rows = torch.arange(len(MIXES)) % 7
    got, want = (ops.sample(logits, rows, mixed()) for ops in (cpu, reference))
    assert torch.equal(got, want)


def test_the_build_chooses_as_the_reference_among_many_ties():
    logits = torch.randint(3, (7, 999), generator=torch.Generator().manual_seed(0)).float()
    rows = torch.arange(len(MIXES)) % 7
    got, want = (ops.sample(logits, rows, mixed()) for ops in (cpu, reference))
    assert torch.equal(got, want)


CHILDREN = {  # logits, tau -> the first three ids and their probabilities at T = 0
    "the likeliest first": ([0.1, 0.5, 0.4], 1.0, [1, 2, 0], [0.5, 0.4, 0.1]),
    "ties: the lowest id first": ([0.2, 0.2, 0.2, 0.4], 1.0, [3, 0, 1], [0.4, 0.2, 0.2]),
    "tau sharpens": ([0.2, 0.4, 0.4], 0.5, [1, 2, 0], [4 / 9, 4 / 9, 1 / 9]),
    "mass beyond the three counts": ([0.1] * 10, 1.0, [0, 1, 2], [0.1, 0.1, 0.1]),
    "in two vectors and a tail": (
        [0.01] * 30 + [0.3, 0.01, 0.01, 0.3, 0.08],
        1.0,
        [30, 33, 34],
        [0.3, 0.3, 0.08],
    ),
}


@BUILDS
@pytest.mark.parametrize(("p", "tau", "ids", "law"), CHILDREN.values(), ids=CHILDREN)
def test_the_likeliest_children_are(ops, p, tau, ids, law):
    got, weight = ops.top_children(torch.tensor([p]).log(), SampleParams.greedy(1), 3, tau)
    assert got.tolist() == [ids]
    torch.testing.assert_close(weight.exp(), torch.tensor([law]), rtol=1e-5, atol=0)


@BUILDS
def test_the_first_child_is_what_the_target_would_draw_from_the_same_logits(ops):
    logits, rows = random_tensor(64, 333), torch.arange(64)
    ids, _ = ops.top_children(logits, asked(64, 0.7), 4, 0.8)
    assert torch.equal(ids[:, 0], ops.sample(logits, rows, asked(64, 0.7)))


@pytest.mark.pairs
@EVERY_LEVEL_AND_ARM
@pytest.mark.parametrize("temperature", [0, 0.5, 2])
@pytest.mark.parametrize(("V", "k"), [(16, 16), (5, 2), (300, 1), (1000, 16), (4099, 8)])
def test_the_build_ranks_children_as_the_reference(V, k, temperature):
    logits, params = 3 * random_tensor(20, V), asked(20, temperature)
    (got, weight), (want, law) = (o.top_children(logits, params, k, 0.8) for o in (cpu, reference))
    assert torch.equal(got, want)
    torch.testing.assert_close(weight, law, rtol=1e-4, atol=1e-4)  # weights span about 20
