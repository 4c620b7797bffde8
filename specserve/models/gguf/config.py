"""Converts a GGUF file's metadata to config.json, and llama.cpp's tensor names."""

import struct
from math import prod
from typing import Any

from specserve.models.decoder_config import MAX_HEAD_DIM, MAX_LAYERS
from specserve.models.gguf.header import Header, Tensor

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


def checkpoint_name(name: str) -> str | None:
    """Convert blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; None if unknown."""
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    block, _, rest = module.partition(".")
    number, _, inner = rest.partition(".")
    if block != "blk" or inner not in IN_LAYER:
        return None
    return f"model.layers.{number}.{IN_LAYER[inner]}.{kind}"


def file_name(name: str) -> str:
    """Convert model.layers.3.self_attn.q_proj.weight to blk.3.attn_q.weight."""
    module, _, kind = name.rpartition(".")
    theirs = {ours: theirs for names in (TOP, IN_LAYER) for theirs, ours in names.items()}
    if module in theirs:
        return f"{theirs[module]}.{kind}"
    number, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{theirs[inner]}.{kind}"


def is_turned(architecture: str, name: str) -> bool:
    """Whether the tensor's rows are in another order than in checkpoints. The architecture rotates
    the pairs (2i, 2i + 1) of a head, and checkpoints have (i, i + D/2).
    """
    return architecture in ("llama", "smollm3") and name.split(".")[-2] in ("attn_q", "attn_k")


ARCHITECTURES = {  # Mistral models have the architecture llama
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
NAMES = {  # required key, without the architecture's prefix -> field of config.json
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
WITHOUT_EFFECT: dict[str, Any] = {  # unsupported keys -> the value that has no effect
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attention.sliding_window_pattern": None,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "rope.dimension_sections": None,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}


def read_config(header: Header) -> dict[str, Any]:
    """The fields of a config.json. Raises ValueError for unsupported metadata."""
    architecture = find_architecture(header)
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    for key, neutral in WITHOUT_EFFECT.items():
        if key in values and values[key] != neutral:
            raise ValueError(f"{architecture}.{key} = {values[key]!r} is not supported")
    for key in NAMES:
        if key not in values:
            raise ValueError(f"the key {architecture}.{key} is missing")
    if EMBEDDING not in header.tensors:
        raise ValueError(f"the tensor {EMBEDDING} is missing")
    fields = {NAMES[key]: values[key] for key in NAMES} | {
        "architectures": [ARCHITECTURES[architecture]],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "head_dim": head_size(architecture, values),
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "num_key_value_heads": values.get("attention.head_count_kv"),
        "rope_theta": values.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": HEAD not in header.tensors,
        "vocab_size": header.tensors[EMBEDDING].shape[0],
    }
    return fields | windows(values) | rope(header, values)


def find_architecture(header: Header) -> str:
    named = header.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(
            f"GGUF files of architecture {named!r} are not supported, only {supported}; the "
            "model's Hugging Face folder or hub id may work"
        )
    return named


def head_size(architecture: str, values: dict[str, Any]) -> Any:
    """The size of keys, values and rotated dimensions, which must be equal; None: not given."""
    size = values.get("attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        other = values.get(key, size)
        size = other if size is None else size
        if other != size:
            raise ValueError(
                f"{architecture}.{key} = {other!r} is not supported, only the head size {size!r}"
            )
    return size


def windows(values: dict[str, Any]) -> dict[str, Any]:
    """The config.json fields for a sliding window, which all layers have."""
    window, layers = values.get("attention.sliding_window"), values["block_count"]
    if not window or not isinstance(layers, int) or layers > MAX_LAYERS:
        return {}
    kinds = ["sliding_attention"] * layers
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}


def rope(header: Header, values: dict[str, Any]) -> dict[str, Any]:
    """The config.json field rope_scaling, if there is one."""
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    factors = header.tensors.get(ROPE_FACTORS)
    if factors is not None:
        if kind != "none":
            raise ValueError(f"{ROPE_FACTORS} with rope.scaling.type = {kind!r} is not supported")
        return {"rope_scaling": {"rope_type": "factors", "factors": rope_factors(factors)}}
    if kind == "none":
        return {}
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0))
    others = {name: values[key] for key, name in YARN.items() if key in values}
    if kind == "longrope":  # its factors are in separate tensors
        raise ValueError(f"rope type {kind!r} is not supported in a GGUF file")
    return {"rope_scaling": {"rope_type": kind, "factor": factor} | others}


def rope_factors(tensor: Tensor) -> list[float]:
    """The RoPE factors of a file: the results of llama3's formula, not its parameters."""
    if tensor.type.name != "F32" or prod(tensor.shape) > MAX_HEAD_DIM // 2:
        raise ValueError(f"{ROPE_FACTORS} is not a list of F32, one per pair of dimensions")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{prod(tensor.shape)}f", file.read(tensor.size)))
