"""GGUF files of published shapes with random weights, on which engines are timed.

`python -m specserve_bench.gguf_shapes qwen3-0.6b Q4_K_M FILE` writes a file. All blocks are random
bytes with fixed scales, so nothing is quantized. The tokens are the demo's, then unused ones.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import specserve  # noqa: F401, first: it configures the process before torch loads
from specserve.config import DEMO_TARGET
from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.decoder_config import DecoderConfig
from specserve.models.folder import read_json
from specserve.models.gguf.architectures import ARCHITECTURES as OF_GGUF
from specserve.models.gguf.header import BY_NAME
from specserve.models.gguf.names import EMBEDDING, HEAD, files_shapes, places
from specserve.models.gguf.recurrent import as_stored
from specserve_bench.demo.scaled_model import QWEN3, sizes_of
from specserve_bench.demo.scaled_model import SHAPES as DENSE
from specserve_bench.figures.recurrent import SHAPES as RECURRENT
from specserve_bench.peers.gguf_file import ARCHITECTURES, add_shape, gguf_package

POSITIONS = 40_960  # context of all shapes
SHAPES: dict[str, Mapping[str, Any]] = {  # fields of config.json
    "qwen3-0.6b": DENSE["qwen3-0.6b"],
    "qwen3-4b": QWEN3 | sizes_of(2560, 9728, 36, 32, 8, 128, True),
    **RECURRENT,
}
NAMES = ARCHITECTURES | {"Qwen3_5ForCausalLM": "qwen35", "Lfm2ForCausalLM": "lfm2"}
Q4_K_M, Q8_0 = "Q4_K_M", "Q8_0"  # mixtures of block types, by their names in llama.cpp
MIXTURES = Q4_K_M, Q8_0
STD = 0.02  # standard deviation of weights
# Factors of the weights that add to hidden states. Attention and recurrent layers add nothing, so
# the next token depends on the last one only. A repeated prompt then has a repeated response, as
# n-gram lookup needs. The first MLP adds most: no token follows itself, and rounding changes few.
FACTORS = {
    "attn_output": 0.0,
    "ssm_out": 0.0,
    "shortconv.out_proj": 0.0,
    "blk.0.ffn_down": 64.0,
}
FLOATS = ("ssm_conv1d.weight", "shortconv.conv.weight")  # matrices that are never quantized


class BlockScale(NamedTuple):
    """A float16 at a byte of each block: `factor` times a weight's standard deviation."""

    byte: int
    factor: float


# Of random bytes. The second scale of Q4_K multiplies offsets, and makes the mean 0.
SCALES = {
    "Q4_K": (BlockScale(0, 1 / 258), BlockScale(2, 7.5 / 258)),
    "Q6_K": (BlockScale(208, 1 / 1370),),
    "Q8_0": (BlockScale(0, 1 / 74),),
}


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m specserve_bench.gguf_shapes", description=__doc__)
    p.add_argument("shape", choices=SHAPES, help="published model whose shape the file has")
    p.add_argument("mixture", choices=MIXTURES, help="types of the weights")
    p.add_argument("file", type=Path, help="GGUF file to write")
    args = p.parse_args()
    try:
        write_shape(SHAPES[args.shape], args.mixture, args.file)
    except (ConfigError, OSError) as e:
        p.error(str(e))
    return 0


def write_shape(
    fields: Mapping[str, Any], mixture: str, file: Path, factors: Mapping[str, float] = FACTORS
) -> None:
    """Write a file; the same arguments give the same bytes. `factors` are by the ends of names."""
    config = as_stored(parse_config.parse({**fields, "max_position_embeddings": POSITIONS}))
    architecture = NAMES[config.architecture]
    shapes = files_shapes(places(config, OF_GGUF[architecture]))
    package = gguf_package()
    writer = package.GGUFWriter(file, architecture)
    add_shape(writer, config)
    add_tokens(writer, config.vocab_size)
    kinds = block_types(shapes, config, mixture)
    for name, shape in shapes.items():
        kind = BY_NAME[kinds[name]]
        size = math.prod(shape) // kind.width * kind.size
        plain = np.dtype(np.float32)  # as a row's bytes are not said in uint8
        number = package.GGMLQuantizationType[kind.name]
        writer.add_tensor_info(name, shape, plain, size, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    dice = np.random.default_rng(0)
    for name, shape in shapes.items():  # one at a time, so that memory holds one
        if kinds[name] == "F32":
            writer.write_tensor_data(floats(name, shape, dice))
            continue
        ends = (factor for end, factor in factors.items() if name.endswith(f"{end}.weight"))
        writer.write_tensor_data(blocks(kinds[name], shape, STD * next(ends, 1.0), dice))
    writer.close()


def add_tokens(writer: Any, vocab_size: int) -> None:
    """The demo's vocabulary, filled with unused tokens up to the shape's size."""
    known = read_json(DEMO_TARGET / "tokenizer.json")
    texts = {id: text for text, id in known["model"]["vocab"].items()}
    special = {token["id"] for token in known["added_tokens"]}
    if vocab_size < len(texts):
        raise ConfigError(f"A shape needs {len(texts)} tokens or more, not {vocab_size}.")
    kinds = gguf_package().TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([texts.get(id, f"[PAD{id}]") for id in range(vocab_size)])
    writer.add_token_types(
        [
            kinds.CONTROL if id in special else kinds.NORMAL if id in texts else kinds.UNUSED
            for id in range(vocab_size)
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in known["model"]["merges"]])
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)


def block_types(
    shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig, mixture: str
) -> dict[str, str]:
    """The type of each tensor, as llama.cpp's quantizer chooses it for models without experts."""
    values = [name for name in shapes if name.endswith(("attn_v.weight", "attn_qkv.weight"))]
    values.sort(key=layer_of)
    better = {name for i, name in enumerate(values) if has_more_bits(i, len(values))}
    better |= {
        name
        for name in shapes
        if name.endswith("ffn_down.weight") and has_more_bits(layer_of(name), config.num_layers)
    }
    better.add(HEAD if HEAD in shapes else EMBEDDING)

    def kind(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) != 2 or name.endswith(FLOATS):
            return "F32"
        chosen = "Q8_0" if mixture == Q8_0 else "Q6_K" if name in better else "Q4_K"
        if shape[-1] % BY_NAME[chosen].width:
            raise ConfigError(f"{name} has {shape[-1]} columns, which {chosen} does not divide.")
        return chosen

    return {name: kind(name, shape) for name, shape in shapes.items()}


def layer_of(name: str) -> int:
    return int(name.split(".")[1])


def has_more_bits(index: int, count: int) -> bool:
    """Whether Q4_K_M has Q6_K for the values and the last map of the MLP in this layer."""
    begin = count // 8
    return index < begin or index >= 7 * count // 8 or (index - begin) % 3 == 2


def blocks(
    kind: str, shape: tuple[int, ...], std: float, dice: np.random.Generator
) -> NDArray[np.uint8]:
    """The rows of a map: random bytes, with scales for weights of a standard deviation."""
    width, size = BY_NAME[kind].width, BY_NAME[kind].size
    number = math.prod(shape) // width
    words = dice.integers(1 << 64, size=-(-number * size // 8), dtype=np.uint64)
    made = words.view(np.uint8)[: number * size].reshape(number, size)
    if kind == "Q8_0":  # quantizers do not write -128
        codes = made[:, 2:].view(np.int8)
        np.maximum(codes, -127, out=codes)
    for byte, factor in SCALES[kind]:
        made[:, byte : byte + 2] = np.array([std * factor], np.float16).view(np.uint8)
    return made.reshape(shape[0], -1)


def floats(name: str, shape: tuple[int, ...], dice: np.random.Generator) -> NDArray[np.float32]:
    """Norms are 1; states of recurrent layers keep from 0.4 to 0.99 of their value per token."""
    if name.endswith("ssm_a"):
        made = -dice.uniform(0.01, 1, shape)
    elif name.endswith("ssm_dt.bias"):
        made = dice.uniform(-1, 0, shape)
    elif name.endswith(FLOATS):
        made = dice.normal(0, 0.5, shape)
    else:
        made = np.ones(shape)
    return made.astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())
