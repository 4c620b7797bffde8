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

Two small models that come with specserve. They let you start a server without a download, and
they serve to measure drafters. The target model answers questions about Python's standard library
with text of its docstrings, and it completes Python source. It is not a general assistant, and
even its responses about the library may be wrong.

| | target model | draft model |
|---|---|---|
| shape | Qwen3, {size_words(target)} | Qwen3, {size_words(draft)} |
| tokens | {t["tokens"]["target"]:,} | {t["tokens"]["draft"]:,}, distilled from the target model |
| training time, hours | {t["hours"]["target"]} | {t["hours"]["draft"]} |
| loss on held-out source, nats per token | {f.held_out_loss:.2f} | {f.held_out_draft_loss:.2f} |

- **Data:** source and docstrings of the standard library of Python {t["python"]}, and
  conversations made from its signatures and docstrings. Licence: PSF
  (`specserve/demo/weights/LICENSE.txt`); it applies to text of the library that the models repeat.
  The draft model was trained on the same conversations, and on source that the target model
  continued. Half of the continuations are greedy, half have temperature 1.
- **Not in training:** the files in `bench/specserve_bench/demo/evaluation/files`, the functions and
  classes that they define, and the phrasings of `evaluation/questions.jsonl`.
- **Exact first sentences:** {f.right_first_sentences:.1%} of {f.questions:,} responses begin with
  exactly the docstring's first sentence. The questions are about functions and classes of the
  training text, in other phrasings.
- **Mean acceptance length** (greedy, 16 draft tokens per step): {f.acceptance_on_questions:.2f} on
  200 of these questions and {f.acceptance_on_completion:.2f} on source, with
  `drafter.name = "model"` and its n-grams. Without n-grams (`drafter.options.ngrams = false`) it is
  {f.acceptance_alone_on_completion:.2f} on source. The source is 128 tokens after the beginning of
  each file. N-grams are effective because a small target model repeats text.
- **Cost of a draft forward** of 8 rows, from embedding to logits: {f.draft_cost:.2f} of the target
  model's, in a loop of ten forwards. In the engine it is higher, because of overhead and cache
  misses.
- **Vocabulary:** byte-level BPE, {config["vocab_size"]:,} tokens. Up to 8,192 positions; training
  rows had {config["length"]} or {config["long_length"]} tokens.
- **Machine:** {t["machine"]}, torch {t["torch"]}.

`python -m specserve_bench.demo.train OUT` trains such a pair.
`python -m specserve_bench.demo.evaluate` measures these figures again.
"""


def size_words(size: dict[str, int]) -> str:
    layers = "1 layer" if size["layers"] == 1 else f"{size['layers']} layers"
    return f"{layers}, hidden {size['hidden']}, {size['heads']} heads of 64, MLP {size['mlp']}"
