"""The part of a model that one rank holds: a range of layers, and columns of their linear maps.

A rank holds columns of all experts of a mixture, or whole experts.

Each column is the same sum as without ranks, and no sum is cut. Results therefore have the same
bits for every number of ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.decoder_config import DecoderConfig

PANEL = 32  # columns that the kernels compute together


class ShardHeads(NamedTuple):
    """The attention heads of the ranks of a stage."""

    begins: tuple[int, ...]  # [tensor + 1]  first query head of each rank, and the end
    query: range  # of this rank
    kv: range  # KV heads of this rank
    kv_begins: tuple[int, ...]  # as `begins`, of KV heads; empty if several ranks hold one


class Shard(NamedTuple):
    """The place of a rank: rank = stage * tensor + column."""

    rank: int = 0
    tensor: int = 1  # ranks that share the columns of a layer
    pipeline: int = 1  # stages, each with a range of layers
    has_whole_experts: bool = False  # else columns of all experts

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    @property
    def column(self) -> int:
        return self.rank % self.tensor

    @property
    def stage(self) -> int:
        return self.rank // self.tensor

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this rank. The first stages have no more than the others."""
        first, end = (num_layers * s // self.pipeline for s in (self.stage, self.stage + 1))
        return range(first, end)

    def stage_of(self, layer: int, num_layers: int) -> int:
        """The stage that runs a layer."""
        stages = range(self.pipeline)
        return next(s for s in stages if layer in self.at(s * self.tensor).layers(num_layers))

    def at(self, rank: int) -> "Shard":
        """The place of another rank of the same model."""
        return self._replace(rank=rank)

    def begins(self, num_columns: int) -> tuple[int, ...]:
        """The first column of each rank, and the end."""
        T = self.tensor
        unit = PANEL if num_columns >= T * PANEL else 1
        inner = (num_columns * r // (T * unit) * unit for r in range(1, T))
        return 0, *inner, num_columns

    def columns(self, num_columns: int) -> range:
        """The columns of this rank."""
        begins = self.begins(num_columns)
        return range(begins[self.column], begins[self.column + 1])

    def expert_begins(self, num_experts: int) -> tuple[int, ...]:
        """The first expert of each rank, and the end, if ranks hold whole experts."""
        return tuple(num_experts * r // self.tensor for r in range(self.tensor + 1))

    def experts(self, num_experts: int) -> range:
        """The experts of this rank."""
        if not self.has_whole_experts:
            return range(num_experts)
        begins = self.expert_begins(num_experts)
        return range(begins[self.column], begins[self.column + 1])

    def heads(self, config: DecoderConfig, layer: int = 0) -> ShardHeads:
        """The heads of each rank in a layer. With more ranks than KV heads, some share one."""
        return self.divided(config.num_heads, config.kv_heads(layer).number)

    def divided(self, H: int, Hk: int) -> ShardHeads:
        """Divide H heads, which read Hk KV heads."""
        T = self.tensor
        group, sharing = H // Hk, max(1, T // Hk)
        first: list[int] = []
        if Hk < T:
            begins = tuple(group * r // sharing for r in range(T + 1))
            kv = range(self.column // sharing, self.column // sharing + 1)
        else:
            first = [Hk * r // T for r in range(T + 1)]
            begins = tuple(group * k for k in first)
            kv = range(first[self.column], first[self.column + 1])
        return ShardHeads(
            begins, range(begins[self.column], begins[self.column + 1]), kv, (*first,)
        )

    def qkv_rows(self, config: DecoderConfig, order: Tensor | None) -> Tensor | None:
        """The rows of the fused QKV weight that this rank holds; None: all, in their order.

        order  [(H + 2 Hk) D]  int64  the order of the whole weight's rows; None: as stored
        """
        if self.tensor == 1:
            return order
        heads, D, H, Hk = self.heads(config), config.head_dim, config.num_heads, config.num_kv_heads
        assert not config.family.has_kinds, "tensor ranks need equal layers"
        each = [
            *heads.query,
            *(H + head for head in heads.kv),
            *(H + Hk + head for head in heads.kv),
        ]
        rows = (torch.tensor(each)[:, None] * D + torch.arange(D)).flatten()
        return rows if order is None else order[rows]

    def gate_up_rows(self, config: DecoderConfig) -> Tensor | None:
        """The rows of the MLP's first weight that this rank holds; None: all."""
        return self.rows(config.intermediate_size, 2 if config.family.ungated is None else 1)

    def rows(self, num_columns: int, num_parts: int = 1) -> Tensor | None:
        """The rows of the weight of this rank's columns; None: all. A weight that is fused from
        `num_parts` maps has `num_columns` rows of each.
        """
        if self.tensor == 1:
            return None
        own = torch.tensor(self.columns(num_columns))
        return torch.cat([own + part * num_columns for part in range(num_parts)])

    def check(self, config: DecoderConfig) -> None:
        """Raise ConfigError if the ranks cannot share the model."""
        T, H, Hk = self.tensor, config.num_heads, config.num_kv_heads
        if Hk < T and (T % Hk or T > H):
            raise ConfigError(
                f"parallel.tensor = {T} does not fit {H} attention heads with {Hk} KV heads. Set "
                f"it to at most {Hk}, or to a multiple of {Hk} up to {H}"
            )
        if self.pipeline > config.num_layers:
            raise ConfigError(
                f"parallel.pipeline = {self.pipeline} exceeds the model's {config.num_layers} "
                f"layers. Set it to at most {config.num_layers}"
            )
        is_whole = config.num_shared_layers > 0 or config.per_layer_size > 0
        if T > 1 and config.family.has_kinds:
            remedy = "Run the model in one process" if is_whole else "Use parallel.pipeline instead"
            raise ConfigError(
                f"parallel.tensor = {T}: this model's layers have different heads, so ranks cannot "
                f"share them. {remedy}"
            )
        if self.pipeline > 1 and is_whole:
            raise ConfigError(
                f"parallel.pipeline = {self.pipeline}: this model's layers read KV or embeddings "
                "of other stages, so stages cannot share them. Run the model in one process"
            )
        if self.has_whole_experts:
            self.check_experts(config.mixture.num_experts if config.mixture else 0)
        if Hk < T and config.qk_norm == "width":
            raise ConfigError(
                f"parallel.tensor = {T}: this model normalizes keys of all heads together, so "
                f"each rank needs one of its {Hk} KV heads. Set it to at most {Hk}"
            )

    def check_experts(self, num_experts: int) -> None:
        if num_experts == 0:
            raise ConfigError("parallel.expert: this model has no experts. Remove the setting")
        if num_experts < self.tensor:
            raise ConfigError(
                f"parallel.expert: {self.tensor} ranks cannot each hold one of {num_experts} "
                f"experts. Set parallel.tensor to at most {num_experts}, or remove parallel.expert"
            )


WHOLE = Shard()
