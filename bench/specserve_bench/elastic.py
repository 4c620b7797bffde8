"""Draft KV in the target's pool, compared with a pool of its own, where memory is short."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from specserve import LLM, SamplingParams
from specserve.config import DEMO_DRAFT
from specserve.memory.blocks import BlockPool, BlockTable, Keys
from specserve.speculation.draft_model import DraftModel
from specserve_bench.scale import scale_model
from specserve_bench.workloads import source_tokens

HEADS = 6  # of the draft: its KV has a quarter of the target's bytes a token
BLOCK_SIZE, SHARE = 16, 0.6
ROUNDS = 5


class Load(NamedTuple):
    """Requests that arrive at once: prompts of source, and tokens to generate."""

    requests: int
    num_prompt: int
    num_said: int


LOADS = [Load(32, 300, 100), Load(16, 800, 200)]


def elastic_figures() -> list[dict[str, Any]]:
    """Tokens a second in a pool of 60 % of what both models want, over those of a fixed split."""
    with TemporaryDirectory(prefix="specserve-bench-") as folder:
        draft = larger_draft(Path(folder))
        return [one_load(load, draft) for load in LOADS]


def larger_draft(folder: Path) -> Path:
    """The demo pair's draft with heads added, whose outputs are multiplied by zero."""
    shape = json.loads((DEMO_DRAFT / "config.json").read_text())
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(shape | heads))
    scale_model(DEMO_DRAFT, folder / "draft", str(folder / "shape"))
    return folder / "draft"


def one_load(load: Load, draft: Path) -> dict[str, Any]:
    roomy = LLM(draft_model=draft, progress=False, set=settings(load, kv_bytes=1 << 28))
    bytes_of = [
        runner.kv.layers[0].k[0, 0].nbytes * 2 * len(runner.kv.layers)
        for runner in (roomy.engine.target, roomy.engine.draft_model.runner)  # type: ignore[union-attr]
    ]
    draft_share = bytes_of[1] / sum(bytes_of)
    length = load.num_prompt + load.num_said
    target_blocks = load.requests * -(-length // BLOCK_SIZE)
    num_blocks = int(SHARE * target_blocks / (1 - draft_share))
    sized = settings(load, num_blocks * roomy.engine.pool.block_bytes)
    llms = {
        name: LLM(None, own, drafter, progress=False, set=sized, weights=roomy.weights)
        for name, own, drafter in (
            ("elastic", draft, "model"),
            ("split", draft, "model"),
            ("off", None, "none"),
        )
    }
    split(llms["split"], draft_share)
    asks = prompts(roomy, load)
    rates: dict[str, list[float]] = {name: [] for name in llms}
    fallbacks = {}
    for _ in range(1 + ROUNDS):  # the first one warms up
        for name, llm in llms.items():
            before = llm.engine.stats.num_fallbacks
            rates[name].append(tokens_per_second(llm, asks, load.num_said))
            fallbacks[name] = llm.engine.stats.num_fallbacks - before
    ratios = [e / s for e, s in zip(rates["elastic"][1:], rates["split"][1:], strict=True)]
    return {
        **load._asdict(),
        "blocks": num_blocks,
        "draft_bytes_over_target": round(bytes_of[1] / bytes_of[0], 3),
        "tokens_per_s": {name: round(median(x[1:]), 1) for name, x in rates.items()},
        "fallbacks": fallbacks,
        "elastic_over_split": round(median(ratios), 3),
        "elastic_over_split_min_max": [round(f(ratios), 3) for f in (min, max)],
    }


def settings(load: Load, kv_bytes: int) -> dict[str, Any]:
    return {
        "scheduler.max_running": load.requests,
        "scheduler.max_model_len": load.num_prompt + load.num_said + 1,
        "memory.block_size": BLOCK_SIZE,
        "memory.kv_bytes": kv_bytes,
    }


def prompts(llm: LLM, load: Load) -> list[list[int]]:
    """Slices, at random places, of source that the demo pair was not trained on."""
    source = source_tokens(llm)
    rng, most = random.Random(0), len(source) - load.num_prompt
    begins = [rng.randrange(most) for _ in range(load.requests)]
    return [source[begin : begin + load.num_prompt] for begin in begins]


def tokens_per_second(llm: LLM, asks: Sequence[list[int]], num_said: int) -> float:
    llm.reset_cache()
    params = SamplingParams(max_tokens=num_said, temperature=0, ignore_eos=True)
    start = perf_counter()
    llm.generate(asks, params)
    return len(asks) * num_said / (perf_counter() - start)


def split(llm: LLM, draft_share: float) -> None:
    """Split the pool: the draft model's KV gets a fixed part, which nothing else may use.

    Both lie in the same arena: the target keeps the first blocks.
    """
    engine, pool = llm.engine, llm.engine.pool
    draft_model, scheduler = engine.draft_model, engine.scheduler
    assert draft_model is not None
    total, kept = pool.num_blocks, round(pool.num_blocks * (1 - draft_share))
    drafts = BlockPool(total, pool.block_bytes)
    drafts.updates = pool.updates
    drafts.free = list(range(total - 1, kept - 1, -1))
    pool.free, pool.num_blocks = list(range(kept - 1, -1, -1)), kept
    make_table = engine.tables.table

    def table(
        model: str, salt: str, keys: Keys | None = None, adapter: str = "", tenant: int = 0
    ) -> BlockTable:
        made = make_table(model, salt, keys, adapter, tenant)
        if model == "draft":
            made.pool = drafts
        return made

    class Apart(DraftModel):
        @property
        def spare(self) -> int:
            return drafts.num_available

    draft_model.__class__ = Apart
    engine.tables.table = table  # type: ignore[method-assign]
    scheduler.reclaim = lambda keeper: False  # type: ignore[method-assign]
