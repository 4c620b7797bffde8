"""What config.json alone says of a model that transformers is to compute."""

import json

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specserve.errors import ConfigError
from specserve.models import parse_config, transformers_config
from specserve.models.source import open_source
from specserve.models.transformers_config import causal_models
from tests.checkpoints import FAMILIES, RECURRENT, tiny_checkpoint
from tests.models.gguf_files import write
from tests.models.transformers_models import CASES, foreign_checkpoint


def test_the_table_of_transformers_is_read_without_importing_it():
    assert causal_models() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_sizes_are_those_of_the_checkpoint(overrides, tmp_path):
    shape = open_source(foreign_checkpoint(tmp_path, **overrides)).shape("transformers")
    sizes = shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size
    assert sizes == (2, 64, 4, 320)
    assert (shape.max_positions, shape.implementation) == (512, "transformers")


# In transformers' modules, the attention of Llama 4 has no chunks.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama4", *RECURRENT}))
def test_both_implementations_find_the_same_sizes(family, tmp_path):
    source = open_source(tiny_checkpoint(tmp_path, family))
    native, other = source.shape("native"), source.shape("transformers")
    shared = other.__struct_fields__
    assert [getattr(native, name) for name in shared] == [getattr(other, name) for name in shared]


def test_auto_is_native_where_that_has_the_architecture(tmp_path):
    folders = {
        kind: foreign_checkpoint(tmp_path / kind, model_type=kind) for kind in ("llama", "olmo")
    }
    chosen = {kind: open_source(f).shape("auto").implementation for kind, f in folders.items()}
    assert chosen == {"llama": "native", "olmo": "transformers"}
    with pytest.raises(ConfigError, match="'OlmoForCausalLM'"):
        open_source(folders["olmo"]).shape("native")


def test_what_native_code_lacks_names_the_implementation_that_may_have_it(tmp_path):
    remedy = "Try model.implementation = 'transformers'"
    folder = tiny_checkpoint(tmp_path / "gelu", "llama", hidden_act="gelu")
    with pytest.raises(ConfigError, match=f"hidden_act = 'gelu' is not supported.*{remedy}"):
        open_source(folder).shape("auto")
    assert open_source(folder).shape("transformers").implementation == "transformers"
    path = folder / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"attention_chunk_size": 8}))
    with pytest.raises(ConfigError, match="attention_chunk_size") as e:
        open_source(folder).shape("auto")
    assert remedy not in str(e.value)


OLMO = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
REFUSED = {  # changes of olmo's config.json, words of the complaint
    "code of its own": (
        {"architectures": ["NewForCausalLM"], "auto_map": {"AutoModelForCausalLM": "new.New"}},
        r"code from a checkpoint \(auto_map\) is never run",
    ),
    "a name that transformers lacks": (
        {"architectures": ["NewForCausalLM"]},
        "has no decoder of this name for model_type = 'olmo'",
    ),
    "another type's name": ({"model_type": "granite"}, "for model_type = 'granite'"),
    "no type": ({"model_type": None}, "model_type = None must name"),
    "Phi-3-small": (
        {"architectures": ["Phi3SmallForCausalLM"], "auto_map": {"AutoModelForCausalLM": "x.X"}},
        "its attention is block-sparse",
    ),
    "an encoder": (
        {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": True,
        },
        "models with an encoder",
    ),
    "an encoder under a decoder's name": ({"is_encoder_decoder": True}, "only decoders"),
    "images": (
        {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}},
        "images or sound",
    ),
    "images under a decoder's name": ({"vision_config": {}}, "vision_config: in transf"),
    "linear attention": ({"layer_types": ["linear_attention"] * 2}, "'linear_attention' is not"),
    "mamba": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "model_type = 'mamba': layers with a recurrent state",
    ),
    "mamba layers": ({"mamba_d_state": 16}, "mamba_d_state: layers with a recurrent state"),
    "chunked attention": ({"attention_chunk_size": 8}, "chunked attention"),
    "latent attention": ({"kv_lora_rank": 8}, r"\(MLA\)"),
    "values of their own size": ({"head_dim": 16, "v_head_dim": 32}, "v_head_dim = 32 must equal"),
    "rope by length": ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' depends on"),
    "rope by length of a layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
        "'longrope' depends on",
    ),
    "rope by length, old style": ({"rope_scaling": {"type": "su"}}, "rope_scaling: rope_type 'su'"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: "),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    "no positions": ({"max_position_embeddings": None}, "max_position_embeddings = None"),
    "no vocabulary": ({"vocab_size": None}, "vocab_size = None"),
    "heads beyond the kernels": ({"head_dim": 514}, "head_dim = 514.*512"),
}


@pytest.mark.parametrize(("changes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_before_it_is_loaded(tmp_path, changes, complaint):
    folder = foreign_checkpoint(tmp_path, **OLMO)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=complaint) as error:
        open_source(folder).shape("auto")
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "bamba", "falcon_h1", "nemotron_h"])
def test_a_recurrent_state_is_for_native_code(family, tmp_path):
    source = open_source(tiny_checkpoint(tmp_path, family))
    with pytest.raises(ConfigError) as e:
        source.shape("transformers")
    assert str(e.value) == (
        "model.implementation = transformers: layers with a recurrent state run in native code "
        "only. Remove this setting"
    )


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("lfm2", "block_multiple_of", 0),
        ("lfm2", "block_ff_dim", "a"),
        ("lfm2", "block_ffn_dim_multiplier", []),
        ("lfm2", "full_attn_idxs", 3),
        ("lfm2", "full_attn_idxs", [0, "a"]),
        ("lfm2", "layer_types", [[], "conv", "full_attention"]),
        ("lfm2", "layer_types", ["linear_attention", "full_attention", "conv"]),
        ("qwen3_next", "full_attention_interval", 0),
        ("qwen3_next", "num_hidden_layers", None),
        ("qwen3_next", "layer_types", ["conv", "linear_attention", "full_attention"]),
        ("olmo_hybrid", "num_attention_heads", "a"),
        ("olmo_hybrid", "linear_num_key_heads", 0),
        ("falcon_h1", "num_hidden_layers", 10**30),
        ("falcon_h1", "num_hidden_layers", True),
        ("falcon_h1", "mamba_n_heads", None),
        ("falcon_h1", "mamba_d_head", {}),
        ("falcon_h1", "mamba_d_ssm", "a"),
        ("falcon_h1", "time_step_limit", 0),
        ("bamba", "attn_layer_indices", 1),
        ("bamba", "mamba_expand", "a"),
        ("nemotron_h", "layers_block_type", 5),
        ("nemotron_h", "layers_block_type", [[]]),
    ],
)
def test_invalid_sizes_of_recurrent_layers_are_named(tmp_path, family, name, value):
    fields = {"layer_types": None, name: value}
    path = tiny_checkpoint(tmp_path, family) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ConfigError, match=rf"{name}( = |: )"):
        open_source(tmp_path).shape("auto")


def test_a_gguf_file_is_for_native_code(tmp_path):
    write(tmp_path / "m")
    file = tmp_path / "m/model.gguf"
    assert open_source(file).shape("auto").implementation == "native"
    with pytest.raises(ConfigError, match="needs a folder in the Hugging Face layout"):
        open_source(file).shape("transformers")


def test_where_the_table_is_not_found_loading_reports(monkeypatch):
    monkeypatch.setattr(transformers_config, "causal_models", dict)
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 9}
    written = {**OLMO, **sizes, "architectures": ["NewForCausalLM"], "max_position_embeddings": 9}
    assert transformers_config.parse(written).architecture == "NewForCausalLM"
    assert not parse_config.names_family(written)
