"""The demo pair's card: how it was trained, and the figures that were measured."""

from pathlib import Path
from typing import Any

import msgspec

from specserve.config import DEMO

JSON, TEXT = "card.json", "README.md"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by `python -m specserve_bench.demo.evaluate`."""

    questions: int
    right_first_sentences: float  # share of the questions
    held_out_loss: float  # nats a token of the held-out files, the target's
    held_out_draft_loss: float
    acceptance_on_questions: float  # mean acceptance length at 16 nodes
    acceptance_on_completion: float
    acceptance_alone_on_completion: float  # without n-grams
    draft_cost: float  # seconds of a forward of 8 rows, the draft's over the target's


class Card(msgspec.Struct, frozen=True, kw_only=True):
    figures: Figures
    training: dict[str, Any]
    config: dict[str, Any]


def read_card(folder: Path = DEMO) -> Card:
    return msgspec.json.decode((folder / JSON).read_bytes(), type=Card)


def write_card(folder: Path, card: msgspec.Struct, text: str) -> None:
    """As JSON for programs, and in words."""
    plain = msgspec.json.format(msgspec.json.encode(card), indent=2)
    (folder / JSON).write_bytes(plain + b"\n")
    (folder / TEXT).write_text(text, encoding="utf-8")


def words(card: Card) -> str:
    f, t, config = card.figures, card.training, card.config
    target, draft = config["target"], config["draft"]
    return f"""# specserve-demo and specserve-demo-draft

Two small models that come with specserve, so that there is something to serve in the first minute
and something to measure drafters with. The target answers questions about Python's standard
library in the words of its docstrings, and goes on with Python source. It is no assistant: it
knows nothing else, and makes things up about functions that it does not know well.

| | target | draft |
|---|---|---|
| shape | Qwen3, {size_words(target)} | Qwen3, {size_words(draft)} |
| tokens | {t["tokens"]["target"]:,} | {t["tokens"]["draft"]:,}, distilled from the target |
| hours of steps | {t["hours"]["target"]} | {t["hours"]["draft"]} |
| loss on held-out source, nats a token | {f.held_out_loss:.2f} | {f.held_out_draft_loss:.2f} |

- **Data:** the standard library of Python {t["python"]} as installed, source and docstrings, and
  conversations made of its signatures and docstrings. Licence: PSF
  (`specserve/demo/weights/LICENSE.txt`), which holds for what the models repeat of it. The
  draft learnt from the same conversations, and from beginnings of source with the target's own
  continuations, half of them greedy, half at temperature 1.
- **Not in training:** the files in `bench/specserve_bench/demo/evaluation/files`, what is defined
  there, and the phrasings of `questions.jsonl` beside them.
- **Right first sentences:** {f.right_first_sentences:.1%} of {f.questions:,} questions about
  functions and classes it has seen, in phrasings it has not: the docstring's first sentence, to
  the letter.
- **Mean acceptance length** at 16 nodes, greedy, of 200 of these questions and of 128 tokens after
  the beginning of every file: {f.acceptance_on_questions:.2f} on questions,
  {f.acceptance_on_completion:.2f} on source with `drafter.name = "model"`, which n-grams
  extend unless `drafter.options.ngrams` is false, and
  {f.acceptance_alone_on_completion:.2f} without them. So small a target repeats itself.
- **Cost of a draft forward** of 8 rows, embedding to logits, ten in a row: {f.draft_cost:.2f} of
  the target's. What surrounds it in the engine, and weights that have left the caches, cost more.
- **Vocabulary:** byte-level BPE, {config["vocab_size"]:,}. Up to 8,192 positions; training saw
  {config["length"]} and {config["long_length"]} at a time.
- **Machine:** {t["machine"]}, torch {t["torch"]}.

`python -m specserve_bench.demo.train OUT` makes such a pair,
`python -m specserve_bench.demo.evaluate` measures these figures again.
"""


def size_words(size: dict[str, int]) -> str:
    layers = "1 layer" if size["layers"] == 1 else f"{size['layers']} layers"
    return f"{layers}, hidden {size['hidden']}, {size['heads']} heads of 64, MLP {size['mlp']}"
