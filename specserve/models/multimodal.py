"""The text model inside a multimodal checkpoint: its fields of config.json, and its tensors' names.

Does not import torch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specserve.models.folder import text_part

# Prefixes of the text model's tensors. Some checkpoints have the names of a text model instead.
DECODER = re.compile(r"(language_model\.model|model\.language_model)\.")
HEAD = "language_model.lm_head."
OTHER_PARTS = re.compile(  # tensors that text does not need
    r"(model\.)?(vision_tower|vision_model|vision_embed_tokens|visual|multi_modal_projector"
    r"|patch_merger|pre_mm_projector_norm|audio_tower|embed_vision|embed_audio)\."
)
OUTER = ("architectures", "quantization_config")  # fields next to text_config that concern text
TIED = "tie_word_embeddings"


def text_type(written: Mapping[str, Any], types: Sequence[str]) -> str:
    """The model type of a config.json's text model. Raises ValueError if `types` lack it."""
    part = text_part(written)
    kind = types[0] if part is written else part.get("model_type", types[0])
    if kind not in types:
        raise ValueError(
            f"text_config.model_type = {kind!r} is not supported, only {', '.join(types)}"
        )
    return str(kind)


def text_fields(written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json's text model, as in a text checkpoint."""
    part = text_part(written)
    outer = {key: written[key] for key in OUTER if key in written}
    if TIED in written and (written[TIED] or TIED not in part):
        outer[TIED] = written[TIED]
    return {**part, **outer}


def text_name(name: str) -> str | None:
    """The name of a tensor in a text checkpoint; None for tensors of other parts."""
    if OTHER_PARTS.match(name):
        return None
    if name.startswith(HEAD):
        return name.removeprefix("language_model.")
    return DECODER.sub("model.", name, count=1) if DECODER.match(name) else name


def other_parts(names: Iterable[str]) -> list[str]:
    """The names of the parts that text does not need, in the checkpoint's order."""
    found = (OTHER_PARTS.match(name) for name in names)
    return list(dict.fromkeys(match[2] for match in found if match))
