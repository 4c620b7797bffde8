"""The supported model families: their properties, and the defaults of config fields."""

from typing import Any

from msgspec.structs import replace

from specserve.models.experts import ExpertStyle, StackedNames
from specserve.models.family import ConfigKeys, Family, Multimodal, Norms

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
MINISTRAL3 = LLAMA | {
    "head_dim": 128,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "vocab_size": 131072,
}
UNGATED = "mlp.up_proj", "mlp.down_proj"
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
GEMMA_KEYS = ConfigKeys(
    activation="hidden_activation",
    query_scalar="query_pre_attn_scalar",
    score_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)

GRANITE_KEYS = ConfigKeys(
    score_scale="attention_multiplier",
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    logit_divisor="logits_scaling",
)

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
        keys=replace(GEMMA_KEYS, local_theta="rope_local_base_freq"),
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
    "Olmo3ForCausalLM": Family(
        models="OLMo 3",
        defaults=LLAMA
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "vocab_size": 50304,
        },
        keys=ConfigKeys(local_theta="rope_theta"),  # scaling is only for layers without a window
        mlp_bias=False,
        qk_norm="width",
        norms=NORMS_AFTER,
        windowed="pattern",
    ),
    "SeedOssForCausalLM": Family(
        models="Seed-OSS",
        defaults=LLAMA
        | {
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "intermediate_size": 27648,
            "max_position_embeddings": 524288,
            "num_attention_heads": 80,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "vocab_size": 155136,
        },
        keys=ConfigKeys(out_bias="attention_out_bias"),
    ),
    "Ernie4_5ForCausalLM": Family(
        models="ERNIE 4.5, dense",
        defaults=LLAMA
        | {
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 131072,
            "num_attention_heads": 16,
            "num_hidden_layers": 18,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "vocab_size": 103424,
        },
        keys=ConfigKeys(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
        rotates_neighbors=True,
    ),
    "GraniteForCausalLM": Family(models="Granite 3, dense", defaults=GRANITE, keys=GRANITE_KEYS),
    "GraniteMoeForCausalLM": Family(
        models="Granite 3 with experts: 1B-A400M, 3B-A800M",
        defaults=GRANITE | {"num_experts_per_tok": 2},
        keys=GRANITE_KEYS,
        experts=ExpertStyle(
            module="block_sparse_moe",
            router="router.layer",
            width="intermediate_size",
            number=8,
            normalizes=True,  # the softmax covers only the chosen experts
            stacked=StackedNames(
                gate_up="input_linear.weight", down="output_linear.weight", is_transposed=False
            ),
        ),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        models="Hunyuan, dense: 0.5B to 7B",
        defaults=LLAMA | {"rms_norm_eps": 1e-5, "vocab_size": 290943},
        mlp_bias=False,
        qk_norm="heads",
        qk_norm_names=("query_layernorm", "key_layernorm"),
        norms_after_rope=True,
        rope_names={"dynamic": "ntk_alpha"},  # the frequencies depend on no length
    ),
    "Ministral3ForCausalLM": Family(
        models="Ministral 3 without vision",
        defaults=MINISTRAL3,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windowed="all",
    ),
    "CohereForCausalLM": Family(
        models="Command R, Command R+",
        defaults=COHERE | {"rope_theta": 500_000.0, "use_qk_norm": False},
        keys=ConfigKeys(
            norm_eps="layer_norm_eps", logit_scale="logit_scale", qk_norm="use_qk_norm"
        ),
        mlp_bias=False,
        qk_norm="each",
        norms=Norms(before_mlp=None),
        is_centered=True,
        is_parallel=True,
        rotates_neighbors=True,
    ),
    "Starcoder2ForCausalLM": Family(
        models="StarCoder2",
        defaults=LLAMA
        | {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_bias": True,
            "vocab_size": 49152,
        },
        keys=ConfigKeys(
            qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", norm_eps="norm_epsilon"
        ),
        is_centered=True,
        norm_bias=True,
        ungated=("mlp.c_fc", "mlp.c_proj"),
        windowed="all",
    ),
    "StableLmForCausalLM": Family(
        models="StableLM 2 1.6B, StableLM 3B, StableCode",
        defaults=LLAMA
        | {
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "use_qkv_bias": False,
            "vocab_size": 50304,
        },
        keys=ConfigKeys(qkv_bias="use_qkv_bias", norm_eps="layer_norm_eps"),
        out_bias=False,
        mlp_bias=False,
        is_centered=True,
        norm_bias=True,
        rotates_a_share=True,
        refused=("qk_layernorm", "use_parallel_residual"),
    ),
    "NemotronForCausalLM": Family(
        models="Nemotron 4, Minitron",
        defaults=LLAMA
        | {
            "hidden_act": "relu2",
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "num_attention_heads": 48,
            "partial_rotary_factor": 0.5,
            "vocab_size": 256000,
        },
        keys=ConfigKeys(norm_eps="norm_eps"),
        adds_one=True,
        is_centered=True,
        norm_bias=True,
        ungated=UNGATED,
        rotates_a_share=True,
    ),
    "ArceeForCausalLM": Family(
        models="Arcee AFM 4.5B",
        defaults=LLAMA
        | {
            "hidden_act": "relu2",
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        ungated=UNGATED,
    ),
    "ApertusForCausalLM": Family(
        models="Apertus",
        defaults=LLAMA
        | {
            "hidden_act": "xielu",
            "intermediate_size": 14336,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12_000_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "rope_theta": 12_000_000.0,
            "vocab_size": 131072,
        },
        mlp_bias=False,
        qk_norm="heads",
        norms=Norms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
        ungated=UNGATED,
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
        defaults=COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
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
    "Lfm2ForCausalLM": Family(
        models="LFM2 and LFM2.5, dense: 350M, 700M, 1.2B, 2.6B",
        defaults=LLAMA
        | {
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "conv_bias": False,
            "full_attn_idxs": None,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "vocab_size": 65536,
        },
        keys=ConfigKeys(norm_eps="norm_eps"),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm="heads",
        recurrent="short_conv",
        renamed={
            ".operator_norm.": ".input_layernorm.",
            ".ffn_norm.": ".post_attention_layernorm.",
            ".feed_forward.w1.": ".mlp.gate_proj.",
            ".feed_forward.w3.": ".mlp.up_proj.",
            ".feed_forward.w2.": ".mlp.down_proj.",
            ".self_attn.out_proj.": ".self_attn.o_proj.",
            ".self_attn.q_layernorm.": ".self_attn.q_norm.",
            ".self_attn.k_layernorm.": ".self_attn.k_norm.",
            "model.embedding_norm.": "model.norm.",
        },
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
    "MiniMaxM2ForCausalLM": Family(
        models="MiniMax M2",
        defaults=LLAMA
        | {
            "head_dim": 128,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "max_position_embeddings": 196608,
            "num_attention_heads": 48,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 62,
            "num_key_value_heads": 8,
            "rope_theta": 5_000_000.0,
            "vocab_size": 200064,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm="width",
        rotates_a_share=True,
        experts=ExpertStyle(
            module="block_sparse_moe",
            maps=("w1", "w3", "w2"),
            width="intermediate_size",
            number=256,
            normalizes=True,
            is_sigmoid=True,
            correction="e_score_correction_bias",
        ),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        models="ERNIE 4.5 with experts: 21B-A3B, 300B-A47B",
        defaults=LLAMA
        | {
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
            "num_attention_heads": 20,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "use_bias": False,
            "vocab_size": 103424,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rotates_neighbors=True,
        experts=ExpertStyle(
            width="moe_intermediate_size",
            number=64,
            number_keys=("moe_num_experts",),
            active_key="moe_k",
            normalizes=True,
            correction="moe_statics.e_score_correction_bias",
            correction_rank=2,
            shared_width="moe_intermediate_size",
            shared_count="moe_num_shared_experts",
            shared_name="shared_experts",
            has_shared_gate=False,
        ),
        refused=("use_bias",),
    ),
    "Glm4MoeForCausalLM": Family(
        models="GLM-4.5, GLM-4.6, GLM-4.7 and their Air models",
        defaults=LLAMA
        | {
            "first_k_dense_replace": 1,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        keys=ConfigKeys(qk_norm="use_qk_norm"),
        out_bias=False,
        mlp_bias=False,
        qk_norm="heads",
        rotates_a_share=True,
        experts=ExpertStyle(
            width="moe_intermediate_size",
            number=128,
            number_keys=("n_routed_experts",),
            is_sigmoid=True,
            correction="gate.e_score_correction_bias",
            factor="routed_scaling_factor",
            shared_width="moe_intermediate_size",
            shared_count="n_shared_experts",
            shared_name="shared_experts",
            has_shared_gate=False,
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
            stacked=StackedNames(has_pairs=True),
        ),
    ),
}

LFM2 = FAMILIES["Lfm2ForCausalLM"]
QWEN35 = Family(
    models="Qwen 3.5, dense, as text models",
    defaults=QWEN2
    | {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "sliding_window": None,
        "vocab_size": 248320,
    },
    mlp_bias=False,
    qk_norm="heads",
    adds_one=True,
    rotates_a_share=True,
    rope_names={"mrope": "default"},
    recurrent="gated_delta",
    gates_attention=True,
)
QWEN35_EXPERTS = {
    **QWEN35.defaults,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
QWEN35_MOE = replace(
    QWEN35,
    models="Qwen 3.5 with experts, as text models",
    defaults=QWEN35_EXPERTS,
    experts=ExpertStyle(
        width="moe_intermediate_size",
        number=256,
        normalizes=True,
        shared_width="shared_expert_intermediate_size",
        stacked=StackedNames(is_transposed=False),
    ),
)
FAMILIES |= {
    "Lfm2MoeForCausalLM": replace(
        LFM2,
        models="LFM2 and LFM2.5 with experts: 8B-A1B, 24B-A2B",
        defaults={
            **LFM2.defaults,
            "block_auto_adjust_ff_dim": False,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
        },
        renamed={
            **LFM2.renamed,
            ".feed_forward.": ".mlp.",
            ".w1.": ".gate_proj.",
            ".w3.": ".up_proj.",
            ".w2.": ".down_proj.",
        },
        experts=ExpertStyle(
            width="moe_intermediate_size",
            number=32,
            is_sigmoid=True,
            correction="expert_bias",
            factor="routed_scaling_factor",
            stacked=StackedNames(is_transposed=False),
        ),
    ),
    "Qwen3NextForCausalLM": replace(
        QWEN35,
        models="Qwen3-Next 80B-A3B",
        defaults=QWEN35_EXPERTS
        | {
            "norm_topk_prob": True,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "vocab_size": 151936,
        },
        rope_names={},
        has_joined_inputs=True,
        experts=ExpertStyle(
            width="moe_intermediate_size",
            number=512,
            shared_width="shared_expert_intermediate_size",
        ),
    ),
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
}
MAMBA: dict[str, Any] = {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": True,
}
FEED_FORWARD = {
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    "model.final_layernorm.": "model.norm.",
}
BAMBA = Family(
    models="Bamba 9B",
    defaults=LLAMA
    | MAMBA
    | {
        "attn_layer_indices": None,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128000,
    },
    rotates_a_share=True,
    recurrent="mamba",
    renamed=FEED_FORWARD,
)
FAMILIES |= {
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": Family(
        models="Falcon H1: 0.5B, 1.5B, 3B, 7B, 34B",
        defaults={
            **BAMBA.defaults,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "key_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "max_position_embeddings": 8192,
            "mlp_multipliers": None,
            "partial_rotary_factor": 1.0,
            "projectors_bias": False,
        },
        keys=ConfigKeys(
            embedding_scale="embedding_multiplier",
            logit_scale="lm_head_multiplier",
            key_scale="key_multiplier",
            attention_in_scale="attention_in_multiplier",
            attention_out_scale="attention_out_multiplier",
            mlp_scales="mlp_multipliers",
        ),
        recurrent="mamba",
        renamed=FEED_FORWARD,
        refused=("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        models="Granite 4 H and Granite 4, dense and with experts",
        defaults=GRANITE
        | MAMBA
        | {
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "position_embedding_type": None,
            "shared_intermediate_size": 1024,
        },
        keys=GRANITE_KEYS,
        mlp_bias=False,
        fuses_gate_up=True,
        recurrent="mamba",
        renamed={
            ".shared_mlp.input_linear.": ".mlp.gate_up_proj.",
            ".shared_mlp.output_linear.": ".mlp.down_proj.",
        },
        experts=ExpertStyle(
            module="block_sparse_moe",
            router="router.layer",
            width="intermediate_size",
            number=8,
            normalizes=True,  # the softmax covers only the chosen experts
            shared_width="shared_intermediate_size",
            shared_path="mlp",
            fuses_shared=True,
            has_shared_gate=False,
            stacked=StackedNames(
                gate_up="input_linear.weight", down="output_linear.weight", is_transposed=False
            ),
        ),
    ),
    "NemotronHForCausalLM": Family(
        models="Nemotron H and Nemotron Nano 2, without experts: 4B, 8B, 9B, 12B, 47B, 56B",
        defaults=LLAMA
        | {
            "conv_kernel": 4,
            "head_dim": 128,
            "intermediate_size": 21504,
            "layer_norm_epsilon": 1e-5,
            "mamba_head_dim": 64,
            "mamba_norm_before_gate": False,
            "mamba_num_heads": 128,
            "mamba_rms_norm": True,
            "max_position_embeddings": 4096,
            "mlp_hidden_act": "relu2",
            "n_groups": 8,
            "num_key_value_heads": 8,
            "position_embedding_type": None,
            "ssm_state_size": 128,
            "use_bias": False,
            "use_conv_bias": True,
            "vocab_size": 131072,
        },
        keys=ConfigKeys(activation="mlp_hidden_act", norm_eps="layer_norm_epsilon"),
        qkv_bias=False,
        out_bias=False,
        norms=Norms(before_attention="norm", before_mlp="norm"),
        ungated=UNGATED,
        recurrent="mamba",
        is_split=True,
        renamed={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.norm_f.": "model.norm.",
            "backbone.": "model.",
            **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in ("q", "k", "v", "o")},
            **{f".mixer.{x}_proj.": f".mlp.{x}_proj." for x in ("up", "down")},
            ".mixer.": ".mamba.",
        },
    ),
}
GEMMA3, QWEN3_MOE = FAMILIES["Gemma3ForCausalLM"], FAMILIES["Qwen3MoeForCausalLM"]
MROPE = {"mrope": "default"}  # for text only, M-RoPE is plain RoPE
QWEN25_VL = replace(
    FAMILIES["Qwen2ForCausalLM"],
    defaults=QWEN2
    | {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "max_window_layers": 80,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "vocab_size": 152064,
    },
    rope_names=MROPE,
)
QWEN3_VL = replace(
    FAMILIES["Qwen3ForCausalLM"],
    defaults=QWEN2
    | {
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "rope_theta": 500_000.0,
        "sliding_window": None,
    },
    rope_names=MROPE,
    windowed="none",
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    defaults={
        **QWEN3_MOE.defaults,
        "intermediate_size": 5632,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rope_theta": 500_000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    rope_names=MROPE,
    windowed="none",
    experts=ExpertStyle(
        width="moe_intermediate_size",
        number=60,
        normalizes=True,
        stacked=StackedNames(is_transposed=None),  # published with swapped dimensions, and without
    ),
)
GLM4V = replace(
    FAMILIES["Glm4ForCausalLM"],
    defaults={
        **FAMILIES["Glm4ForCausalLM"].defaults,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
    },
    qkv_bias=True,
    rope_names=MROPE,
)
GLM4V_MOE = replace(
    FAMILIES["Glm4MoeForCausalLM"],
    defaults={
        **FAMILIES["Glm4MoeForCausalLM"].defaults,
        "attention_bias": True,
        "max_position_embeddings": 65536,
        "vocab_size": 151424,
    },
    keys=ConfigKeys(),
    qk_norm="none",
    rope_names=MROPE,
)
MULTIMODAL = {
    "Gemma3ForConditionalGeneration": Multimodal(
        models="Gemma 3 with vision: 4B, 12B, 27B", texts={"gemma3_text": GEMMA3}
    ),
    "Mistral3ForConditionalGeneration": Multimodal(
        models="Mistral Small 3.1 and 3.2, Ministral 3",
        texts={
            "mistral": FAMILIES["MistralForCausalLM"],
            "ministral3": FAMILIES["Ministral3ForCausalLM"],
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": Multimodal(
        models="Qwen 2.5 VL", texts={"qwen2_5_vl_text": QWEN25_VL}
    ),
    "Qwen3VLForConditionalGeneration": Multimodal(
        models="Qwen 3 VL, dense", texts={"qwen3_vl_text": QWEN3_VL}
    ),
    "Qwen3VLMoeForConditionalGeneration": Multimodal(
        models="Qwen 3 VL with experts: 30B-A3B and others",
        texts={"qwen3_vl_moe_text": QWEN3_VL_MOE},
    ),
    "Qwen3_5ForConditionalGeneration": Multimodal(
        models="Qwen 3.5, dense: 0.8B, 2B, 4B, 9B, 27B", texts={"qwen3_5_text": QWEN35}
    ),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        models="Qwen 3.5 with experts: 35B-A3B and others",
        texts={"qwen3_5_moe_text": QWEN35_MOE},
    ),
    "Glm4vForConditionalGeneration": Multimodal(
        models="GLM-4.1V, GLM-4.6V-Flash", texts={"glm4v_text": GLM4V}
    ),
    "Glm4vMoeForConditionalGeneration": Multimodal(
        models="GLM-4.5V, GLM-4.6V", texts={"glm4v_moe_text": GLM4V_MOE}
    ),
    "Glm46VForConditionalGeneration": Multimodal(
        models="GLM-4.6V-Flash, GLM-4.6V",
        texts={"glm4v_text": GLM4V, "glm4v_moe_text": GLM4V_MOE},
    ),
}
