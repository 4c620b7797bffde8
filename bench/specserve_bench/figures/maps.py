"""Linear layers with quantized weights against bf16, by number of rows."""

from collections.abc import Mapping, Sequence
from ctypes import addressof
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve_bench.bound import Bound
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_kernels import Codes, cpu
from specserve_kernels.cpu import arguments, native

N = K = 4096
ROWS = (1, 4, 8, 16, 32, 64, 128)


class Kind(NamedTuple):
    """A form of the weight; `group` is K for a scale per channel, and 0 for bf16."""

    name: str
    bits: int
    group: int
    has_offsets: bool = False
    rounds_rows: bool = False


KINDS = (
    Kind("bf16", 16, 0),
    Kind("w4 g128", 4, 128),
    Kind("w4 g32", 4, 32),
    Kind("w4 g32 and offsets", 4, 32, True),
    Kind("w8", 8, K),
    Kind("w8 g32 and offsets", 8, 32, True),
    Kind("w8a8", 8, K, rounds_rows=True),
)


class Map:
    """Copies of a weight, each of which an op multiplies rows by: they come from memory."""

    def __init__(self, kind: Kind, size: int = N, most: int = max(ROWS)) -> None:
        draw = torch.Generator().manual_seed(0)
        packed = cpu.prepack(weight(kind, size, size, draw))
        count = max(2, -(-(96 << 20) // packed.words.nbytes)) if size == N else 2
        self.copies = [packed._replace(words=packed.words.clone()) for _ in range(count)]
        self.x = torch.randn(most, size, generator=draw).bfloat16()
        self.out = torch.empty(most, size, dtype=torch.bfloat16)
        self.args = [
            arguments.linear(0, self.x, p, None, self.out, arguments.PLAIN) for p in self.copies
        ]
        linear = native.address("linear")
        self.ops = (native.Op * count)(*(native.Op(linear, addressof(a), 0) for a in self.args))

    def ms(self, num_rows: int) -> float:
        """Milliseconds of one layer, in a list of all copies' layers, like a program's."""
        step = native.StepStruct((num_rows, 0))
        start = perf_counter()
        native.run(self.ops, step, torch.get_num_threads())
        return 1e3 * (perf_counter() - start) / len(self.copies)


def weight(kind: Kind, height: int, width: int, draw: torch.Generator) -> Tensor | Codes:
    if kind.group == 0:
        return torch.randn(height, width, generator=draw).bfloat16()
    group = min(kind.group, width)
    q = torch.randint(0, 1 << kind.bits, (height, width), generator=draw, dtype=torch.uint8)
    scale = torch.rand(height, width // group, generator=draw)
    offset = scale / 2 if kind.has_offsets else None
    return Codes(kind.bits, group, q, scale, offset=offset, rounds_rows=kind.rounds_rows)


@torch.inference_mode()
def measure(rows: Sequence[int] = ROWS, rounds: int = 7, size: int = N) -> dict[str, Any]:
    """Milliseconds of a map by form and rows, over interleaved rounds, and their ratio to bf16."""
    maps, bound = {kind.name: Map(kind, size) for kind in KINDS}, Bound()
    times: dict[int, dict[str, list[float]]] = {n: {name: [] for name in maps} for n in rows}
    read = []
    for _ in range(rounds):
        read.append(bound.rates().read / 1e9)
        for n in rows:
            for name, each in maps.items():
                times[n][name].append(median(each.ms(n) for _ in range(3)))
    return {
        "map": [size, size],
        "arithmetic": cpu.arithmetic(),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "read_gb_per_s": extremes(read),
        "rows": [
            {"rows": n}
            | {
                name: {"ms": extremes(ms), "over_bf16": extremes_over(ms, each["bf16"])}
                for name, ms in each.items()
            }
            for n, each in times.items()
        ],
    }


def table(result: Mapping[str, Any]) -> str:
    """bf16's milliseconds, and each form's share of them."""
    names = [kind.name for kind in KINDS[1:]]
    rows = (
        [
            str(row["rows"]),
            f"{row['bf16']['ms']['median']:.3f}",
            *(extremes_words(row[name]["over_bf16"]) for name in names),
        ]
        for row in result["rows"]
    )
    read = result["read_gb_per_s"]["median"]
    about = f"{result['arithmetic']}, {result['threads']} threads, {read:.1f} GB/s read"
    head = ["rows", "bf16, ms", *(f"{name} / bf16" for name in names)]
    return f"{about}\n\n{markdown_table(head, rows)}"
