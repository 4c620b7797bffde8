"""What a checkpoint says of its own generation: when it ends, and how it samples."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from specserve.errors import ConfigError
from specserve.models.folder import read_json

TokenId = Annotated[int, Meta(ge=0)]
FILE = "generation_config.json"


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The values of parameters that a request leaves unset."""

    eos_token_ids: tuple[TokenId, ...] = ()
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0


def load_defaults(folder: Path) -> GenerationDefaults:
    """The values written in generation_config.json, with config.json's eos where it has none.

    Read as it stands, because transformers' GenerationConfig would fill in values of its own.
    """
    path = folder / FILE
    written = read_json(path) if path.exists() else {}
    values = {key: written.get(key) for key in GenerationDefaults.__struct_fields__}
    values["eos_token_ids"] = eos(written) or eos(read_json(folder / "config.json"))
    if written.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return msgspec.convert(
            {key: value for key, value in values.items() if value is not None}, GenerationDefaults
        )
    except msgspec.ValidationError as e:
        raise ConfigError(f"{path}: {e}; correct the file, or remove the key") from e


def eos(fields: dict[str, Any]) -> Any:
    ids = fields.get("eos_token_id")
    return [ids] if isinstance(ids, int) else ids
