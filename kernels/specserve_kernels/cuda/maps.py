"""Linear maps by cuBLAS, and what a packed weight has to offer."""

from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn.functional import linear


class LinearMap(Protocol):
    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor: ...

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor: ...


class PlainMap(NamedTuple):
    weight: Tensor  # [N, K]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.weight, bias)

    def linear_add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if bias is None:
            return residual.addmm_(x, self.weight.t())
        return residual.add_(linear(x, self.weight, bias))
