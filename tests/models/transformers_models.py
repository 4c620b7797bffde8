"""Tiny checkpoints of architectures, for tests of models that transformers' modules compute."""

from specserve.models.source import open_source
from specserve.models.transformers_loader import load_transformers
from specserve_kernels import cpu
from tests.checkpoints import tiny_checkpoint

WINDOW = {"sliding_window": 7}
CASES = {  # name -> what departs from the tiny checkpoint
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "starcoder2, a window": {"model_type": "starcoder2"} | WINDOW,
    "stablelm": {"model_type": "stablelm"},
    "olmo": {"model_type": "olmo"},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "gpt2, learned positions": {"model_type": "gpt2", "num_key_value_heads": 4},
    "gemma3_text, scaled embeddings": {"model_type": "gemma3_text"} | WINDOW,
    "granite, scaled logits": {"model_type": "granite", "logits_scaling": 3.0},
    "cohere2, layers without rope": {"model_type": "cohere2"} | WINDOW,
    "glm4": {"model_type": "glm4"},
    "mixtral, experts": {"model_type": "mixtral"},
    "gemma2, capped scores": {"model_type": "gemma2", "attn_logit_softcapping": 2.0} | WINDOW,
    "gpt_oss, sinks": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    | WINDOW,
}


def foreign_checkpoint(folder, **overrides):
    """A family is a starting point here: `model_type` says what the checkpoint is."""
    return tiny_checkpoint(folder, "llama", **overrides)


def load_foreign(folder, dtype="fp32", ops=cpu, max_len=None, **kwargs):
    shape = open_source(folder).shape("transformers")
    return load_transformers(folder, shape, dtype, ops, max_len, **kwargs)
