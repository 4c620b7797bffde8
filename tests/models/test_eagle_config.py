"""Both forms of an EAGLE-3 head's config.json, and what of them is refused."""

import json

import pytest

from specserve.errors import ConfigError
from specserve.models.source import load_eagle_config
from tests.models.eagle_heads import LAYERS, LLAMA, SPECULATORS

FORMS = {"SpecForge": LLAMA, "speculators": SPECULATORS}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def parse(tmp_path):
    """What a config.json comes to, some of its fields replaced; None takes a field out."""

    def parse(form, **changes):
        fields = {k: v for k, v in (FORMS[form] | changes).items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_eagle_config(tmp_path)

    return parse


def test_both_forms_say_the_same(parse):
    one, other = parse("SpecForge"), parse("speculators")
    assert one == other
    assert one.aux_layer_ids == (1, 2, 3) and one.width == 3 * 64
    assert (one.draft_vocab_size, one.target_hidden_size) == (200, 64)
    assert (one.layers.num_layers, one.layers.hidden_size, one.layers.vocab_size) == (1, 64, 320)
    assert not any(getattr(one, flag) for flag in FLAGS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_is_read_in_both_forms(parse, form, flag):
    got = parse(form, **{flag: True})
    assert [name for name in FLAGS if getattr(got, name)] == [flag]


@pytest.mark.parametrize("form", FORMS)
def test_missing_sizes_are_those_of_the_layers(parse, form):
    got = parse(form, draft_vocab_size=None)
    assert (got.draft_vocab_size, got.target_hidden_size) == (320, 64)
    assert parse(form, target_hidden_size=96).width == 3 * 96


def test_layers_of_qwen3_have_their_norms_of_heads(parse):
    layers = SPECULATORS["transformer_layer_config"] | {"model_type": "qwen3"}
    got = parse("speculators", transformer_layer_config=layers)
    assert got.layers.qk_norm_shapes(0) == ((16,), (16,))


def test_layers_may_have_a_window(parse):
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    layers = SPECULATORS["transformer_layer_config"] | windowed
    assert parse("speculators", transformer_layer_config=layers).layers.windows == (8,)


NESTED = {  # fields of eagle_config, of those beside it -> the auxiliary layers
    "layers that begin with another layer than 1": ({IDS: [2, 5, 8]}, {}, (2, 5, 8)),
    "layers beside it": ({IDS: [1, 5, 8]}, {IDS: [2, 6, 9]}, (2, 6, 9)),
    "any number of layers": ({IDS: [0, 2, 5, 8]}, {"num_aux_hidden_states": 4}, (0, 2, 5, 8)),
    "what is always so": (
        {
            IDS: [2, 5],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "parallel_draft_step": 1,
        },
        {},
        (2, 5),
    ),
}


@pytest.mark.parametrize(("nested", "beside", "aux_layer_ids"), NESTED.values(), ids=NESTED)
def test_aux_layer_ids_may_stand_in_eagle_config(parse, nested, beside, aux_layer_ids):
    config = parse("SpecForge", **{IDS: None} | beside, eagle_config=nested)
    assert config.aux_layer_ids == aux_layer_ids


def test_flags_may_stand_in_eagle_config(parse):
    assert parse("SpecForge", eagle_config={"norm_before_fc": True}).norm_before_fc


BOTH = {  # what is wrong in both forms -> the change, the complaint
    "no layers": (
        {IDS: None},
        rf"{IDS} is missing\. List the target model's layers .* rejected draft tokens",
    ),
    "an empty list of layers": ({IDS: []}, f"{IDS} is missing"),
    "layers that are no list": ({IDS: 2}, f"{IDS} = 2 must be ascending layer numbers"),
    "a layer that is no number": ({IDS: [1, "2"]}, f"{IDS} = .* must be ascending layer numbers"),
    "a negative layer": ({IDS: [-1, 2]}, f"{IDS} = .* must be ascending layer numbers"),
    "layers out of order": ({IDS: [3, 2, 1]}, f"{IDS} = .* must be ascending"),
    "a layer twice": ({IDS: [1, 1]}, f"{IDS} = .* must be ascending"),
    "another number of layers": (
        {"num_aux_hidden_states": 4},
        rf"num_aux_hidden_states = 4, but {IDS} = \[1, 2, 3\] has 3 entries",
    ),
    "both norms before fc": (
        {"norm_before_fc": True, "fc_norm": True},
        "norm_before_fc and fc_norm are both true",
    ),
    "a word for a flag": ({"fc_norm": "yes"}, "fc_norm = 'yes' must be true or false"),
    "an unknown flag": ({"norm_after_fc": True}, "norm_after_fc = True is not supported"),
    "drafts in parallel": ({"mask_token_id": 7}, "mask_token_id = 7 is not supported"),
    "quantized weights": (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config = .* is not supported for EAGLE-3 heads",
    ),
    "more tokens than the target has": (
        {"draft_vocab_size": 321},
        "draft_vocab_size = 321 must be a whole number from 1 to 320",
    ),
    "no width of the target": ({"target_hidden_size": 0}, "target_hidden_size = 0"),
    "scaled logits": ({"logit_scale": 0.5}, "logit_scale = 0.5 is not supported, only 1"),
}
BY_FORM = {
    "another architecture": (
        "SpecForge",
        {"architectures": ["LlamaForCausalLM"]},
        r"architectures = \['LlamaForCausalLM'\] is not an EAGLE-3 head\. .*LlamaForCausalLMEagle3",
    ),
    "no architecture": ("SpecForge", {"architectures": None}, "architectures = None is not an"),
    "another model's layers": (
        "SpecForge",
        {"model_type": "llama4_text"},
        "model_type = 'llama4_text' is not supported for LlamaForCausalLMEagle3, only 'llama'",
    ),
    "layers that programs read in two ways": (
        "SpecForge",
        {IDS: None, "eagle_config": {IDS: [1, 5, 8]}},
        rf"eagle_config.{IDS} = \[1, 5, 8\] is ambiguous: .* Add {IDS} next to eagle_config: "
        r"\[2, 6, 9\] for outputs, \[1, 5, 8\] for inputs",
    ),
    "no layer but the last one": (
        "SpecForge",
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state = False is not supported, only True",
    ),
    "no norm of embeddings": (
        "SpecForge",
        {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
        "use_input_layernorm_in_first_layer = False",
    ),
    "several tokens a step": (
        "SpecForge",
        {"eagle_config": {"parallel_draft_step": 3}},
        "parallel_draft_step = 3 is not supported, only 1",
    ),
    "an unknown flag in eagle_config": (
        "SpecForge",
        {"eagle_config": {"use_mtp_layernorm": True}},
        "use_mtp_layernorm = True is not supported for EAGLE-3 heads",
    ),
    "an eagle_config that is no object": (
        "SpecForge",
        {"eagle_config": 3},
        "eagle_config = 3 must be an object",
    ),
    "another activation": ("SpecForge", {"hidden_act": "gelu"}, "'gelu' is not supported"),
    "another kind": (
        "speculators",
        {"speculators_model_type": "dflash"},
        "speculators_model_type = 'dflash' is not supported, only 'eagle3'",
    ),
    "no word on the residual": (
        "speculators",
        {"norm_before_residual": None},
        "norm_before_residual is missing, and programs differ in its default. Add it",
    ),
    "no layers": (
        "speculators",
        {"transformer_layer_config": None},
        "transformer_layer_config = None must be an object",
    ),
    "layers of another model": (
        "speculators",
        {"transformer_layer_config": {"model_type": "gpt_oss"} | LAYERS},
        "transformer_layer_config.model_type = 'gpt_oss' is not supported, only llama, qwen3",
    ),
    "an unknown field of the layers": (
        "speculators",
        {"transformer_layer_config": {"model_type": "llama", "use_qk_norm": True} | LAYERS},
        "use_qk_norm = True is not supported",
    ),
}
REFUSED = BY_FORM | {
    f"{name}, {form}": (form, *case) for name, case in BOTH.items() for form in FORMS
}


@pytest.mark.parametrize(("form", "changes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(
    parse, tmp_path, form, changes, complaint
):
    with pytest.raises(ConfigError, match=complaint) as error:
        parse(form, **changes)
    assert str(error.value).startswith(str(tmp_path / "config.json"))
