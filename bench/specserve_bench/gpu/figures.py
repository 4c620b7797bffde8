"""Times at the shape of an 8B model, by CUDA events: steps, draft levels, adapters, prompts."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from specserve.engine.runner import RowGroup, build_step_input
from specserve.models.decoder import Decoder
from specserve_bench.figures.adapters import random_adapter, started
from specserve_bench.gpu import flashinfer
from specserve_bench.gpu.ceilings import copy_bandwidth
from specserve_bench.gpu.random_batches import RandomBatches, token_bytes
from specserve_bench.gpu.record import Record
from specserve_bench.gpu.stage import StageOptions, ops_of, options, record_of, take_each
from specserve_bench.gpu.timing import Deciles, step_seconds
from specserve_bench.random_model import random_decoder, random_head, streamed_bytes
from specserve_kernels import Ops, SampleParams

SHAPE = "llama-3.1-8b"

MIXTURE: dict[str, Any] = {  # fields that differ from Qwen3-0.6B's: half of Qwen3-30B-A3B's layers
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}


class FigureSizes(NamedTuple):
    """Sizes of the measurements, smaller in a rehearsal."""

    changes: dict[str, Any]  # fields of the target and of its draft model that differ
    mixture: dict[str, Any]
    context: int
    long: int
    prompts: tuple[int, int]
    adapted: int  # requests, each with one of four adapters
    rank: int


FULL = FigureSizes({}, MIXTURE, 512, 32_768, (1000, 8000), adapted=8, rank=16)
REHEARSAL = FigureSizes(
    SMALL,
    MIXTURE | SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    20,
    60,
    (20, 40),
    adapted=2,
    rank=4,
)


def main(argv: list[str]) -> int:
    args = options(argv)
    record, size = record_of("figures", args), REHEARSAL if args.rehearse else FULL
    if "copy GB/s" not in record:
        record.put("copy GB/s", copy_bandwidth(args) / 1e9)
    with torch.inference_mode():
        figures = ShapeFigures(record, ops_of(args), size, args)
        return take_each(record, figures.each(), args.seconds)


class ShapeFigures:
    """The figures by name. A model's weights are made when its first figure is measured, and are
    dropped with its last one.
    """

    def __init__(self, record: Record, ops: Ops, size: FigureSizes, args: StageOptions) -> None:
        self.record, self.ops, self.size, self.args = record, ops, size, args
        self.longest = max(size.long, *size.prompts) + 200
        self.building = None if args.rehearse else flashinfer.begin(128)

    def each(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield from self.of_target()
        yield from self.of_rounded_target()
        yield from self.of_mixture()
        yield "adapters", self.adapters
        yield from self.of_prompts()

    def target(self, **changes: Any) -> Decoder:
        given = self.size.changes | changes
        return random_decoder(SHAPE, self.ops, self.longest, **given)

    def of_target(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        size, names = self.size, [f"step of {n}" for n in ("1 row", "8 rows", "32 rows")]
        names += ["tree of 32 rows, long context", "draft model level", "head level"]
        if all(name in self.record for name in names):
            return
        decoder = self.target()
        for name, rows in zip(names, (1, 8, 32), strict=False):
            yield name, partial(self.step, decoder, rows, size.context, has_floor=True)
        yield names[3], partial(self.step, decoder, 32, size.long, has_floor=True)
        yield names[4], self.draft_level
        yield names[5], partial(self.head_level, decoder)

    def of_rounded_target(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        names = "w4 step of 1 row", "w4 step of 8 rows"
        if all(name in self.record for name in names):
            return
        decoder = self.target(bits=4)
        for name, rows in zip(names, (1, 8), strict=True):
            yield name, partial(self.step, decoder, rows, self.size.context)

    def of_mixture(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        names = "mixture, step of 1 row", "mixture, step of 8 rows"
        if all(name in self.record for name in names):
            return
        longest = self.size.context + 200
        decoder = random_decoder("qwen3-0.6b", self.ops, longest, **self.size.mixture)
        for name, rows in zip(names, (1, 8), strict=True):
            yield name, partial(self.step, decoder, rows, self.size.context)

    def of_prompts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        names = "short prompt", "long prompt"
        if all(name in self.record for name in names):
            return
        if self.building is not None:
            self.record.put("FlashInfer's kernels", flashinfer.outcome(self.building))
        decoder = self.target()
        for name, n in zip(names, self.size.prompts, strict=True):
            yield name, partial(self.prompt, decoder, n)

    def step(
        self, decoder: Decoder, rows: int, context: int, has_floor: bool = False
    ) -> dict[str, Any]:
        """One request: a root, and a random tree below it."""
        batches = RandomBatches(decoder, context + rows + 32)
        taken = step_seconds(batches.step(batches.groups(1, rows, context)))
        return self.compared(taken, decoder, context + rows) if has_floor else {"ms": taken.ms}

    def compared(self, taken: Deciles, decoder: Decoder, num_tokens: int) -> dict[str, Any]:
        """Compares with reading the weights and the KV at the speed of a copy."""
        read = streamed_bytes(decoder) + num_tokens * token_bytes(decoder)
        floor = read / (1e9 * self.record.figures["copy GB/s"])
        return {
            "ms": taken.ms,
            "weights and KV at copy bandwidth, ms": round(1e3 * floor, 4),
            "over": round(taken.median / floor, 3),
        }

    def draft_level(self) -> dict[str, Any]:
        """Four rows of the draft model, their likeliest children, and a wait for these."""
        context, changes = self.size.context, self.size.changes
        decoder = random_decoder(f"{SHAPE}-draft", self.ops, context + 200, **changes)
        batches = RandomBatches(decoder, context + 64)
        groups = batches.groups(1, 4, context)
        return {"ms": step_seconds(lambda: self.level(batches, groups)).ms}

    def head_level(self, target: Decoder) -> dict[str, Any]:
        """Four rows of an EAGLE-3 head, their likeliest children, and a wait for these."""
        head = random_head(target, self.size.context + 200)
        batches = RandomBatches(head, self.size.context + 64)
        groups = batches.groups(1, 4, self.size.context)
        features = torch.randn(4, head.config.hidden_size).to(head.dtype)
        placed = self.ops.place(features)
        return {"ms": step_seconds(lambda: self.level(batches, groups, placed.clone())).ms}

    def level(
        self,
        batches: RandomBatches,
        groups: list[RowGroup],
        features: torch.Tensor | None = None,
    ) -> list[list[int]]:
        step = build_step_input(groups, batches.pool.updates)
        logits = batches.runner.launch(step, features).logits
        params = SampleParams.greedy(len(logits))
        children: list[list[int]] = self.ops.top_children(logits, params, 4, 1.0)[0].tolist()
        return children

    def adapters(self) -> dict[str, Any]:
        """Steps of requests with an adapter each, and without."""
        decoder, n, rank = self.target(), self.size.adapted, self.size.rank
        max_len = self.size.context + 300
        with TemporaryDirectory() as home:
            folders = [
                random_adapter(Path(home, str(i)), decoder.config, rank, i) for i in range(4)
            ]
            ms, attends = {}, {}
            for name, chosen in (("none", (-1,)), ("four adapters", (0, 1, 2, 3))):
                engine = started(decoder, "", max_len, n, folders, chosen, rank, self.size.context)
                before = self.planned()
                ms[name] = step_seconds(engine.step).ms
                attends[name] = sorted(self.planned() - before)
                del engine
        return {"requests": n, "rank": rank, "ms": ms, "attends": attends}

    def prompt(self, decoder: Decoder, size: int) -> dict[str, Any]:
        """TTFT through the engine, without other requests."""
        batches = RandomBatches(decoder, 2 * size + 64)
        engine, before = batches.engine(min(size, 2048), 4), self.planned()
        ask = partial(batches.first_token, engine, size)
        taken = step_seconds(ask, repeats=5, warm_up=1)
        return {"tokens": size, "ms": taken.ms, "attends": sorted(self.planned() - before)}

    def planned(self) -> Any:
        return getattr(self.ops, "num_planned").copy()  # noqa: B009  no part of the protocol


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
