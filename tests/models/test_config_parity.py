"""What is read from a config.json, against transformers' own classes."""

import copy
import math
import re

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specserve.models import parse_config
from specserve.models.families import FAMILIES
from specserve.models.multimodal_families import MULTIMODAL
from specserve.models.rotary import frequencies

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "qwen2",  # its own code derives from that
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
    "Cohere2ForCausalLM": "cohere2",
    "Exaone4ForCausalLM": "exaone4",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Olmo3ForCausalLM": "olmo3",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "Ministral3ForCausalLM": "ministral3",
    "CohereForCausalLM": "cohere",
    "Starcoder2ForCausalLM": "starcoder2",
    "StableLmForCausalLM": "stablelm",
    "NemotronForCausalLM": "nemotron",
    "ArceeForCausalLM": "arcee",
    "ApertusForCausalLM": "apertus",
    "GraniteMoeForCausalLM": "granitemoe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Llama4ForCausalLM": "llama4_text",
    "BambaForCausalLM": "bamba",
    "FalconH1ForCausalLM": "falcon_h1",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3NextForCausalLM": "qwen3_next",
    "OlmoHybridForCausalLM": "olmo_hybrid",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = YARN | {"mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2}
LONGROPE = {"type": "longrope", "short_factor": [1.5] * 48, "long_factor": [2.5] * 48}
OF_4096 = {"original_max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SMALL = {"num_hidden_layers": 4, "hidden_size": 256} | HEADS

COMMON = {  # for every family: what is read of it -> fields
    "nothing": {},
    "sizes": SMALL | {"vocab_size": 300, "intermediate_size": 100, "rms_norm_eps": 1e-5},
    "as many KV heads as heads": SMALL | {"num_key_value_heads": None},
    "KV heads": SMALL | {"num_key_value_heads": 2},
    "a head size": SMALL | {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "not tied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "an old dtype": {"torch_dtype": "bfloat16"},
    "theta, old": {"rope_theta": 500_000},
    "theta, new": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "theta, in both places": {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}},
    "no scaling": {"rope_scaling": None, "rope_theta": 1e6},
    "linear, oldest": {"rope_scaling": {"type": "linear", "factor": 3}, "rope_theta": 1e6},
    "linear, old": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "linear, new": {"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 7e4}},
    "two types": {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
    "two spellings": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN},
    "llama3, old": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
    "llama3, new": {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}},
    "llama3, without a length": {
        "rope_parameters": {k: v for k, v in LLAMA3.items() if not k.startswith("orig")},
        "max_position_embeddings": 8192,
    },
    "yarn, old": {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1e6},
    "yarn, new": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "yarn, with a length outside": {
        "rope_parameters": YARN,
        "original_max_position_embeddings": 4096,
    },
    "yarn, with the ratio": {"rope_parameters": YARN | {"factor": None}},
    "yarn, with an attention factor": {"rope_parameters": YARN | {"attention_factor": 0.5}},
    "yarn, as DeepSeek has it": {"rope_parameters": DEEPSEEK},
    "yarn, between dimensions": {"rope_parameters": YARN | {"truncate": False}},
    "yarn, of a short text": {"rope_parameters": YARN | {"original_max_position_embeddings": 6}},
    "longrope": SMALL
    | {
        "hidden_size": 128,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 4 for i in range(16)],
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 256,
        },
        "original_max_position_embeddings": 256,
    },
    "all of the head rotates": {"partial_rotary_factor": 1.0},
    "a window": SMALL | {"sliding_window": 8},
    "no window": SMALL | {"sliding_window": None},
    "a window that is used": SMALL | {"sliding_window": 8, "use_sliding_window": True},
    "a window from a layer on": SMALL
    | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "layer types": SMALL
    | {"layer_types": ["full_attention"] * 4, "sliding_window": 8, "use_sliding_window": True},
    "windows by layer": SMALL
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "use_sliding_window": True,
    },
    "layers that do not rotate": SMALL | {"no_rope_layers": [1, 0, 1, 0]},
}
OWN = {
    "SmolLM3ForCausalLM": {
        "every second layer does not rotate": SMALL | {"no_rope_layer_interval": 2},
        "a window where it does not rotate": SMALL
        | {"sliding_window": 8, "use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1]},
    },
    "Phi3ForCausalLM": {
        "a share of the head rotates": {"partial_rotary_factor": 0.75},
        "longrope, old": {"rope_scaling": LONGROPE, "max_position_embeddings": 131072},
        "longrope, oldest name": {"rope_scaling": LONGROPE | {"type": "su", **OF_4096}},
        "longrope, not named so": {"rope_scaling": LONGROPE | {"type": "yarn"}},
        "longrope of a share": {
            "rope_scaling": LONGROPE | {"short_factor": [1.5] * 36, "long_factor": [2.5] * 36},
            "partial_rotary_factor": 0.75,
        },
        "longrope, new": {
            "rope_parameters": LONGROPE | {"rope_type": "longrope", "attention_factor": 1.25},
        },
        "longrope of another length": {
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 2048,
        },
    },
    "Gemma3ForCausalLM": {
        "a rope for each kind of layer": {
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        "one window in three": SMALL | {"sliding_window_pattern": 3},
        "a local theta": {"rope_local_base_freq": 2e4, "rope_theta": 3e6},
    },
    "Glm4ForCausalLM": {"a share of the head rotates": {"partial_rotary_factor": 0.75}},
    "Cohere2ForCausalLM": {"one window in two": SMALL | {"sliding_window_pattern": 2}},
    "Qwen2MoeForCausalLM": {
        "windows below a layer": SMALL
        | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
    },
    "GptOssForCausalLM": {
        "as it is published": {
            "head_dim": 64,
            "initial_context_length": 4096,
            "max_position_embeddings": 131072,
            "quantization_config": {
                "modules_to_not_convert": ["lm_head"],
                "quant_method": "mxfp4",
            },
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "swiglu_limit": 7.0,
        },
    },
    "Llama4ForCausalLM": {
        "as it is published": {
            "attn_temperature_tuning": True,
            "no_rope_layers": [],
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        "no chunks": SMALL | {"layer_types": ["full_attention"] * 4},
        "a layer in two without rope": SMALL
        | {"no_rope_layer_interval": 2, "attention_chunk_size": 16},
    },
    "Exaone4ForCausalLM": {
        "no window at all": SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 4},
        "one window in two": SMALL | {"sliding_window": 8, "sliding_window_pattern": 2},
    },
}
HEADS_BY_KIND = SMALL | {"head_dim": 32, "global_head_dim": 64}
OWN["Gemma3nForCausalLM"] = {
    "shared layers": SMALL | {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
    "more sparse layers": SMALL
    | {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.3], "num_kv_shared_layers": 0},
    "widths by layer": SMALL | {"intermediate_size": [8, 16, 24, 32], "num_kv_shared_layers": 0},
    "other streams": {"altup_num_inputs": 2, "laurel_rank": 8, "altup_correct_scale": False},
    "a local theta": {"rope_local_base_freq": 2e4, "rope_theta": 3e6},
}
OWN["Gemma4ForCausalLM"] = {
    "shared layers": HEADS_BY_KIND | {"num_hidden_layers": 12, "num_kv_shared_layers": 6},
    "layer types, of which the last is wrong": HEADS_BY_KIND
    | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "values that are keys": HEADS_BY_KIND
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "num_hidden_layers": 6},
    "other heads, but values of their own": HEADS_BY_KIND | {"num_global_key_value_heads": 2},
    "heads by layer": SMALL
    | {"per_layer_config": {"3": {"head_dim": 64}}, "head_dim": 32}
    | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "one head size": SMALL | {"per_layer_config": {}, "head_dim": 32},
    "a rope for each kind of layer": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e5,
                "factor": 4.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    },
    "attention to later parts of an image": {"use_bidirectional_attention": "vision"},
}
# It wants rope_parameters by layer type.
BY_LAYER_TYPE = ", new|oldest|spellings|longrope|theta, in both|llama3, without|yarn, ([wabi]|of)"
OWN |= {
    "Olmo3ForCausalLM": {
        "a rope for each kind of layer": OWN["Gemma3ForCausalLM"]["a rope for each kind of layer"]
        | {"max_position_embeddings": 131072},
    },
    "qwen2_5_vl_text": {
        "a rope for images, too": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    },
    "glm4v_text": {"a share of the head rotates": {"partial_rotary_factor": 0.5}},
}
GEMMA4 = re.compile("as many KV heads|no window|scaling|linear|two|llama3|yarn|longrope")
GEMMA3N = re.compile("as many KV heads|no window|yarn, old|" + BY_LAYER_TYPE)
REFUSED = {  # by transformers
    "Phi3ForCausalLM": re.compile("linear|yarn|llama3|two"),
    "MistralForCausalLM": re.compile("as many KV heads"),
    "mistral": re.compile("as many KV heads"),
    "Gemma2ForCausalLM": re.compile("as many KV heads"),
    "Gemma3ForCausalLM": re.compile("as many KV heads|" + BY_LAYER_TYPE),
    "gemma3_text": re.compile("as many KV heads|" + BY_LAYER_TYPE),
    # It wants rope_parameters by layer type, and does not read rope_scaling.
    "Gemma3nForCausalLM": GEMMA3N,
    "gemma3n_text": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "gemma4_text": GEMMA4,
    # It takes rope_theta only for layers without a window.
    "Olmo3ForCausalLM": re.compile("no scaling|yarn, old|" + BY_LAYER_TYPE),
    "Glm4ForCausalLM": re.compile("as many KV heads|longrope"),
    "Exaone4ForCausalLM": re.compile("as many KV heads|no window"),
    "Qwen3MoeForCausalLM": re.compile("as many KV heads"),
    "Qwen2MoeForCausalLM": re.compile("as many KV heads"),
    "qwen3_vl_moe_text": re.compile("as many KV heads"),
    "GptOssForCausalLM": re.compile("as many KV heads"),
    "HunYuanDenseV1ForCausalLM": re.compile("yarn"),
    "Ministral3ForCausalLM": re.compile("as many KV heads"),
    "ministral3": re.compile("as many KV heads"),
    "Starcoder2ForCausalLM": re.compile("as many KV heads"),
    "StableLmForCausalLM": re.compile("as many KV heads|longrope"),
    "NemotronForCausalLM": re.compile("longrope"),
    "MiniMaxM2ForCausalLM": re.compile("as many KV heads"),
    "Ernie4_5_MoeForCausalLM": re.compile("as many KV heads"),
    "Llama4ForCausalLM": re.compile("as many KV heads|layer types|windows by layer"),
    "llama4_text": re.compile("as many KV heads|layer types|windows by layer"),
    # The heads of their defaults have no whole size.
    "Glm4MoeForCausalLM": re.compile("^(?!sizes|KV heads|a head size|a window|no window)"),
    "glm4v_moe_text": re.compile("^(?!sizes|KV heads|a head size|a window|no window)"),
    "MixtralForCausalLM": re.compile("as many KV heads|yarn"),  # the head size must be there
    # Their kinds of layers come from other fields, or none of their default layers has attention.
    "BambaForCausalLM": re.compile("layer types|windows by layer|longrope"),
    "FalconH1ForCausalLM": re.compile("biases|layer types|windows by layer"),
    "GraniteMoeHybridForCausalLM": re.compile(""),
    "NemotronHForCausalLM": re.compile(""),
    "OlmoHybridForCausalLM": re.compile("layer types|windows by layer"),
    "Lfm2ForCausalLM": re.compile("as many KV heads"),
    "Lfm2MoeForCausalLM": re.compile("as many KV heads"),
    **dict.fromkeys(
        (
            *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
            *("qwen3_5_text", "qwen3_5_moe_text"),
        ),
        re.compile("as many KV heads|longrope"),
    ),
}
# Few layers are fewer than those that share KV by default.
FIRST = {family: {"num_kv_shared_layers": 0} for family in ("Gemma3nForCausalLM", "gemma3n_text")}
FIRST["BambaForCausalLM"] = {"attn_layer_indices": [0]}
TABLE = {
    f"{family}: {name}": {"architectures": [family], **FIRST.get(family, {}), **fields}
    for family in FAMILIES
    for name, fields in (COMMON | OWN.get(family, {})).items()
    if family not in REFUSED or not REFUSED[family].search(name)
}
TABLE |= {
    f"{family}, {kind}: {name}": {
        "architectures": [family],
        "text_config": {"model_type": kind, **FIRST.get(kind, {}), **fields},
    }
    for family, multimodal in MULTIMODAL.items()
    for kind in multimodal.texts
    for name, fields in (COMMON | OWN.get(kind, {})).items()
    if kind not in REFUSED or not REFUSED[kind].search(name)
}


def theirs(fields):
    family = fields["architectures"][0]
    text = fields.get("text_config", fields)
    kind = MODEL_TYPES[family] if family in FAMILIES else text["model_type"]
    return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(text))


def rope_of(config, layer_type):
    """The frequencies and the factor of all cosines and sines."""
    rope, asked = config.rope_parameters, {}
    if layer_type in rope:
        rope, asked = rope[layer_type], {"layer_type": layer_type}
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **asked)
    if has_kinds(config) and layer_type in config.layer_types:
        config = config.per_layer_config[layer_type]
    elif has_kinds(config):  # no layer has this rope
        return 1.0 / 1e4 ** (torch.arange(0, 256, 2) / 256), 1.0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (rope["rope_theta"] ** exponent), 1.0


def check_streams(got, want):
    normal, shares = torch.distributions.Normal(0, 1), want.activation_sparsity_pattern
    wanted = [normal.icdf(torch.tensor(x)).item() if x > 0 else None for x in shares]
    assert list(got.deviations) == [x and pytest.approx(x, rel=1e-5) for x in wanted]
    assert got.num_streams == want.altup_num_inputs and got.laurel_rank == want.laurel_rank
    assert got.scales_streams == want.altup_correct_scale


def check_heads(got, want, num_heads):
    assert got.num_kv_heads == (want.num_key_value_heads or num_heads)
    assert got.head_dim == (getattr(want, "head_dim", None) or want.hidden_size // num_heads)


def has_kinds(config):
    """Whether layers may differ in their heads."""
    is_gemma4 = config.model_type == "gemma4_text"
    return is_gemma4 and config.per_layer_config is not None


def kinds_of(config):
    """By layer: KV heads, head size, and the layer that has its KV."""
    layers = range(config.num_hidden_layers)
    own = [config.per_layer_config[i] if has_kinds(config) else config for i in layers]
    modes, types = config.kv_sharing_modes, config.layer_types
    last = {t: i for i, t in enumerate(types) if modes[i] != "reuse"}
    sources = [last[t] if modes[i] == "reuse" else i for i, t in enumerate(types)]
    return [(c.num_key_value_heads, c.head_dim, s) for c, s in zip(own, sources, strict=True)]


def windows_of(config):
    types = getattr(config, "layer_types", None)
    if types is None:  # Mistral's are all alike; Llama's attention has no window
        windowed = ("mistral", "ministral3", "phi3", "mixtral", "qwen3_moe", "starcoder2")
        has_any = config.model_type in windowed and config.sliding_window is not None
        kind = "sliding_attention" if has_any else "full_attention"
        types = [kind] * config.num_hidden_layers
    windows = {"sliding_attention": getattr(config, "sliding_window", None)}
    windows["chunked_attention"] = getattr(config, "attention_chunk_size", None)
    return tuple(windows.get(kind) for kind in types)


def longest_text(fields, want):
    """As vLLM has it: transformers leaves a length that YaRN raises as it was."""
    rope = getattr(want, "rope_parameters", None) or {}
    written = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if rope.get("rope_type") == "yarn" and written.get("factor"):
        original = rope["original_max_position_embeddings"]
        return int(fields.get("original_max_position_embeddings", original) * rope["factor"])
    return want.max_position_embeddings


@pytest.mark.parametrize("fields", TABLE.values(), ids=TABLE)
def test_a_config_means_what_transformers_takes_it_to_mean(fields):
    want, got = theirs(fields), parse_config.parse(fields)
    assert got.num_layers == want.num_hidden_layers
    assert got.num_heads == want.num_attention_heads
    is_mixed = has_kinds(want) and "sliding_attention" in want.layer_types
    local = want.per_layer_config["sliding_attention"] if is_mixed else want
    if not has_kinds(want) or is_mixed:
        check_heads(got, local, want.num_attention_heads)
    for name in ("hidden_size", "vocab_size"):
        assert getattr(got, name) == getattr(want, name), name
    inner = getattr(want, "intermediate_size", None)
    each = inner if isinstance(inner, list) else [inner] * got.num_layers
    # LFM2's MLP derives its width. A model with experts in all layers has no width.
    has_own = got.family.has_kinds or want.model_type in ("lfm2", "qwen3_5_moe_text")
    assert has_own or got.intermediate_size == getattr(want, got.family.keys.inner)
    if got.family.has_streams:
        assert [got.inner_size(i) for i in range(got.num_layers)] == each
        check_streams(got, want)
    assert got.max_positions == longest_text(fields.get("text_config", fields), want)
    assert got.norm_eps == getattr(want, got.family.keys.norm_eps)
    assert got.tied == getattr(want, "tie_word_embeddings", False)
    assert got.windows == windows_of(want)
    assert list(got.rope) == rotating(want)
    if got.family.has_kinds:
        each = [(got.kv_heads(i), got.kv_layer(i)) for i in range(got.num_layers)]
        assert [(heads.number, heads.size, source) for heads, source in each] == kinds_of(want)
    ropes = {
        "full_attention": got.rope_parameters,
        "sliding_attention": got.local_rope_parameters,
    }
    for layer_type, rope in ropes.items():
        inverse, factor = rope_of(want, layer_type)
        is_global = layer_type == "full_attention" and got.global_heads is not None
        size = got.global_heads.size if is_global else got.head_dim
        assert torch.equal(padded(frequencies(rope, size), size), padded(inverse, size))
        assert math.isclose(rope.attention_factor, factor, rel_tol=1e-15)


def padded(frequencies, head_dim):
    """With the pairs that do not rotate."""
    return torch.cat([frequencies, torch.zeros(head_dim // 2 - len(frequencies))])


def rotating(config):
    """Whether a layer rotates, as the attention of its module has it."""
    has_window = [window is not None for window in windows_of(config)]
    if config.model_type == "cohere2":
        return has_window
    if config.model_type == "exaone4":
        return [config.sliding_window is None or x for x in has_window]
    return [bool(x) for x in getattr(config, "no_rope_layers", [1] * len(has_window))]


def test_the_table_reports_the_kinds_of_rope_apart():
    """So that a kind that is read as another one fails."""
    ropes = {name: parse_config.parse(fields).rope_parameters for name, fields in TABLE.items()}
    llama = {name: rope for name, rope in ropes.items() if name.startswith("LlamaForCausalLM")}
    assert {rope.kind for rope in llama.values()} == {
        "default",
        "linear",
        "llama3",
        "yarn",
        "longrope",
    }
    assert len({rope.attention_factor for rope in llama.values()}) == 5
