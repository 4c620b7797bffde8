"""The pair as models of transformers: built, begun, written and read."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from specserve_bench.demo.tokenizer import END_OF_TEXT, END_TURN
from specserve_bench.demo.training_config import Size, TrainingConfig


class Norm(nn.RMSNorm):
    """Qwen3's, in one launch each way instead of eight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def build(size: Size, config: TrainingConfig, tokenizer: Any) -> Any:
    torch.manual_seed(config.seed)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (END_TURN, END_OF_TEXT)]
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            num_hidden_layers=size.layers,
            hidden_size=size.hidden,
            intermediate_size=size.mlp,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ids,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=False,
        )
    )
    for name, norm in list(model.named_modules()):
        if name.endswith("norm"):
            model.set_submodule(name, Norm(len(norm.weight), eps=norm.variance_epsilon))
    return model


def begin_as(draft: Any, target: Any) -> None:
    """Set the draft's embedding to the target's, projected on its first principal directions
    (Eckart and Young 1936). Tokens that are close in one embedding are close in the other.
    """
    embedding = draft.get_input_embeddings().weight
    wide = target.get_input_embeddings().weight.detach().float()
    u, s, _ = torch.linalg.svd(wide, full_matrices=False)
    width = min(embedding.shape[1], len(s))
    embedding.data[:, :width] = (u * s)[:, :width]


def export(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face folder, whole or not at all: bf16 weights in shards, tokenizer."""
    half = folder.with_suffix(".part")
    deepcopy(model).to(torch.bfloat16).save_pretrained(half, max_shard_size="14MB")
    tokenizer.save_pretrained(half)
    half.replace(folder)


def read(folder: Path) -> Any:
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)
