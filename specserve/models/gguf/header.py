"""A GGUF file's header: what it says of the model, and where each tensor lies."""

import mmap
import re
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve.models.folder import MAGIC, check_pointer
from specserve.models.gguf.blocks import Type, find_type
from specserve.models.gguf.cursor import MAX_KEY, U32, U64, Array, Cursor, Value
from specserve.models.weight_files import check_is_at_home

VERSIONS = 2, 3
MAX_KEYS, MAX_TENSORS, MAX_DIMENSIONS, MAX_SIZE = 1 << 16, 1 << 18, 4, 1 << 40
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Tensor(NamedTuple):
    """shape: rows first, as torch has it, and the other way round than in the file."""

    shape: tuple[int, ...]
    type: Type
    file: Path
    offset: int  # of its first byte in the file

    @property
    def size(self) -> int:
        return prod(self.shape) // self.type.width * self.type.size


class Header(NamedTuple):
    path: Path
    metadata: dict[str, Value | Array]
    tensors: dict[str, Tensor]  # by llama.cpp's names
    data_offset: int  # where tensors begin in the file


def read_header(path: Path) -> Header:
    """The header of a model's file, or of all parts of a split one; ConfigError if it is broken."""
    first = read_file(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise damaged(path, "split.count is no number")
    if count == 1:
        return first
    tensors = dict(first.tensors)
    for part in other_parts(path, count):
        for name, tensor in read_file(part).tensors.items():
            if name in tensors:
                raise damaged(part, f"{name} is in another part too")
            tensors[name] = tensor
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise damaged(path, f"its parts have {len(tensors)} tensors, and it says {total}")
    return first._replace(tensors=tensors)


def other_parts(path: Path, count: int) -> Iterator[Path]:
    """The parts that follow the first, which is the one to name."""
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise ConfigError(
            f"{path}: one of {count} parts, and not named as such; rename them to "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    if int(named["number"]) != 1:
        raise ConfigError(
            f"{path}: not the first part; name {named['stem']}-00001-of-{count:05}.gguf"
        )
    home = path.parent.resolve()
    for number in range(2, int(named["count"]) + 1):
        part = path.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise ConfigError(
                f"{part}: missing, and {path.name} needs it; download the model again"
            )
        check_is_at_home(home, part)
        yield part


def read_file(path: Path) -> Header:
    try:
        stat = path.stat()
        return read_version(path, stat.st_size, stat.st_mtime_ns)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}); check its permissions") from e


@lru_cache(maxsize=8)
def read_version(path: Path, size: int, changed_at: int) -> Header:
    """The header of the file as it is since then; read once, as a vocabulary is large."""
    if size == 0:
        raise damaged(path, "it is empty")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return parse(path, data)
    except ValueError as e:  # text that is no UTF-8 as well
        raise damaged(path, str(e)) from e


def damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path}: no readable GGUF file, cut short or damaged ({reason}); download it again"
    )


def parse(path: Path, data: mmap.mmap) -> Header:
    check_version(path, data[:8])
    cursor = Cursor(data, 8)
    num_tensors = cursor.count(MAX_TENSORS, "tensors")
    metadata = read_metadata(cursor, cursor.count(MAX_KEYS, "keys"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment = {alignment!r} is no power of two from 8 on")
    tensors = dict(read_tensor(path, cursor) for _ in range(num_tensors))
    if len(tensors) < num_tensors:
        raise ValueError("two tensors have the same name")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: t._replace(offset=t.offset + start) for name, t in tensors.items()}
    check_places(tensors, start, alignment, len(data))
    return Header(path, metadata, tensors, start)


def check_version(path: Path, head: bytes) -> None:
    version, swapped = (int.from_bytes(head[4:], order) for order in ("little", "big"))
    if head[:4] != MAGIC:
        check_pointer(path)
        raise ConfigError(
            f"{path}: no GGUF file, as it does not begin with GGUF; name a .gguf file, or the "
            "folder that holds config.json"
        )
    if len(head) < 8:
        raise ValueError("it ends too early")
    if swapped in VERSIONS:
        raise ConfigError(f"{path}: a big-endian GGUF file; take a little-endian one")
    if version not in VERSIONS:
        raise ConfigError(
            f"{path}: version {version} of GGUF is not supported, {VERSIONS[0]} and {VERSIONS[1]} "
            "are; convert the model again"
        )


def read_metadata(cursor: Cursor, num_keys: int) -> dict[str, Value | Array]:
    metadata: dict[str, Value | Array] = {}
    for _ in range(num_keys):
        key = cursor.string(MAX_KEY)
        if key in metadata:
            raise ValueError(f"the key {key!r:.80} is there twice")
        metadata[key] = cursor.value()
    return metadata


def read_tensor(path: Path, cursor: Cursor) -> tuple[str, Tensor]:
    """A tensor's entry; its offset is counted from where tensors begin."""
    name = cursor.string(MAX_KEY)
    num_dimensions = int(cursor.number(U32))
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{name!r:.80} has {num_dimensions} dimensions")
    sizes = [int(cursor.number(U64)) for _ in range(num_dimensions)]
    number, offset = int(cursor.number(U32)), int(cursor.number(U64))
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise ValueError(f"{name!r:.80} has the shape {sizes[::-1]}")
    try:
        type = find_type(number)
    except ValueError as e:
        raise ConfigError(
            f"{path}: the tensor {name!r:.80} {e}; take another quantization of the model"
        ) from e
    if sizes[0] % type.width:
        raise ValueError(f"{name!r:.80}: rows of {sizes[0]} values are no {type.name} blocks")
    return name, Tensor(tuple(sizes[::-1]), type, path, offset)


def check_places(tensors: dict[str, Tensor], start: int, alignment: int, end: int) -> None:
    """ValueError unless every tensor lies in the file, and apart from the others."""
    free = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset % alignment:
            raise ValueError(f"{name!r:.80} is not aligned to {alignment} bytes")
        if tensor.offset < free:
            raise ValueError(f"{name!r:.80} overlaps another tensor")
        free = tensor.offset + tensor.size
        if free > end:
            raise ValueError(f"{name!r:.80} ends {free - end} bytes beyond the file")
