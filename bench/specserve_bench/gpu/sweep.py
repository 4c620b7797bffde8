"""Steps, attention, TTFT and gaps at two shapes and every size, against the copy bandwidth."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from specserve.engine.engine import Engine
from specserve.engine.runner import RowGroup, build_step_input
from specserve.exchange.sampling_params import Sampling
from specserve_bench.figures.maps import KINDS, weight
from specserve_bench.figures.steps import plain_sampling
from specserve_bench.gpu.ceilings import copy_bandwidth
from specserve_bench.gpu.random_batches import RandomBatches, token_bytes
from specserve_bench.gpu.record import Record
from specserve_bench.gpu.stage import options, record_of, take_each
from specserve_bench.gpu.timing import device_seconds, timed
from specserve_bench.random_model import random_decoder, streamed_bytes
from specserve_kernels import Ops, Rows, SampleParams, load
from specserve_kernels.cuda import paged
from specserve_kernels.cuda.attention import FlashInfer, load_flashinfer, run_parts
from specserve_kernels.cuda.masks import sight
from specserve_kernels.ops import EagerProgram

ROWS = (1, 4, 8, 16, 32, 64)
PROMPT = 1000
PROFILED = 5  # steps
AT_ONCE = 8  # requests that ask for sampling parameters


class Kernel(NamedTuple):
    """One launch; microseconds."""

    name: str
    start: float
    end: float


class SweepSizes(NamedTuple):
    """How much is measured: less of it in a trial without a GPU."""

    models: dict[str, dict[str, Any]]  # names of SHAPES, and the fields that are changed
    rows: tuple[int, ...] = ROWS
    requests: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (512, 4096, 32768)
    prompt: int = PROMPT
    maps: tuple[tuple[int, int], ...] = ((28672, 4096), (4096, 4096))  # of an 8B's layers


FULL = SweepSizes({"llama-3.1-8b": {}, "qwen3-0.6b": {}})
TRIAL = SweepSizes(
    {"qwen3-0.6b": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320}},
    rows=(1, 4),
    requests=(1, 2),
    contexts=(40, 1 << 22),
    prompt=20,
    maps=((96, 64),),
)


def main(argv: list[str]) -> int:
    args = options(argv)
    size, record = TRIAL if args.rehearse else FULL, record_of("sweep", args)
    ops = load("cpu" if args.rehearse else "cuda")
    if "copy GB/s" not in record:
        record.put("copy GB/s", copy_bandwidth(args) / 1e9)
    with torch.inference_mode():
        return take_each(record, each(record, ops, size), args.seconds, summary)


def each(record: Record, ops: Ops, size: SweepSizes) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All figures by name. A model's weights are made if the record lacks one of its figures."""
    for shape in size.maps:
        yield f"map of {shape[0]} x {shape[1]}, us", partial(map_times, ops, shape, (*ROWS, 128))
    for model, changes in size.models.items():
        if all(name in record for name, _ in ModelFigures(record, ops, size, model, None).parts()):
            continue
        longest = max(size.contexts) + 64 if size is not TRIAL else 1024
        decoder = random_decoder(model, ops, longest, **changes)
        yield from ModelFigures(record, ops, size, model, decoder).parts()
        del decoder


class ModelFigures:
    """The figures of one model, by name; its weights are made when the first is measured."""

    def __init__(self, record: Record, ops: Ops, size: SweepSizes, name: str, decoder: Any) -> None:
        self.record, self.ops, self.size, self.name = record, ops, size, name
        self.decoder = decoder
        self.batches: RandomBatches | None = None

    def parts(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield f"{self.name} TTFT of {self.size.prompt} tokens", self.ttft
        for rows in (1, 32):
            yield f"{self.name} gaps: {rows} rows", partial(self.gaps, rows)
        for rows in (1, 32):
            yield f"{self.name} step op by op: {rows} rows", partial(self.op_by_op, rows)
        for rows in (1, 64):
            yield f"{self.name} sampling: {rows} rows", partial(self.sampling, rows)
        yield f"{self.name} parameters: {AT_ONCE} requests", self.parameters
        for context in self.size.contexts:
            for requests in self.size.requests:
                for rows in self.size.rows:
                    name = f"{self.name} step: {rows} rows x {requests} requests, context {context}"
                    yield name, partial(self.step, rows, requests, context)
                yield (
                    f"{self.name} attention: {requests} requests, context {context}",
                    partial(self.attention, requests, context),
                )

    def room(self, num_tokens: int) -> RandomBatches | None:
        """Batches with room for so many tokens; None if the device lacks the memory."""
        size = token_bytes(self.decoder)
        if self.batches is not None and self.batches.pool.num_available * 16 >= num_tokens:
            return self.batches
        self.batches = None
        if num_tokens * size + (4 << 30) * (self.size is not TRIAL) > self.ops.free_memory():
            return None
        self.batches = RandomBatches(self.decoder, num_tokens + 16)
        return self.batches

    def step(self, rows: int, requests: int, context: int) -> dict[str, Any] | str:
        batches = self.room(requests * (context + rows + 16))
        if batches is None:
            return "left out: does not fit"
        groups = batches.groups(requests, rows, context)
        taken = timed(batches.step(groups))
        batches.release(groups)
        kv = requests * (context + rows) * token_bytes(self.decoder)
        bandwidth = 1e9 * self.record.figures["copy GB/s"]
        floor = (streamed_bytes(self.decoder) + kv) / bandwidth
        return {
            "ms": [round(1e3 * t, 3) for t in taken],
            "weights and KV at copy bandwidth, ms": round(1e3 * floor, 3),
            "over": round(taken.median / floor, 3),
        }

    def op_by_op(self, rows: int) -> dict[str, Any] | str:
        """A step of one request at the first context, without CUDA graphs."""
        batches = self.room(self.size.contexts[0] + rows + 16)
        assert batches is not None, "no room for a step"
        runner = batches.runner
        recorded, runner.program = runner.program, EagerProgram(self.decoder, runner.kv)
        try:
            return self.step(rows, 1, self.size.contexts[0])
        finally:
            runner.program = recorded

    def attention(self, requests: int, context: int) -> dict[str, Any] | str:
        """A layer of it: microseconds by kind and rows, and the KV at copy bandwidth."""
        batches = self.room(requests * (context + 64 + 16))
        if batches is None:
            return "left out: does not fit"
        kv_bytes = requests * context * token_bytes(self.decoder)
        bandwidth = 1e9 * self.record.figures["copy GB/s"]
        layers = self.decoder.config.num_layers
        out: dict[str, Any] = {"KV, us": round(1e6 * kv_bytes / layers / bandwidth, 1)}
        for rows in self.size.rows:
            for name, prepare in attentions(batches, requests, rows, context):
                try:
                    taken = device_seconds(prepare())
                    out[f"{name}, {rows} rows"] = [round(1e6 * t, 1) for t in taken]
                except torch.AcceleratorError:
                    raise
                except Exception as e:  # one kind's failure is a result
                    out[f"{name}, {rows} rows"] = f"{type(e).__name__}: {e}"[:300]
        return out

    def ttft(self) -> dict[str, Any]:
        """TTFT through the engine, without other requests."""
        batches, engine = self.engine()
        ask = partial(batches.first_token, engine, self.size.prompt)
        return {"ms": [round(1e3 * t, 3) for t in timed(ask)]}

    def engine(self) -> tuple[RandomBatches, Engine]:
        batches = self.room(2 * self.size.prompt + 2048)
        assert batches is not None, "no room for a prompt"
        return batches, batches.engine(self.size.prompt + 24, 64)

    def parameters(self) -> dict[str, Any]:
        """Milliseconds of a whole step of requests of one row, by their sampling parameters."""
        figure = {}
        for name, sampling in asked(self.decoder.config.vocab_size).items():
            batches, engine = self.engine()
            for seed in range(AT_ONCE):
                engine.add(batches.prompt(64), msgspec.structs.replace(sampling, seed=seed))
            while any(r.num_output == 0 for r in engine.requests.values()):
                engine.step()
            figure[name] = [round(1e3 * t, 4) for t in timed(engine.step)]
        return figure

    def sampling(self, rows: int) -> dict[str, Any]:
        """Milliseconds to sample tokens, by sampling parameters."""
        batches = self.room(1024)
        assert batches is not None, "no room at all"
        greedy = SampleParams.greedy(rows)
        warm = greedy._replace(temperature=torch.ones(rows), seeds=torch.arange(rows))
        top_k, top_p = torch.full((rows,), 40, dtype=torch.int32), torch.full((rows,), 0.95)
        asked = {"greedy": greedy, "T = 1": warm}
        asked["T = 1, top_k, top_p"] = warm._replace(top_k=top_k, top_p=top_p)
        device, at = batches.arena.blocks.device, torch.arange(rows)
        logits = 3 * torch.randn(rows, self.decoder.config.vocab_size, device=device)

        def choose(params: SampleParams) -> list[int]:
            tokens: list[int] = self.ops.sample(logits, at, params).tolist()
            return tokens

        return {
            name: [round(1e3 * t, 4) for t in timed(partial(choose, params))]
            for name, params in asked.items()
        }

    def gaps(self, rows: int) -> dict[str, Any]:
        """The time of a step in which no kernel runs."""
        batches = self.room(self.size.contexts[0] + rows + 16)
        assert batches is not None, "no room for a step"
        groups = batches.groups(1, rows, self.size.contexts[0])
        step = batches.step(groups)
        taken = timed(step)
        planned = timed(lambda: self.decoder.plan(rows_of(batches, groups), batches.runner.kv))
        figure: dict[str, Any] = {
            "step ms": round(1e3 * taken.median, 3),
            "plan ms": round(1e3 * planned.median, 3),
        }
        figure |= gaps(profile(step), PROFILED)
        batches.release(groups)
        return figure


def map_times(ops: Ops, shape: tuple[int, int], rows: Sequence[int]) -> dict[str, list[float]]:
    """Microseconds of a map [N, K] by its form and the rows that are multiplied."""
    times, draw = {}, torch.Generator().manual_seed(0)
    for kind in KINDS:
        plain = kind._replace(has_offsets=False, rounds_rows=False)
        packed = ops.prepack(weight(plain, *shape, draw))
        for n in rows:
            x = ops.place(torch.randn(n, shape[1]).bfloat16())
            taken = device_seconds(partial(ops.linear, x, packed))
            times[f"{kind.name}, {n} rows"] = [round(1e6 * t, 1) for t in taken]
    return times


def asked(vocab_size: int) -> dict[str, Sampling]:
    """Sampling parameters, from none to all; each has those before it."""
    greedy = plain_sampling(1 << 20)
    drawn = msgspec.structs.replace(greedy, temperature=0.8)
    filtered = msgspec.structs.replace(drawn, top_k=40, top_p=0.95, min_p=0.02)
    penalized = msgspec.structs.replace(
        filtered, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1
    )
    every = msgspec.structs.replace(
        penalized,
        logit_bias={7: 2.0, 9: -2.0},
        bad_words=((11,), (12, 13)),
        min_tokens=1 << 20,
        stop_ids=frozenset([5]),
        allowed_ids=tuple(range(0, vocab_size, 2)),
    )
    told = msgspec.structs.replace(every, logprobs=20)
    return {
        "greedy": greedy,
        "T": drawn,
        "filters": filtered,
        "penalties": penalized,
        "all": every,
        "all, 20 logprobs": told,
    }


def rows_of(batches: RandomBatches, groups: list[RowGroup]) -> Rows:
    return build_step_input(groups, batches.pool.updates).rows()


def attentions(
    batches: RandomBatches, requests: int, rows: int, context: int
) -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """One layer's attention by every available kernel, each with the call that prepares it."""
    if not torch.cuda.is_available():
        return
    decoder, layer = batches.decoder, batches.runner.kv.layers[0]
    shape = requests * rows, decoder.config.num_heads, decoder.config.head_dim
    q = torch.randn(shape, device=layer.k.device).to(decoder.dtype)
    kinds = {"causal fa2": "chain", "own split": "tree"}
    kinds |= {"custom mask fa2": "tree"} if rows > 1 else {}
    for name, kind in kinds.items():
        groups = batches.groups(requests, rows, context, kind)
        means = own_split if name == "own split" else partial(flashinfer_of, name[-3:])
        yield name, partial(means, batches, rows_of(batches, groups), q)
        batches.release(groups)


def own_split(batches: RandomBatches, rows: Rows, q: Tensor) -> Callable[[], object]:
    layer, seen = batches.runner.kv.layers[0], sight(rows, None)
    work = paged.deal(rows, seen, q.shape[1], layer.k.shape[2])
    tables = map(torch.from_numpy, (work.pieces, work.merges))
    host = (*tables, *seen.tensors(), rows.indices, rows.indptr)
    inputs = paged.Inputs(*(x.to(q.device) for x in host))
    scores = paged.Scores(batches.decoder.config.score_scale)
    return partial(paged.attention, q, layer, scores, work, inputs)


def flashinfer_of(
    backend: str, batches: RandomBatches, rows: Rows, q: Tensor
) -> Callable[[], object]:
    kv, indices = batches.runner.kv, rows.indices.to(q.device)
    flashinfer = FlashInfer(q.device, load_flashinfer(), backend)
    masks = flashinfer.masks(rows, kv, [None])
    on_device = {w: (m[0].to(q.device), m[1].to(q.device)) for w, m in masks.items()}
    parts = flashinfer.plan(rows, indices, kv, q.shape[1], [None], on_device)
    return partial(run_parts, q, kv.layers[0], parts, batches.decoder.config.score_scale, None)


def profile(step: Callable[[], object]) -> list[Kernel]:
    """The kernels of some steps, in order; without a GPU, the host's operators in their stead."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    has_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]
    with profiler(activities=kinds) as seen:
        for _ in range(PROFILED):
            step()
    known: Any = torch.autograd.profiler
    where = known.DeviceType.CUDA if has_gpu else known.DeviceType.CPU
    events = [e for e in seen.events() or () if e.device_type == where]
    return sorted(
        (Kernel(e.name[:80], e.time_range.start, e.time_range.end) for e in events),
        key=lambda kernel: kernel.start,
    )


def gaps(kernels: list[Kernel], steps: int) -> dict[str, Any]:
    """How busy the device was, where it idled, and before which kernel; milliseconds a step."""
    busy: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    end = kernels[0].start
    for kernel in kernels:
        busy[kernel.name] += kernel.end - kernel.start
        idle[kernel.name] += max(0.0, kernel.start - end)
        end = max(end, kernel.end)

    def ms(microseconds: float) -> float:
        return round(microseconds / 1e3 / steps, 4)

    def longest(by_name: dict[str, float]) -> dict[str, float]:
        ordered = sorted(by_name.items(), key=lambda item: -item[1])
        return {name: ms(t) for name, t in ordered[:12]}

    return {
        "launches": len(kernels) / steps,
        "busy ms": ms(sum(busy.values())),
        "idle ms": ms(sum(idle.values())),
        "busy ms by kernel": longest(busy),
        "idle ms before kernel": longest(idle),
    }


def summary(figures: dict[str, Any]) -> list[str]:
    """The most important figures, a line each, with their targets."""
    lines = [f"copy {figures.get('copy GB/s', 0):.0f} GB/s"]
    for model in FULL.models:
        one, tree = (
            figures.get(f"{model} step: {rows} rows x 1 requests, context 512") for rows in (1, 32)
        )
        if one and tree and "ms" in one and "ms" in tree:
            ratio = tree["ms"][0] / one["ms"][0]
            busy = [
                figures.get(f"{model} gaps: {rows} rows", {}).get("busy ms") for rows in (1, 32)
            ]
            lines.append(
                f"{model}: plain step {one['ms'][0]:.2f} ms, {one['over']:.2f} x weights and KV at "
                f"that (asked of 8B: 1.5); 32 rows {ratio:.3f} x (asked: "
                f"1.15), kernels alone in ms: {busy}"
            )
        ttft = figures.get(f"{model} TTFT of {PROMPT} tokens")
        if ttft and "ms" in ttft:
            lines.append(f"{model}: TTFT {ttft['ms'][0]:.1f} ms (asked of 8B: 60)")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
