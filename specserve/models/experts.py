"""Mixtures of experts, as config.json describes them, and their tensors in a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec


class ExpertStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's code fixes of its mixtures."""

    module: str  # of a layer
    maps: tuple[str, str, str]  # of an expert: gate, up and down
    width: str  # which field has an expert's width
    number: int  # of experts, where config.json does not say
    normalizes: bool | None = None  # None: norm_topk_prob


QWEN3_STYLE = ExpertStyle(
    module="mlp",
    maps=("gate_proj", "up_proj", "down_proj"),
    width="moe_intermediate_size",
    number=128,
)
OLMOE_STYLE = msgspec.structs.replace(QWEN3_STYLE, width="intermediate_size", number=64)
MIXTRAL_STYLE = ExpertStyle(
    module="block_sparse_moe",
    maps=("w1", "w3", "w2"),
    width="intermediate_size",
    number=8,
    normalizes=True,
)


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """The layers' mixtures of experts. A row has `num_active` of them."""

    num_experts: int
    num_active: int
    width: int  # of an expert's inner rows
    normalizes: bool  # the weights of a row's experts have the sum 1
    layers: tuple[bool, ...]  # which layers have one in place of the MLP
    module: str  # as of ExpertStyle
    maps: tuple[str, str, str]

    @property
    def router(self) -> str:
        return f"{self.module}.gate"

    def gate_up_names(self, expert: int) -> list[str]:
        gate, up, _ = self.maps
        return [f"{self.module}.experts.{expert}.{name}" for name in (gate, up)]

    def down_name(self, expert: int) -> str:
        return f"{self.module}.experts.{expert}.{self.maps[2]}"

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
        """A layer's linear maps: name, output and input width."""
        yield self.router, (self.num_experts, hidden)
        for expert in range(self.num_experts):
            for name in self.gate_up_names(expert):
                yield name, (self.width, hidden)
            yield self.down_name(expert), (hidden, self.width)


def is_router(module: str) -> bool:
    """Whether a linear map chooses experts: it is not rounded, as others then answer."""
    return module.endswith((".mlp.gate", ".block_sparse_moe.gate"))


def number_field(fields: Mapping[str, Any]) -> str:
    """Which field has the number of experts."""
    return "num_local_experts" if "num_local_experts" in fields else "num_experts"


def sparse_layers(num_layers: int, every: int, without: Sequence[Any]) -> tuple[bool, ...]:
    """Which layers have experts: every so manyth, but for some."""
    return tuple((i + 1) % every == 0 and i not in without for i in range(num_layers))
