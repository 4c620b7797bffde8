"""Parses config.json of an EAGLE-3 head (Li et al. 2503.01840), in two forms.

The form of speculators has `speculators_model_type`, and the fields of the head's layers in
`transformer_layer_config`. The form of SpecForge, SGLang and vLLM has Llama's fields; the head's
fields are at the top level, or in `eagle_config`.
"""

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import msgspec

from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.config_fields import MAX_SIZE, flag, is_int, positive
from specserve.models.decoder_config import DecoderConfig, Shape
from specserve.models.families import FAMILIES

KIND, LAYERS, NESTED = "speculators_model_type", "transformer_layer_config", "eagle_config"
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
OF_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # architecture by model_type
LLAMA = OF_LAYERS["llama"]
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OWN = (*FLAGS, AUX_LAYER_IDS, "draft_vocab_size", "num_aux_hidden_states", "target_hidden_size")
ROPE = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
)
ALLOWED: dict[str, tuple[Any, ...]] = {  # supported values of fields that change the computation
    "logit_scale": (None, 1),
    "next_layer_regular": (True,),
    "parallel_draft_step": (None, 1),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}
# Ignored fields: the origin of a head, its training, and options of unsupported fields.
HARMLESS = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "embed_requires_grad",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "parallel_draft_heads_num_layers",
    "pretraining_tp",
    "speculators_config",
    "speculators_version",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


class EagleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the weights that a head needs."""

    layers: DecoderConfig  # the head's layers; the vocabulary is the target model's
    # The auxiliary layers, ascending: layers of the target model whose inputs the head reads, i.e.
    # transformers' hidden_states[i].
    aux_layer_ids: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool  # the first layer adds to the normalized feature
    norm_before_fc: bool  # normalizes all auxiliary hidden states together
    fc_norm: bool  # normalizes each auxiliary hidden state
    norm_output: bool  # the next draft step reads normalized rows

    @property
    def width(self) -> int:
        """Width of the concatenated auxiliary hidden states."""
        return len(self.aux_layer_ids) * self.target_hidden_size


def names_head(written: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 head, supported or not."""
    named = written.get("architectures")
    is_listed = isinstance(named, list) and bool(named) and named[0] in ARCHITECTURES
    return KIND in written or is_listed


def check_target(folder: Path, config: EagleConfig, target: Shape) -> None:
    """Raise ConfigError unless the head fits the target model, which must run natively."""
    if target.implementation != "native":
        raise ConfigError(
            f"{folder}: draft heads need a target model that the native code runs, but "
            f"{target.implementation} runs this one. Remove the head"
        )
    sizes = {
        "target_hidden_size": (config.target_hidden_size, "hidden_size", target.hidden_size),
        "vocab_size": (config.layers.vocab_size, "vocab_size", target.vocab_size),
    }
    for key, (has, name, wanted) in sizes.items():
        if has != wanted:
            raise ConfigError(
                f"{folder}/config.json: {key} = {has}, but the target model's {name} is {wanted}. "
                "Use a head that was trained for this target model"
            )
    if config.aux_layer_ids[-1] >= target.num_layers:
        raise ConfigError(
            f"{folder}/config.json: {AUX_LAYER_IDS} = {list(config.aux_layer_ids)}, but the target "
            f"model has only the layers 0 to {target.num_layers - 1}. Use a head that was trained "
            "for this target model"
        )


def parse(written: Mapping[str, Any]) -> EagleConfig:
    """Parse a head's config.json. Raises ValueError for unsupported heads."""
    fields, of_layers = parts(written)
    layers = parse_config.parse(of_layers)
    flags = {name: flag({name: False} | fields, name) for name in FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError("norm_before_fc and fc_norm are both true, but they exclude each other")
    return EagleConfig(
        layers=layers,
        aux_layer_ids=read_aux_layer_ids(fields),
        target_hidden_size=read_size(fields, "target_hidden_size", layers.hidden_size),
        draft_vocab_size=read_size(
            fields, "draft_vocab_size", layers.vocab_size, layers.vocab_size
        ),
        norm_before_residual=flags["norm_before_residual"],
        norm_before_fc=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
    )


def parts(written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head's fields, and the fields of its layers with `architectures`."""
    return (of_speculators if KIND in written else of_llama)(written)


def of_speculators(written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`parts` for the form of speculators."""
    if written[KIND] != "eagle3":
        raise ValueError(f"{KIND} = {written[KIND]!r} is not supported, only 'eagle3'")
    check_fields(written, (*OWN, KIND, LAYERS, "tie_word_embeddings"))
    if "norm_before_residual" not in written:  # false to speculators, and true to vLLM
        raise ValueError(
            "norm_before_residual is missing, and programs differ in its default. Add it, true or "
            "false as in the training of the head"
        )
    told = table(written, LAYERS)
    model_type = told.get("model_type")
    if not isinstance(model_type, str) or model_type not in OF_LAYERS:
        raise ValueError(
            f"{LAYERS}.model_type = {model_type!r} is not supported, only {', '.join(OF_LAYERS)}"
        )
    return dict(written), layer_fields(told, OF_LAYERS[model_type])


def of_llama(written: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`parts` for the form with Llama's fields."""
    if not names_head(written):
        raise ValueError(
            f"architectures = {shortened(written.get('architectures'))} is not an EAGLE-3 head. "
            f"EAGLE-3 heads have {' or '.join(ARCHITECTURES)}, or {KIND} = 'eagle3'"
        )
    if written.get("model_type", "llama") != "llama":
        raise ValueError(
            f"model_type = {written['model_type']!r} is not supported for "
            f"{written['architectures'][0]}, only 'llama'"
        )
    nested = table(written, NESTED) if written.get(NESTED) else {}
    check_fields(nested, OWN)
    if nested.get(AUX_LAYER_IDS) and not written.get(AUX_LAYER_IDS):
        check_counts_entries(nested[AUX_LAYER_IDS])
    told = {key: value for key, value in written.items() if key not in (*OWN, NESTED)}
    own = {key: written[key] for key in OWN if key in written}
    layer_ids = own.get(AUX_LAYER_IDS) or nested.get(AUX_LAYER_IDS)
    return own | nested | {AUX_LAYER_IDS: layer_ids}, layer_fields(told, LLAMA)


def layer_fields(told: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The config.json of a decoder with the head's layers. Raises ValueError for unknown fields."""
    check_fields(told, (*FAMILIES[family].defaults, *ROPE))
    return dict(told) | {"architectures": [family]}


def check_fields(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for fields that would be ignored; unknown empty fields are accepted."""
    for key, value in fields.items():
        if key in ALLOWED:
            if value not in ALLOWED[key]:
                raise ValueError(
                    f"{key} = {shortened(value)} is not supported, only {ALLOWED[key][-1]}"
                )
        elif value and key not in known and key not in HARMLESS:
            raise ValueError(f"{key} = {shortened(value)} is not supported for EAGLE-3 heads")


def table(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = fields.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} = {shortened(value)} must be an object")
    return value


def read_size(fields: Mapping[str, Any], key: str, missing: int, most: int = MAX_SIZE) -> int:
    return missing if fields.get(key) is None else positive(fields, key, most)


def read_aux_layer_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    layer_ids = fields.get(AUX_LAYER_IDS)
    if not layer_ids:
        raise ValueError(
            f"{AUX_LAYER_IDS} is missing. List the target model's layers whose inputs the head was "
            "trained on, e.g. [2, 18, 33]. A default would be unsafe: wrong layers cause no error, "
            "only rejected draft tokens"
        )
    check_layers(layer_ids)
    number = fields.get("num_aux_hidden_states")
    if number is not None and number != len(layer_ids):
        raise ValueError(
            f"num_aux_hidden_states = {number!r}, but {AUX_LAYER_IDS} = {layer_ids} has "
            f"{len(layer_ids)} entries"
        )
    return tuple(layer_ids)


def check_layers(layer_ids: Any) -> None:
    is_list = isinstance(layer_ids, list) and all(
        is_int(layer) and layer >= 0 for layer in layer_ids
    )
    if not is_list or layer_ids != sorted(set(layer_ids)):
        raise ValueError(
            f"{AUX_LAYER_IDS} = {shortened(layer_ids)} must be ascending layer numbers"
        )


def check_counts_entries(layer_ids: Any) -> None:
    """Raise ValueError for an ambiguous list in `eagle_config`. If the list begins with 1, SGLang
    reads the outputs of these layers, and vLLM reads their inputs.
    """
    check_layers(layer_ids)
    if layer_ids[0] == 1:
        raise ValueError(
            f"{NESTED}.{AUX_LAYER_IDS} = {layer_ids} is ambiguous: it means outputs of these "
            f"layers in SGLang, and inputs in vLLM. Add {AUX_LAYER_IDS} next to {NESTED}: "
            f"{[layer + 1 for layer in layer_ids]} for outputs, {layer_ids} for inputs"
        )
