"""Edits and masks of rows, as the ops take them."""

import random

import torch

from specserve_kernels import Edits, Masks

OFF = (0.0, 1.0, 0.0)  # bias, factor, penalty
BAN = (-torch.inf, 1.0, 0.0)


def edits_of(*rows):
    """Of rows that are each (base, own), by id: (bias, factor, penalty). Rows with the same object
    as base share a list.
    """
    edits, begins = [], {}

    def range_of(some):
        if id(some) not in begins:
            begins[id(some)] = len(edits)
            edits.extend((at, *edit) for at, edit in some.items())
        return begins[id(some)], begins[id(some)] + len(some)

    ranges = torch.tensor([[range_of(some) for some in row] for row in rows], dtype=torch.int32)
    ids, *values = zip(*(edits or [(0, *OFF)]), strict=True)
    base, own = ranges.contiguous().unbind(1)
    values = (torch.tensor(x, dtype=torch.float32) for x in values)
    return Edits(base.contiguous(), own.contiguous(), torch.tensor(ids).int(), *values)


def masks_of(V, *rows):
    """Of rows that are each a set of allowed ids, or None for all; equal sets are one mask."""
    sets = list(dict.fromkeys(frozenset(row) for row in rows if row is not None))
    number = [0 if row is None else 1 + sets.index(frozenset(row)) for row in rows]
    bits = torch.zeros(len(sets), -(-V // 32) * 32, dtype=torch.int64)
    for row, ids in zip(bits, sets, strict=True):
        row[list(ids)] = 1
    words = (bits.unflatten(1, (-(-V // 32), 32)) << torch.arange(32)).sum(2)
    return Masks(torch.tensor(number, dtype=torch.int32), words.int())  # keeps the low 32 bits


def penalized(prompt, output, bias=None, repetition=1.0, frequency=0.0, presence=0.0):
    """What vLLM's penalties and a bias by id make of a text: the edits of its next token."""
    bias = bias or {}
    edits = {}
    for at in {*bias, *prompt, *output}:
        factor = repetition if at in {*prompt, *output} else 1.0
        count = output.count(at)
        edits[at] = bias.get(at, 0.0), factor, frequency * count + presence * (count > 0)
    return edits


def random_edits(n, V, seed=0):
    """Of n rows, of which some have none, some share a base, and some replace parts of it."""
    rng = random.Random(seed)

    def some(most):
        ids = rng.sample(range(V), min(V, rng.randint(0, most)))
        values = ((-torch.inf, -3.0, 0.0, 2.5), (1.0, 0.7, 1.3), (0.0, 0.5, -1.0))
        return {at: tuple(map(rng.choice, values)) for at in ids}

    bases = [{}, some(V), some(40)]
    return edits_of(*((bases[i % 3], some(5) if i % 4 else {}) for i in range(n)))


def random_masks(n, V, seed=0):
    """Of n rows: without a mask, with all ids but a few, with few, with one."""
    rng = random.Random(seed)
    few = [rng.sample(range(V), max(1, V // k)) for k in (2, 20, V)]
    masks = [None, {*range(V)} - {*few[1]} or {0}, *few, {V - 1}]
    return masks_of(V, *(masks[i % len(masks)] for i in range(n)))
