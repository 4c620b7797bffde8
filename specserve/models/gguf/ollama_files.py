"""Files that Ollama wrote: names of metadata and tensors that differ from llama.cpp's."""

import re
from collections.abc import Mapping
from typing import Any

from specserve.models.gguf.header import Header, Tensor

ARCHITECTURE, TOKENIZER = "general.architecture", "tokenizer.ggml.model"
# Beginnings of the names of tensors that are no part of the text model -> what they are part of
OTHER_PARTS = {"a.": "audio", "mm.": "vision", "mtp.": "MTP layers", "v.": "vision"}
GPT_OSS = "gptoss"
NAMES = {GPT_OSS: "gpt-oss"}  # architectures
KEYS = {  # Ollama's keys of an architecture -> llama.cpp's
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope.scaling_beta": "attention.temperature_scale",
}
TENSORS = {  # architecture -> parts of Ollama's names of tensors -> of llama.cpp's
    GPT_OSS: {
        r"\.attn_out\.": ".attn_output.",
        r"\.attn_sinks$": ".attn_sinks.weight",
        r"\.ffn_norm\.": ".post_attention_norm.",
    },
    "lfm2": {r"^output_norm\.": "token_embd_norm."},
    "qwen35": {r"\.ssm_dt$": ".ssm_dt.bias"},
    "qwen35moe": {r"\.ssm_dt$": ".ssm_dt.bias"},
}
GEMMA3 = {  # what Ollama's files of Gemma 3 leave out
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1_000_000.0,
    "rope.freq_base_swa": 10_000.0,
}
STRETCHED = 131_072  # context of those models of Gemma 3 that stretch positions by 8


def as_llama_cpp(header: Header) -> Header:
    """The header with llama.cpp's names. Headers of its own files stay as they are."""
    named = header.metadata.get(ARCHITECTURE)
    if not isinstance(named, str):
        return header
    name, begin = NAMES.get(named, named), f"{named}."
    metadata = dict(header.metadata) | {ARCHITECTURE: name}
    for key in header.metadata:
        if key.startswith(begin):
            inner = key.removeprefix(begin)
            metadata[f"{name}.{KEYS.get(inner, inner)}"] = metadata.pop(key)
    tensors = renamed(header.tensors, TENSORS.get(named, {}))
    if named == GPT_OSS and "blk.0.ffn_gate_exps.weight" in tensors:
        width = tensors["blk.0.ffn_gate_exps.weight"].shape[-2]
        metadata.setdefault(f"{name}.expert_feed_forward_length", width)
    if name == "gemma3" and is_gemma3_of_ollama(header):
        add_defaults_of_gemma3(metadata)
    # Files of Gemma 4 may have the name of SentencePiece, with merges.
    if name == "gemma4" and metadata.get(TOKENIZER) == "llama":
        metadata[TOKENIZER] = "gemma4"
    return header._replace(metadata=metadata, tensors=tensors)


def renamed(tensors: Mapping[str, Tensor], parts: Mapping[str, str]) -> dict[str, Tensor]:
    found = dict(tensors)
    for theirs, ours in parts.items():
        found = {re.sub(theirs, ours, name): tensor for name, tensor in found.items()}
    return found


def is_gemma3_of_ollama(header: Header) -> bool:
    return (
        "gemma3.attention.layer_norm_rms_epsilon" not in header.metadata
        or "gemma3.rope.global.freq_base" in header.metadata
        or any(name.startswith(("v.", "mm.")) for name in header.tensors)
    )


def add_defaults_of_gemma3(metadata: dict[str, Any]) -> None:
    for key, value in GEMMA3.items():
        metadata.setdefault(f"gemma3.{key}", value)
    context = metadata.get("gemma3.context_length")
    if isinstance(context, int) and context >= STRETCHED:
        metadata.setdefault("gemma3.rope.scaling.type", "linear")
        metadata.setdefault("gemma3.rope.scaling.factor", 8.0)


def other_parts(header: Header) -> dict[str, str]:
    """The tensors that are no part of the text model: name -> what they are part of."""
    return {
        name: part
        for name in header.tensors
        for begin, part in OTHER_PARTS.items()
        if name.startswith(begin)
    }
