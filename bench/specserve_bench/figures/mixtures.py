"""Steps of a mixture of experts against the bytes of those experts that its rows have."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specserve.models import parse_config
from specserve.models.decoder_config import DecoderConfig
from specserve_bench.bound import Bound, StepSize, kv_token_bytes
from specserve_bench.figures.steps import Steps, interleaved
from specserve_bench.pairs import EXPERTS
from specserve_bench.random_model import RandomWeights
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_kernels import load

# A row a request, as rows over the same context have nearly the same experts in a random model.
SIZES = tuple(StepSize(f"{n} requests at 128", (128,) * n, 1) for n in (1, 2, 4, 8, 16))


@torch.inference_mode()
def measure(
    shape: Mapping[str, Any] = EXPERTS, sizes: Sequence[StepSize] = SIZES, rounds: int = 7
) -> dict[str, Any]:
    """Milliseconds by rows over interleaved rounds, and what reading takes that one row needs."""
    config, bound = parse_config.parse(dict(shape)), Bound()
    model = RandomWeights(load(torch.device("cpu"))).decoder(config, config.max_positions)
    steps = Steps(model, "mixture", sizes)
    steps.runner.arena.blocks.view(torch.bfloat16).normal_()
    active, reading = active_bytes(config, sizes[0]), list[float]()
    times = interleaved(
        {"ms": steps}, sizes, rounds, lambda: reading.append(1e3 * active / bound.rates().read)
    )
    first = times[sizes[0].label]["ms"]
    return {
        "shape": dict(shape),
        "rounds": rounds,
        "active_bytes": active,
        "reading_ms": extremes(reading),
        "over_reading": extremes_over(first, reading),
        "steps": [
            {"step": s, "ms": extremes(t["ms"]), "over_first": extremes_over(t["ms"], first)}
            for s, t in times.items()
        ],
    }


def active_bytes(config: DecoderConfig, size: StepSize) -> int:
    """Bytes that a step of one row reads: its experts, other layers, the head, and the KV."""
    weights = config.num_layer_weights + config.vocab_size * config.hidden_size
    return 2 * weights + sum(size.contexts) * kv_token_bytes(config)


def table(result: Mapping[str, Any]) -> str:
    """Each step's time, and its ratio to that of one row."""
    about = (
        f"one row reads {result['active_bytes'] / 1e9:.2f} GB, in "
        f"{result['reading_ms']['median']:.1f} ms; its step takes "
        f"{extremes_words(result['over_reading'])} of that"
    )
    steps = result["steps"]
    head = ["step", "ms", f"/ {steps[0]['step']}"]
    rows = ([s["step"], f"{s['ms']['median']:.1f}", extremes_words(s["over_first"])] for s in steps)
    return f"{about}\n\n{markdown_table(head, rows)}"
