"""A drafter with a chosen acceptance, to measure the engine's speed at it."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from specserve_drafters.base import DraftRequest, Options
from specserve_drafters.candidates import Draft

NAME = "specserve_bench.scripted:ScriptedDrafter"


class ScriptedOptions(Options, frozen=True):
    """recording   a JSON list of token ids: each a prompt and what the target says after it
    acceptance  chance of a right guess at depth 1, 2, ..., where all before it were right
    seed        of the chances
    """

    recording: str
    acceptance: tuple[Annotated[float, Meta(ge=0.0, le=1.0)], ...]
    seed: int = 0


class ScriptedDrafter:
    """Proposes the recorded continuation as a chain, corrupted from some depth on by chance.

    The draw depends on the seed and the request's length only, so that runs guess alike.
    """

    Options = ScriptedOptions
    needs_executor = False

    def __init__(self, options: ScriptedOptions) -> None:
        self.options = options
        raw = Path(options.recording).read_bytes()
        self.texts = [array("i", ids) for ids in msgspec.json.decode(raw, type=list[list[int]])]
        self.known: dict[int, array[int]] = {}  # request -> its whole text

    def propose(self, items: Sequence[DraftRequest]) -> list[Draft]:
        return [self.chain(item) for item in items]

    def chain(self, item: DraftRequest) -> Draft:
        end = len(item.token_ids)
        text = self.text_of(item)
        chance = random.Random(f"{self.options.seed} {item.seed} {end}")
        tokens = text[end : end + min(item.limit, len(self.options.acceptance))].tolist()
        for depth, acceptance in enumerate(self.options.acceptance[: len(tokens)]):
            if chance.random() >= acceptance:
                tokens[depth:] = [t - 1 if t else 1 for t in tokens[depth:]]  # other ids
                break
        return Draft.chain(tokens)

    def text_of(self, item: DraftRequest) -> "array[int]":
        """The recorded text that begins with the request's tokens; empty if there is none."""
        text = self.known.get(item.id)
        if text is None or text[: len(item.token_ids)] != item.token_ids:
            begins = (t for t in self.texts if t[: len(item.token_ids)] == item.token_ids)
            text = self.known[item.id] = next(begins, item.token_ids)
        return text

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        pass

    def forget(self, id: int) -> None:
        self.known.pop(id, None)
