"""Steps of every dense family beside Llama's, with the same linear maps: what their flags cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specserve.models import decoder_config
from specserve.models.decoder import Decoder, DecoderWeights, Layer
from specserve.models.decoder_config import DecoderConfig
from specserve.models.families import FAMILIES
from specserve.models.loader import Tables, rotary_tables, table_of
from specserve_bench.steps import Size, Steps, beside, words
from specserve_kernels import Ops, QKNorm, load

ROUNDS = 7
BASE = "LlamaForCausalLM"
DENSE = [name for name, family in FAMILIES.items() if family.experts is None]
SIZES = (Size("1 row at 512", (512,), 1), Size("8 rows at 512", (512,), 8))
SHAPE: dict[str, Any] = {  # Qwen3 0.6B's
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
# Of windows and biases: all that a family may have, but no bytes that others lack.
FIELDS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "sliding_window": 256}
SMALL = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "vocab_size": 320}
TINY = SHAPE | SMALL | {"num_hidden_layers": 2}


@torch.inference_mode()
def family_figures(
    shape: Mapping[str, Any] = SHAPE, sizes: Sequence[Size] = SIZES, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Milliseconds by family and size, over interleaved rounds, and their ratio to Llama's."""
    ops = load(torch.device("cpu"))
    maps = RandomMaps(parsed(BASE, shape), ops)
    steps = {name: Steps(maps.decoder(parsed(name, shape)), name, sizes) for name in DENSE}
    figures = beside(steps, sizes, rounds, BASE, "over_llama")
    result = {"shape": dict(shape), "rounds": rounds, "steps": figures}
    print(table(result))
    return result


def parsed(architecture: str, shape: Mapping[str, Any]) -> DecoderConfig:
    return decoder_config.parse({"architectures": [architecture], **FIELDS, **shape})


class RandomMaps:
    """Packed linear maps of random weights, which the decoders of all families share."""

    def __init__(self, shape: DecoderConfig, ops: Ops) -> None:
        self.ops, self.draw = ops, torch.Generator().manual_seed(0)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.embedding = self.weight(shape.vocab_size, hidden)
        self.head = ops.prepack(self.embedding)
        self.layers = [
            (
                ops.prepack(self.weight(query + 2 * kv, hidden)),
                ops.prepack(self.weight(hidden, query)),
                ops.prepack(self.weight(2 * inner, hidden), is_gated=True),
                ops.prepack(self.weight(hidden, inner)),
            )
            for _ in range(shape.num_layers)
        ]

    def weight(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=self.draw)

    def decoder(self, config: DecoderConfig) -> Decoder:
        tables = rotary_tables(config, config.max_positions, self.ops)
        layers = tuple(self.layer(config, i, tables) for i in range(config.num_layers))
        norm = torch.ones(config.hidden_size)
        weights = DecoderWeights(self.embedding, layers, norm, self.head, torch.bfloat16)
        return Decoder(config, self.ops, tables.all_positions, weights)

    def layer(self, config: DecoderConfig, index: int, tables: Tables) -> Layer:
        qkv, out, gate_up, down = self.layers[index]
        norms = config.family.norms

        def norm(name: str | None) -> Tensor | None:
            return None if name is None else torch.ones(config.hidden_size)

        return Layer(
            window=config.windows[index],
            rotary=table_of(config, index, tables),
            qk_norm=qk_norm(config),
            attention_norm=norm(norms.before_attention),
            qkv=qkv,
            qkv_bias=None,
            out=out,
            out_bias=None,
            after_attention=norm(norms.after_attention),
            mlp_norm=norm(norms.before_mlp),
            gate_up=gate_up,
            gate_up_bias=None,
            down=down,
            down_bias=None,
            after_mlp=norm(norms.after_mlp),
        )


def qk_norm(config: DecoderConfig) -> QKNorm | None:
    if config.qk_norm_widths is None:
        return None
    q, k = map(torch.ones, config.qk_norm_widths)
    return QKNorm(q, k, config.norm_eps)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: each family's step, and its ratio to Llama's."""
    steps = result["steps"]
    lines = [
        "| family | " + " | ".join(f"{s['step']}, ms | / Llama" for s in steps) + " |",
        "|" + " --- |" * (1 + 2 * len(steps)),
    ]
    for name in DENSE:
        cells = [f"{s[name]['ms']['median']:.1f} | {words(s[name]['over_llama'])}" for s in steps]
        lines.append(f"| {name.removesuffix('ForCausalLM')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
