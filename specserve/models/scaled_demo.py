"""A demo at a larger model's cost: a small file that names a model of the package and a shape.

Its weights are made while they are loaded (`specserve.models.scaling`). Does not import torch.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import msgspec

from specserve.config import DEMO, DEMO_COST
from specserve.models.decoder_config import DecoderConfig
from specserve.models.eagle_config import names_head
from specserve.models.folder import Scaled, read_json
from specserve.models.scaled_shape import NOTE, HeadSizes, Sizes, head_sizes, sizes
from specserve.text.defaults import GenerationDefaults
from specserve.text.tokenizer import Tokenizer


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str  # a model of the package
    like: str  # the shape whose cost it has


class ScaledDemo:
    def __init__(self, path: Path) -> None:
        """`path` is one of the package's files."""
        from specserve.models.source import Folder

        assert path.parent == DEMO_COST, f"{path} is no file of the package"
        self.path, self.text = path, path.read_bytes()
        self.recipe = msgspec.json.decode(self.text, type=Recipe)
        self.source = Folder(DEMO / self.recipe.source)

    @cached_property
    def sizes(self) -> Sizes:
        return sizes(self.source.path, self.recipe.like, "bfloat16", self.recipe.source)

    @cached_property
    def head_sizes(self) -> HeadSizes:
        return head_sizes(self.source.path, self.recipe.like)

    @property
    def is_head(self) -> bool:
        """Whether it is an EAGLE-3 head, which has `head_sizes`; other models have `sizes`."""
        return names_head(read_json(self.source.path / "config.json"))

    def config(self) -> DecoderConfig:
        return self.sizes.large

    def shape(self, implementation: str) -> DecoderConfig:
        from specserve.models.source import refuse_transformers

        refuse_transformers(self.path, implementation)
        return self.config()

    def defaults(self) -> GenerationDefaults:
        return self.source.defaults()

    def ends(self) -> dict[str, list[int]]:
        return self.source.ends()

    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer()

    def scaled(self) -> Scaled:
        return Scaled(self.recipe.source, self.recipe.like, NOTE)

    def check(self) -> None:
        self.source.check()

    def identity(self) -> Iterator[bytes]:
        yield self.text
        yield from self.source.identity()
