"""Models whose layers differ, or have several residual streams, with the build for GPUs."""

import itertools

import pytest
import torch

from specserve.models.loader import load_decoder
from specserve_kernels import reference
from tests.checkpoints import tiny_checkpoint
from tests.kernels.builds import ON_GPU, cuda
from tests.models.forward import causal_rows, empty_kv, prompt


def steps(folder, ops):
    """The logits of two steps, of 8 rows and of one."""
    decoder, ids, found = load_decoder(folder, "fp32", ops), prompt(320, 9), []
    with torch.inference_mode():
        kv = empty_kv(decoder, 1, 16)
        program = decoder.program(kv, 8, 8)
        for start, end in itertools.pairwise([0, 8, 9]):
            rows = causal_rows([0], start, end, 16)
            run = program.run(rows, ids[start:end], torch.arange(end - start))
            found.append(run.logits.cpu().clone())
    return torch.cat(found)


@ON_GPU
@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "gemma4_moe"])
def test_the_build_for_gpus_computes_what_the_reference_computes(family, tmp_path):
    folder = tiny_checkpoint(tmp_path, family)
    got, want = (steps(folder, ops) for ops in (cuda, reference))
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 1e-4
