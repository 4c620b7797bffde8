"""Steps of one model with transformers' modules and native code, op by op and recorded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specserve.models.decoder import LoadedModel
from specserve.models.loader import load_decoder
from specserve.models.source import open_source
from specserve_bench.bound import StepSize
from specserve_bench.figures.steps import Steps, beside, longest_context
from specserve_bench.pairs import random_checkpoint
from specserve_bench.report import extremes_words, markdown_table
from specserve_kernels import load
from specserve_kernels.ops import EagerProgram

SIZES = tuple(StepSize(f"{n} rows at 512", (512,), n) for n in (1, 4, 16, 64))
NAMES = "native, op by op", "native, recorded", "transformers"
EAGER = NAMES[0]


@torch.inference_mode()
def measure(
    folder: Path | None = None, sizes: Sequence[StepSize] = SIZES, rounds: int = 7
) -> dict[str, Any]:
    """Milliseconds by implementation and size, over interleaved rounds, and their ratio to native
    code op by op.
    """
    from specserve.models.transformers_loader import load_transformers  # slow to import

    folder = folder or random_checkpoint()
    ops, longest = load(torch.device("cpu")), longest_context(sizes)
    native = load_decoder(folder, "bf16", ops, longest)
    shape = open_source(folder).shape("transformers")
    foreign = load_transformers(folder, shape, "bf16", ops, longest)
    models: Sequence[LoadedModel] = native, native, foreign
    named = zip(NAMES, models, strict=True)
    steps = {name: Steps(model, f"{folder} {name}", sizes) for name, model in named}
    runner = steps[EAGER].runner
    runner.program = EagerProgram(native, runner.kv)
    figures = beside(steps, sizes, rounds, EAGER, "over_eager")
    return {"rounds": rounds, "threads": torch.get_num_threads(), "steps": figures}


def table(result: Mapping[str, Any]) -> str:
    """Native code's milliseconds op by op, and the others' share of them."""
    rows = (
        [
            step["step"],
            f"{step[EAGER]['ms']['median']:.1f}",
            *(extremes_words(step[name]["over_eager"]) for name in NAMES[1:]),
        ]
        for step in result["steps"]
    )
    return markdown_table(["step", f"{EAGER}, ms", *(f"{n} / {EAGER}" for n in NAMES[1:])], rows)
