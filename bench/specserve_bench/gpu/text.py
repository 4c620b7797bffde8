"""Text in float32 on the GPU against the CPU's: drafters, adapters, a mixture, KV of 8 bits, and
models with recurrent layers.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from specserve import LLM, SamplingParams
from specserve.config import DEMO_TARGET
from specserve.engine import loading
from specserve.models.parse_config import load_config
from specserve_bench.figures.adapters import random_adapter
from specserve_bench.gpu.hybrids import HYBRIDS, hybrid_checkpoint
from specserve_bench.gpu.record import UNFINISHED
from specserve_bench.gpu.stage import StageOptions, interpreted, options, record_of
from specserve_bench.pairs import EXPERTS, shape_folder
from specserve_bench.scale import scale_model
from specserve_bench.workloads import workload
from specserve_kernels import load

DRAFTERS: dict[str, dict[str, Any]] = {  # setting -> as of LLM.change_speculation
    "off": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "draft model": {"drafter": "model"},
    "eagle": {"drafter": "eagle"},
    "auto": {"drafter": "auto", "sources": ["ngram", "model", "eagle", "grammar", "prediction"]},
}
MIXTURE = EXPERTS | {  # room for the demo's layers, at little cost
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
RANK = 8
ADAPTER = "adapter"


def main(argv: list[str]) -> int:
    args = options(argv)
    deadline, record = perf_counter() + args.seconds, record_of("text", args)
    with TemporaryDirectory() as home:
        for model in models(Path(home)):
            if all(f"{model.name}, {name}" in record for name in model.drafters):
                continue
            want = model.texts(args, "cpu", ["off"])["off"]
            if perf_counter() > deadline:
                return UNFINISHED
            for name, got in model.texts(args, "cuda", [*model.drafters]).items():
                record.put(f"{model.name}, {name}", compared(want, got))
    is_equal = all(f["same"] == f["requests"] for f in record.figures.values())
    record.finish(is_equal)
    return 0 if is_equal else 1


class TextModel(NamedTuple):
    """A model, the settings that it is loaded with, and what drafts."""

    name: str
    settings: dict[str, Any]
    drafters: Mapping[str, Mapping[str, Any]]
    adapter: Path | None = None

    def texts(
        self, args: StageOptions, device: str, drafters: list[str]
    ) -> dict[str, list[list[int]]]:
        """Half of them greedy, half drawn, by what drafts."""
        settings = {"model.device": "cpu" if args.rehearse else device, "memory.kv_bytes": 1 << 28}
        settings |= {"model.dtype": "fp32"} | self.settings
        if args.rehearse:
            settings |= {"scheduler.max_batched_tokens": 16, "scheduler.prefill_chunk": 12}
            settings["scheduler.max_running"] = 2
            ops = interpreted() if device == "cuda" else load("cpu")
            loading.load = lambda *_: ops  # type: ignore[attr-defined]
        given: dict[str, Any] = {}
        if self.adapter is not None:
            given["lora_modules"] = {ADAPTER: self.adapter}
            settings |= {"lora.max_loras": 1, "lora.max_rank": RANK}
        with LLM(set=settings, progress=False, **given) as llm:
            asked = asked_of(llm, args)
            found = {}
            for name in drafters:
                if len(self.drafters) > 1:
                    llm.change_speculation(**self.drafters[name])
                lora = None if self.adapter is None else ADAPTER
                found[name] = [o.token_ids for o in llm.generate(*asked, lora=lora)]
        return found


def models(home: Path) -> Iterator[TextModel]:
    off = {"drafter.name": "none"}
    every = {"drafter.name": "auto", "drafter.options": {"sources": DRAFTERS["auto"]["sources"]}}
    yield TextModel("demo", every, DRAFTERS)
    adapter = random_adapter(home / "adapter", load_config(DEMO_TARGET), RANK, 0)
    yield TextModel("demo with LoRA", off, {"off": {}}, adapter)
    yield TextModel("demo, int8 KV", off | {"memory.kv_dtype": "int8"}, {"off": {}})
    mixture = home / "mixture"
    scale_model(DEMO_TARGET, mixture, shape_folder(home / "shape", MIXTURE))
    yield TextModel("mixture", off | {"model.path": str(mixture)}, {"off": {}})
    for name in HYBRIDS:
        path = {"model.path": str(hybrid_checkpoint(name, home / name))}
        drafters = {key: DRAFTERS[key] for key in ("off", "ngram")}
        yield TextModel(name, path | {"drafter.name": "ngram"}, drafters)


def asked_of(llm: LLM, args: StageOptions) -> tuple[list[list[int]], list[SamplingParams]]:
    number, most = (1, 2) if args.rehearse else (4, 48)
    asks = [a for w in ("questions", "completion") for a in workload(w, number, 0).asks]
    processor = llm.input_processor
    prompts = [
        processor.encode(p) if isinstance(p, str) else processor.render(p)
        for p in (ask.prompt for ask in asks)
    ]
    if args.rehearse:
        prompts = [prompt[:12] for prompt in prompts]
    params = [
        SamplingParams(max_tokens=most, temperature=float(i % 2), seed=ask.seed)
        for i, ask in enumerate(asks)
    ]
    return prompts, params


def compared(want: list[list[int]], got: list[list[int]]) -> dict[str, Any]:
    """How many texts are the same, and where the others part."""
    pairs = [*zip(want, got, strict=True)]
    return {
        "requests": len(want),
        "same": sum(a == b for a, b in pairs),
        "tokens": sum(map(len, want)),
        "first differences": [first_difference(a, b) for a, b in pairs if a != b],
    }


def first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
