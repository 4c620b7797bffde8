"""Whether a model gives a row the same bits whatever else a step computes, found by running it.

Guesses and prefix hits change which rows share a step. Where that changes a row's bits, they could
change which text comes.
"""

import logging

import torch
from torch import Tensor

from specserve.memory.arena import Arena, used_bytes
from specserve.models.decoder import LoadedModel
from specserve_kernels import Program, Rows

SIZES = (1, 2, 17, 33, 64, 130)  # rows of a step: around those at which kernels change their ways
CONTEXTS = (16, 32, 48)  # tokens before a row
READ = 64  # rows whose logits are compared

log = logging.getLogger("specserve")


@torch.inference_mode()
def differing_rows(model: LoadedModel, most: int) -> int | None:
    """The rows of the smallest step that gave one of them other bits than a step of `most` rows
    does; None where none did. Reads no KV but its own, for which it takes memory meanwhile.

    Rows are of requests of their own, which share the KV of a prefix, in random order.
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
    """The same for the rows whose logits are read at once."""
    most = min(READ, len(rows))
    want = model.logits(rows, model.ops.place(torch.arange(most)))
    for size in [size for size in SIZES if size < most]:
        chosen = torch.randperm(most, generator=generator)[:size].sort().values
        if not same_bits(model.logits(rows, model.ops.place(chosen)), want[chosen]):
            return size
    return None


def residual(program: Program, chosen: Tensor, ids: Tensor) -> Tensor:
    """[n, hidden], of some rows in one step."""
    return program.run(single_rows(chosen), ids[chosen], chosen[:0]).residual.clone()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN is equal to the same NaN."""
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


def small_program(model: LoadedModel, num_tokens: int) -> Program:
    """The model's forward over KV for so many tokens, each in a block of its own."""
    layouts = model.kv_layouts()
    size = used_bytes(layouts, 1)
    arena = Arena(model.ops.allocate(num_tokens * size), size)
    return model.program(arena.view(layouts, 1), num_tokens, READ)


def single_rows(chosen: Tensor) -> Rows:
    """A row for each number chosen, of a request of its own: its block is that of its number."""
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
    """Causal rows of requests whose blocks hold a token each; a row's slot is at its position
    unless it is given.
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
