"""Tiny random Hugging Face checkpoints, so that no test needs a model from the net."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

PAD, EOS = "<|pad|>", "<|end|>"

GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
GRANITE_HYBRID: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.7,
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    **MAMBA,
    "mamba_d_head": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {  # name -> model_type and what sets the family apart
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "smollm": {"model_type": "llama", "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3"},
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,  # low enough that it bends the scores of these weights
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.0, 0.8],
        "altup_num_inputs": 3,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "sliding_window": 7,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": 310,  # other token ids have the inputs of id 0
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "sliding_window": 7,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_moe": {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 7,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "seed_oss": {"model_type": "seed_oss", "attention_out_bias": True},
    "ernie4_5": {"model_type": "ernie4_5"},
    "hunyuan": {"model_type": "hunyuan_v1_dense"},
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.5,
        },
        "max_position_embeddings": 128,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.6},
    "command_r_plus": {"model_type": "cohere", "logit_scale": 0.6, "use_qk_norm": True},
    "starcoder2": {"model_type": "starcoder2"},
    "stablelm": {"model_type": "stablelm", "partial_rotary_factor": 0.5},
    "nemotron": {"model_type": "nemotron"},
    "arcee": {"model_type": "arcee"},
    "apertus": {"model_type": "apertus"},
    "granite_moe": {
        "model_type": "granitemoe",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
    },
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "block_multiple_of": 32,
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        **GATED_DELTA,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.7,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        **GATED_DELTA,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        **GATED_DELTA,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **GATED_DELTA,
        "rope_parameters": {"rope_theta": None},
    },
    "bamba": {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        **MAMBA,
        "mamba_d_head": 16,
        "mamba_proj_bias": True,
    },
    "granite_hybrid": GRANITE_HYBRID | {"num_local_experts": 0},
    "granite_hybrid_moe": GRANITE_HYBRID
    | {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        **MAMBA,
        "num_hidden_layers": 2,
        "mamba_n_heads": 4,
        "mamba_d_ssm": 48,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.8, 1.3],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": [
            *("linear_attention", "mlp", "full_attention", "mlp", "linear_attention"),
        ],
        "num_hidden_layers": 5,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "num_hidden_layers": 5,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 6,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.7,
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
    },
    "glm4": {"model_type": "glm4", "attention_bias": True},
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window_pattern": 2,
        "logit_scale": 0.6,
        "sliding_window": 7,
    },
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window_pattern": 2,
        "sliding_window": 7,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 80,
    },
    "llama4": {
        "model_type": "llama4_text",
        "attention_chunk_size": 7,
        "attn_scale": 0.5,
        "floor_scale": 8,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
        "num_local_experts": 6,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 1.0,  # low enough that it clamps some gates of these weights
    },
}

VISION = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]}
GLM_ROPE = {"rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
GLM_MOE: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
FAMILIES |= {
    "glm4_moe": {"model_type": "glm4_moe", "use_qk_norm": True, "num_mtp_layers": 0} | GLM_MOE
}
# name -> the model_type of the whole, its vision config, and the fields of its text model
MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3_vision": ("gemma3", {"model_type": "siglip_vision_model"} | VISION, FAMILIES["gemma3"]),
    "gemma4_vision": (
        "gemma4",
        {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 1} | VISION,
        FAMILIES["gemma4"],
    ),
    "mistral3": ("mistral3", {"model_type": "pixtral"} | VISION, FAMILIES["mistral"]),
    "ministral3_vision": ("mistral3", {"model_type": "pixtral"} | VISION, FAMILIES["ministral3"]),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        QWEN_VISION,
        {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
        {"model_type": "qwen3_vl_text", "rope_parameters": MROPE | {"mrope_interleaved": True}},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
        {
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": MROPE,
        },
    ),
    "llama4_vision": (
        "llama4",
        VISION
        | {
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
        },
        FAMILIES["llama4"],
    ),
    "qwen3_5_vision": (
        "qwen3_5",
        QWEN_VISION,
        FAMILIES["qwen3_5"] | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3_5_moe_vision": (
        "qwen3_5_moe",
        QWEN_VISION,
        FAMILIES["qwen3_5_moe"] | {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5}},
    ),
    "glm4v": ("glm4v", QWEN_VISION, {"model_type": "glm4v_text"} | GLM_ROPE),
    "glm46v": ("glm46v", QWEN_VISION, {"model_type": "glm4v_text"} | GLM_ROPE),
    "glm4v_moe": (
        "glm4v_moe",
        QWEN_VISION,
        {"model_type": "glm4v_moe_text"} | GLM_ROPE | GLM_MOE,
    ),
}

# Families with layers that have a state
RECURRENT = {
    "bamba",
    "falcon_h1",
    "granite_hybrid",
    "granite_hybrid_moe",
    "nemotron_h",
    "nemotron_h_moe",
    "lfm2",
    "lfm2_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
    "olmo_hybrid",
}

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,  # more than the tokenizer has: ids without text exist in real models too
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # wide enough that greedy output varies from prompt to prompt
}

CORRECTIONS = "e_score_correction_bias", "expert_bias"  # a parameter, or a buffer
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEXT = """def read_lines(path):
    with open(path) as file:
        return [line.rstrip() for line in file]

the cat sat on the mat, and the other cat sat on the other mat
"""


def tiny_checkpoint(
    folder: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kind: Any = None,
    **overrides: Any,
) -> Path:
    """Write a checkpoint with its tokenizer; `overrides` are fields of the transformers config, or
    of the config of its text model.

    `kind` is the auto class whose head the model has; None: the head for text.

    Same arguments, same bytes: two checkpoints that differ in `seed` make a target and a draft.
    """
    whole, vision, own = MULTIMODAL.get(family, ("", {}, FAMILIES.get(family, {})))
    fields = SIZES | own | overrides
    eos, pad = tiny_tokenizer().convert_tokens_to_ids([EOS, PAD])
    fields = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad} | fields
    if whole:
        tied = fields["tie_word_embeddings"]
        parts = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
        config = CONFIG_MAPPING[whole](**parts)
    else:
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    model = random_model(config, seed, kind)
    save_quietly(model if dtype == torch.float32 else model.to(dtype), folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def draft_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """A tiny checkpoint to draft for the tiny checkpoint of `family`, of one layer if its layers
    are alike.
    """
    fields = ({} if family in RECURRENT else {"num_hidden_layers": 1}) | overrides
    if family.startswith(("gemma3n", "gemma4")):  # its layers differ
        fields |= {"layer_types": None, "num_kv_shared_layers": 0}
    if family == "llama4_vision":
        fields |= {"layer_types": None, "no_rope_layers": None}
    if family == "gemma3n":
        fields |= {"activation_sparsity_pattern": None}
    return tiny_checkpoint(folder, family, seed=1, **fields)


def add_token_beyond(folder: Path) -> str:
    """Give the tokenizer a token, and the generation config an end token, beyond the model's
    vocabulary.
    """
    path, size = folder / "tokenizer.json", SIZES["vocab_size"]
    tokenizer = Tokenizer.from_file(str(path))
    tokens = [f"<|{i}|>" for i in range(tokenizer.get_vocab_size(), size + 1)]
    tokenizer.add_tokens(tokens)
    tokenizer.save(str(path))
    ends = [tokenizer.token_to_id(EOS), size, 2**70]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tokens[-1]


def with_another_token(folder: Path) -> Path:
    """The folder, with a tokenizer that has one more token."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<|think|>"])
    tokenizer.save(str(path))
    return folder


def random_model(config: Any, seed: int, kind: Any = None) -> Any:
    """Random weights, norms and biases included: ones and zeros would hide a missing operation."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = (kind or auto_class(config)).from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_norm.weight"):  # some norms have 2
                parameter += 0.2 * torch.randn_like(parameter)
        for name, tensor in model.state_dict().items():  # the others are zeros
            if name.endswith(CORRECTIONS) and not tensor.any():
                tensor += 0.2 * torch.randn_like(tensor)
            if name.endswith("layer_scalar"):  # a buffer of 1
                tensor += 0.2 * torch.randn_like(tensor)
    return model.eval()


def auto_class(config: Any) -> Any:
    """transformers' class for a model, or for a multimodal model that gets only text."""
    is_multimodal = hasattr(config, "vision_config")
    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM


def oracle(folder: Path, **kwargs: Any) -> Any:
    """transformers' model of a checkpoint, in float32."""
    config = AutoConfig.from_pretrained(folder)
    return auto_class(config).from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def save_quietly(model: Any, folder: Path) -> None:
    """Without the progress bar that transformers draws for every file it writes."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 300 tokens: every string has ids, and few ids are whole words."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else a later fork warns
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def main() -> None:
    folder = tiny_checkpoint(Path(sys.argv[1]))
    print(f"{folder}: a tiny model with RANDOM weights; what it generates means nothing")


if __name__ == "__main__":
    main()
