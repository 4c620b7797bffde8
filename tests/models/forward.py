"""A prompt through a decoder, chunk by chunk, over shuffled blocks of a poisoned pool."""

import itertools
import random

import torch

from specserve.memory.arena import Arena, place_states, used_bytes
from specserve_kernels import Rows, StateRows, cpu, reference
from specserve_kernels.ops import EagerProgram


def builds():
    """The builds of the ops that this machine has."""
    try:
        cpu.library()
    except cpu.BuildError:
        return [reference]
    return [reference, cpu]


def prompt(vocab_size, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (n,), generator=generator)


def logits(decoder, ids, *, block_size=16, chunks=(23,), kv_dtype=None):
    """Of every token; a chunk ends before each number in `chunks`."""
    table = list(range(len(ids) // block_size + 3))
    random.Random(0).shuffle(table)
    kv = empty_kv(decoder, len(table), block_size, kv_dtype)
    borders = [0, *chunks, len(ids)]
    out = []
    with torch.inference_mode():
        for start, end in itertools.pairwise(borders):
            rows = causal_rows(table, start, end, block_size, kv)
            plan = decoder.plan(rows, kv, [ids[start:end]])
            residual, _ = decoder.forward(decoder.embed(ids[start:end]), kv, plan)
            out.append(decoder.logits(residual, torch.arange(end - start)))
    return torch.cat(out).float()


def recorded_and_eager(decoder, ids, chunks, kv_dtype=None):
    """The outputs of steps with all auxiliary layers, by the build's program and op by op.

    The first result is the program. Every chunk is run from its token ids, and then from the
    residual that its first layer got.
    """
    table = list(range(len(ids) // 16 + 3))
    programs, out = [], []
    layers, reads_ids = range(decoder.config.num_layers), decoder.weights.per_layer is not None
    eager = lambda model, kv, *_, aux_layer_ids: EagerProgram(model, kv, aux_layer_ids)  # noqa: E731
    for make in (decoder.ops.program, eager):
        with torch.inference_mode():
            kv = empty_kv(decoder, len(table), 16, kv_dtype)
            program = make(decoder, kv, len(ids), len(ids), aux_layer_ids=layers)
            programs.append(program)
            for start, end in itertools.pairwise([0, *chunks, len(ids)]):
                rows = causal_rows(table, start, end, 16, kv)
                read = torch.arange(end - start)
                memory = kv.states[0].memory.clone() if kv.states else None
                out += tensors(program.run(rows, ids[start:end], read))
                if memory is not None:  # the second run begins with the same state
                    kv.states[0].memory.copy_(memory)
                again = ids[start:end] if reads_ids else None
                out += tensors(program.run(rows, again, read, residual=out[-len(layers)]))
    half = len(out) // 2
    return programs[0], out[:half], out[half:]


def tensors(outputs):
    """Copies; the last are the auxiliary hidden states."""
    return [
        x.clone() for x in (outputs.residual, outputs.logits, *outputs.aux_hidden_states.values())
    ]


def empty_kv(decoder, num_blocks, block_size, dtype=None):
    """NaN everywhere, so that reading a slot that no row wrote shows in the output."""
    layouts, states = decoder.kv_layouts(dtype), decoder.state_layouts()
    size = max([used_bytes(layouts, block_size), *(state.piece_bytes for state in states)])
    num_blocks += place_states(states, size)[0]  # the last blocks are those of the state
    memory = decoder.ops.place(torch.full((num_blocks * size,), 255, dtype=torch.uint8))
    arena = Arena(memory, size)
    kv = arena.add_view("target", layouts, block_size)
    return kv._replace(states=arena.add_states(states, 1)) if states else kv


def state_rows(kv, num_rows):
    """One request's state is in the last blocks of the pool."""
    if not kv.states:
        return None
    size = max(int(state.places[:, 0].max()) for state in kv.states) + 1
    last = len(kv.states[0].memory)
    columns = [[*range(last - size, last)]], [num_rows], [0], [0], [[0] * size]
    return StateRows(*(torch.tensor(x, dtype=torch.int32) for x in columns))


def causal_rows(table, start, end, block_size, kv=None):
    blocks = table[: -(-end // block_size)]
    at = range(start, end)
    slots = [table[i // block_size] * block_size + i % block_size for i in at]
    int32 = [
        [0, end - start],
        [0, len(blocks)],
        blocks,
        [(end - 1) % block_size + 1],
        list(at),
    ]
    return Rows(
        *(torch.tensor(x, dtype=torch.int32) for x in int32),
        torch.tensor(slots),
        torch.arange(start + 1, end + 1, dtype=torch.int32),
        torch.zeros(end - start, dtype=torch.int64),
        states=None if kv is None else state_rows(kv, end - start),
    )
