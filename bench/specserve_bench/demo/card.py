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

Two small models that come with specserve, for a first start and for measurements of drafters. The
target model answers questions about Python's standard library with its docstrings, and completes
Python source. It is not an assistant: it has no other knowledge, and invents facts about functions
that it does not know well.

| | target model | draft model |
|---|---|---|
| shape | Qwen3, {size_words(target)} | Qwen3, {size_words(draft)} |
| training tokens | {t["tokens"]["target"]:,} | {t["tokens"]["draft"]:,}, distilled |
| training hours | {t["hours"]["target"]} | {t["hours"]["draft"]} |
| loss on held-out source, nats per token | {f.held_out_loss:.2f} | {f.held_out_draft_loss:.2f} |

- **Data:** the standard library of Python {t["python"]} as installed, source and docstrings, and
  conversations made of its signatures and docstrings. Licence: PSF
  (`specserve/demo/weights/LICENSE.txt`), which also applies to texts that the models repeat. The
  draft model was trained on the same conversations, and on beginnings of source with the target
  model's continuations. Half of them are greedy, half at temperature 1.
- **Not in training:** the files in `bench/specserve_bench/demo/evaluation/files`, all names defined
  there, and the phrasings of `questions.jsonl` next to them.
- **Right first sentences:** {f.right_first_sentences:.1%} of {f.questions:,} questions. The
  questions ask about functions and classes from the training in new phrasings. A response is right
  if it begins with exactly the docstring's first sentence.
- **Mean acceptance length** with `drafter.name = "model"`, 16 nodes, greedy:
  {f.acceptance_on_questions:.2f} on 200 of these questions, {f.acceptance_on_completion:.2f} on
  128 tokens after the beginning of every file. The drafter also uses n-grams unless
  `drafter.options.ngrams` is false; without them, it is {f.acceptance_alone_on_completion:.2f} on
  source. The small target model repeats itself often.
- **Cost of a draft forward pass** of 8 rows, embedding to logits, ten in a row: {f.draft_cost:.2f}
  of the target model's. In the engine, it is higher because of other work and cold caches.
- **Vocabulary:** byte-level BPE, {config["vocab_size"]:,}. Up to 8,192 positions; the training used
  sequences of {config["length"]} and {config["long_length"]} tokens.
- **Machine:** {t["machine"]}, torch {t["torch"]}.

`python -m specserve_bench.demo.train OUT` trains new demo models,
`python -m specserve_bench.demo.evaluate` repeats the measurements.
"""


def size_words(size: dict[str, int]) -> str:
    layers = "1 layer" if size["layers"] == 1 else f"{size['layers']} layers"
    return f"{layers}, hidden {size['hidden']}, {size['heads']} heads of 64, MLP {size['mlp']}"
