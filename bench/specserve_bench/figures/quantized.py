"""Quantized weights with 8-bit activations: trees, prompts, and a step over its bytes."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specserve.models.decoder import LoadedModel
from specserve.models.gguf.header import read_header
from specserve.models.loader import load_decoder
from specserve.models.weight import Rounding
from specserve_bench.bound import Bound, StepSize, kv_token_bytes
from specserve_bench.figures.recurrent import MAX_LEN, engine_of, prompt_ms
from specserve_bench.figures.steps import Steps, interleaved, longest_context
from specserve_bench.pairs import random_checkpoint
from specserve_bench.peers.command import stored_bytes
from specserve_bench.real_models import real_models
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_kernels import load

BF16, W4 = Rounding(), Rounding.named("w4", "w8", activations="int8")
PROMPTS = 300, 1000  # tokens
TREES = tuple(StepSize(f"{n} rows at 512", (512,), n) for n in (1, 8, 16))
FILE = (*TREES, *(StepSize(f"{n} rows at 7000", (7000,), n) for n in (1, 8)))
BYTES = "its bytes"
# Goals of CPUs with AVX512-VNNI, by model, case and base
GOALS = {
    ("w4", "8 rows at 512", "1 rows at 512"): 1.6,
    ("w4", "16 rows at 512", "1 rows at 512"): 2.6,
    ("w4", "prompt of 300 tokens", "bf16"): 0.65,
    ("w4", "prompt of 1000 tokens", "bf16"): 0.65,
    ("SmolLM2", "1 rows at 512", BYTES): 1.5,
    ("SmolLM2", "8 rows at 7000", "1 rows at 7000"): 1.4,
}


@torch.inference_mode()
def measure(
    folder: Path | None = None,
    file: Path | None = None,
    prompts: Sequence[int] = PROMPTS,
    trees: Sequence[StepSize] = TREES,
    of_file: Sequence[StepSize] = FILE,
    rounds: int = 7,
) -> dict[str, Any]:
    """Milliseconds over interleaved rounds, and ratios within a round.

    The models are a random 0.6B model in 4 bits and in bf16, and SmolLM2's GGUF file if
    `make real-models` has unpacked it. `trees` and `of_file` are their steps.
    """
    folder, real = folder or random_checkpoint(), real_models()
    file = file or (None if real is None else real.smollm2)
    w4, bf16 = (loaded(folder, MAX_LEN, rounding) for rounding in (W4, BF16))
    rows = steps("w4", Steps(w4, f"{folder}-w4", trees), trees, rounds)
    rows += prompt_rows(w4, bf16, str(folder), prompts, rounds)
    if file is not None:
        model = loaded(file, longest_context(of_file), BF16)
        weights = stored_bytes(read_header(file))
        rows += steps("SmolLM2", Steps(model, str(file), of_file), of_file, rounds, weights)
    return {"rounds": rounds, "rows": rows}


def loaded(source: Path, longest: int, rounding: Rounding) -> LoadedModel:
    return load_decoder(source, "bf16", load(torch.device("cpu")), longest, rounding=rounding)


def steps(
    model: str, own: Steps, sizes: Sequence[StepSize], rounds: int, weights: int = 0
) -> list[dict[str, Any]]:
    """Compare steps with the first step of the same context, and the first step with the time of
    reading its bytes, of which `weights` are those of the weights; 0: do not.
    """
    bound, read = Bound(), list[float]()
    times = interleaved({"ms": own}, sizes, rounds, lambda: read.append(bound.rates().read))
    plain = {size.contexts: size.label for size in reversed(sizes)}
    ms = {size.label: times[size.label]["ms"] for size in sizes}
    rows = [
        row(model, s.label, ms[s.label], plain[s.contexts], ms[plain[s.contexts]]) for s in sizes
    ]
    if weights:
        first = sizes[0]
        num_bytes = weights + sum(first.contexts) * kv_token_bytes(own.config)
        reading = [1e3 * num_bytes / rate for rate in read]
        rows.append(row(model, first.label, ms[first.label], BYTES, reading))
    return rows


def prompt_rows(
    w4: LoadedModel, bf16: LoadedModel, name: str, prompts: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Compare the TTFT of prompts, with nothing cached, in 4 bits and in bf16."""
    engines = [engine_of(w4, f"{name}-w4", "none"), engine_of(bf16, name, "none")]
    rng, rows = random.Random(0), list[dict[str, Any]]()
    for size in prompts:
        taken = list[list[float]]()
        for _ in range(rounds + 1):
            ids = [rng.randrange(100, w4.config.vocab_size) for _ in range(size)]
            taken.append([prompt_ms(engine, ids) for engine in engines])
        own, base = zip(*taken[1:], strict=True)  # the first warms up
        rows.append(row("w4", f"prompt of {size} tokens", own, "bf16", base))
    return rows


def row(
    model: str, case: str, ms: Sequence[float], base: str, base_ms: Sequence[float]
) -> dict[str, Any]:
    facts = {"model": model, "case": case, "base": base, "goal": GOALS.get((model, case, base))}
    return facts | {"ms": extremes(ms), "over": extremes_over(ms, base_ms)}


def table(result: Mapping[str, Any]) -> str:
    """Leave out steps that are compared with themselves."""
    rows = (
        [
            *(each[name] for name in ("model", "case")),
            f"{each['ms']['median']:.2f}",
            each["base"],
            extremes_words(each["over"]),
            "-" if each["goal"] is None else f"{each['goal']:g}",
        ]
        for each in result["rows"]
        if each["base"] != each["case"]
    )
    return markdown_table(["model", "case", "ms", "base", "/ base", "goal"], rows)
