"""Whether a row's logits have the same bits in steps of 1 to 64 rows, padded for a graph or not."""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specserve.engine.runner import RowGroup, build_step_input
from specserve_bench.gpu.figures import FULL, REHEARSAL, SHAPE
from specserve_bench.gpu.random_batches import RandomBatches
from specserve_bench.gpu.stage import ops_of, options, record_of, take_each
from specserve_bench.random_model import random_decoder
from specserve_kernels import load
from specserve_kernels.cuda.graphs import GraphProgram
from specserve_kernels.ops import EagerProgram

MOST, CONTEXT = 64, 300


def main(argv: list[str]) -> int:
    args = options(argv)
    size = REHEARSAL if args.rehearse else FULL
    # As in steps of so few rows, which are recorded: FlashInfer would split the KV otherwise.
    ops = ops_of(args) if args.rehearse else load("cuda", "triton")
    with torch.inference_mode():
        decoder = random_decoder(SHAPE, ops, CONTEXT + 200, **size.changes)
        rows = RowBits(RandomBatches(decoder, MOST * (CONTEXT + 20)))
        numbers = (1, 2, 4) if args.rehearse else range(1, MOST + 1)
        figures = ((f"{n} rows", partial(rows.compared, n)) for n in numbers)
        return take_each(record_of("bits", args), figures, args.seconds, summary)


class RowBits:
    """Steps of requests with one row each; the first is always the same."""

    def __init__(self, batches: RandomBatches) -> None:
        self.batches, self.groups = batches, batches.groups(MOST, 1, CONTEXT)
        runner = batches.runner
        self.programs: dict[str, Any] = {"unpadded": EagerProgram(runner.decoder, runner.kv)}
        capture = Rerun() if runner.ops.place(torch.empty(0)).device.type == "cpu" else None
        ops: Any = runner.ops
        counts = ops.child_graphs, ops.num_planned
        graphs = GraphProgram(*counts, runner.decoder, runner.kv, (), capture)
        self.programs["padded"] = graphs
        self.wanted = {name: self.logits(name, self.groups[:1]) for name in self.programs}

    def logits(self, name: str, groups: list[RowGroup]) -> Tensor:
        """Logits of the first request."""
        runner = self.batches.runner
        runner.program = self.programs[name]
        launched = runner.launch(build_step_input(groups, self.batches.pool.updates))
        return launched.logits[0].float().cpu()

    def compared(self, n: int) -> dict[str, Any]:
        """Compares with the step of one row."""
        figure = {}
        for name, want in self.wanted.items():
            got = self.logits(name, self.groups[:n])
            off = (got - want).abs().max().item()
            figure[name] = {"same bits": torch.equal(got, want), "largest difference": off}
        return figure


class Rerun:
    """Stands in for a recording without a GPU: a replay runs the forward again."""

    def __call__(self, forward: Any) -> Any:
        kept = forward()

        def replay() -> None:
            residual, _, logits = forward()
            kept[0].copy_(residual)
            kept[2].copy_(logits)

        return kept, replay


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Numbers of rows whose steps have other bits, and the largest difference."""
    rows = {name: f for name, f in figures.items() if name.endswith(" rows") and "error" not in f}
    found = {}
    for kind in ("unpadded", "padded"):
        others = [int(n.split()[0]) for n, f in rows.items() if not f[kind]["same bits"]]
        largest = max((f[kind]["largest difference"] for f in rows.values()), default=0.0)
        found[kind] = {"other bits": others, "largest difference": largest}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
