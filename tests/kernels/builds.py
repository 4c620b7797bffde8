"""The builds of the ops that tests compare.

The build for GPUs computes on a GPU if there is one, else in Triton's interpreter on the CPU.
"""

import os

import pytest
import torch

from specserve_kernels import cpu, load, reference
from specserve_kernels.cuda import recurrent
from specserve_kernels.cuda.graphs import GraphProgram
from specserve_kernels.cuda.ops import CudaOps
from tests.kernels import fake_flashinfer
from tests.kernels.placed import Placed
from tests.kernels.rerun import Rerun

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# FlashInfer takes minutes to compile for all head sizes; `triton` leaves it out.
ATTENTION = os.environ.get("SPECSERVE_TEST_ATTENTION", "auto")
# Its tensors are on DEVICE.
cuda = load("cuda", ATTENTION) if HAS_GPU else CudaOps(DEVICE, fake_flashinfer)
placed = Placed(cuda, DEVICE)  # its tensors are on the host
if not HAS_GPU:
    recurrent.COLUMNS = 64  # the interpreter runs one program after the other
ON_GPU = pytest.mark.cuda  # these tests run on a GPU if there is one
FLASHINFER = pytest.mark.skipif(ATTENTION == "triton", reason="SPECSERVE_TEST_ATTENTION=triton")
INTERPRETED = pytest.mark.skipif(HAS_GPU, reason="Triton compiles for the GPU here")


def parametrized(*on_gpu):
    each = [pytest.param(reference, id="reference"), pytest.param(cpu, id="cpu")]
    each += [pytest.param(ops, id="cuda", marks=ON_GPU) for ops in on_gpu]
    return pytest.mark.parametrize("ops", each)


CPU_BUILDS = parametrized()  # for tests that take minutes in the interpreter
BUILDS = parametrized(placed)  # for tests of ops
MODEL_BUILDS = parametrized(cuda)  # for tests that load a model, which places its own tensors


def recorded(model, kv, max_rows=0, max_read=0, aux_layer_ids=()):
    """A program of recorded steps: CUDA graphs, or without a GPU forwards that are run again."""
    return GraphProgram(
        cuda.child_graphs, cuda.num_planned, model, kv, aux_layer_ids, None if HAS_GPU else Rerun()
    )
