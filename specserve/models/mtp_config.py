"""Layers for multi-token prediction (DeepSeek-AI 2412.19437, section 2.2) that come with a model:
what a checkpoint calls their tensors, and whether it has them.

Does not import torch.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from specserve.models.decoder_config import (
    MAX_LAYERS,
    names_family,
    num_mtp_layers,
    positive,
    read_config,
)
from specserve.models.weight_files import tensor_names

T = TypeVar("T")


class MtpStyle(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the first such layer's tensors, and what else its makers' code fixes."""

    module: str  # of all others but `layer`
    layer: str  # a decoder layer of the model's own family
    embedding_norm: str
    feature_norm: str
    join: str  # the map of embedding and feature side by side
    norm: str  # before the head; what the next draft step reads has it, too
    embedding: str | None = None  # the model's where there is none
    head: str | None = None  # likewise
    has_feature_first: bool = False  # in the columns of `join`
    reads_normed: bool = True  # the feature has the model's last norm

    def owns(self, name: str) -> bool:
        """Whether a tensor belongs to it, and not to a further layer."""
        if name.startswith(f"{self.layer}."):
            return True
        return name.startswith(f"{self.module}.") and not name.startswith(FURTHER)


FURTHER = "mtp.layers."
LOST = (
    "config.json tells of layers for multi-token prediction, and their tensors are not there; take "
    "a checkpoint that has kept them, or another drafter"
)
QWEN = MtpStyle(
    module="mtp",
    layer=f"{FURTHER}0",
    embedding_norm="pre_fc_norm_embedding",
    feature_norm="pre_fc_norm_hidden",
    join="fc",
    norm="norm",
)
# MiMo's makers hand the residual over as it is (vLLM's mimo.py).
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
    """The style of a checkpoint's tensors; None if it has no such layer."""
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
    """Whether a model has such layers, and native code for their kind."""
    return mtp_state(folder) == "there"


def has_lost_mtp(folder: Path) -> bool:
    """Whether its config.json tells of such layers that its weights lack."""
    return mtp_state(folder) == "lost"


def mtp_state(folder: Path) -> Literal["none", "there", "lost"]:
    """Whether config.json tells of such layers, and whether the weights have them."""
    num_layers = 0 if folder.is_file() else read_config(folder, layers_before)
    if num_layers == 0:
        return "none"
    return "lost" if find_style(tensor_names(folder), num_layers) is None else "there"


def layers_before(written: Mapping[str, Any]) -> int:
    """The layers of a model whose config.json tells of others behind them; 0 of any other."""
    if not names_family(written) or num_mtp_layers(written) == 0:
        return 0
    return positive({"num_hidden_layers": None} | dict(written), "num_hidden_layers", MAX_LAYERS)


def without_mtp(files: Mapping[str, T], num_layers: int, number: int) -> dict[str, T]:
    """A checkpoint's tensors but those of such layers, of which its config.json tells a number."""
    behind = [f"model.layers.{num_layers + i}." for i in range(number)]
    others = (*behind, "mtp.", "model.mtp_layers.") if number else ()
    return {name: file for name, file in files.items() if not name.startswith(others)}
