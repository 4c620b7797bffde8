"""Steps of one model by transformers' modules, beside native code, op by op and recorded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specserve.models.decoder import LoadedModel
from specserve.models.loader import load_decoder
from specserve.models.source import open_source
from specserve_bench.steps import Size, Steps, beside, longest_context, words
from specserve_kernels import load
from specserve_kernels.ops import EagerProgram

ROUNDS = 7
SIZES = tuple(Size(f"{n} rows at 512", (512,), n) for n in (1, 4, 16, 64))
EAGER = "native, op by op"
NAMES = (EAGER, "native, recorded", "transformers")


@torch.inference_mode()
def implementation_figures(
    folder: Path, sizes: Sequence[Size] = SIZES, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Milliseconds by implementation and size, over interleaved rounds, and their ratio to native
    code op by op.
    """
    steps = contenders(folder, sizes)
    figures = beside(steps, sizes, rounds, EAGER, "over_eager")
    result = {"rounds": rounds, "threads": torch.get_num_threads(), "steps": figures}
    print(table(result))
    return result


def contenders(folder: Path, sizes: Sequence[Size]) -> dict[str, Steps]:
    from specserve.models.transformers_loader import load_transformers  # slow to import

    ops, longest = load(torch.device("cpu")), longest_context(sizes)
    native = load_decoder(folder, "bf16", ops, longest)
    shape = open_source(folder).shape("transformers")
    foreign = load_transformers(folder, shape, "bf16", ops, longest)
    models: dict[str, LoadedModel] = dict(zip(NAMES, (native, native, foreign), strict=True))
    steps = {name: Steps(model, f"{folder} {name}", sizes) for name, model in models.items()}
    runner = steps[EAGER].runner
    runner.program = EagerProgram(native, runner.kv)
    return steps


def table(result: Mapping[str, Any]) -> str:
    """Markdown: native code's milliseconds op by op, and the others' share of them."""
    lines = [
        f"| step | {EAGER}, ms | " + " | ".join(f"{name}, / it" for name in NAMES[1:]) + " |",
        "|" + " --- |" * (1 + len(NAMES)),
    ]
    for step in result["steps"]:
        shares = " | ".join(words(step[name]["over_eager"]) for name in NAMES[1:])
        lines.append(f"| {step['step']} | {step[EAGER]['ms']['median']:.1f} | {shares} |")
    return "\n".join(lines)
