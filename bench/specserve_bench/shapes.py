"""Random checkpoints in the shapes of known models: their cost is real, their words are not."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from specserve.models import families

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}


def random_checkpoint(shape: str, folder: Path) -> Path:
    """Weights of the shape, without a tokenizer; made once."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    fields = SHAPES[shape]
    config = families.parse(CONFIG_MAPPING[fields["model_type"]](**fields).to_dict() | fields)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, size in families.tensor_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
