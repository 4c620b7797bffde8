"""Writes a checkpoint of a small model that is padded to a large model's compute (same text).

`specserve_bench.demo.scaled_weights` describes the padding.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file

from specserve.errors import ConfigError
from specserve.models.folder import name_of, not_written, resolve
from specserve.models.reader import DTYPES
from specserve.models.weight_files import INDEX
from specserve.models.writing import SHARD_BYTES, copy_companions, split, write_json
from specserve_bench import arguments
from specserve_bench.demo.scaled_model import SHAPES, scaled_sizes
from specserve_bench.demo.scaled_weights import ScaledTensors


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="specserve bench scale-model",
        description="Write a small model, padded to the compute of a larger shape (same text).",
    )
    parser.add_argument(
        "source", metavar="SRC", help="Qwen3 checkpoint with as many KV heads as heads"
    )
    parser.add_argument("target", metavar="DST", type=Path, help="folder to create")
    known = ", ".join(SHAPES)
    parser.add_argument(
        "--like", required=True, metavar="NAME", help=f"{known}, or a folder with a config.json"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    seeds = arguments.integer(0, 2**63 - 1)
    parser.add_argument(
        "--seed", type=seeds, default=0, help="seed of the added weights; default: 0"
    )
    args = parser.parse_args(argv)
    arguments.check_parent("DST", args.target)
    source = resolve(args.source)
    dtype, name = DTYPES[args.dtype], name_of(args.source)
    try:
        scale_model(source, args.target, args.like, dtype=dtype, seed=args.seed, name=name)
    except (OSError, SafetensorError) as e:
        raise not_written(getattr(e, "filename", None) or args.target, e) from e
    text = "same text" if args.dtype == "fp32" else f"same text, up to rounding to {args.dtype}"
    print(f"{args.target}: {name}, padded to {args.like} compute ({text})")
    return 0


def scale_model(
    source: Path,
    target: Path,
    shape: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    name: str | None = None,
) -> None:
    """Write a checkpoint of a larger shape that computes the function of `source`.

    target  empty or new folder
    shape   name in SHAPES, or a folder with a config.json
    name    name of the source model; default: the name of its folder

    The same arguments write the same bytes.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(
            f"{target}: exists and is not an empty folder. Remove it or name another one."
        )
    scaled = scaled_sizes(
        source, shape, str(dtype).removeprefix("torch."), name or source.resolve().name
    )
    tensors = ScaledTensors(source, scaled.small, scaled.large, dtype, seed)
    target.mkdir(parents=True, exist_ok=True)
    copy_companions(source, target)
    write_shards(tensors, target, shard_bytes)
    # Last, because a folder without config.json is not a model.
    write_json(target / "config.json", scaled.fields)


def write_shards(scaled: ScaledTensors, target: Path, shard_bytes: int) -> None:
    """Write shards one after another, so that memory holds only one."""
    all_bytes = {n: math.prod(s) * scaled.dtype.itemsize for n, s in scaled.shapes.items()}
    shards = split(all_bytes, shard_bytes)
    console = Console(stderr=True)
    for file, names in track(
        shards.items(), f"writing {target.name}", console=console, disable=not console.is_terminal
    ):
        tensors = {name: scaled.get_tensor(name) for name in names}
        save_file(tensors, target / file, metadata={"format": "pt"})
        del tensors  # before the next shard is created
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sum(all_bytes.values())}, "weight_map": weight_map}
        write_json(target / INDEX, index)
