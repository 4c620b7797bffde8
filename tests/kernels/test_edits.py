"""Edits and masks: by hand, by transformers' logits processors, the builds by the reference."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from specserve_kernels import NO_TOKEN, SampleParams, cpu, reference
from specserve_kernels.reference.sampling import allowed, edited, transform
from tests.kernels.builds import BUILDS
from tests.kernels.edits import BAN, OFF, edits_of, masks_of, penalized, random_edits, random_masks
from tests.kernels.levels import EVERY_LEVEL_AND_ARM
from tests.kernels.random_steps import random_tensor
from tests.kernels.test_sampling import MIXES, asked, mixed

INF = torch.inf
EVERY = {0, 1, 2, 3}
ROWS = {  # logits, the base, own edits, the ids allowed -> logits
    "nothing": ([1, 2, -3, 4], {}, {}, None, [1, 2, -3, 4]),
    "a bias adds": ([1, 2, -3, 4], {1: (0.5, 1, 0)}, {}, None, [1, 2.5, -3, 4]),
    "a bias rules out": ([1, 2, -3, 4], {3: BAN}, {}, None, [1, 2, -3, -INF]),
    "a factor divides what is above 0": ([1, 2, -3, 4], {3: (0, 2, 0)}, {}, None, [1, 2, -3, 2]),
    "and multiplies what is below": ([1, 2, -3, 4], {2: (0, 2, 0)}, {}, None, [1, 2, -6, 4]),
    "a factor leaves 0": ([0, 2, -3, 4], {0: (0, 2, 0)}, {}, None, [0, 2, -3, 4]),
    "a factor below 1 raises": ([1, 2, -3, 4], {2: (0, 0.5, 0)}, {}, None, [1, 2, -1.5, 4]),
    "a penalty takes off": ([1, 2, -3, 4], {1: (0, 1, 3)}, {}, None, [1, -1, -3, 4]),
    "bias comes before factor": ([1, 2, -3, 4], {2: (7, 2, 0)}, {}, None, [1, 2, 2, 4]),
    "factor comes before penalty": ([1, 2, -3, 4], {1: (0, 2, 4)}, {}, None, [1, -3, -3, 4]),
    "own edits join": ([1, 2, -3, 4], {0: (1, 1, 0)}, {1: (1, 1, 0)}, None, [2, 3, -3, 4]),
    "own edits replace": ([1, 2, -3, 4], {0: (9, 3, 9)}, {0: (1, 1, 0)}, None, [2, 2, -3, 4]),
    "an own edit lifts a ban": ([1, 2, -3, 4], {0: BAN}, {0: OFF}, None, [1, 2, -3, 4]),
    "a mask forbids": ([1, 2, -3, 4], {}, {}, {0, 2}, [1, -INF, -3, -INF]),
    "all but one": ([1, 2, -3, 4], {}, {}, {2}, [-INF, -INF, -3, -INF]),
    "a mask of all": ([1, 2, -3, 4], {}, {}, EVERY, [1, 2, -3, 4]),
    "a mask of none": ([1, 2, -3, 4], {}, {}, set(), [-INF] * 4),
    "a bias allows nothing": ([1, 2, -3, 4], {3: (9, 1, 0)}, {}, {0}, [1, -INF, -INF, -INF]),
    "what is impossible stays so": ([1, -INF, -3, 4], {1: (9, 2, 1)}, {}, EVERY, [1, -INF, -3, 4]),
}


@pytest.mark.parametrize(("x", "base", "own", "ids", "want"), ROWS.values(), ids=ROWS)
def test_a_row_becomes(x, base, own, ids, want):
    x = torch.tensor(x).float()
    got = allowed(edited(x, edits_of((base, own)), 0), masks_of(4, ids), 0)
    assert got.tolist() == want


def test_rows_have_lists_and_masks_of_their_own():
    base = {1: (10.0, 1.0, 0.0)}
    edits = edits_of((base, {}), ({}, {}), (base, {2: BAN}), ({0: BAN}, {}))
    masks = masks_of(3, None, {0, 1}, {2}, {0, 1})
    got = [allowed(edited(torch.zeros(3), edits, i), masks, i).tolist() for i in range(4)]
    assert got == [[0, 10, 0], [0, 0, -INF], [-INF, -INF, -INF], [-INF, 0, -INF]]


def test_bits_of_a_mask_lie_in_words_of_32_ids():
    ids = {0, 31, 32, 63, 64, 95, 96}
    masks = masks_of(97, ids)
    assert masks.words.tolist() == [[-(2**31) + 1, -(2**31) + 1, -(2**31) + 1, 1]]
    assert {*allowed(torch.zeros(97), masks, 0).isfinite().nonzero()[:, 0].tolist()} == ids


def test_some_rows_keep_their_own_parameters():
    n = len(MIXES)
    params = mixed()._replace(edits=random_edits(n, 50), masks=random_masks(n, 50))
    logits, rows, places = random_tensor(7, 50), torch.arange(n) % 7, [5, 0, 71, 140]
    every, some = reference.sample(logits, rows, params), params.take(places)
    assert torch.equal(reference.sample(logits, rows[places], some), every[places])
    for i, place in enumerate(places):
        got, want = (edited(logits[0], *at) for at in ((some.edits, i), (params.edits, place)))
        assert torch.equal(got, want)


def test_tensors_keep_their_places():
    params = asked(4)._replace(masks=random_masks(4, 9))
    again = params._replace(edits=random_edits(4, 9))
    copies = again.with_tensors(x.clone() for x in again.tensors()).tensors()
    assert all(map(torch.equal, copies, again.tensors()))
    doubled = params.with_tensors(2 * x for x in params.tensors())
    assert doubled.edits is None and torch.equal(doubled.masks.words, 2 * params.masks.words)
    assert torch.equal(doubled.temperature, 2 * params.temperature)
    assert SampleParams.greedy(2).is_plain and not params.is_plain
    assert not asked(4)._replace(edits=random_edits(4, 9)).is_plain


def greedy(x):
    return NO_TOKEN if max(x) == -torch.inf else torch.tensor(x).argmax()


@BUILDS
@pytest.mark.parametrize(("x", "base", "own", "ids", "want"), ROWS.values(), ids=ROWS)
def test_the_choice_is_that_of_the_row_it_becomes(ops, x, base, own, ids, want):
    """Beside a row that nothing changes."""
    edits, masks = edits_of((base, own), ({}, {})), masks_of(4, ids, None)
    logits, rows = torch.tensor([x]).float(), torch.zeros(2).long()
    got = ops.sample(logits, rows, asked(2, 0)._replace(edits=edits, masks=masks))
    assert got.tolist() == [greedy(want), greedy(x)]


@BUILDS
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_what_is_forbidden_is_never_drawn(ops, filters):
    params = asked(96, **filters)._replace(masks=masks_of(5, *[{1, 3}, {2}, None] * 32))
    tokens = ops.sample(torch.zeros(1, 5), torch.zeros(96).long(), params)
    assert {*tokens[::3].tolist()} == {1, 3} and {*tokens[1::3].tolist()} == {2}
    assert len({*tokens[2::3].tolist()}) > 2


def changed(V, kinds="edits and masks"):
    """A row for every mix of parameters, most of them with edits or a mask."""
    edits = random_edits(len(MIXES), V, V) if "edits" in kinds else None
    masks = random_masks(len(MIXES), V, V) if "masks" in kinds else None
    return mixed()._replace(edits=edits, masks=masks)


@pytest.mark.pairs
@EVERY_LEVEL_AND_ARM
@pytest.mark.parametrize("kinds", ["edits", "masks", "edits and masks"])
@pytest.mark.parametrize("V", [1, 5, 64, 300, 1000])
def test_the_build_chooses_as_the_reference(V, kinds):
    logits = 3 * random_tensor(7, V)
    rows, params = torch.arange(len(MIXES)) % 7, changed(V, kinds)
    got, want = (ops.sample(logits, rows, params) for ops in (cpu, reference))
    assert torch.equal(got, want)


V = 300
PROMPT, OUTPUT = [5, 9, 9, 7, 120], [9, 3, 3, 3, 250, 7]


def close(got, want):
    assert torch.equal(got.isfinite(), want.isfinite())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("repetition", [1.3, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_repetition_bias_and_mask_are_those_of_transformers(seed, repetition):
    """In the order in which `generate` calls its processors."""
    x, text = 3 * random_tensor(1, V, seed=seed), torch.tensor([[*PROMPT, *OUTPUT]])
    bias = {3: 4.0, 7: -5.5, 11: 2.0, 250: -INF}
    ids = sorted({*range(0, V, 3), 3, 7, 11})
    processors = [
        logits_process.SequenceBiasLogitsProcessor([[[at], b] for at, b in bias.items()]),
        logits_process.RepetitionPenaltyLogitsProcessor(repetition),
        logits_process.PrefixConstrainedLogitsProcessor(lambda *_: ids, 1),
    ]
    want = x
    for processor in processors:
        want = processor(text, want)
    edits = edits_of((penalized(PROMPT, OUTPUT, bias, repetition), {}))
    close(allowed(edited(x[0], edits, 0), masks_of(V, set(ids)), 0), want[0])


FILTERS = {
    "min_p": ({"min_p": 0.05}, logits_process.MinPLogitsWarper(0.05)),
    "top_k": ({"top_k": 7}, logits_process.TopKLogitsWarper(7)),
    "top_p": ({"top_p": 0.8}, logits_process.TopPLogitsWarper(0.8)),
}


@pytest.mark.parametrize("some", [("min_p",), ("top_k",), ("top_p",), ("min_p", "top_k", "top_p")])
@pytest.mark.parametrize("seed", range(3))
def test_temperature_and_filters_after_them_are_those_of_transformers(seed, some):
    x, text = 3 * random_tensor(1, V, seed=seed), torch.tensor([[*PROMPT, *OUTPUT]])
    want = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(text, x)
    want = logits_process.TemperatureLogitsWarper(0.7)(text, want)
    given = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name in some:
        want = FILTERS[name][1](text, want)
        given |= FILTERS[name][0]
    edits = edits_of((penalized(PROMPT, OUTPUT, repetition=1.3), {}))
    close(transform(edited(x[0], edits, 0), **given), want[0])


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0), (0, 1.5), (-0.7, 0.3), (2, -2)])
def test_frequency_and_presence_count_the_output(frequency, presence):
    x = 3 * random_tensor(V)
    count = np.bincount(OUTPUT, minlength=V)
    want = x.numpy() - frequency * count - presence * (count > 0)
    edits = edits_of((penalized(PROMPT, OUTPUT, frequency=frequency, presence=presence), {}))
    close(edited(x, edits, 0), torch.tensor(want).float())


def test_a_drafted_token_counts_as_a_known_one_to_the_bit():
    """A node's own edits of its path's ids give the row that the longer text has as its base."""
    x = 3 * random_tensor(V)
    how = {"bias": {3: 0.1, 8: 0.7}, "repetition": 1.1, "frequency": 0.3, "presence": 0.9}
    after = penalized(PROMPT, [*OUTPUT, 3, 8], **how)
    node = edits_of((penalized(PROMPT, OUTPUT, **how), {at: after[at] for at in (3, 8)}))
    assert torch.equal(edited(x, node, 0), edited(x, edits_of((after, {})), 0))
