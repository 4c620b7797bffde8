"""The layouts of a model's KV and recurrent states in one rank."""

import torch

from specserve.memory.arena import KVLayout, StateLayout
from specserve.models.decoder_config import DecoderConfig
from specserve.models.recurrent import Mamba2, ShortConv
from specserve.models.recurrent_shard import recurrent_part
from specserve.models.shard import Shard


def kv_layouts(config: DecoderConfig, shard: Shard, dtype: torch.dtype) -> tuple[KVLayout, ...]:
    """The layout of a shard's KV of each layer that has KV."""
    layers, own = filter(config.has_kv, shard.layers(config.num_layers)), []
    for i in layers:
        own.append(KVLayout(len(shard.heads(config, i).kv), config.kv_heads(i).size, dtype))
    return tuple(own)


def state_layouts(
    config: DecoderConfig, shard: Shard, dtype: torch.dtype
) -> tuple[StateLayout, ...]:
    """The layout of the states of a shard's recurrent ops, in the order of a forward. `dtype` is
    that of the activations.
    """
    if config.recurrent is None:
        return ()
    number = sum(map(config.is_recurrent, shard.layers(config.num_layers)))
    own = recurrent_part(config.recurrent, shard).own
    width = own.width if isinstance(own, ShortConv) else own.inner
    conv = StateLayout(1, (own.taps - 1, width), dtype, width)
    if isinstance(own, ShortConv):
        return (conv,) * number
    if isinstance(own, Mamba2):
        H, G = own.num_heads, own.num_groups
        size, kept = (own.state_dim, own.head_dim), G * own.state_dim + H * (own.head_dim + 1)
        return (conv, StateLayout(H, size, torch.float32, kept, G)) * number
    Hv, shape = own.num_v_heads, (own.k_dim, own.v_dim)
    kept = Hv * (own.k_dim + own.v_dim + 2)
    return (conv, StateLayout(Hv, shape, torch.float32, kept)) * number
