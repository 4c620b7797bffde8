"""Mixtures of experts: their description in config.json, and their tensors in a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class StackedNames(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors that all experts of a layer share: their names within the module, and their form.

    `gate_up` is [E, 2 F, hidden], and `down` [E, hidden, F].
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool | None = True  # the last two dimensions are swapped; None: see the shape
    has_pairs: bool = False  # rows of gate and up alternate; else gate has the first half


class ExpertStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a family's mixtures of experts."""

    module: str = "mlp"  # of a layer
    router: str = "gate"
    maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    width: str  # field with an expert's width
    number: int  # default number of experts
    normalizes: bool | None = None  # None: norm_topk_prob
    has_biases: bool = False  # router and experts
    limit: str | None = None  # field with the limit of clamped gates; None: not clamped
    shared_width: str | None = None  # field with the shared expert's width; None: no such expert
    stacked: StackedNames | None = None  # None: each expert has its own tensors


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """A model's mixtures of experts."""

    num_experts: int
    num_active: int  # experts per row
    width: int  # intermediate size of an expert
    normalizes: bool  # the weights of a row's experts sum to 1
    layers: tuple[bool, ...]  # by layer: whether experts replace the MLP
    style: ExpertStyle
    limit: float | None = None  # `limit` of `Ops.experts`
    shared_width: int = 0  # intermediate size of the shared expert; 0: no such expert

    @property
    def router(self) -> str:
        return f"{self.style.module}.{self.style.router}"

    @property
    def shared(self) -> str:
        """The module of the shared expert, which all rows use."""
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
        """The weights that multiply a row, divided by hidden_size."""
        shared = 3 * self.shared_width + 1 if self.shared_width else 0
        return self.num_experts + 3 * self.num_active * self.width + shared

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        """Yield a layer's linear maps: name, (output width, input width, whether it has a bias)."""
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


ROUTERS = (
    *(".mlp.gate", ".mlp.router", ".mlp.shared_expert_gate"),
    *(".block_sparse_moe.gate", ".block_sparse_moe.router.layer"),
)


def is_router(module: str) -> bool:
    """Whether a linear map selects or weights experts. These maps are not quantized, because this
    would change the selection.
    """
    return module.endswith(ROUTERS)


def number_field(fields: Mapping[str, Any]) -> str:
    """The name of the field with the number of experts."""
    first, second = (fields.get(name) for name in ("num_local_experts", "num_experts"))
    if None not in (first, second) and first != second:
        raise ValueError(
            f"num_local_experts = {first!r:.50} and num_experts = {second!r:.50} must be equal"
        )
    return "num_local_experts" if "num_local_experts" in fields else "num_experts"
