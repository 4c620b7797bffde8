"""A model of a known shape with random weights, made on the device."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from specserve.models import decoder_config, rotary
from specserve.models.decoder import Decoder, Layer, Weights
from specserve.models.shapes import SHAPES
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import Ops, QKNorm, Rotary

STD = 0.02


def random_decoder(
    shape: str, ops: Ops, max_len: int, dtype: torch.dtype = torch.bfloat16, **overrides: Any
) -> Decoder:
    fields = SHAPES[shape] | {"max_position_embeddings": max_len} | overrides
    config = decoder_config.parse(CONFIG_MAPPING[fields["model_type"]](**fields).to_dict() | fields)
    device = ops.place(torch.empty(0)).device

    def weight(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, STD)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=device)

    hidden, D = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    tables = rotary.tables(config.rope_parameters, D, max_len + TREE_SLOTS)
    table = Rotary(*map(ops.place, tables))
    embedding = weight(config.vocab_size, hidden)
    layers = tuple(
        Layer(
            window=config.windows[i],
            rotary=table,
            qk_norm=QKNorm(ones(D), ones(D), config.norm_eps) if config.qk_norm_widths else None,
            attention_norm=ones(hidden),
            qkv=ops.prepack(weight((heads + 2 * kv_heads) * D, hidden)),
            qkv_bias=None,
            out=ops.prepack(weight(hidden, heads * D)),
            out_bias=None,
            after_attention=None,
            mlp_norm=ones(hidden),
            gate_up=ops.prepack(weight(2 * config.intermediate_size, hidden), is_gated=True),
            gate_up_bias=None,
            down=ops.prepack(weight(hidden, config.intermediate_size)),
            down_bias=None,
        )
        for i in range(config.num_layers)
    )
    head = ops.prepack(embedding if config.tied else weight(config.vocab_size, hidden))
    return Decoder(config, ops, table, Weights(embedding, layers, ones(hidden), head, dtype))


def streamed_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that a step of few rows reads: all but an untied embedding."""
    shapes = decoder_config.tensor_shapes(decoder.config)
    numbers = sum(map(math.prod, shapes.values()))
    if not decoder.config.tied:
        numbers -= math.prod(shapes["model.embed_tokens.weight"])
    return numbers * decoder.dtype.itemsize
