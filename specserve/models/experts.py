"""Mixtures of experts, as config.json describes them, and their tensors in a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class ExpertStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's code fixes of its mixtures."""

    module: str = "mlp"  # of a layer
    router: str = "gate"
    maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    width: str  # which field has an expert's width
    number: int  # of experts, where config.json does not say
    normalizes: bool | None = None  # None: norm_topk_prob
    has_biases: bool = False  # router and experts
    limit: str | None = None  # which field has that of clamped gates; None: they are not
    shared_width: str | None = None  # which field has that of the expert of all rows; None: none
    is_stacked: bool = False  # experts share tensors in the checkpoint: tensor_views.py


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """The layers' mixtures of experts. A row has `num_active` of them."""

    num_experts: int
    num_active: int
    width: int  # of an expert's inner rows
    normalizes: bool  # the weights of a row's experts have the sum 1
    layers: tuple[bool, ...]  # which layers have one in place of the MLP
    style: ExpertStyle
    limit: float | None = None  # as of `Ops.experts`
    shared_width: int = 0  # of the inner rows of the expert that all rows have; 0: there is none

    @property
    def router(self) -> str:
        return f"{self.style.module}.{self.style.router}"

    @property
    def shared(self) -> str:
        """The expert that all rows have."""
        return f"{self.style.module}.shared_expert"

    @property
    def shared_gate(self) -> str:
        return f"{self.shared}_gate"

    def gate_up_names(self, expert: int) -> list[str]:
        gate, up, _ = self.style.maps
        return [f"{self.style.module}.experts.{expert}.{name}" for name in (gate, up)]

    def down_name(self, expert: int) -> str:
        return f"{self.style.module}.experts.{expert}.{self.style.maps[2]}"

    @property
    def row_width(self) -> int:
        """The weights that a row is multiplied by, over hidden_size."""
        shared = 3 * self.shared_width + 1 if self.shared_width else 0
        return self.num_experts + 3 * self.num_active * self.width + shared

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """A layer's linear maps: name, output and input width, whether it has a bias."""
        has_bias = self.style.has_biases
        yield self.router, (self.num_experts, hidden, has_bias)
        for expert in range(self.num_experts):
            for name in self.gate_up_names(expert):
                yield name, (self.width, hidden, has_bias)
            yield self.down_name(expert), (hidden, self.width, has_bias)
        if self.shared_width:
            for name in ("gate_proj", "up_proj"):
                yield f"{self.shared}.{name}", (self.shared_width, hidden, False)
            yield f"{self.shared}.down_proj", (hidden, self.shared_width, False)
            yield self.shared_gate, (1, hidden, False)


ROUTERS = (".mlp.gate", ".mlp.router", ".mlp.shared_expert_gate", ".block_sparse_moe.gate")


def is_router(module: str) -> bool:
    """Whether a linear map chooses or weighs experts: it is not rounded, as others then answer."""
    return module.endswith(ROUTERS)


def number_field(fields: Mapping[str, Any]) -> str:
    """Which field has the number of experts."""
    first, second = (fields.get(name) for name in ("num_local_experts", "num_experts"))
    if None not in (first, second) and first != second:
        raise ValueError(
            f"num_local_experts = {first!r:.50} and num_experts = {second!r:.50} mean the same"
        )
    return "num_local_experts" if "num_local_experts" in fields else "num_experts"
