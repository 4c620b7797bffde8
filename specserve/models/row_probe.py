"""Tests by running a model whether its results are batch-invariant.

Draft tokens and prefix hits change which rows share a step. If the results of a row depend on the
batch, they could change the text.
"""

import logging

import torch
from torch import Tensor

from specserve.memory.arena import Arena, used_bytes
from specserve.models.decoder import LoadedModel
from specserve_kernels import Program, Rows

SIZES = (1, 2, 17, 33, 64, 130)  # rows per step, near the sizes at which kernels switch algorithms
CONTEXTS = (16, 32, 48)  # tokens before a row
READ = 64  # maximum rows whose logits are compared

log = logging.getLogger("specserve")


@torch.inference_mode()
def differing_rows(model: LoadedModel, most: int) -> int | None:
    """The size of a step that computes a row with other bits than a step of `most` rows, or None if
    the model is batch-invariant. Allocates its own KV.

    Each row is a separate request. The requests share the KV of a prefix, and are in random order.
    """
    most = max(most, SIZES[0] + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (max(CONTEXTS) + most,), generator=generator)
    prefix, own = ids[: max(CONTEXTS)], ids[max(CONTEXTS) :]
    program = small_program(model, len(ids))
    length, usual_threads = max(CONTEXTS), torch.get_num_threads()
    shared = rows_of([0, length], [0, length], torch.arange(length), torch.arange(length))
    try:
        program.run(shared, prefix, torch.empty(0, dtype=torch.int64))
        every = torch.arange(most)
        want = residual(program, every, own)
        for i, size in enumerate([1, *(size for size in SIZES if size < most), most]):
            torch.set_num_threads((1, usual_threads)[i % 2])
            chosen = torch.randperm(most, generator=generator)[:size]
            if not same_bits(residual(program, chosen, own), want[chosen]):
                return size
        return differing_reads(model, want, generator)
    finally:
        torch.set_num_threads(usual_threads)


def differing_reads(model: LoadedModel, rows: Tensor, generator: torch.Generator) -> int | None:
    """The same test for the number of rows whose logits are computed together."""
    most = min(READ, len(rows))
    want = model.logits(rows, model.ops.place(torch.arange(most)))
    for size in [size for size in SIZES if size < most]:
        chosen = torch.randperm(most, generator=generator)[:size].sort().values
        if not same_bits(model.logits(rows, model.ops.place(chosen)), want[chosen]):
            return size
    return None


def residual(program: Program, chosen: Tensor, ids: Tensor) -> Tensor:
    """The residual [n, hidden] of the chosen rows, computed in one step."""
    return program.run(single_rows(chosen), ids[chosen], chosen[:0]).residual.clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit by bit."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


def small_program(model: LoadedModel, num_tokens: int) -> Program:
    """The model's forward pass over KV for `num_tokens` tokens, with one block per token."""
    layouts = model.kv_layouts()
    size = used_bytes(layouts, 1)
    arena = Arena(model.ops.allocate(num_tokens * size), size)
    return model.program(arena.view(layouts, 1), num_tokens, READ)


def single_rows(chosen: Tensor) -> Rows:
    """One row per chosen number, each in a separate request; the number selects its KV block."""
    context = torch.tensor(CONTEXTS)[chosen % len(CONTEXTS)]
    slots = max(CONTEXTS) + chosen
    blocks = [
        torch.cat([torch.arange(int(length)), slot[None]])
        for length, slot in zip(context, slots, strict=True)
    ]
    ends = torch.cumsum(context + 1, 0).tolist()
    return rows_of(list(range(len(chosen) + 1)), [0, *ends], torch.cat(blocks), context, slots)


def rows_of(
    qo_indptr: list[int],
    indptr: list[int],
    blocks: Tensor,
    positions: Tensor,
    slots: Tensor | None = None,
) -> Rows:
    """Causal rows of requests with one token per block. `slots` are the rows' KV slots; None: their
    positions.
    """
    slots = positions if slots is None else slots
    return Rows(
        qo_indptr=torch.tensor(qo_indptr, dtype=torch.int32),
        indptr=torch.tensor(indptr, dtype=torch.int32),
        indices=blocks.int(),
        last_page_len=torch.ones(len(indptr) - 1, dtype=torch.int32),
        positions=positions.int(),
        slots=slots.long(),
        prefix=(positions + 1).int(),
        mask=torch.zeros(len(positions), dtype=torch.int64),
    )
