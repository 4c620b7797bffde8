"""What LoRA adapters take of a step: one, four in a batch, and slots that nobody uses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from specserve.engine.engine import Engine
from specserve.exchange.messages import AdapterRef
from specserve.models.adapters import fused_maps
from specserve.models.decoder import LoadedModel
from specserve.models.decoder_config import DecoderConfig
from specserve.models.loader import load_decoder
from specserve_bench.figures.steps import BLOCK_SIZE, elapsed, make_engine, plain_sampling
from specserve_bench.pairs import random_checkpoint
from specserve_bench.report import extremes_words, markdown_table
from specserve_bench.results import extremes, extremes_over
from specserve_drafters.candidates import TREE_SLOTS
from specserve_kernels import load

WARM_UP = 12
STEPS = 6  # of each subject in a round; their median counts
PROMPT = 200
BASE = "no slots"
SUBJECTS: dict[str, tuple[int, ...] | None] = {  # the adapters of requests in turn; -1: none
    BASE: None,
    "slots, no adapter": (-1,),
    "one adapter": (0,),
    "four adapters": (0, 1, 2, 3),
    "four adapters and none": (0, -1, 1, -1, 2, -1, 3, -1),
}
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@torch.inference_mode()
def measure(folder: Path | None = None, rounds: int = 7, rank: int = 16) -> dict[str, Any]:
    """Milliseconds of a step by subject and requests, over interleaved rounds, and their ratio to
    the engine's that has no slots.
    """
    max_len, rows = PROMPT + WARM_UP + 2 * rounds * STEPS + BLOCK_SIZE, []
    folder = folder or random_checkpoint()
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), max_len)
    with TemporaryDirectory() as home:
        adapters = [random_adapter(Path(home, str(i)), decoder.config, rank, i) for i in range(4)]
        for number in (1, 8):
            engines = {
                name: started(decoder, str(folder), max_len, number, adapters, of, rank)
                for name, of in SUBJECTS.items()
                if number > 1 or of is None or len(of) == 1
            }
            rows.append({"requests": number, "steps": figures(engines, rounds)})
    return {"rounds": rounds, "rank": rank, "maps": MAPS, "rows": rows}


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
    decoder: LoadedModel,
    name: str,
    max_len: int,
    number: int,
    folders: Sequence[Path],
    chosen: Sequence[int] | None,
    rank: int,
    prompt_tokens: int = PROMPT,
) -> Engine:
    """An engine with so many requests, all in midst of their outputs."""
    slots = {} if chosen is None else {"lora.max_loras": 4, "lora.max_rank": rank}
    settings = {
        "memory.prefix_cache": False,
        "scheduler.max_running": number,
        "scheduler.max_batched_tokens": 2 * prompt_tokens,
        "scheduler.prefill_chunk": prompt_tokens,
        "drafter.name": "none",
    }
    num_tokens = number * (max_len + TREE_SLOTS + BLOCK_SIZE)
    engine = make_engine(decoder, name, max_len, num_tokens, settings | slots)
    refs: list[AdapterRef | None] = []
    if engine.adapters is not None:
        welcome, read = engine.adapters.welcome, engine.adapters.read
        refs += [welcome(str(folder), read(folder)) for folder in folders]
    refs.append(None)
    how, chance = plain_sampling(1 << 20), Random(1)
    for i in range(number):
        prompt = [chance.randrange(decoder.config.vocab_size) for _ in range(prompt_tokens)]
        own = refs[(chosen or (-1,))[i % len(chosen or (-1,))]]
        engine.add_choices(prompt, [how], adapter=own)
    while len(engine.step()) < number:
        pass
    for _ in range(WARM_UP):
        engine.step()
    return engine


def figures(engines: Mapping[str, Engine], rounds: int) -> dict[str, Any]:
    ms: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(rounds):
        ran: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(STEPS):
            for name in [*engines][:: 1 - 2 * (i % 2)]:
                ran[name].append(1e3 * elapsed(engines[name].step))
        for name, each in ran.items():
            ms[name].append(median(each))
    return {
        name: {"ms": extremes(each), "over_base": extremes_over(each, ms[BASE])}
        for name, each in ms.items()
    }


def table(result: Mapping[str, Any]) -> str:
    """The step without slots, and the others' ratio to it."""
    names, rows = [name for name in SUBJECTS if name != BASE], []
    for row in result["rows"]:
        steps = row["steps"]
        shares = (extremes_words(steps[n]["over_base"]) if n in steps else "-" for n in names)
        rows.append([str(row["requests"]), f"{steps[BASE]['ms']['median']:.1f}", *shares])
    return markdown_table(["requests", f"{BASE}, ms", *(f"{n}, / it" for n in names)], rows)
