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
that enter the target model's layers {layers}. It has one layer and a vocabulary of {size:,} tokens,
in SpecForge's format.

The table shows, on held-out texts, how often the head's most probable token equals the target
model's greedy token. Column n is for draft token n of a chain, if all earlier ones were accepted.
The last column is the mean number of tokens per step with chains of {steps}, including the target
model's own token.

| text | chains |{head} tokens per step |
|---|---|{"---|" * steps}---|
{rows}

- **Data:** {data(t, c.held_out)}
- **Training:** {c.tokens:,} tokens, {t.hours} hours on {t.machine}, torch {t.torch}. The
  training-time test has {c.draft_steps} draft steps. The loss of each step weighs
  {c.step_weight:g} times the loss of the step before.
"""


def row(kind: str, figures: Rightness) -> str:
    shares = "".join(f" {share:.1%} |" for share in figures.right)
    return f"| {kind} | {figures.chains:,} |{shares} {figures.acceptance_length:.2f} |"


def data(t: Training, share: float) -> str:
    if t.texts:
        return f"{', '.join(t.texts)}; the last {share:.0%} are held out."
    return f"""conversations made from docstrings of Python {t.python}'s standard library, and
  source of the library that the target model continued. Half of the continuations are greedy, half
  have temperature 1. Licence: PSF (`../LICENSE.txt`); it applies to text that the head repeats."""
