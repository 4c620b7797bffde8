"""Models of known shapes with random weights, made on the device."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from specserve.models import decoder_config, rotary
from specserve.models.decoder import Decoder, DecoderWeights, Experts, Layer
from specserve.models.decoder_config import DecoderConfig
from specserve.models.eagle_head import EagleHead, EagleWeights
from specserve.models.source import load_eagle_config
from specserve_bench.demo.scaled_model import SHAPES
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import Codes, Ops, QKNorm, Rotary

STD = 0.02
GROUP = 128  # columns of a row of 4-bit codes that share a scale


class Maker:
    """Random weights of a dtype on the device of the ops; linear maps of 4-bit codes, if asked."""

    def __init__(self, ops: Ops, dtype: torch.dtype, bits: int | None = None) -> None:
        self.ops, self.dtype, self.bits = ops, dtype, bits
        self.device = ops.place(torch.empty(0)).device

    def weight(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(0, STD)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device)

    def map(self, rows: int, columns: int, is_gated: bool = False) -> Any:
        return self.ops.prepack(self.weight_or_codes(rows, columns), is_gated)

    def weight_or_codes(self, rows: int, columns: int) -> Tensor | Codes:
        if self.bits is None:
            return self.weight(rows, columns)
        group = GROUP if columns % GROUP == 0 else columns
        q = torch.randint(0, 1 << self.bits, (rows, columns), dtype=torch.uint8, device=self.device)
        scale = torch.full((rows, columns // group), STD / 4, device=self.device)
        return Codes(self.bits, group, q, scale)

    def layer(self, config: DecoderConfig, index: int, table: Rotary) -> Layer:
        hidden, D = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        norm = QKNorm(self.ones(D), self.ones(D), config.norm_eps)
        mlp: Callable[..., Any] = self.map
        has_mlp, inner = config.mixture is None, config.intermediate_size
        return Layer(
            window=config.windows[index],
            rotary=table,
            qk_norm=norm if config.qk_norm_widths else None,
            attention_norm=self.ones(hidden),
            qkv=self.map((heads + 2 * kv_heads) * D, hidden),
            qkv_bias=None,
            out=self.map(hidden, heads * D),
            out_bias=None,
            after_attention=None,
            mlp_norm=self.ones(hidden),
            gate_up=mlp(2 * inner, hidden, is_gated=True) if has_mlp else None,
            gate_up_bias=None,
            down=mlp(hidden, inner) if has_mlp else None,
            down_bias=None,
            experts=None if has_mlp else self.experts(config),
        )

    def experts(self, config: DecoderConfig) -> Experts:
        mixture, hidden = config.mixture, config.hidden_size
        assert mixture is not None, "a shape without experts"
        pack, n, width = self.ops.prepack_experts, mixture.num_experts, mixture.width
        return Experts(
            router=self.ops.prepack(self.weight(n, hidden)),
            gate_up=pack((self.weight(2 * width, hidden) for _ in range(n)), True),
            down=pack(self.weight(hidden, width) for _ in range(n)),
            num_active=mixture.num_active,
            normalizes=mixture.normalizes,
        )

    def table(self, config: DecoderConfig, max_len: int) -> Rotary:
        tables = rotary.tables(config.rope_parameters, config.head_dim, max_len + TREE_SLOTS)
        return Rotary(*map(self.ops.place, tables))


def random_decoder(
    shape: str,
    ops: Ops,
    max_len: int,
    dtype: torch.dtype = torch.bfloat16,
    bits: int | None = None,
    **overrides: Any,
) -> Decoder:
    """Of a name in SHAPES, with fields that differ. With `bits` its layers' maps are codes."""
    fields = SHAPES[shape] | {"max_position_embeddings": max_len} | overrides
    known = CONFIG_MAPPING[fields["model_type"]](**fields).to_dict()
    config, maker = decoder_config.parse(known | fields), Maker(ops, dtype, bits)
    table = maker.table(config, max_len)
    embedding = maker.weight(config.vocab_size, config.hidden_size)
    layers = tuple(maker.layer(config, i, table) for i in range(config.num_layers))
    own = embedding if config.tied else maker.weight(config.vocab_size, config.hidden_size)
    norm = maker.ones(config.hidden_size)
    return Decoder(
        config, ops, table, DecoderWeights(embedding, layers, norm, ops.prepack(own), dtype)
    )


def random_head(target: Decoder, max_len: int, draft_vocab_size: int = 32_000) -> EagleHead:
    """An EAGLE-3 head of one layer for the target."""
    told = target.config
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": min(draft_vocab_size, told.vocab_size),
        "eagle_aux_hidden_state_layer_ids": sorted({0, told.num_layers // 2, told.num_layers - 1}),
        "head_dim": told.head_dim,
        "hidden_act": "silu",
        "hidden_size": told.hidden_size,
        "intermediate_size": told.intermediate_size,
        "max_position_embeddings": max_len,
        "num_attention_heads": told.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": told.num_kv_heads,
        "rms_norm_eps": told.norm_eps,
        "vocab_size": told.vocab_size,
    }
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        config = load_eagle_config(Path(folder))
    maker, layers, hidden = Maker(target.ops, target.dtype), config.layers, told.hidden_size
    table = maker.table(layers, max_len)
    body = DecoderWeights(
        target.weights.embedding,
        (maker.layer(layers, 0, table),),
        maker.ones(hidden),
        maker.map(config.draft_vocab_size, hidden),
        target.dtype,
    )
    rows = (layers.num_heads + 2 * layers.num_kv_heads) * layers.head_dim
    own = EagleWeights(
        fuse=maker.map(hidden, config.width),
        taps_norm=None,
        tap_norms=[],
        feature_norm=None,
        embedding_norm=maker.ones(hidden),
        embedding_qkv=maker.map(rows, hidden),
        targets=torch.arange(config.draft_vocab_size, device=maker.device),
    )
    return EagleHead(config, Decoder(layers, target.ops, table, body), own)


def streamed_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that a step of few rows reads: all but an untied embedding."""
    shapes = decoder_config.tensor_shapes(decoder.config)
    numbers = sum(map(math.prod, shapes.values()))
    if not decoder.config.tied:
        numbers -= math.prod(shapes["model.embed_tokens.weight"])
    return numbers * decoder.dtype.itemsize
