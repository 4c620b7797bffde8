"""The part of a recurrent layer that one of several tensor ranks holds: some of its heads.

Each rank updates the states of its heads. The ranks gather the results, as those of attention.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models.decoder_config import DecoderConfig
from specserve.models.recurrent import GatedDelta, Mamba2, ShortConv
from specserve.models.shard import Shard, ShardHeads


class RecurrentPart(NamedTuple):
    """One rank's part of a model's recurrent layers.

    own       the layer's sizes with this rank's heads only
    inputs    rows of the map of inputs as stored that this rank holds, in the order of kernels
    columns   the same rows, as numbers in the order of kernels; None: all
    channels  of the convolution; None: all
    heads     of values; a convolution's heads are its channels
    begins    first column of each rank in the results of the ops, and the end
    """

    own: ShortConv | GatedDelta | Mamba2
    inputs: Tensor | None
    columns: Tensor | None
    channels: Tensor | None
    heads: range
    begins: tuple[int, ...]

    def of_heads(self, weight: Tensor, width: int = 1) -> Tensor:
        """This rank's part of a weight with `width` numbers per head."""
        return weight[self.heads.start * width : self.heads.stop * width]

    def of_channels(self, weight: Tensor) -> Tensor:
        return weight if self.channels is None else weight[self.channels.to(weight.device)]


def recurrent_part(config: ShortConv | GatedDelta | Mamba2, shard: Shard) -> RecurrentPart:
    if isinstance(config, ShortConv):
        return of_short_conv(config, shard)
    return of_delta(config, shard) if isinstance(config, GatedDelta) else of_mamba(config, shard)


def of_short_conv(config: ShortConv, shard: Shard) -> RecurrentPart:
    width, own = config.width, shard.columns(config.width)
    rows, begins = shard.rows(width, 3), shard.begins(width)
    channels = None if rows is None else torch.tensor(own)
    part = replace(config, width=len(own))
    return RecurrentPart(part, rows, rows, channels, own, begins)


def of_delta(config: GatedDelta, shard: Shard) -> RecurrentPart:
    K, H, Dk, Dv = config.num_k_heads, config.num_v_heads, config.k_dim, config.v_dim
    heads, order = shard.divided(H, K), config.input_rows()
    q, k, v, z = (0, K * Dk, 2 * K * Dk, config.inner)
    b = z + H * Dv
    of_qkv = [*((at, heads.kv, Dk) for at in (q, k)), (v, heads.query, Dv)]
    of_gates = (z, heads.query, Dv), (b, heads.query, 1), (b + H, heads.query, 1)
    own = replace(config, num_k_heads=len(heads.kv), num_v_heads=len(heads.query))
    return part_of(own, shard, order, of_qkv, of_gates, heads, Dv)


def of_mamba(config: Mamba2, shard: Shard) -> RecurrentPart:
    H, G, P, N = config.num_heads, config.num_groups, config.head_dim, config.state_dim
    heads = shard.divided(H, G)
    b, z = H * P, config.inner
    of_xbc = (0, heads.query, P), (b, heads.kv, N), (b + G * N, heads.kv, N)
    of_gates = (z, heads.query, P), (z + H * P, heads.query, 1)
    own = replace(config, num_heads=len(heads.query), num_groups=len(heads.kv))
    return part_of(own, shard, config.input_rows(), of_xbc, of_gates, heads, P)


Piece = tuple[int, range, int]  # first row, heads, and rows per head


def part_of(
    own: GatedDelta | Mamba2,
    shard: Shard,
    order: list[int] | None,
    of_conv: Iterable[Piece],
    of_gates: Iterable[Piece],
    heads: ShardHeads,
    width: int,
) -> RecurrentPart:
    """The part with these heads, whose results have `width` columns each."""
    stored = None if order is None else torch.tensor(order)
    begins = tuple(width * head for head in heads.begins)
    if shard.tensor == 1:
        return RecurrentPart(own, stored, None, None, heads.query, begins)
    channels = torch.cat([rows_of_heads(*piece) for piece in of_conv])
    columns = torch.cat([channels, *(rows_of_heads(*piece) for piece in of_gates)])
    inputs = columns if stored is None else stored[columns]
    return RecurrentPart(own, inputs, columns, channels, heads.query, begins)


def rows_of_heads(first: int, heads: range, size: int) -> Tensor:
    return torch.arange(first + heads.start * size, first + heads.stop * size)


def check_recurrent(config: DecoderConfig, shard: Shard) -> None:
    """Raise ConfigError if the ranks cannot share a model's recurrent layers."""
    layers, T = config.recurrent, shard.tensor
    if layers is None:
        return
    for stage in range(shard.pipeline):
        own = shard.at(stage * T).layers(config.num_layers)
        if not any(config.has_kv(i) for i in own):
            raise ConfigError(
                f"parallel.pipeline = {shard.pipeline}: layers {own.start} to {own.stop - 1} of "
                "the model have no attention, and each stage needs a layer with attention. Lower it"
            )
    if isinstance(layers, ShortConv):
        return
    is_mamba = isinstance(layers, Mamba2)
    H, G = (
        (layers.num_heads, layers.num_groups)
        if isinstance(layers, Mamba2)
        else (layers.num_v_heads, layers.num_k_heads)
    )
    if isinstance(layers, Mamba2) and layers.has_norm and G < T:
        raise ConfigError(
            f"parallel.tensor = {T}: this model normalizes each of its {G} groups of heads in "
            f"recurrent layers, so each rank needs one. Set it to at most {G}, or use "
            "parallel.pipeline"
        )
    if G < T and (T % G or T > H):
        kind = "groups" if is_mamba else "key heads"
        raise ConfigError(
            f"parallel.tensor = {T} does not fit {H} heads with {G} {kind} in recurrent layers. "
            f"Set it to at most {G}, or to a multiple of {G} up to {H}"
        )
