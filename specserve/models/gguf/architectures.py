"""llama.cpp's architectures: how their files differ from a checkpoint of the same model."""

from collections.abc import Mapping
from typing import Any

import msgspec


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of an architecture means. Its norms include the 1 that some families add."""

    family: str  # a key of FAMILIES
    mixture: str | None = None  # the family of models with experts, if it is another one
    windowed: str | None = None  # the family of models with sliding windows, if it is another one
    unscaled: str | None = None  # the family of models without any of `keys`, if it is another one
    keys: Mapping[str, str] = {}  # further metadata -> field of config.json
    fields: Mapping[str, Any] = {}  # fields of config.json that files lack
    rope: Mapping[str, Any] = {}  # the same within rope_scaling, if positions are scaled
    rope_keys: Mapping[str, str] = {}  # further metadata -> field of rope_scaling
    final_norm: str = "output_norm"  # name of the norm before the head
    names: Mapping[str, str] = {}  # usual name of a layer's module -> its name in these files
    # Rows of queries and keys are in another order than in checkpoints: the architecture rotates
    # the pairs (2i, 2i + 1) of a head, and checkpoints have (i, i + D/2).
    is_turned: bool = False
    # Value heads of a gated DeltaNet that have the same key head are not adjacent, and b and a have
    # a map each.
    is_tiled: bool = False
    # Every n-th layer has full attention, the others have the sliding window; 0: all have it.
    full_every: int = 0
    window: int | None = None  # sliding window, if the file has none
    merges_by_id: bool = False  # of SentencePiece: the first tokens come first, not the best scores
    # Queries are scaled by the head size, or by hidden_size / heads in the model with this number
    # of layers.
    wide_queries: int | None = None
    # Bare norms of queries and keys are absent in the model with this number of experts.
    bare_except: int | None = None
    has_sections: bool = False  # may have M-RoPE, which is plain RoPE for text


SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA = {
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
ARCHITECTURES = {
    "apertus": Architecture(family="ApertusForCausalLM"),
    "arcee": Architecture(family="ArceeForCausalLM", is_turned=True),
    "command-r": Architecture(family="CohereForCausalLM", keys={"logit_scale": "logit_scale"}),
    "ernie4_5": Architecture(family="Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        family="Ernie4_5_MoeForCausalLM",
        keys={
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
    ),
    "cohere2": Architecture(
        family="Cohere2ForCausalLM", keys={"logit_scale": "logit_scale"}, full_every=4
    ),
    "exaone4": Architecture(family="Exaone4ForCausalLM", full_every=4),
    "falcon-h1": Architecture(family="FalconH1ForCausalLM"),  # weights include all factors
    "gemma2": Architecture(
        family="Gemma2ForCausalLM",
        keys=SOFT_CAPS,
        full_every=2,
        window=4096,
        wide_queries=46,
        merges_by_id=True,
    ),
    "gemma3": Architecture(
        family="Gemma3ForCausalLM",
        keys=SOFT_CAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        full_every=6,
        wide_queries=62,
        merges_by_id=True,
    ),
    "gemma3n": Architecture(
        family="Gemma3nForCausalLM",
        keys=GEMMA
        | {
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        full_every=5,
        window=512,
        merges_by_id=True,
    ),
    "gemma4": Architecture(
        family="Gemma4ForCausalLM",
        keys=GEMMA | {"rope.freq_base_swa": "rope_local_base_freq"},
        full_every=6,
    ),
    "glm4": Architecture(family="Glm4ForCausalLM", has_sections=True),
    "glm4moe": Architecture(
        family="Glm4MoeForCausalLM",
        keys={
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        names={"ffn_norm": "post_attention_norm"},
        has_sections=True,
    ),
    "gpt-oss": Architecture(
        family="GptOssForCausalLM",
        rope={"truncate": False},
        names={"ffn_norm": "post_attention_norm"},
        full_every=2,
    ),
    "granite": Architecture(family="GraniteForCausalLM", keys=GRANITE, is_turned=True),
    "granitehybrid": Architecture(
        family="GraniteMoeHybridForCausalLM",
        unscaled="BambaForCausalLM",
        keys=GRANITE,
        is_turned=True,
    ),
    "granitemoe": Architecture(family="GraniteMoeForCausalLM", keys=GRANITE, is_turned=True),
    "hunyuan-dense": Architecture(family="HunYuanDenseV1ForCausalLM"),
    "lfm2": Architecture(
        family="Lfm2ForCausalLM",
        keys={"shortconv.l_cache": "conv_L_cache"},
        # feed_forward_length is the width of the MLP, and converters write no biases.
        fields={"block_auto_adjust_ff_dim": False, "conv_bias": False},
        final_norm="token_embd_norm",
    ),
    "lfm2moe": Architecture(
        family="Lfm2MoeForCausalLM",
        keys={
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
        },
        fields={"block_auto_adjust_ff_dim": False, "conv_bias": False},
        final_norm="token_embd_norm",
    ),
    "llama": Architecture(  # includes Mistral
        family="LlamaForCausalLM", mixture="MixtralForCausalLM", is_turned=True
    ),
    "llama4": Architecture(
        family="Llama4ForCausalLM",
        keys={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        full_every=4,
        window=8192,
        bare_except=128,
    ),
    "minimax-m2": Architecture(family="MiniMaxM2ForCausalLM"),
    "mistral3": Architecture(
        family="Ministral3ForCausalLM",
        rope={"mscale": 1.0},
        rope_keys={
            "attention.temperature_scale": "llama_4_scaling_beta",
            "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        },
        is_turned=True,
    ),
    "nemotron": Architecture(family="NemotronForCausalLM"),
    "nemotron_h": Architecture(
        family="NemotronHForCausalLM",
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.group_count": "n_groups",
            "ssm.state_size": "ssm_state_size",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        names={"ffn_norm": "attn_norm"},  # each layer has one norm
    ),
    "olmo2": Architecture(family="Olmo2ForCausalLM", windowed="Olmo3ForCausalLM", full_every=4),
    "olmoe": Architecture(family="OlmoeForCausalLM"),
    "phi3": Architecture(family="Phi3ForCausalLM"),
    "qwen2": Architecture(family="Qwen2ForCausalLM"),
    "qwen2moe": Architecture(family="Qwen2MoeForCausalLM"),
    "qwen2vl": Architecture(family="Qwen2ForCausalLM", has_sections=True),
    "qwen3": Architecture(family="Qwen3ForCausalLM"),
    "qwen35": Architecture(
        family="Qwen3_5ForCausalLM",
        names={"ffn_norm": "post_attention_norm"},
        has_sections=True,
        is_tiled=True,
    ),
    "qwen35moe": Architecture(
        family="Qwen3_5MoeForCausalLM",
        names={"ffn_norm": "post_attention_norm"},
        has_sections=True,
        is_tiled=True,
    ),
    "qwen3moe": Architecture(family="Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}),
    "qwen3next": Architecture(
        family="Qwen3NextForCausalLM", names={"ffn_norm": "post_attention_norm"}
    ),
    "qwen3vl": Architecture(family="Qwen3ForCausalLM", has_sections=True),
    "qwen3vlmoe": Architecture(
        family="Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}, has_sections=True
    ),
    "seed_oss": Architecture(
        family="SeedOssForCausalLM", names={"ffn_norm": "post_attention_norm"}
    ),
    "stablelm": Architecture(family="StableLmForCausalLM"),
    "starcoder2": Architecture(family="Starcoder2ForCausalLM"),
    "smollm3": Architecture(family="SmolLM3ForCausalLM", is_turned=True),
}
