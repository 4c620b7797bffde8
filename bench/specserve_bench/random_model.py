"""Models of known shapes with random weights, made on the device of the ops."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from specserve.models import parse_config, tensor_shapes
from specserve.models.decoder import Decoder, DecoderWeights, Experts, Layer
from specserve.models.decoder_config import DecoderConfig
from specserve.models.eagle_head import EagleHead, EagleWeights
from specserve.models.loader import Tables, rotary_tables, table_of
from specserve.models.source import load_eagle_config
from specserve_bench.demo.scaled_model import SHAPES
from specserve_kernels import Codes, Ops, QKNorm

STD = 0.02  # standard deviation of weights
GROUP = 128  # columns of a row of 4-bit codes that share a scale


class RandomWeights:
    """Random weights of a dtype; with `bits`, linear maps are codes. A map of a name is made once,
    so decoders of the same sizes share their maps.
    """

    def __init__(
        self, ops: Ops, dtype: torch.dtype = torch.bfloat16, bits: int | None = None
    ) -> None:
        self.ops, self.dtype, self.bits = ops, dtype, bits
        self.device = ops.place(torch.empty(0)).device
        self.draw = torch.Generator(self.device).manual_seed(0)
        self.made: dict[str, Any] = {}

    def weight(self, *size: int) -> Tensor:
        made = torch.empty(size, dtype=self.dtype, device=self.device)
        return made.normal_(0, STD, generator=self.draw)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def map(self, name: str, rows: int, columns: int, is_gated: bool = False) -> Any:
        return self.once(
            name, lambda: self.ops.prepack(self.weight_or_codes(rows, columns), is_gated)
        )

    def weight_or_codes(self, rows: int, columns: int) -> Tensor | Codes:
        if self.bits is None:
            return self.weight(rows, columns)
        group = GROUP if columns % GROUP == 0 else columns
        q = torch.randint(0, 1 << self.bits, (rows, columns), dtype=torch.uint8, device=self.device)
        scale = torch.full((rows, columns // group), STD / 4, device=self.device)
        return Codes(self.bits, group, q, scale)

    def decoder(self, config: DecoderConfig, max_len: int) -> Decoder:
        tables = rotary_tables(config, max_len, self.ops)
        size = config.vocab_size, config.hidden_size
        embedding = self.once("embedding", lambda: self.weight(*size))
        head = self.once(
            "head", lambda: self.ops.prepack(embedding if config.tied else self.weight(*size))
        )
        layers = tuple(self.layer(config, i, tables) for i in range(config.num_layers))
        weights = DecoderWeights(embedding, layers, self.ones(config.hidden_size), head, self.dtype)
        return Decoder(config, self.ops, tables.all_positions, weights)

    def layer(self, config: DecoderConfig, index: int, tables: Tables) -> Layer:
        hidden, inner, norms = config.hidden_size, config.intermediate_size, config.family.norms
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        is_dense = config.mixture is None

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else self.ones(hidden)

        return Layer(
            window=config.windows[index],
            rotary=table_of(config, index, tables),
            qk_norm=self.qk_norm(config) if config.has_qk_norm else None,
            attention_norm=norm(norms.before_attention),
            qkv=self.map(f"qkv {index}", query + 2 * kv, hidden),
            qkv_bias=None,
            out=self.map(f"out {index}", hidden, query),
            out_bias=None,
            after_attention=norm(norms.after_attention),
            mlp_norm=norm(norms.before_mlp),
            gate_up=self.first_map(config, index) if is_dense else None,
            gate_up_bias=None,
            down=self.map(f"down {index}", hidden, inner) if is_dense else None,
            down_bias=None,
            after_mlp=norm(norms.after_mlp),
            experts=None if is_dense else self.experts(config),
        )

    def first_map(self, config: DecoderConfig, index: int) -> Any:
        """The first map of an MLP with or without a gate."""
        hidden, inner = config.hidden_size, config.intermediate_size
        if config.family.ungated is not None:
            return self.map(f"up {index}", inner, hidden)
        return self.map(f"gate_up {index}", 2 * inner, hidden, True)

    def qk_norm(self, config: DecoderConfig) -> QKNorm:
        q, k = (self.ops.place(torch.ones(shape)) for shape in config.qk_norm_shapes(0))
        return QKNorm(q, k, config.norm_eps, config.qk_norm == "each")

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


def random_decoder(
    shape: str, ops: Ops, max_len: int, bits: int | None = None, **overrides: Any
) -> Decoder:
    """A model of a name in SHAPES, with some fields changed. `bits` quantizes linear layers."""
    from transformers import CONFIG_MAPPING  # slow to import

    fields = SHAPES[shape] | {"max_position_embeddings": max_len} | overrides
    known = CONFIG_MAPPING[fields["model_type"]](**fields).to_dict()
    config = parse_config.parse(known | fields)
    return RandomWeights(ops, bits=bits).decoder(config, max_len)


def random_head(target: Decoder, max_len: int) -> EagleHead:
    """An EAGLE-3 head of one layer for the target."""
    told = target.config
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": min(32_000, told.vocab_size),
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
    made, layers, hidden = RandomWeights(target.ops, target.dtype), config.layers, told.hidden_size
    tables = rotary_tables(layers, max_len, target.ops)
    body = DecoderWeights(
        target.weights.embedding,
        (made.layer(layers, 0, tables),),
        made.ones(hidden),
        made.map("head", config.draft_vocab_size, hidden),
        target.dtype,
    )
    rows = (layers.num_heads + 2 * layers.num_kv_heads) * layers.head_dim
    own = EagleWeights(
        fuse=made.map("fuse", hidden, config.width),
        aux_norm=None,
        aux_layer_norms=[],
        feature_norm=None,
        embedding_norm=made.ones(hidden),
        embedding_qkv=made.map("embedding_qkv", rows, hidden),
        targets=torch.arange(config.draft_vocab_size, device=made.device),
    )
    return EagleHead(config, Decoder(layers, target.ops, tables.all_positions, body), own)


def streamed_bytes(decoder: Decoder) -> int:
    """Bytes of the weights that a step of few rows reads: all but an untied embedding."""
    shapes = tensor_shapes.tensor_shapes(decoder.config)
    numbers = sum(map(math.prod, shapes.values()))
    if not decoder.config.tied:
        numbers -= math.prod(shapes["model.embed_tokens.weight"])
    return numbers * decoder.dtype.itemsize
