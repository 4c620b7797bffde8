"""`python -m specserve_bench.demo.evaluate`: measures the figures of the demo pair's card.

All text is greedy and comes from the engine; prompts come from the held-out files and questions.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from specserve import LLM, SamplingParams
from specserve.api.outputs import Output
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.engine.runner import RowGroup, Runner, build_step_input
from specserve.errors import ConfigError
from specserve.memory.blocks import BlockTable
from specserve_bench.demo.card import JSON, Figures, read_card
from specserve_bench.demo.held_out import Question, questions, source_files

import torch  # isort: skip
from torch.nn import functional as F  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

NODES = 16
ASKED_FOR_ACCEPTANCE = 200  # questions, evenly drawn from all
WINDOW = 512  # tokens of a file that are scored together
ROWS, CONTEXT = 8, 256
TURNS, IN_A_ROW = 60, 10  # of the forwards that are timed


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m specserve_bench.demo.evaluate", description=__doc__
    )
    parser.add_argument("--target", type=Path, default=DEMO_TARGET)
    parser.add_argument("--draft", type=Path, default=DEMO_DRAFT)
    parser.add_argument("--every", type=int, default=1, help="ask every Nth question only")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every {args.every}: at least 1")
    show(evaluate(args.target, args.draft, args.every), args.target.parent)
    return 0


def show(figures: Figures, folder: Path) -> None:
    """Print figures, each with the card's where the folder has a card."""
    card = msgspec.to_builtins(read_card(folder).figures) if (folder / JSON).exists() else {}
    for name, value in msgspec.to_builtins(figures).items():
        print(f"{name:26} {value:>10} {f'(card: {card[name]})' if card else ''}".rstrip())


def evaluate(target: Path, draft: Path, every: int = 1) -> Figures:
    asked = questions()[::every]
    settings: dict[str, Any] = {"speculation.max_nodes": NODES, "scheduler.max_running": 16}
    with LLM(target, draft, "model", set=settings) as llm:
        outputs = ask(llm, asked)
        some = asked[:: max(1, len(asked) // ASKED_FOR_ACCEPTANCE)]
        one_by_one = [output for q in some for output in ask(llm, [q])]
        completed = complete(llm)
        cost = draft_cost(llm)
        weights = llm.weights
    settings["drafter.options.ngrams"] = False
    with LLM(target, draft, "model", set=settings, weights=weights) as llm:
        completed_alone = complete(llm)
    right = sum(is_right(o.text, q) for o, q in zip(outputs, asked, strict=True))
    return Figures(
        questions=len(asked),
        right_first_sentences=round(right / len(asked), 4),
        held_out_loss=round(held_out_loss(target), 4),
        held_out_draft_loss=round(held_out_loss(draft), 4),
        acceptance_on_questions=round(acceptance_length(one_by_one), 3),
        acceptance_on_completion=round(acceptance_length(completed), 3),
        acceptance_alone_on_completion=round(acceptance_length(completed_alone), 3),
        draft_cost=round(cost, 3),
    )


def ask(llm: LLM, asked: Sequence[Question]) -> list[Output]:
    conversations = [[{"role": "user", "content": q.question}] for q in asked]
    return llm.chat(conversations, SamplingParams(temperature=0, max_tokens=96))


def is_right(answer: str, question: Question) -> bool:
    """Whether the answer's first sentence is the docstring's own."""
    rest = answer.removeprefix(question.first_sentence)
    return rest != answer and (rest == "" or rest[0].isspace())


def complete(llm: LLM) -> list[Output]:
    """128 tokens after the first 1,000 characters of every held-out file, one file at a time."""
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    return [llm.generate(text[:1000], params)[0] for text in source_files().values()]


@torch.inference_mode()
def draft_cost(llm: LLM) -> float:
    """Seconds of a forward of 8 rows, embedding to logits, the draft's over the target's.

    Medians over turns of IN_A_ROW forwards. Only the first forward of a turn finds the caches
    filled with the other model's weights, like the first level of a draft.
    """
    assert llm.engine.draft_model is not None
    runners = [llm.engine.target, llm.engine.draft_model.runner]
    taken: list[list[float]] = [[], []]
    for _ in range(TURNS):
        for runner, seconds in zip(runners, taken, strict=True):
            seconds += forward_seconds(llm, runner)
    target, draft = map(median, taken)
    return draft / target


def forward_seconds(llm: LLM, runner: Runner) -> list[float]:
    table = BlockTable(llm.engine.pool, runner.kv.block_size)
    table.try_reserve(CONTEXT + ROWS)
    group = RowGroup(table, [0] * ROWS, CONTEXT, num_read=ROWS)
    step = build_step_input([group], llm.engine.pool.updates)
    moments = [perf_counter()]
    for _ in range(IN_A_ROW):
        runner.launch(step)
        moments.append(perf_counter())
    table.clear()
    return [b - a for a, b in pairwise(moments)]


def acceptance_length(outputs: Sequence[Output]) -> float:
    steps = sum(o.speculation.steps for o in outputs)
    # Steps without draft tokens have no mean: each emits one token.
    tokens = sum(
        (o.speculation.mean_acceptance_length or 1.0) * o.speculation.steps for o in outputs
    )
    return tokens / steps


@torch.inference_mode()
def held_out_loss(folder: Path) -> float:
    """Mean nats a token over the held-out files, in windows, by transformers in float32."""
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
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as e:
        sys.exit(f"error: {e}")
