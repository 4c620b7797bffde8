"""All sources of guesses there are, each used as far as it saves time."""

from typing import Annotated, Any

from msgspec import Meta, field

from specserve_drafters import base
from specserve_drafters.tree import MAX_NODES

EAGLE = "eagle"  # the source that is a head of the target
USUAL = "ngram", "model", EAGLE, "grammar", "prediction"
BUILT_IN = *USUAL, "suffix", "recycle"


class AutoOptions(base.Options, frozen=True):
    # ngram, model (where there is a draft model), eagle (where there is a head), grammar,
    # prediction, suffix, recycle, and drafters as package.module:Class
    sources: Annotated[tuple[str, ...], Meta(min_length=1, max_length=16)] = USUAL
    # of the drafters among them, by these names
    source_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    max_depth: Annotated[int, Meta(ge=1, le=MAX_NODES)] = 16  # levels of a model
    width: Annotated[int, Meta(ge=1, le=16)] = 4  # nodes run a level, and children a node
    tau: Annotated[float, Meta(gt=0, le=4)] = 1.0  # see Ops.top_children


class Auto:
    """The options of the sources that the engine asks and plans by itself."""

    Options = AutoOptions
