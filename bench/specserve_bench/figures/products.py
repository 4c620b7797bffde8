"""Linear layers of many rows: the share of the CPU's multiply-adds per second that they reach."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from specserve_bench.bound import Bound
from specserve_bench.figures.maps import Kind, Map, N
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes
from specserve_kernels import cpu

ROWS = (64, 128, 300)
GOALS = {  # the least share of the peak
    Kind("bf16", 16, 0): 0.85,
    Kind("w8a8", 8, N, rounds_rows=True): 0.85,
    Kind("w4 g32, int8", 4, 32, rounds_rows=True): 0.6,
    Kind("w4 g32 and offsets, int8", 4, 32, has_offsets=True, rounds_rows=True): 0.6,
    Kind("w8 g32, int8", 8, 32, rounds_rows=True): 0.6,
}


@torch.inference_mode()
def measure(rows: Sequence[int] = ROWS, rounds: int = 7, size: int = N) -> dict[str, Any]:
    """For each form and number of rows: the share of the peak of bf16 or of 8-bit codes, over
    interleaved rounds.
    """
    maps, bound = {kind: Map(kind, size, max(rows)) for kind in GOALS}, Bound()
    peaks = {"bf16": list[float](), "codes": list[float]()}
    rates: dict[tuple[Kind, int], list[float]] = {(kind, n): [] for kind in maps for n in rows}
    for _ in range(rounds):
        peaks["bf16"].append(bound.rates().multiply)
        peaks["codes"].append(bound.code_rate())
        for (kind, n), each in rates.items():
            ms = median(maps[kind].ms(n) for _ in range(3))
            each.append(2 * n * size * size / (ms / 1e3))
    return {
        "map": [size, size],
        "arithmetic": cpu.arithmetic(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "peaks": {
            "bf16": {"unit": bound.unit, "tops": extremes([x / 1e12 for x in peaks["bf16"]])},
            "codes": {
                "unit": bound.code_unit,
                "tops": extremes([x / 1e12 for x in peaks["codes"]]),
            },
        },
        "forms": [
            {
                "form": kind.name,
                "goal": goal,
                "rows": [
                    {"rows": n, "share": shares(rates[kind, n], peaks[peak_of(kind)])} for n in rows
                ],
            }
            for kind, goal in GOALS.items()
        ],
    }


def peak_of(kind: Kind) -> str:
    return "codes" if kind.rounds_rows else "bf16"


def shares(rates: Sequence[float], peaks: Sequence[float]) -> dict[str, float]:
    """Of the peak measured in the same round."""
    return extremes([rate / peak for rate, peak in zip(rates, peaks, strict=True)])


def table(result: Mapping[str, Any]) -> str:
    """A row per form, with its goal."""
    numbers = [row["rows"] for row in result["forms"][0]["rows"]]
    rows = (
        [each["form"], *(extremes_words(row["share"]) for row in each["rows"]), f"{each['goal']:g}"]
        for each in result["forms"]
    )
    peaks = (f"{p['tops']['median']:.2f} TOPS with {p['unit']}" for p in result["peaks"].values())
    bf16, codes = peaks
    about = (
        f"{result['arithmetic']}, {result['threads']} threads; peaks: {bf16} for bf16, "
        f"{codes} for 8-bit codes"
    )
    head = ["form", *(f"{n} rows / peak" for n in numbers), "goal"]
    return f"{about}\n\n{markdown_table(head, rows)}"
