import json

import pytest
from safetensors.torch import load_file

from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.families import FAMILIES
from specserve.models.parse_config import load_config
from tests.checkpoints import tiny_checkpoint


@pytest.fixture
def parse(tmp_path):
    """What a tiny Llama's config.json comes to, some of its fields replaced."""
    folder = tiny_checkpoint(tmp_path, "llama")
    fields = json.loads((folder / "config.json").read_text())

    def parse(**changes):
        (folder / "config.json").write_text(json.dumps(fields | changes))
        return load_config(folder)

    return parse


def test_the_weights_of_the_layers_are_counted_as_the_checkpoint_has_them(tmp_path):
    shape = {"num_hidden_layers": 3, "head_dim": 24, "num_key_value_heads": 1}
    folder = tiny_checkpoint(tmp_path, "qwen3", **shape)
    tensors = load_file(folder / "model.safetensors").items()
    maps = [t.numel() for name, t in tensors if ".layers." in name and t.ndim == 2]
    assert load_config(folder).num_layer_weights == sum(maps) > 0


def test_of_experts_those_that_a_row_has_are_counted(tmp_path):
    sparse = tiny_checkpoint(tmp_path / "sparse", "qwen3_moe", mlp_only_layers=[0])
    tensors = load_file(sparse / "model.safetensors").items()
    maps = {name: t.numel() for name, t in tensors if ".layers." in name and t.ndim == 2}
    others = sum(n for name, n in maps.items() if ".experts." not in name)
    of_experts = sum(n for name, n in maps.items() if ".experts." in name)
    assert load_config(sparse).num_layer_weights == others + of_experts * 3 // 8


MOE = {"architectures": ["Qwen3MoeForCausalLM"]}
MIXTURES = {  # fields -> experts, those of a row, which layers have them
    "as Qwen has it": (MOE, (128, 8, (True, True))),
    "by its other name": (MOE | {"num_local_experts": 16}, (16, 8, (True, True))),
    "every second layer": (MOE | {"decoder_sparse_step": 2}, (128, 8, (False, True))),
    "but for some layers": (MOE | {"mlp_only_layers": [1]}, (128, 8, (True, False))),
    "no layer": (MOE | {"mlp_only_layers": [0, 1]}, None),
    "no experts": (MOE | {"num_experts": 0}, None),
    "Mixtral": ({"architectures": ["MixtralForCausalLM"]}, (8, 2, (True, True))),
    "a family without": ({"num_experts": 8}, None),
}


@pytest.mark.parametrize(("changes", "want"), MIXTURES.values(), ids=MIXTURES)
def test_which_layers_have_experts_and_how_many(parse, changes, want):
    got = parse(**changes).mixture
    assert (got and (got.num_experts, got.num_active, got.layers)) == want


MISTRAL, QWEN2 = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
QWEN3, SMOLLM3 = {"architectures": ["Qwen3ForCausalLM"]}, {"architectures": ["SmolLM3ForCausalLM"]}
LLAMA4 = {"architectures": ["Llama4ForCausalLM"]}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
SWA = {"use_sliding_window": True, "sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}

WINDOWS = {
    "llama has none": ({"sliding_window": 8}, (None, None)),
    "mistral's is everywhere": (MISTRAL | {"sliding_window": 8}, (8, 8)),
    "mistral without one": (MISTRAL | {"sliding_window": None}, (None, None)),
    "mistral with layer_types": (MISTRAL | MIXED | {"sliding_window": 8}, (8, None)),
    "qwen's is off unless it is used": (QWEN2 | {"sliding_window": 8}, (None, None)),
    "qwen's starts at a layer": (QWEN2 | SWA | {"max_window_layers": 1}, (None, 8)),
    "layer_types wins": (QWEN3 | SWA | MIXED | {"max_window_layers": 1}, (8, None)),
}


@pytest.mark.parametrize(("changes", "windows"), WINDOWS.values(), ids=WINDOWS)
def test_windows_by_layer(parse, changes, windows):
    assert parse(**changes).windows == windows


REFUSED = {  # what is wrong -> the change, the complaint
    "an unknown architecture": (
        {"architectures": ["GemmaForCausalLM"]},
        f"'GemmaForCausalLM'.*{', '.join(FAMILIES)}",
    ),
    "Phi-3-small": (
        {"architectures": ["Phi3SmallForCausalLM"], "auto_map": {}},
        "Phi3SmallForCausalLM is not supported: its attention is block-sparse",
    ),
    "no architecture": ({"architectures": None}, "architectures is missing.*LlamaForCausalLM"),
    "an empty list of architectures": ({"architectures": []}, "architectures is missing or empty"),
    "quantized in an unknown way": ({"quantization_config": {"bits": 4}}, "quant_method = None"),
    "another activation": ({"hidden_act": "gelu"}, "'gelu' is not.*silu, gelu_pytorch"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_attention_heads = 4.*= 3"),
    "odd heads": ({"head_dim": 3}, "head_dim = 3"),
    "odd heads that transformers refuses": ({"head_dim": 15}, "head_dim.*15"),
    "heads beyond the kernels": ({"head_dim": 514}, "head_dim = 514.*512"),
    "heads beyond the kernels, by division": (
        {"head_dim": None, "hidden_size": 4096},
        "head_dim = 1024.*512",
    ),
    "a negative eps": ({"rms_norm_eps": -1e-6}, "rms_norm_eps = -1e-06"),
    "an infinite eps": ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
    "an eps of 0": ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    "an eps that is no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    "a word for an eps": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    "no eps": ({"rms_norm_eps": None}, "rms_norm_eps"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads = 0"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    "layers beyond all reason": ({"num_hidden_layers": 10**400}, "num_hidden_layers = 1000"),
    "a truth for a number": ({"vocab_size": True}, "vocab_size = True"),
    "a word for a truth": ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
    "more experts a row than there are": (
        {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
        "num_experts_per_tok = 9 must be a whole number from 1 to 8",
    ),
    "too many experts": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 1025},
        "num_local_experts = 1025 .* to 1024",
    ),
    "a number for a list of layers": (
        {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 1},
        "mlp_only_layers = 1 is not a list",
    ),
    "null for a number": ({"intermediate_size": None}, "intermediate_size = None"),
    "heads of no whole size": ({"head_dim": None, "hidden_size": 66}, "hidden_size = 66.*= 4"),
    "a theta of nothing": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0"),
    "a rope that is no table": ({"rope_parameters": "default"}, "'default' is not an object"),
    "a rope for another layer type": (
        {"rope_parameters": {"linear_attention": {"rope_type": "default"}}},
        "by layer type are supported only for full_attention",
    ),
    "tokens that see later ones": (
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention = true",
    ),
    "clipped queries": (
        {"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0},
        "clip_qkv = 8.0 is not supported",
    ),
    "an endless logit": (
        {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
        "logits_scaling = 0 must be a number",
    ),
    "a cap that is a word": (
        {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": "50"},
        "attn_logit_softcapping = '50'",
    ),
    "two experts a row of Llama 4": (
        LLAMA4 | {"num_experts_per_tok": 2},
        "num_experts_per_tok = 2 is not supported for this family, only 1",
    ),
    "chunks of no size": (LLAMA4 | {"attention_chunk_size": None}, "attention_chunk_size = None"),
    "windows for chunks": (
        LLAMA4 | {"layer_types": ["full_attention", "sliding_attention"]},
        "'sliding_attention' is not supported, only full_attention and chunked_attention",
    ),
    "a word for growing queries": (
        LLAMA4 | {"attn_temperature_tuning": "yes"},
        "attn_temperature_tuning = 'yes' must be true or false",
    ),
    "a number for layers with experts": (LLAMA4 | {"moe_layers": 1}, "moe_layers = 1 is not"),
    "a word for a number": ({"hidden_size": "64"}, "hidden_size"),
    "another layer type": (
        QWEN3 | {"layer_types": ["full_attention", "chunked_attention"]},
        "'chunked_attention'.*sliding_attention",
    ),
    "too few layer types": (QWEN3 | {"layer_types": ["full_attention"]}, "layer_types"),
    "too few for mistral": (MISTRAL | {"layer_types": ["full_attention"]}, "layer_types"),
    "too few for llama": ({"layer_types": ["full_attention"]}, "layer_types"),
    "a window without a size": (QWEN3 | MIXED, "sliding_window = None"),
    "an empty window": (MISTRAL | {"sliding_window": 0}, "sliding_window = 0"),
    "too few rope layers": (
        SMOLLM3 | {"no_rope_layers": [1], "layer_types": ["full_attention"] * 2},
        r"no_rope_layers = \[1\].* list of 2",
    ),
    "rope by length": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "the batch"),
    "rope by length, old style": (
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic'.*the batch",
    ),
    "another rope": ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'.*llama3"),
    "half a rope": ({"rope_parameters": {"rope_type": "llama3"}}, "factor"),
    "rope of nothing": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "frequencies are finite",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "more than all of it": (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
    "an odd share": (PHI3 | {"partial_rotary_factor": 0.2}, "= 0.2 for head size 16"),
    "too few factors": (
        PHI3 | {"rope_parameters": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "8 numbers each.*has 1",
    ),
    "factors that are none": (
        PHI3 | {"rope_parameters": {"type": "su", "short_factor": 1, "long_factor": [1]}},
        "short_factor = 1 is not a list",
    ),
    "a first length of nothing": (
        PHI3
        | {
            "rope_parameters": {"type": "longrope", "short_factor": [1], "long_factor": [1]},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings = 1 must be at least 2",
    ),
    "no factors": (PHI3 | {"rope_parameters": {"type": "longrope"}}, "short_factor is missing"),
}


@pytest.mark.parametrize(("changes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(parse, tmp_path, changes, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        parse(**changes)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_rope_in_the_old_style_means_the_same(parse):
    new = parse(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    scaling = {"type": "linear", "factor": 4.0}
    assert parse(rope_parameters=None, rope_scaling=scaling, rope_theta=5e5) == new
    assert new != parse()


def test_remote_code_is_not_asked_for_the_config(parse):
    assert parse(auto_map={"AutoConfig": "evil.Config"}, model_type="evil") == parse()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hybrid_override_pattern": "MX*-"}, "layer type 'X' is not supported"),
        ({"hybrid_override_pattern": "ME*-", "moe_latent_size": 64}, "moe_latent_size = 64 is not"),
        ({"hybrid_override_pattern": "ME*-", "n_group": 2}, "n_group = 2 is not supported"),
        ({"hybrid_override_pattern": "ME*-", "mlp_bias": True}, "mlp_bias = true is not supported"),
        ({"hybrid_override_pattern": "ME*-", "mlp_hidden_act": "silu"}, "only 'relu2'"),
        ({"layers_block_type": ["mamba", "moe"]}, "at least one layer with attention"),
        ({"layers_block_type": ["mamba", "mlp"]}, "at least one layer with attention"),
        ({"hybrid_override_pattern": "M*", "time_step_limit": [0.1, 1.0]}, "time_step_limit"),
        ({"hybrid_override_pattern": "M*", "n_groups": 3}, "not a multiple of mamba_n_groups"),
    ],
)
def test_unsupported_forms_of_mamba_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        parse_config.parse({"architectures": ["NemotronHForCausalLM"], **fields})
