"""MTP (multi-token prediction) layers of a model (DeepSeek-AI 2412.19437, section 2.2): the names
of their tensors, and whether a checkpoint has them.

Does not import torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from specserve.models.config_fields import MAX_LAYERS, positive
from specserve.models.multimodal import text_fields, text_name
from specserve.models.parse_config import find_family, names_family, num_mtp_layers, read_config
from specserve.models.weight_files import tensor_names

T = TypeVar("T")


class MtpStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the first MTP layer's tensors, and its other properties, for one model maker."""

    module: str  # prefix of all names below except `layer`
    layer: str  # a decoder layer of the model's family
    embedding_norm: str
    feature_norm: str
    join: str  # the map of the concatenated embedding and feature
    norm: str  # applied before the head, and to the input of the next draft step
    embedding: str | None = None  # None: the model's embedding
    head: str | None = None  # None: the model's head
    has_feature_first: bool = False  # order in the columns of `join`
    reads_normed: bool = True  # the model's final norm is applied to the feature

    def owns(self, name: str) -> bool:
        """Whether a tensor belongs to the first MTP layer, and not to a later one."""
        if name.startswith(f"{self.layer}."):
            return True
        return name.startswith(f"{self.module}.") and not name.startswith(FURTHER)


FURTHER = "mtp.layers."
LOST = (
    "config.json describes MTP layers, but their tensors are missing. Use a checkpoint with these "
    "tensors, or another drafter"
)
QWEN = MtpStyle(
    module="mtp",
    layer=f"{FURTHER}0",
    embedding_norm="pre_fc_norm_embedding",
    feature_norm="pre_fc_norm_hidden",
    join="fc",
    norm="norm",
)
# MiMo's layer reads the residual without the final norm (see vLLM's mimo.py).
MIMO = MtpStyle(
    module="model.mtp_layers.0",
    layer="model.mtp_layers.0",
    embedding_norm="token_layernorm",
    feature_norm="hidden_layernorm",
    join="input_proj",
    norm="final_layernorm",
    has_feature_first=True,
    reads_normed=False,
)


def find_style(names: Iterable[str], num_layers: int) -> MtpStyle | None:
    """The style of a checkpoint's MTP layer; None if it has none."""
    behind = f"model.layers.{num_layers}"
    deepseek = MtpStyle(
        module=behind,
        layer=behind,
        embedding_norm="enorm",
        feature_norm="hnorm",
        join="eh_proj",
        norm="shared_head.norm",
        embedding="embed_tokens",
        head="shared_head.head",
    )
    names = list(names)
    return next((s for s in (deepseek, QWEN, MIMO) if any(map(s.owns, names))), None)


def has_mtp(folder: Path) -> bool:
    """Whether a model has MTP layers of a supported style."""
    return mtp_state(folder) == "there"


def has_lost_mtp(folder: Path) -> bool:
    """Whether config.json describes MTP layers that the weights lack."""
    return mtp_state(folder) == "lost"


def mtp_state(folder: Path) -> Literal["none", "there", "lost"]:
    """Whether config.json describes no MTP layers, or the weights have or lack them."""
    place = None if folder.is_file() else read_config(folder, place_of_layer)
    if place is None:
        return "none"
    names = filter(None, map(text_name, tensor_names(folder)))
    if find_style(names, place.num_layers) is not None:
        return "there"
    return "lost" if place.is_described else "none"


class MtpPlace(NamedTuple):
    """Where a checkpoint may have MTP layers: after `num_layers` others."""

    num_layers: int
    is_described: bool  # by config.json


def place_of_layer(written: Mapping[str, Any]) -> MtpPlace | None:
    """The place of MTP layers; None if the model cannot have any, or its family uses none."""
    if not names_family(written):
        return None
    family = find_family(written)[1] if written.get("architectures") else None
    recurrent = "none" if family is None else family.recurrent
    if recurrent not in ("none", "gated_delta"):
        return None
    fields = {"num_hidden_layers": None} | text_fields(written)
    is_described = num_mtp_layers(fields) > 0
    if not is_described and recurrent == "none":
        return None
    return MtpPlace(positive(fields, "num_hidden_layers", MAX_LAYERS), is_described)


def without_mtp(
    files: Mapping[str, T], num_layers: int, number: int, may_have_more: bool = False
) -> dict[str, T]:
    """A checkpoint's tensors without the `number` MTP layers that config.json describes.
    `may_have_more`: it may have layers of other names that config.json does not describe.
    """
    behind = [f"model.layers.{num_layers + i}." for i in range(number)]
    others = (*behind, "mtp.", "model.mtp_layers.") if number or may_have_more else ()
    return {name: file for name, file in files.items() if not name.startswith(others)}
