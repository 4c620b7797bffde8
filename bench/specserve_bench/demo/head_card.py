"""The card of an EAGLE-3 head: its training and its acceptance rates."""

from pathlib import Path

import msgspec

from specserve_bench.demo.card import JSON
from specserve_bench.demo.head_figures import Rightness
from specserve_bench.demo.training_config import HeadConfig


class Training(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    texts: list[str]  # none: the demo target's own
    aux_layer_ids: list[int] = msgspec.field(name="taps")
    hours: float
    machine: str
    torch: str
    python: str  # whose library the demo's text is


class HeadCard(msgspec.Struct, frozen=True):
    figures: dict[str, Rightness]  # by kind of text
    training: Training
    config: HeadConfig


def read_head_card(folder: Path) -> HeadCard:
    return msgspec.json.decode((folder / JSON).read_bytes(), type=HeadCard)


def head_words(card: HeadCard) -> str:
    t, c = card.training, card.config
    layers, size = ", ".join(map(str, t.aux_layer_ids)), c.draft_vocab_size
    steps = max(len(each.right) for each in card.figures.values()) if card.figures else 0
    head = "".join(f" {n + 1} |" for n in range(steps))
    rows = "\n".join(map(row, card.figures, card.figures.values()))
    return f"""# {t.target}-head

An EAGLE-3 head (Li et al. 2503.01840) for {t.target}: it predicts tokens from the hidden states
that enter the target's layers {layers}. It has one layer, the form of SpecForge's, and {size:,}
tokens.

The table has the share of its first choices that equal the target's greedy token, in chains of
draft tokens whose earlier tokens were accepted, on held-out texts. The last column is the mean
number of tokens per step with chains of {steps}, including the target's own token.

| text | chains |{head} tokens per step |
|---|---|{"---|" * steps}---|
{rows}

- **Data:** {data(t, c.held_out)}
- **Training:** {c.tokens:,} tokens, {t.hours} hours of steps on {t.machine}, torch {t.torch};
  training-time test of {c.draft_steps} draft steps, each of {c.step_weight:g} times the
  weight of the one before.
"""


def row(kind: str, figures: Rightness) -> str:
    shares = "".join(f" {share:.1%} |" for share in figures.right)
    return f"| {kind} | {figures.chains:,} |{shares} {figures.acceptance_length:.2f} |"


def data(t: Training, share: float) -> str:
    if t.texts:
        return f"{', '.join(t.texts)}; the last {share:.0%} were held out."
    return f"""the standard library of Python {t.python}: conversations made of its docstrings, and
  beginnings of its source with the target's own continuations, half of them greedy, half at
  temperature 1. Licence: PSF (`../LICENSE.txt`), for what it repeats of that."""
