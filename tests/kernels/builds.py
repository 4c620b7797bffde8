"""The builds of the ops that tests compare: the one for the GPU runs in Triton's interpreter."""

import pytest
import torch

from specserve_kernels import cpu, reference
from specserve_kernels.cuda.ops import CudaOps
from tests.kernels import fake_flashinfer

HAS_GPU = torch.cuda.is_available()
interpreted = None if HAS_GPU else CudaOps(torch.device("cpu"), fake_flashinfer)
ALL = {"reference": reference, "cpu": cpu} | ({} if HAS_GPU else {"cuda": interpreted})
BUILDS = pytest.mark.parametrize("ops", ALL.values(), ids=ALL)
