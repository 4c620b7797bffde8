"""Defaults of config fields that several families share, and their names of fields and norms."""

from typing import Any

from specserve.models.family import ConfigKeys, Norms

LLAMA: dict[str, Any] = {  # defaults of missing fields
    "attention_bias": False,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": None,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "no_rope_layers": None,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,  # num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2 = LLAMA | {
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GRANITE = LLAMA | {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
COHERE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
}
UNGATED = "mlp.up_proj", "mlp.down_proj"
NORMS_AFTER = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
GRANITE_KEYS = ConfigKeys(
    score_scale="attention_multiplier",
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    logit_divisor="logits_scaling",
)
