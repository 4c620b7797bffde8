"""Philox and the Gumbel noise: counter-based, so that nothing but seed, index and id matters."""

import pytest
import torch

from specserve_kernels import SampleParams, cpu, reference
from specserve_kernels.reference.sampling import gumbel, philox

KNOWN = [  # Random123's kat_vectors for philox4x32-10: counter, key -> words
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip
SEEDS = [0, 1, 12345, 2**32 - 1, 2**32, 2**53 - 1, 2**63 - 1, -(2**63), -2]


def ints(words):
    return [int(word, 16) for word in words.split()]


def flat(n, V, seeds, index):
    """n rows that leave the choice to the noise."""
    params = SampleParams.greedy(n)
    return torch.zeros(n, V), params._replace(
        temperature=torch.ones(n), seeds=torch.tensor(seeds), token_index=torch.tensor(index)
    )


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    got = philox(tuple(torch.tensor([x]) for x in ints(counter)), tuple(ints(key)))
    assert [int(x) for x in got] == ints(words)


def test_the_counter_is_id_and_index_and_the_key_is_the_seed():
    """The first published block serves the ids 0 to 3 of seed 0 at index 0, word by word."""
    u = (torch.tensor(ints(KNOWN[0][2]), dtype=torch.float64) + 0.5) / 2**32
    want = -(-(-u).log1p()).log()
    torch.testing.assert_close(gumbel(0, 0, 4).double(), want, rtol=1e-5, atol=1e-6)


def test_a_negative_seed_has_the_key_of_its_64_bits():
    """The key of the second published block is that of the seed -1."""
    zero = torch.zeros(1).long()
    words = philox((zero, zero, zero, zero), (2**32 - 1, 2**32 - 1))
    u = (torch.cat(words).double() + 0.5) / 2**32
    torch.testing.assert_close(
        gumbel(-1, 0, 4).double(), -(-(-u).log1p()).log(), rtol=1e-5, atol=1e-6
    )


EXTREMES = [  # found by search: seed, index, id -> word, noise
    (1659320703, 7, 2, 0x00000000, 22.8739),
    (2197957295, 7, 0, 0x00000000, 22.8739),
    (3121743790, 7, 1, 0x00000000, 22.8739),
    (2032122887, 7, 3, 0x00000000, 22.8739),
    (1684665985, 7, 0, 0xFFFFFFFF, -2.8115),
    (342150046, 8, 1, 0xFFFFFFFF, -2.8115),
    (1149922601, 8, 2, 0xFFFFFFFF, -2.8115),
    (3203765758, 7, 3, 0xFFFFFFFF, -2.8115),
]


@pytest.mark.parametrize(("seed", "index", "id", "word", "noise"), EXTREMES)
def test_an_extreme_word_is_finite_noise(seed, index, id, word, noise):
    zero = torch.zeros(1).long()
    assert philox((zero, zero + index, zero, zero), (seed, 0))[id].tolist() == [word]
    g = gumbel(seed, index, 4)
    torch.testing.assert_close(g[id], torch.tensor(noise), rtol=0, atol=1e-4)
    ids, weight = cpu.top_children(*flat(1, 4, [seed], [index]), 4, 1.0)
    torch.testing.assert_close(weight[0], g.log_softmax(-1)[ids[0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_finite_and_a_standard_gumbels(seed):
    g = gumbel(seed, 2**31, 200_000)
    assert g.min() > -3 and g.max() <= 22.95
    quantiles = g.double().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    want = -(-torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64).log()).log()
    torch.testing.assert_close(quantiles, want, rtol=0, atol=0.03)  # fixed seeds: no flake


@pytest.mark.parametrize("V", [1, 3, 64, 1001])
def test_noise_of_an_id_does_not_depend_on_the_vocabulary(V):
    torch.testing.assert_close(gumbel(5, 6, V), gumbel(5, 6, 4096)[:V], rtol=1e-6, atol=1e-6)


def test_every_seed_and_index_has_noise_of_its_own():
    cases = [(s, i) for s in [*SEEDS, 2**32 + 1, 2**40] for i in (0, 1, 2, 1000)]
    rows = torch.stack([gumbel(s, i, 64) for s, i in cases])
    assert len(rows.unique(dim=0)) == len(cases)
    assert len(rows.flatten().unique()) > 0.99 * rows.numel()


@pytest.mark.parametrize("V", [3, 64, 65, 1000])
def test_the_builds_noise_is_the_references(V):
    cases = [(s, i) for s in SEEDS for i in (0, 1, 17, 4096, 10**6)]
    logits, params = flat(len(cases), V, *zip(*cases, strict=True))
    ids, weight = cpu.top_children(logits, params, V if V < 17 else 16, 1.0)
    want, law = reference.top_children(logits, params, V if V < 17 else 16, 1.0)
    assert torch.equal(ids, want)
    torch.testing.assert_close(weight, law, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("V", [1, 2, 63, 130, 4097, 151_937])
def test_flat_logits_are_decided_by_the_references_noise(V):
    n = 12 if V > 100_000 else 200
    seeds = [(s * 0x9E3779B97F4A7C15) % 2**53 for s in range(n)]
    logits, params = flat(n, V, seeds, [i * i for i in range(n)])
    rows = torch.arange(n)
    assert torch.equal(cpu.sample(logits, rows, params), reference.sample(logits, rows, params))


def test_an_id_has_the_same_noise_whether_filtered_or_not():
    logits, params = flat(100, 500, [*range(100)], [*range(100)])
    all_but_nothing = params._replace(min_p=torch.full((100,), 0.5))
    rows = torch.arange(100)
    assert torch.equal(cpu.sample(logits, rows, params), cpu.sample(logits, rows, all_but_nothing))
