"""Writing a checkpoint as a GGUF file, for llama.cpp: weights and shape, no tokenizer."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.models import parse_config, tensor_shapes
from specserve.models.checkpoint import Checkpoint, unquantized
from specserve.models.decoder_config import DecoderConfig
from specserve.models.gguf.architectures import ARCHITECTURES as OF_GGUF
from specserve.models.gguf.names import TensorPlace, places
from specserve.models.recurrent import GatedDelta, ShortConv

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def write_gguf(folder: Path, file: Path) -> None:
    """Matrices in bfloat16, norms and biases in float32. It takes token ids and gives token ids."""
    package = gguf_package()
    config = parse_config.load_config(folder)
    architecture = architecture_of(folder, config)
    writer = package.GGUFWriter(file, architecture)
    add_shape(writer, config)
    writer.add_tokenizer_model("no_vocab")
    shapes = tensor_shapes.tensor_shapes(config)
    found = places(config, OF_GGUF[architecture])
    checkpoint = Checkpoint(folder)
    checkpoint.check(unquantized(shapes))
    for name, shape in shapes.items():
        kind = gguf_dtype(shape)
        count, dtype = math.prod(shape), package.GGMLQuantizationType[kind]
        itemsize = 2 if kind == "BF16" else 4
        plain = np.dtype(np.float32)  # as a row's bytes are not said in uint8
        writer.add_tensor_info(found[name].name, shape, plain, itemsize * count, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():  # one at a time, so that memory holds one
        tensor = torch.empty(
            shape, dtype={"BF16": torch.bfloat16, "F32": torch.float32}[gguf_dtype(shape)]
        )
        checkpoint.read(name, tensor)
        turned = rotation(found[name], config, tensor).contiguous()
        writer.write_tensor_data(turned.view(torch.uint8).numpy())  # NumPy has no bfloat16
    writer.close()


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise ConfigError("gguf is not installed. Run pip install 'specserve[bench]'.") from e
    return gguf


def gguf_dtype(shape: tuple[int, ...]) -> str:
    return "BF16" if len(shape) == 2 else "F32"


def architecture_of(folder: Path, config: DecoderConfig) -> str:
    """llama.cpp's name of it; ConfigError for what this file cannot write."""
    reasons = {
        f"it is a {config.architecture}": config.architecture not in ARCHITECTURES,
        "it has sliding windows": any(window is not None for window in config.windows),
        "some layers have no rotary embedding": not all(config.rope),
        "its rope_parameters scale positions": config.rope_parameters.kind != "default",
        "its MLP has biases": config.mlp_bias,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(
                f"{folder}: cannot be written as GGUF: {reason}. Measure without --llama."
            )
    return ARCHITECTURES[config.architecture]


def add_shape(writer: Any, config: DecoderConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    kv_heads: int | list[int] = config.num_kv_heads
    if isinstance(config.recurrent, ShortConv):
        writer.add_shortconv_l_cache(config.recurrent.taps)
        attends = map(config.attends, range(config.num_layers))
        kv_heads = [config.num_kv_heads * has for has in attends]
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rope_parameters.rotating(config.head_dim))
    writer.add_rope_freq_base(config.rope_parameters.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(config.recurrent, GatedDelta):
        add_delta(writer, config, config.recurrent)


def add_delta(writer: Any, config: DecoderConfig, delta: GatedDelta) -> None:
    """Sizes of gated DeltaNets, and which layers have one."""
    writer.add_ssm_conv_kernel(delta.taps)
    writer.add_ssm_state_size(delta.k_dim)
    writer.add_ssm_group_count(delta.num_k_heads)
    writer.add_ssm_inner_size(delta.value_width)
    writer.add_ssm_time_step_rank(delta.num_v_heads)
    layers = list(config.recurrent_layers)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", layers)
    if OF_GGUF[writer.arch].has_sections:  # of M-RoPE, which are the same for text
        pairs = config.rope_parameters.rotating(config.head_dim) // 2
        third = pairs // 3
        writer.add_rope_dimension_sections([pairs - 2 * third, third, third, 0])


def rotation(place: TensorPlace, config: DecoderConfig, tensor: Tensor) -> Tensor:
    """llama.cpp's `llama` turns the pairs (2i, 2i + 1) of a head, checkpoints have (i, i + D/2)."""
    if not place.is_turned:
        return tensor
    halves = tensor.view(-1, 2, config.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
