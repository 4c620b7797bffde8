"""Linear maps by cuBLAS, and what a packed weight has to offer."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear


class LinearMap(Protocol):
    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor: ...

    def floats(self, x: Tensor) -> Tensor:
        """The sums [R, N] as float32, not rounded to the dtype of x."""
        ...


class PlainMap(NamedTuple):
    weight: Tensor  # [N, K]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.weight, bias)

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if bias is None:
            return residual.addmm_(x, self.weight.t())
        return residual.add_(linear(x, self.weight, bias))

    def floats(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return linear(x.float(), self.weight.float())  # the CPU's mm has no other dtype of its sums
