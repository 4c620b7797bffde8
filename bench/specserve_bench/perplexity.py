"""`specserve bench perplexity`: what rounding costs a model, in words that it has not learned.

Perplexity is e to the mean loss of a token, computed by the engine itself in windows of 512 tokens.
A difference has a standard error, from the differences of the windows.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve import LLM
from specserve.config import parse_overrides
from specserve.engine.runner import RowGroup, build_step_input
from specserve.errors import ConfigError
from specserve.memory.blocks import BlockTable
from specserve.models.folder import resolve
from specserve.models.source import open_source
from specserve_bench.arguments import Once, listed
from specserve_bench.demo.held_out import source_files
from specserve_bench.real_prompts import problems

WINDOW = 512
STORED = "stored"  # the name of weights that are not rounded
NAMES = (STORED, "w8", "w8a8", "w4")
ACTIVATIONS = ("int8", "float")  # values of model.activations
ROUNDINGS = (*NAMES, *(f"{name}:{kind}" for name in NAMES for kind in ACTIVATIONS))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specserve bench perplexity",
        description="Perplexity of a model with rounded weights.",
    )
    parser.add_argument(
        "--model", help="local folder, .gguf file or hub id; default: the demo's target model"
    )
    parser.add_argument(
        "--quantize",
        action=Once,
        type=listed(str, ROUNDINGS, repeats=True),
        metavar="Q,...",
        help="roundings to compare with the first one. Q:int8 and Q:float also set "
        "model.activations. Default: stored,w8,w8a8,w4, or stored:float,stored:int8 if the weights "
        "are quantized already",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        help="default: the demo's held-out files",
    )
    parser.add_argument(
        "--human-eval",
        action="store_true",
        help="measure on HumanEval's programs, which `make real-models` downloads",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting"
    )
    args = parser.parse_args(argv)
    if args.human_eval and args.text:
        raise ConfigError("--human-eval and --text exclude each other. Remove one of them.")
    texts = [read(file) for file in args.text or ()]
    if args.human_eval:
        texts = [programs()]
    texts = texts or list(source_files().values())
    settings = parse_overrides(args.set)
    for key in ("model.quantize", "model.activations"):
        if key in settings:
            raise ConfigError(f"--set {key}: use --quantize instead.")
    show(args.model, args.quantize or default_names(args.model), texts, settings)
    return 0


def default_names(model: str | None) -> Sequence[str]:
    """All of them, unless the checkpoint is quantized already."""
    told = open_source(resolve(model)).config().quantization if model else None
    return NAMES if told is None else [f"{STORED}:float", f"{STORED}:int8"]


def read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--text {file}: cannot be read ({e}); name a text file") from e


def programs() -> str:
    """HumanEval's problems with their solutions."""
    return "\n".join(each["prompt"] + each["canonical_solution"] for each in problems())


class Loss(NamedTuple):
    """The sum of the losses of a window's tokens, and their number."""

    total: float
    count: int


def show(
    model: str | None, rounded: Sequence[str], texts: Sequence[str], settings: dict[str, Any]
) -> None:
    first: list[Loss] = []
    for name in rounded:
        weights, _, activations = name.partition(":")
        given = settings | ({"model.activations": activations} if activations else {})
        quantize = None if weights == STORED else weights
        with LLM(model, drafter="none", quantize=quantize, set=given, progress=False) as llm:
            losses, words = window_losses(llm, texts), llm.weights.target.decoder.forms.words
        ratio = f" ({difference(first, losses)})" if first else ""
        first = first or losses
        print(f"{name:12} perplexity {mean(losses):8.3f}{ratio}, {words}", flush=True)


def mean(losses: Sequence[Loss]) -> float:
    """Perplexity."""
    return math.exp(sum(loss.total for loss in losses) / sum(loss.count for loss in losses))


def difference(before: Sequence[Loss], after: Sequence[Loss]) -> str:
    """The relative difference of perplexity and its standard error, for the same windows."""
    count = sum(loss.count for loss in after)
    differences = [b.total - a.total for a, b in zip(before, after, strict=True)]
    log_ratio = sum(differences) / count
    errors = (d - b.count * log_ratio for d, b in zip(differences, after, strict=True))
    error = math.sqrt(sum(e * e for e in errors)) / count
    return f"{math.expm1(log_ratio):+.2%}, standard error {error:.2%}"


def perplexity(llm: LLM, texts: Iterable[str]) -> float:
    return mean(window_losses(llm, texts))


@torch.inference_mode()
def window_losses(llm: LLM, texts: Iterable[str]) -> list[Loss]:
    """Losses of texts that are cut into windows; a window has no context before it."""
    losses = []
    for text in texts:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids) - 1, WINDOW):
            window = ids[start : start + WINDOW]
            logits = window_logits(llm, window)[:-1]
            told = torch.tensor(window[1:], device=logits.device)
            loss = F.cross_entropy(logits, told, reduction="sum").item()
            losses.append(Loss(loss, len(window) - 1))
    if not losses or not sum(loss.count for loss in losses):
        raise ConfigError("--text: no file has two tokens. Name longer files.")
    return losses


@torch.inference_mode()
def window_logits(llm: LLM, ids: list[int]) -> Tensor:
    """The logits after each of the tokens, in one step [len(ids), V]."""
    runner, pool = llm.engine.target, llm.engine.pool
    table = BlockTable(pool, runner.kv.block_size)
    if not table.try_reserve(len(ids)):
        raise ConfigError(f"The KV pool has no room for {len(ids)} tokens. Raise memory.kv_bytes.")
    group = RowGroup(table, ids, 0, num_read=len(ids))
    logits = runner.launch(build_step_input([group], pool.updates)).logits.clone()
    table.clear()
    return logits
