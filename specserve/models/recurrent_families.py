"""Families with recurrent layers: short convolutions, gated DeltaNets and Mamba-2."""

from typing import Any

from msgspec.structs import replace

from specserve.models.experts import ExpertStyle, StackedNames
from specserve.models.family import ConfigKeys, Family, Norms
from specserve.models.family_defaults import (
    GRANITE,
    GRANITE_KEYS,
    LLAMA,
    NORMS_AFTER,
    QWEN2,
    UNGATED,
)

LFM2 = Family(
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
)
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
RECURRENT: dict[str, Family] = {
    "Lfm2ForCausalLM": LFM2,
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
            "use_expert_bias": True,
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
            corrects="use_expert_bias",
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
RECURRENT["OlmoHybridForCausalLM"] = Family(
    models="OLMo hybrid 7B",
    defaults=LLAMA
    | {
        "full_attention_interval": 4,
        "hidden_size": 3840,
        "linear_allow_neg_eigval": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": None,  # 0.75 hidden_size / linear_num_key_heads
        "linear_num_key_heads": None,  # num_attention_heads
        "linear_num_value_heads": None,  # num_attention_heads
        "linear_value_head_dim": None,  # 2 linear_key_head_dim
        "max_position_embeddings": 65536,
        "num_attention_heads": 30,
        "vocab_size": 100352,
    },
    mlp_bias=False,
    qk_norm="width",
    norms=NORMS_AFTER,
    recurrent="gated_delta",
    recurrent_norms=Norms(),
    recurrent_norm_eps=1e-5,
    has_split_inputs=True,
    ends_attending=True,
    renamed={
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
        ".linear_attn.o_norm.": ".linear_attn.norm.",
        ".linear_attn.o_proj.": ".linear_attn.out_proj.",
    },
)
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
RECURRENT |= {
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
        models="Nemotron H, Nemotron Nano 2: 4B, 8B, 9B, 12B, 47B, 56B; Nemotron 3 Nano 30B-A3B",
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
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 7688,
            "moe_latent_size": None,
            "moe_shared_expert_intermediate_size": 7688,
            "n_group": 1,
            "n_groups": 8,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.0,
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
        experts=ExpertStyle(
            is_gated=False,
            width="moe_intermediate_size",
            number=8,
            number_keys=("n_routed_experts",),
            is_sigmoid=True,
            correction="gate.e_score_correction_bias",
            factor="routed_scaling_factor",
            shared_width="moe_shared_expert_intermediate_size",
            shared_name="shared_experts",
            has_shared_gate=False,
        ),
        renamed={
            "backbone.embeddings.": "model.embed_tokens.",
            "backbone.norm_f.": "model.norm.",
            "backbone.": "model.",
            **{f".mixer.{x}.": f".mlp.{x}." for x in ("experts", "gate", "shared_experts")},
            **{f".mixer.{x}_proj.": f".self_attn.{x}_proj." for x in ("q", "k", "v", "o")},
            **{f".mixer.{x}_proj.": f".mlp.{x}_proj." for x in ("up", "down")},
            ".mixer.": ".mamba.",
        },
    ),
}
