"""A checkpoint's generation defaults: end-of-text tokens and sampling parameters."""

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specserve.errors import ConfigError
from specserve.models.folder import read_json, text_part

TokenId = Annotated[int, Meta(ge=0)]
Temperature = Annotated[float, Meta(ge=0, le=1e4)]
TopP = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-4, le=1e4)]  # bounds that keep logits finite
FILE, CONFIG = "generation_config.json", "config.json"
MIN_TEMPERATURE = 1e-4  # minimum nonzero value, so that logits / it fit float32
NOT_APPLIED: dict[str, Any] = {  # keys that only transformers applies -> value without effect
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "typical_p": 1,
}

log = logging.getLogger("specserve")


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Default values of parameters that a request leaves unset."""

    eos_token_ids: tuple[TokenId, ...] = ()
    temperature: Temperature = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None  # None: the rest of the context

    def __post_init__(self) -> None:
        check_temperature(self.temperature)

    @property
    def parameters(self) -> dict[str, float | int]:
        """The sampling parameters by their names in requests."""
        names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
        limit = {} if self.max_new_tokens is None else {"max_tokens": self.max_new_tokens}
        return {name: getattr(self, name) for name in names} | limit

    @property
    def for_chats(self) -> dict[str, float | int]:
        """The parameters that a chat of a user sends; none if the model's files name some.

        Small models often write gibberish at a temperature of 1.
        """
        neutral = GenerationDefaults(eos_token_ids=self.eos_token_ids)
        return CHAT if self == neutral else {}


CHAT: dict[str, float | int] = {
    "temperature": 0.7,
    "top_p": 0.95,
    "min_p": 0.05,
    "max_tokens": 2048,
}


def check_temperature(temperature: float) -> None:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature {temperature} is neither 0 nor at least {MIN_TEMPERATURE}. Use 0 for "
            "greedy decoding."
        )


def load_defaults(folder: Path) -> GenerationDefaults:
    """Read the values of generation_config.json, except end tokens.

    The file is read directly, because transformers' GenerationConfig adds default values.
    """
    path = folder / FILE
    return read_defaults(path, read_json(path) if path.exists() else {})


def load_ends(folder: Path) -> dict[str, list[int]]:
    """Read the end tokens of generation_config.json and config.json, by file."""
    paths = [path for name in (FILE, CONFIG) if (path := folder / name).exists()]
    return {path.name: ends for path in paths if (ends := read_ends(path, read_json(path)))}


def read_ends(path: Path, fields: dict[str, Any]) -> list[int]:
    try:
        ids = fields.get("eos_token_id", text_part(fields).get("eos_token_id"))
        return msgspec.convert([ids] if isinstance(ids, int) else ids or [], list[TokenId])
    except (ValueError, msgspec.ValidationError) as e:
        raise ConfigError(f"{path}: eos_token_id: {e}. Correct the file, or remove the key.") from e


def read_defaults(path: Path, written: dict[str, Any]) -> GenerationDefaults:
    """Convert the values of a generation_config.json; `path` is its name in errors."""
    names = {*GenerationDefaults.__struct_fields__} - {"eos_token_ids"}
    values = {key: written.get(key) for key in names}
    if written.get("do_sample") is False:
        values["temperature"] = 0.0
    keys = [k for k, off in NOT_APPLIED.items() if written.get(k) not in (None, [], {}, off)]
    if keys:
        log.warning(
            "%s: specserve ignores these settings, which may change the text: %s",
            path,
            ", ".join(keys),
        )
    try:
        return msgspec.convert(
            {key: value for key, value in values.items() if value is not None}, GenerationDefaults
        )
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}. Correct the file, or remove the key.") from e
