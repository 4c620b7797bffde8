"""`python -m specserve.demo.evaluate`: what the demo pair can do, and its card.

Everything is asked through the engine, greedily, from the committed evaluation files.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from specserve import LLM, SamplingParams
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.demo.evaluation import Question, questions, source_files
from specserve.generation import Output

import torch  # isort: skip
from torch.nn import functional as F  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

NODES = 16
ASKED_FOR_ACCEPTANCE = 200  # questions, evenly drawn from all
WINDOW = 512  # tokens of a file that are scored together


class Figures(msgspec.Struct, kw_only=True):
    """What the card says of a pair."""

    questions: int
    right_first_sentences: float  # share
    held_out_loss: float  # nats a token of the evaluation files, the target's
    held_out_draft_loss: float
    acceptance_on_questions: float  # mean length at 16 nodes, bonus included
    acceptance_on_completion: float


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m specserve.demo.evaluate", description=__doc__)
    parser.add_argument("--target", type=Path, default=DEMO_TARGET)
    parser.add_argument("--draft", type=Path, default=DEMO_DRAFT)
    parser.add_argument("--every", type=int, default=1, help="ask every Nth question only")
    args = parser.parse_args(argv)
    figures = evaluate(args.target, args.draft, args.every)
    print(msgspec.json.format(msgspec.json.encode(figures)).decode())
    return 0


def evaluate(target: Path, draft: Path, every: int = 1) -> Figures:
    asked = questions()[::every]
    settings = {"speculation.max_nodes": NODES, "scheduler.max_running": 16}
    with LLM(target, draft, "model", set=settings) as llm:
        outputs = ask(llm, asked)
        one_by_one = [output for q in asked[:: spacing(asked)] for output in ask(llm, [q])]
        completed = complete(llm)
    right = sum(is_right(o.text, q) for o, q in zip(outputs, asked, strict=True))
    return Figures(
        questions=len(asked),
        right_first_sentences=round(right / len(asked), 4),
        held_out_loss=round(held_out_loss(target), 4),
        held_out_draft_loss=round(held_out_loss(draft), 4),
        acceptance_on_questions=round(acceptance_length(one_by_one), 3),
        acceptance_on_completion=round(acceptance_length(completed), 3),
    )


def ask(llm: LLM, asked: Sequence[Question]) -> list[Output]:
    conversations = [[{"role": "user", "content": q.question}] for q in asked]
    return llm.chat(conversations, SamplingParams(temperature=0, max_tokens=96))


def is_right(answer: str, question: Question) -> bool:
    """Whether the answer's first sentence is the docstring's own."""
    rest = answer.removeprefix(question.first_sentence)
    return rest != answer and (rest == "" or rest[0].isspace())


def complete(llm: LLM) -> list[Output]:
    """The second half of every evaluation file's first 2,000 characters, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    return [llm.generate(text[:1000], params)[0] for text in source_files().values()]


def spacing(asked: Sequence[Any]) -> int:
    return max(1, len(asked) // ASKED_FOR_ACCEPTANCE)


def acceptance_length(outputs: Sequence[Output]) -> float:
    steps = sum(o.speculation.steps for o in outputs)
    # A lone output tells its mean over steps; one without guesses said a token a step.
    tokens = sum(
        (o.speculation.mean_acceptance_length or 1.0) * o.speculation.steps for o in outputs
    )
    return tokens / steps


@torch.inference_mode()
def held_out_loss(folder: Path) -> float:
    """Mean nats a token over the evaluation files, in windows, by transformers in float32."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for text in source_files().values():
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        for window in torch.split(ids, WINDOW):
            if len(window) > 1:
                logits = model(window[None]).logits[0, :-1]
                total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
                count += len(window) - 1
    return total / count if count else math.nan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
