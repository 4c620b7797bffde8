"""Small models with recurrent layers and random weights, which share the demo's tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specserve.config import DEMO_TARGET
from specserve.models import decoder_config

SIZES: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "LFM2": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "Qwen3-Next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "Granite 4 H": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "attention_multiplier": 0.125,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_n_heads": 16,
        "mamba_d_conv": 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
    },
}


def hybrid_checkpoint(name: str, folder: Path) -> Path:
    """Write the checkpoint of a model of HYBRIDS."""
    demo = json.loads((DEMO_TARGET / "config.json").read_text())
    ids = {key: value for key, value in demo.items() if key.endswith("_token_id")}
    fields = SIZES | {"vocab_size": demo["vocab_size"]} | ids | HYBRIDS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    for path in DEMO_TARGET.iterdir():
        if path.name != "config.json" and not path.name.startswith("model"):
            shutil.copy(path, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(size, generator=generator) * (0.1 if len(size) > 1 else 0.25)
        for name, size in decoder_config.tensor_shapes(decoder_config.load_config(folder)).items()
    }
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.5  # norms, decays and time steps
    save_file(tensors, folder / "model.safetensors")
    return folder
