"""Log-probabilities of tokens and of the likeliest: by hand, by log_softmax, alone and beside
others.
"""

import pytest
import torch

from specserve_kernels import cpu, reference
from tests.kernels.builds import BUILDS, CPU_BUILDS
from tests.kernels.levels import EVERY_LEVEL_AND_ARM
from tests.kernels.random_steps import random_tensor

INF = torch.inf

SAID = {  # probabilities, the token, k -> its probability and rank, the k likeliest and theirs
    "the likeliest": ([0.2, 0.5, 0.3], 1, 2, (0.5, 1, [1, 2], [0.5, 0.3])),
    "the last": ([0.2, 0.5, 0.3], 0, 2, (0.2, 3, [1, 2], [0.5, 0.3])),
    "none but the token": ([0.2, 0.5, 0.3], 2, 0, (0.3, 2, [], [])),
    "ties: the lowest id first": ([1, 2, 2, 2], 2, 3, (2 / 7, 2, [1, 2, 3], [2 / 7] * 3)),
    "any scale": ([20, 50, 30], 1, 1, (0.5, 1, [1], [0.5])),
    "impossible ones": ([0, 1, 0, 0, 1], 3, 4, (0, 5, [1, 4, 0, 2], [0.5, 0.5, 0, 0])),
    "beyond a vector": ([1] * 40 + [10], 39, 2, (0.02, 41, [40, 0], [0.2, 0.02])),
    "one token": ([7], 0, 1, (1, 1, [0], [1])),
}


def said(ops, p, token, k):
    logits = torch.tensor([p]).float().log()
    return ops.logprobs(logits, torch.tensor([0]), torch.tensor([token]), k)


def check_said(got, want):
    p, rank, ids, top = want
    assert (got.rank.tolist(), got.ids.tolist()) == ([rank], [ids])
    torch.testing.assert_close(got.token.exp(), torch.tensor([p]).float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(got.top.exp(), torch.tensor([top]).float(), rtol=1e-5, atol=0)


@BUILDS
@pytest.mark.parametrize(("p", "token", "k", "want"), SAID.values(), ids=SAID)
def test_a_model_says(ops, p, token, k, want):
    check_said(said(ops, p, token, k), want)


def asked(n, V, seed=0):
    """Rows and tokens: some of the likeliest, some of the others."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5, (n,), generator=draw), torch.randint(V, (n,), generator=draw)


@EVERY_LEVEL_AND_ARM
@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(("V", "k"), [(1, 1), (5, 5), (64, 20), (1000, 1), (4099, 20), (4099, 0)])
def test_the_build_says_what_the_reference_says(V, k, spread):
    logits, given = spread * random_tensor(5, V), asked(9, V)
    got, want = (ops.logprobs(logits, *given, k) for ops in (cpu, reference))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert torch.equal(got.rank, want.rank) and torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.token, want.token, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.top, want.top, rtol=1e-6, atol=1e-6)


@CPU_BUILDS
def test_they_are_torchs_for_a_whole_vocabulary(ops):
    logits, (_, tokens) = 3 * random_tensor(1, 151_936), asked(20, 151_936)
    got = ops.logprobs(logits, torch.zeros(20).long(), tokens, 20)
    law = logits[0].double().log_softmax(0).float()  # in float32 it is off by 5e-6
    torch.testing.assert_close(got.token, law[tokens], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.top[0], law.topk(20).values, rtol=1e-6, atol=1e-6)


@BUILDS
def test_a_token_among_the_likeliest_has_the_same_bits_there(ops):
    logits = 3 * random_tensor(1, 1000)
    top = ops.logprobs(logits, torch.tensor([0]), torch.tensor([0]), 20)
    each = ops.logprobs(logits, torch.zeros(20).long(), top.ids[0], 0)
    assert torch.equal(each.token, top.top[0])
    assert each.rank.tolist() == list(range(1, 21))


@EVERY_LEVEL_AND_ARM
@pytest.mark.parametrize("V", [300, 4099])
def test_a_row_is_said_the_same_of_alone_and_among_others(V):
    logits, (rows, tokens) = 3 * random_tensor(5, V), asked(33, V)
    every = cpu.logprobs(logits, rows, tokens, 8)
    for threads, some in ((1, [4]), (2, [0, 32]), (3, [*range(32, 3, -2)])):
        torch.set_num_threads(threads)
        got = cpu.logprobs(logits[rows[some]], torch.arange(len(some)), tokens[some], 8)
        assert all(torch.equal(x, y[some]) for x, y in zip(got, every, strict=True))
        alone = cpu.logprobs(logits, rows[some], tokens[some], 0)
        assert torch.equal(alone.token, every.token[some])
