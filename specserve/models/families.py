"""The supported model families: their properties, and the names and defaults of config fields."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from specserve.models.experts import (
    ExpertStyle,
)

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


GEMMA2 = LLAMA | {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
    "vocab_size": 256000,
}


class Norms(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a layer's norms in a checkpoint; None: no norm at this place.

    Norms before attention and MLP normalize their input, norms after them normalize their output
    before it is added to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


NORMS_AFTER = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
NORMS_OF_GEMMA = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class ConfigKeys(msgspec.Struct, frozen=True, kw_only=True):
    """A family's names of fields in config.json; None: it has no such field."""

    activation: str = "hidden_act"
    qkv_bias: str = "attention_bias"
    norm_eps: str = "rms_norm_eps"
    query_scalar: str | None = None  # scores are divided by its square root
    score_scale: str | None = None  # factor of scores; both None: 1 / sqrt(head_dim)
    embedding_scale: str | None = None
    residual_scale: str | None = None  # factor of additions to the residual stream
    logit_scale: str | None = None
    logit_divisor: str | None = None
    score_cap: str | None = None
    logit_cap: str | None = None
    local_theta: str | None = None  # of layers with a window


GEMMA_KEYS = ConfigKeys(
    activation="hidden_activation",
    query_scalar="query_pre_attn_scalar",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a model family. None: the config's field decides."""

    models: str  # known models, for the documentation
    defaults: Mapping[str, Any]
    keys: ConfigKeys = ConfigKeys()
    qkv_bias: bool | None = None  # None: attention_bias, or the name in `keys`
    out_bias: bool | None = None  # None: attention_bias
    mlp_bias: bool | None = None  # None: mlp_bias
    qk_norm: Literal["none", "heads", "width"] = "none"  # norm per head, or over all heads
    has_sinks: bool = False  # attention sinks: one additional score per head, without a value
    norms: Norms = Norms()
    adds_one: bool = False  # norms multiply by 1 + weight
    is_centered: bool = False  # norms are LayerNorm
    is_parallel: bool = False  # attention and MLP read the same input
    scales_by_width: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    fuses_qkv: bool = False  # the checkpoint has queries, keys and values in one map
    fuses_gate_up: bool = False
    rotates_a_share: bool = False  # partial_rotary_factor of each head's dimensions rotates
    rotates_neighbors: bool = False  # pairs are dimensions 2i and 2i + 1, not i and i + D/2
    rope_names: Mapping[str, str] = {}  # the family's names of RoPE types
    # Layers with the sliding_window if layer_types is missing. `all`: all layers. `pattern`: all
    # except every sliding_window_pattern-th. The others need use_sliding_window. `asked`: all
    # layers. `upper`: layers from max_window_layers on. `lower`: every second layer below it.
    # `unrotated`: layers without rotary embedding.
    windowed: Literal["none", "all", "asked", "upper", "lower", "unrotated", "pattern"] = "none"
    # Layers with rotary embedding. `named`: see no_rope_layers. `windowed`: layers with a window.
    # `windowed if any`: layers with a window, or all layers if there is no sliding_window.
    rotated: Literal["named", "windowed", "windowed if any"] = "named"
    experts: ExpertStyle | None = None


# SmolLM and SmolLM2 are LlamaForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family(
        models="Llama 2, 3, 3.1, 3.2 (text), SmolLM, SmolLM2, TinyLlama, many others in this form",
        defaults=LLAMA,
    ),
    "MistralForCausalLM": Family(
        models="Mistral 7B and others of the family without vision or experts",
        defaults=LLAMA
        | {
            "intermediate_size": 14336,
            "max_position_embeddings": 4096 * 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windowed="all",
    ),
    "Qwen2ForCausalLM": Family(
        models="Qwen 2, Qwen 2.5",
        defaults=QWEN2,
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        windowed="upper",
    ),
    "Qwen3ForCausalLM": Family(
        models="Qwen 3, dense",
        defaults=QWEN2 | {"head_dim": 128},
        mlp_bias=False,
        qk_norm="heads",
        windowed="upper",
    ),
    "MiMoForCausalLM": Family(
        models="MiMo 7B",
        defaults=QWEN2,
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        windowed="upper",
    ),
    "SmolLM3ForCausalLM": Family(
        models="SmolLM3",
        defaults=LLAMA
        | {
            "hidden_size": 2048,
            "max_position_embeddings": 32768,
            "no_rope_layer_interval": 4,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        windowed="unrotated",
    ),
    "Phi3ForCausalLM": Family(
        models="Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4 mini",
        defaults=LLAMA
        | {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32064,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        fuses_qkv=True,
        fuses_gate_up=True,
        rotates_a_share=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        windowed="all",
    ),
    "Gemma2ForCausalLM": Family(
        models="Gemma 2",
        defaults=GEMMA2,
        keys=GEMMA_KEYS,
        mlp_bias=False,
        norms=NORMS_OF_GEMMA,
        adds_one=True,
        scales_by_width=True,
        windowed="pattern",
    ),
    "Gemma3ForCausalLM": Family(
        models="Gemma 3 without vision: 270M, 1B",
        defaults=GEMMA2
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131072,
            "rope_local_base_freq": 10_000.0,
            "rope_theta": 1_000_000.0,
            "sliding_window_pattern": 6,
            "vocab_size": 262208,
        },
        keys=msgspec.structs.replace(GEMMA_KEYS, local_theta="rope_local_base_freq"),
        mlp_bias=False,
        qk_norm="heads",
        norms=NORMS_OF_GEMMA,
        adds_one=True,
        scales_by_width=True,
        windowed="pattern",
    ),
    "Olmo2ForCausalLM": Family(
        models="OLMo 2",
        defaults=LLAMA | {"rms_norm_eps": 1e-5, "vocab_size": 50304},
        mlp_bias=False,
        qk_norm="width",
        norms=NORMS_AFTER,
    ),
    "GraniteForCausalLM": Family(
        models="Granite 3, dense",
        defaults=LLAMA
        | {
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
        keys=ConfigKeys(
            score_scale="attention_multiplier",
            embedding_scale="embedding_multiplier",
            residual_scale="residual_multiplier",
            logit_divisor="logits_scaling",
        ),
    ),
    "Glm4ForCausalLM": Family(
        models="GLM-4 of 2025: GLM-4-0414, GLM-Z1",
        defaults=LLAMA
        | {
            "attention_bias": True,
            "head_dim": 128,
            "intermediate_size": 13696,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 0.00000015625,
            "vocab_size": 151552,
        },
        out_bias=False,
        mlp_bias=False,
        norms=Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
        fuses_gate_up=True,
        rotates_a_share=True,
        rotates_neighbors=True,
    ),
    "Cohere2ForCausalLM": Family(
        models="Command R7B, Command A",
        defaults=LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "num_attention_heads": 64,
            "num_hidden_layers": 40,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
            "vocab_size": 256000,
        },
        keys=ConfigKeys(norm_eps="layer_norm_eps", logit_scale="logit_scale"),
        mlp_bias=False,
        norms=Norms(before_mlp=None),
        is_centered=True,
        is_parallel=True,
        rotates_neighbors=True,
        windowed="pattern",
        rotated="windowed",
    ),
    "Exaone4ForCausalLM": Family(
        models="EXAONE 4",
        defaults=LLAMA
        | {
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "vocab_size": 102400,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm="heads",
        norms=NORMS_AFTER,
        windowed="pattern",
        rotated="windowed if any",
    ),
    "Qwen3MoeForCausalLM": Family(
        models="Qwen 3 with experts: 30B-A3B and others",
        defaults=LLAMA
        | {
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 32768,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        mlp_bias=False,
        qk_norm="heads",
        windowed="asked",
        experts=ExpertStyle(width="moe_intermediate_size", number=128),
    ),
    "MixtralForCausalLM": Family(
        models="Mixtral 8x7B and 8x22B",
        defaults=LLAMA
        | {
            "intermediate_size": 14336,
            "max_position_embeddings": 4096 * 32,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windowed="all",
        experts=ExpertStyle(
            module="block_sparse_moe",
            maps=("w1", "w3", "w2"),
            width="intermediate_size",
            number=8,
            normalizes=True,
        ),
    ),
    "OlmoeForCausalLM": Family(
        models="OLMoE",
        defaults=LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "rms_norm_eps": 1e-5,
            "vocab_size": 50304,
        },
        qk_norm="width",
        experts=ExpertStyle(width="intermediate_size", number=64),
    ),
    "Qwen2MoeForCausalLM": Family(
        models="Qwen 1.5 and Qwen 2 with experts: A2.7B, 57B-A14B",
        defaults=LLAMA
        | {
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "mlp_only_layers": None,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        keys=ConfigKeys(qkv_bias="qkv_bias"),
        out_bias=False,
        mlp_bias=False,
        windowed="lower",
        experts=ExpertStyle(
            width="moe_intermediate_size", number=60, shared_width="shared_expert_intermediate_size"
        ),
    ),
    "GptOssForCausalLM": Family(
        models="gpt-oss 20B and 120B, in MXFP4 or bf16",
        defaults=LLAMA
        | {
            "attention_bias": True,
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "vocab_size": 201088,
        },
        has_sinks=True,
        windowed="pattern",
        experts=ExpertStyle(
            router="router",
            width="intermediate_size",
            number=128,
            normalizes=True,  # the softmax covers only the chosen experts
            has_biases=True,
            limit="swiglu_limit",
            is_stacked=True,
        ),
    ),
}
