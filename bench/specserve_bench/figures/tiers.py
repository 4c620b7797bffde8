"""KV tiers: hits from host memory and disk against computing, streams meanwhile, and a restart."""

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from specserve.engine.engine import Engine
from specserve.memory.disk_tier import DiskTier
from specserve.memory.tiers import Tiers
from specserve.models.decoder import Decoder
from specserve.models.loader import load_decoder
from specserve_bench.figures.steps import make_engine, plain_sampling
from specserve_bench.pairs import random_checkpoint
from specserve_bench.report import markdown_table
from specserve_bench.results import extremes
from specserve_kernels import load

HIT = 2000  # tokens of a prompt
STREAM = 200  # tokens of the stream's prompt
LIMITS = {"host": 0.05, "disk": 0.15, "disk_over_read": 1.2, "streams": 1.25, "restart": 0.1}


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", type=Path, help="folder; default: random weights of a 0.6B shape")
    p.add_argument("--rounds", type=int, default=5, metavar="N")
    p.add_argument(
        "--session",
        type=int,
        default=4000,
        metavar="TOKENS",
        help="prompt of the restart. Computing grows faster than loading (default: %(default)s)",
    )
    p.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a new one")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    most = max(args.session, HIT) + 64
    model = args.model or random_checkpoint()
    decoder = load_decoder(model, "bf16", load(torch.device("cpu")), most)
    assert isinstance(decoder, Decoder)
    with TemporaryDirectory(prefix="specserve-bench-", dir=args.folder) as folder:
        measured = Measured(decoder, str(model), HIT + 64, Path(folder))
        try:
            figures = measured.hits(args.rounds) | measured.streams(args.rounds)
        finally:
            measured.engine.close()
    with TemporaryDirectory(prefix="specserve-bench-", dir=args.folder) as folder:
        return figures | restart(decoder, str(model), most, Path(folder), args.session)


class Measured:
    """An engine with both tiers. Its disk blocks leave the page cache before each read."""

    def __init__(self, decoder: Decoder, name: str, most: int, folder: Path) -> None:
        self.engine = tiered(decoder, name, most, folder, prompts=2)
        self.engine.target.arena.blocks.zero_()  # the system assigns the pages
        self.rng, self.vocab_size = random.Random(0), decoder.config.vocab_size

    def prompt(self, size: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(size)]

    def hits(self, rounds: int) -> dict[str, Any]:
        """TTFT of a prompt that is computed, loaded from host memory, and loaded from disk."""
        seconds: dict[str, list[float]] = {name: [] for name in ("compute", "host", "disk", "read")}
        for _ in range(rounds + 1):  # the first round assigns pages
            prompt = self.prompt(HIT)
            seconds["compute"].append(ttft(self.engine, prompt))
            evict(self.engine)
            seconds["host"].append(ttft(self.engine, prompt))
            evict(self.engine)
            num_read = leave_host(self.engine)
            seconds["read"].append(plain_read(disk_of(self.engine), num_read))
            seconds["disk"].append(ttft(self.engine, prompt))
        each = {name: times[1:] for name, times in seconds.items()}
        over = {
            "host": ratios(each["host"], each["compute"]),
            "disk": ratios(each["disk"], each["compute"]),
            "disk_over_read": ratios(each["disk"], each["read"]),
        }
        hits = {name: stats.hits for name, stats in tiers_of(self.engine).stats.items()}
        ms = {f"{name}_ms": round(1e3 * median(times), 1) for name, times in each.items()}
        block_bytes = self.engine.pool.block_bytes
        return {"tokens": HIT, "block_bytes": block_bytes, "hits": hits, **ms, **over}

    def streams(self, rounds: int) -> dict[str, Any]:
        """Steps of a stream while blocks are loaded from host memory, over its other steps."""
        alone, loading = list[float](), list[float]()
        prompt = self.prompt(HIT)
        ttft(self.engine, prompt)
        for _ in range(rounds):
            evict(self.engine)
            stream = self.engine.add(self.prompt(STREAM), plain_sampling(1 << 20))
            while stream.num_output < 10:
                self.engine.step()
            alone += [timed(self.engine.step) for _ in range(20)]
            request = self.engine.add(prompt, plain_sampling(1))
            self.engine.scheduler.is_load_faster = lambda *_: True  # type: ignore[method-assign]
            seconds = timed(self.engine.step)
            while tiers_of(self.engine).loads:
                loading.append(seconds)
                seconds = timed(self.engine.step)
            del self.engine.scheduler.is_load_faster
            assert request.num_cached or not request.num_output, "the prompt was computed"
            for each in (request, stream):
                self.engine.finish(each.id)
        ratio = median(loading) / median(alone)
        return {"streams": round(ratio, 3), "loading_steps": len(loading)}


def tiered(decoder: Decoder, name: str, most: int, folder: Path, prompts: int = 1) -> Engine:
    """An engine whose pool has room for so many of the longest prompts, and whose tiers have
    `prompts` times its room.
    """
    tokens = prompts * most + 1024
    engine = make_engine(decoder, name, most, tokens, {"drafter.name": "none"})
    block_bytes = engine.pool.block_bytes
    num_bytes = prompts * engine.pool.num_blocks * block_bytes
    engine.close()
    settings = {
        "drafter.name": "none",
        "memory.host_bytes": num_bytes,
        "memory.disk_path": str(folder),
        "memory.disk_bytes": num_bytes,
    }
    return make_engine(decoder, name, most, tokens, settings)


def tiers_of(engine: Engine) -> Tiers:
    tiers = engine.scheduler.tiers
    assert tiers is not None, "the settings have tiers"
    return tiers


def disk_of(engine: Engine) -> DiskTier:
    disk = tiers_of(engine).disk
    assert disk is not None, "the settings have a disk"
    return disk


def timed(act: Callable[[], object]) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start


def ttft(engine: Engine, prompt: list[int]) -> float:
    """Seconds from a prompt's arrival to its first token, while nothing else runs."""
    start = perf_counter()
    engine.add(prompt, plain_sampling(1))
    while not engine.is_idle:
        engine.step()
    return perf_counter() - start


def evict(engine: Engine) -> None:
    """Let other requests take all of the pool, and wait for the disk."""
    pool, tiers = engine.pool, tiers_of(engine)
    blocks = pool.try_allocate(pool.num_available)
    assert blocks is not None
    pool.release(reversed(blocks))
    engine.target.run_updates(pool.updates)
    tiers.save([*tiers.host.found])
    while tiers.saving:
        tiers.advance()
        tiers.wait(1.0)
    tiers.finish_writes()


def leave_host(engine: Engine) -> int:
    """Drop the host tier's blocks. Return the number of blocks of the last prompt."""
    host = tiers_of(engine).host
    for key in [*host.found]:
        host.drop(key)
    cool(disk_of(engine))
    return (HIT - 1) // engine.target.kv.block_size


def cool(disk: DiskTier) -> None:
    """Remove the blocks from the page cache."""
    os.fsync(disk.blocks)
    os.posix_fadvise(disk.blocks, 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(disk: DiskTier, num_blocks: int) -> float:
    """Seconds of a cold read of so many blocks, as they lie. They are cold again afterwards."""
    memory, start = bytearray(num_blocks * disk.block_bytes), perf_counter()
    os.preadv(disk.blocks, [memory], 0)  # assigns the pages
    cool(disk)
    start = perf_counter()
    os.preadv(disk.blocks, [memory], 0)
    seconds = perf_counter() - start
    cool(disk)
    return seconds


def ratios(times: list[float], others: list[float]) -> dict[str, Any]:
    return extremes([time / other for time, other in zip(times, others, strict=True)], 4)


def restart(decoder: Decoder, name: str, most: int, folder: Path, session: int) -> dict[str, Any]:
    """TTFT of a conversation's prompt after a restart, over the time to compute it. The start of
    the process and reading the weights are not included.
    """
    rng = random.Random(1)
    prompt = [rng.randrange(decoder.config.vocab_size) for _ in range(session)]
    engine = tiered(decoder, name, most, folder)
    computed = ttft(engine, prompt)
    evict(engine)
    cool(disk_of(engine))
    engine.close()
    engine = tiered(decoder, name, most, folder)
    found = ttft(engine, prompt)
    hits = tiers_of(engine).stats["disk"].hits
    engine.close()
    assert hits == (session - 1) // engine.target.kv.block_size, "the session was computed"
    return {
        "session": session,
        "session_ms": round(1e3 * computed, 1),
        "resumed_ms": round(1e3 * found, 1),
        "restart": round(found / computed, 4),
    }


def table(figures: dict[str, Any]) -> str:
    tokens, session = figures["tokens"], figures["session"]
    rows = [
        (f"TTFT of a hit of {tokens:,} tokens in host memory / computed", "host"),
        (f"TTFT of a hit of {tokens:,} tokens on disk, cold / computed", "disk"),
        ("the same / a cold read of these bytes", "disk_over_read"),
        ("step of a stream while blocks are loaded / alone", "streams"),
        (f"TTFT of a conversation of {session:,} tokens after a restart / computed", "restart"),
    ]
    lines = []
    for words, name in rows:
        value = figures[name]
        shown = value["median"] if isinstance(value, dict) else value
        lines.append((words, f"{shown:.3f}", f"{LIMITS[name]:g}"))
    return markdown_table(["figure", "measured", "goal"], lines)
