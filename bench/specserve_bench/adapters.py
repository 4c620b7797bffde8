"""What LoRA adapters take of a step: one, four in a batch, and slots that nobody uses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file

from specserve.config import load_config
from specserve.engine.build import assemble
from specserve.engine.engine import Engine
from specserve.engine.loading import Model, ModelKey
from specserve.engine.pool_plan import Models
from specserve.engine.tuning import tune
from specserve.exchange.messages import AdapterRef
from specserve.exchange.sampling_params import Sampling
from specserve.models.adapters import fused_maps
from specserve.models.decoder_config import DecoderConfig
from specserve.models.loader import load_decoder
from specserve_bench.results import ratio
from specserve_bench.steps import BLOCK_SIZE, kv_token_bytes, spread, words
from specserve_drafters.tree import TREE_SLOTS
from specserve_kernels import load

ROUNDS, WARM_UP = 7, 12
STEPS = 6  # of each subject in a round; their median counts
PROMPT, RANK, SLOTS = 200, 16, 4
BASE = "no slots"
SUBJECTS: dict[str, tuple[int, ...] | None] = {  # the adapters of requests in turn; -1: none
    BASE: None,
    "slots, no adapter": (-1,),
    "one adapter": (0,),
    "four adapters": (0, 1, 2, 3),
    "four adapters and none": (0, -1, 1, -1, 2, -1, 3, -1),
}
SIZES = 1, 8  # requests
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@torch.inference_mode()
def adapter_figures(folder: Path, rounds: int = ROUNDS, rank: int = RANK) -> dict[str, Any]:
    """Milliseconds of a step by subject and requests, over interleaved rounds, and their ratio to
    the engine's that has no slots.
    """
    max_len = PROMPT + WARM_UP + 2 * rounds * STEPS + BLOCK_SIZE
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), max_len)
    model = Model(decoder, ModelKey(str(folder), "cpu", "auto", "bf16", max_len))
    rows = []
    with TemporaryDirectory() as home:
        adapters = [random_adapter(Path(home) / str(i), decoder.config, rank, i) for i in range(4)]
        for number in SIZES:
            engines = {
                name: started(model, max_len, number, adapters, of, rank)
                for name, of in SUBJECTS.items()
                if number > 1 or of is None or len(of) == 1
            }
            rows.append({"requests": number} | measured(engines, rounds))
    result = {"rounds": rounds, "rank": rank, "maps": MAPS, "rows": rows}
    print(table(result))
    return result


def random_adapter(folder: Path, config: DecoderConfig, rank: int, seed: int) -> Path:
    """One that changes every linear map."""
    folder.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config.num_layers):
        for part in (part for parts in fused_maps(config, layer).values() for part in parts):
            for matrix, size in (("A", (rank, part.width)), ("B", (part.height, rank))):
                name = f"base_model.model.{part.module}.lora_{matrix}.weight"
                tensors[name] = torch.empty(size, dtype=torch.bfloat16).normal_(
                    0, 0.02, generator=draw
                )
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*MAPS]}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def started(
    model: Model,
    max_len: int,
    number: int,
    folders: Sequence[Path],
    chosen: Sequence[int] | None,
    rank: int,
    prompt_tokens: int = PROMPT,
) -> Engine:
    """An engine with so many requests, all in midst of their outputs."""
    decoder = model.decoder
    slots = {} if chosen is None else {"lora.max_loras": SLOTS, "lora.max_rank": rank}
    held = number * (max_len + TREE_SLOTS + BLOCK_SIZE)  # tokens
    settings = {
        "memory.kv_bytes": held * kv_token_bytes(decoder.config),
        "memory.block_size": BLOCK_SIZE,
        "memory.prefix_cache": False,
        "scheduler.max_running": number,
        "scheduler.max_batched_tokens": 2 * prompt_tokens,
        "scheduler.prefill_chunk": prompt_tokens,
        "drafter.name": "none",
    }
    config = load_config(None, settings | slots)
    engine = assemble(config, Models(decoder), max_len)
    tune(model, engine.target, engine.pool, config, max_len)
    refs = list[AdapterRef | None]()
    if engine.adapters is not None:
        welcome, read = engine.adapters.welcome, engine.adapters.read
        refs += [welcome(str(folder), read(folder)) for folder in folders]
    refs.append(None)
    how = Sampling(max_tokens=1 << 20, temperature=0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    chance = Random(1)
    for i in range(number):
        prompt = [chance.randrange(decoder.config.vocab_size) for _ in range(prompt_tokens)]
        own = refs[(chosen or (-1,))[i % len(chosen or (-1,))]]
        engine.add_choices(prompt, [how], adapter=own)
    while len(engine.step()) < number:
        pass
    for _ in range(WARM_UP):
        engine.step()
    return engine


def measured(engines: Mapping[str, Engine], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(rounds):
        ran: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(STEPS):
            for name in [*engines][:: 1 - 2 * (i % 2)]:
                start = perf_counter()
                engines[name].step()
                ran[name].append(perf_counter() - start)
        for name, each in ran.items():
            seconds[name].append(median(each))
    told = {}
    for name, each in seconds.items():
        over = ratio(each, seconds[BASE])
        assert over is not None, "there is a round at least"
        over_base = {"median": over.median, "low": over.low, "high": over.high}
        told[name] = {"ms": spread([1e3 * s for s in each]), "over_base": over_base}
    return {"steps": told}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: the step without slots, and the others' ratio to it."""
    names = [name for name in SUBJECTS if name != BASE]
    lines = [
        f"| requests | {BASE}, ms | " + " | ".join(f"{name}, / it" for name in names) + " |",
        "|" + " --- |" * (2 + len(names)),
    ]
    for row in result["rows"]:
        steps = row["steps"]
        shares = (words(steps[n]["over_base"]) if n in steps else "-" for n in names)
        ms = steps[BASE]["ms"]["median"]
        lines.append(f"| {row['requests']} | {ms:.1f} | " + " | ".join(shares) + " |")
    return "\n".join(lines)
