"""Multimodal architectures, whose text models are of the families."""

from msgspec.structs import replace

from specserve.models.experts import ExpertStyle, StackedNames
from specserve.models.families import FAMILIES
from specserve.models.family import ConfigKeys, Multimodal
from specserve.models.family_defaults import QWEN2
from specserve.models.recurrent_families import QWEN35, QWEN35_MOE

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
    "Gemma3nForConditionalGeneration": Multimodal(
        models="Gemma 3n: E2B, E4B", texts={"gemma3n_text": FAMILIES["Gemma3nForCausalLM"]}
    ),
    "Gemma4ForConditionalGeneration": Multimodal(
        models="Gemma 4", texts={"gemma4_text": FAMILIES["Gemma4ForCausalLM"]}
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
    "Llama4ForConditionalGeneration": Multimodal(
        models="Llama 4: Scout, Maverick", texts={"llama4_text": FAMILIES["Llama4ForCausalLM"]}
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
