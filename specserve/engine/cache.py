"""Builds the tiers of the KV pool, and identifies the KV in them."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

import torch

from specserve.config import Config
from specserve.engine.loading import Weights, asked_for
from specserve.engine.ranks import Followers
from specserve.engine.runner import Runner
from specserve.errors import ConfigError
from specserve.memory.blocks import BlockPool
from specserve.memory.disk_tier import DiskInUse, DiskTier, ForeignFile
from specserve.memory.host_tier import HostTier
from specserve.memory.sessions import Sessions
from specserve.memory.tiers import Tiers
from specserve.models.source import open_source
from specserve.version import VERSION
from specserve_kernels.cpu.compiler import source_hash

NO_IDENTITIES: Mapping[str, str] = MappingProxyType({})
TIMED = 32  # blocks that are copied to measure the time of a load; more than caches hold


def build_sessions(
    config: Config,
    pool: BlockPool,
    target: Runner,
    followers: Followers | None = None,
    draft: Runner | None = None,
) -> Sessions | None:
    """Return the tiers of a pool and their sessions; None if the config has no tiers. ConfigError
    if memory is missing, or the folder cannot be used.
    """
    memory, arena, block_bytes = config.memory, target.arena, pool.block_bytes
    num_blocks = memory.host_bytes // block_bytes
    if memory.host_bytes == 0:
        return None
    # Pinned blocks fill at most half of the tier.
    least = 2 + 2 * max(target.state_size, 0 if draft is None else draft.state_size)
    if num_blocks < least:
        raise ConfigError(
            f"memory.host_bytes = {memory.host_bytes} holds fewer than {least} blocks of "
            f"{block_bytes} bytes. Raise it to {least * block_bytes}, or set it to 0"
        )
    try:
        arena.host = target.ops.host_blocks(num_blocks, block_bytes)
        if followers is not None:
            followers.allocate_host(num_blocks)
        seconds = seconds_per_block(target, pool)
    except (OSError, OverflowError, RuntimeError) as e:
        raise ConfigError(
            f"the system refuses {num_blocks * block_bytes} bytes of host memory ({asked_for(e)}). "
            "Lower memory.host_bytes"
        ) from e
    disk = file = None
    if memory.disk_path is not None and memory.disk_bytes is not None:
        disk = open_disk(Path(memory.disk_path), memory.disk_bytes, block_bytes)
        file = Path(memory.disk_path) / "sessions"
    return Sessions(Tiers(pool, HostTier(num_blocks), arena.host, disk, seconds), file)


def open_disk(folder: Path, num_bytes: int, block_bytes: int) -> DiskTier:
    if num_bytes < block_bytes:
        raise ConfigError(
            f"memory.disk_bytes = {num_bytes} holds no block of {block_bytes} bytes. Raise it"
        )
    try:
        return DiskTier(folder, num_bytes, block_bytes)
    except DiskInUse as e:
        raise ConfigError(f"memory.disk_path: {e}. Stop that server, or set another folder") from e
    except ForeignFile as e:
        raise ConfigError(f"memory.disk_path: {e}. Set a new folder") from e
    except OSError as e:
        raise ConfigError(
            f"memory.disk_path = {str(folder)!r} cannot be used ({e}). Set a writable folder"
        ) from e


def seconds_per_block(target: Runner, pool: BlockPool) -> float:
    """Measure the time to load a block from host memory."""
    host = target.arena.host
    assert host is not None, "the host tier has memory"
    count = min(TIMED, pool.num_blocks, len(host.memory))
    pairs, times = [(i, i) for i in range(count)], list[float]()
    blocks = target.arena.blocks
    with torch.inference_mode():
        host.store(blocks, pairs)  # the system assigns the pages
        host.load(blocks, pairs)
        host.wait()
        for _ in range(3):
            start = perf_counter()
            host.load(blocks, pairs)
            host.wait()
            times.append((perf_counter() - start) / count)
    return min(times)


def kv_identities(config: Config, weights: Weights) -> dict[str, str]:
    """Return digests of everything that each model's KV on disk depends on, in addition to its
    name: weights and build. It is empty if nothing is kept on disk.
    """
    if config.memory.disk_path is None:
        return {}
    build = f"{VERSION} {source_hash()} {weights.target.decoder.ops.arithmetic()}"
    return {name: f" {identity_of(each, build)}" for name, each in weights.folders.items()}


def identity_of(folders: Iterable[Path], build: str) -> str:
    """Return a digest of models and the build that computes their KV."""
    digest = hashlib.sha256(build.encode())
    for folder in folders:
        for part in open_source(folder).identity():
            digest.update(part)
        digest.update(stamp_of(folder).encode())  # `identity` has samples of the weights only
    return digest.hexdigest()


def stamp_of(folder: Path) -> str:
    """Return names, sizes and times of a model's weight files, in a folder or in one file."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    each = ((file.name, file.stat()) for file in files)
    return "".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in each)


def tier_words(tiers: Tiers) -> str:
    host, block_bytes = tiers.host, tiers.pool.block_bytes
    rate = block_bytes / max(tiers.host_seconds, 1e-9) / 1e9
    words = f"host: {host.num_blocks * block_bytes >> 20} MiB, loaded at {rate:.1f} GB/s"
    if tiers.disk is None:
        return words
    size = tiers.disk.num_blocks * block_bytes >> 20
    return f"{words}; disk: {size} MiB, {len(tiers.disk)} blocks found"
