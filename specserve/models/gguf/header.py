"""Parses a GGUF file's header: metadata of the model, and place and type of each tensor.

A row of a quantized tensor consists of blocks of values that share their scales.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve.models.folder import MAGIC, check_pointer
from specserve.models.weight_files import check_is_at_home


class Type(NamedTuple):
    name: str
    width: int  # values per block
    size: int  # bytes per block

    @property
    def is_plain(self) -> bool:
        return self.width == 1


TYPES = {  # supported types, by number
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    10: Type("Q2_K", 256, 84),
    11: Type("Q3_K", 256, 110),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    15: Type("Q8_K", 256, 292),
    16: Type("IQ2_XXS", 256, 66),
    17: Type("IQ2_XS", 256, 74),
    18: Type("IQ3_XXS", 256, 98),
    19: Type("IQ1_S", 256, 50),
    20: Type("IQ4_NL", 32, 18),
    21: Type("IQ3_S", 256, 110),
    22: Type("IQ2_S", 256, 82),
    23: Type("IQ4_XS", 256, 136),
    29: Type("IQ1_M", 256, 56),
    30: Type("BF16", 1, 2),
    34: Type("TQ1_0", 256, 54),
    35: Type("TQ2_0", 256, 66),
    39: Type("MXFP4", 32, 17),
}
OTHERS = {  # names of unsupported types, for error messages
    9: "Q8_1",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
    41: "Q1_0",
}
BY_NAME = {type.name: type for type in TYPES.values()}
QUANTIZED = tuple(type.name for type in TYPES.values() if not type.is_plain)


LITTLE_ENDIAN = {  # by number of the metadata value's type
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
STRING, ARRAY = 8, 9
U32, FLOAT32, U64 = 4, 6, 10
MAX_KEY = 1 << 16  # bytes
MAX_ARRAY = 1 << 24  # elements, a hundred times the size of a vocabulary

Value = int | float | bool | str


class Cursor:
    """A position in a file, which every read advances. Raises ValueError for invalid data."""

    def __init__(self, data: mmap.mmap, position: int = 0) -> None:
        self.data, self.position = data, position

    def skip(self, size: int) -> int:
        """Skip bytes; return the position where they begin."""
        start = self.position
        if size > len(self.data) - start:
            raise ValueError("the file ends too early")
        self.position = start + size
        return start

    def number(self, kind: int) -> int | float | bool:
        form = LITTLE_ENDIAN[kind]
        value: int | float | bool = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def count(self, most: int, what: str) -> int:
        """Read a count; `what` names the counted things."""
        value = int(self.number(U64))
        if value > most:
            raise ValueError(f"{value} {what} exceed the maximum {most}")
        return value

    def string(self, most: int | None = None) -> str:
        size = self.count(len(self.data) if most is None else most, "bytes of text")
        start = self.skip(size)
        return self.data[start : start + size].decode("utf-8")

    def value(self) -> "Value | Array":
        kind = int(self.number(U32))
        if kind == STRING:
            return self.string()
        return self.array() if kind == ARRAY else self.scalar(kind)

    def scalar(self, kind: int) -> Value:
        if kind not in LITTLE_ENDIAN:
            raise ValueError(f"a value has the unknown type {kind}")
        value = self.number(kind)
        return shortest(value) if kind == FLOAT32 else value

    def array(self) -> "Array":
        kind = int(self.number(U32))
        if kind != STRING and kind not in LITTLE_ENDIAN:
            raise ValueError(f"an array has elements of the unsupported type {kind}")
        array = Array(self.data, kind, self.count(MAX_ARRAY, "elements of an array"), self.position)
        if kind == STRING:
            for _ in range(array.count):
                self.skip(int(self.number(U64)))
        else:
            self.skip(array.count * LITTLE_ENDIAN[kind].size)
        return array


class Array:
    """An array in a file, decoded on access."""

    def __init__(self, data: mmap.mmap, kind: int, count: int, start: int) -> None:
        self.data, self.kind, self.count, self.start = data, kind, count, start

    def __repr__(self) -> str:
        return f"an array of {self.count}"

    @property
    def is_numeric(self) -> bool:
        return self.kind != STRING

    def strings(self) -> list[str]:
        if self.kind != STRING:
            raise ValueError("an array of strings is expected")
        cursor = Cursor(self.data, self.start)
        return [cursor.string() for _ in range(self.count)]

    def numbers(self) -> list[int | float | bool]:
        if self.kind == STRING:
            raise ValueError("an array of numbers is expected")
        form = f"<{self.count}{LITTLE_ENDIAN[self.kind].format[-1]}"
        return list(struct.unpack_from(form, self.data, self.start))


def shortest(value: float) -> float:
    """The shortest decimal that rounds to a float32, e.g. 1e-06 for 9.999999974752427e-07."""
    pack = LITTLE_ENDIAN[FLOAT32].pack
    decimals = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((d for d in decimals if pack(d) == pack(value)), value)


VERSIONS = 2, 3
MAX_KEYS, MAX_TENSORS, MAX_DIMENSIONS, MAX_SIZE = 1 << 16, 1 << 18, 4, 1 << 40
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Tensor(NamedTuple):
    """A tensor's entry in the header. `shape` has torch's order; the file has the reverse order."""

    shape: tuple[int, ...]
    type: Type
    file: Path
    offset: int  # of the first byte in the file

    @property
    def size(self) -> int:
        return prod(self.shape) // self.type.width * self.type.size


class Header(NamedTuple):
    path: Path
    metadata: dict[str, Value | Array]
    tensors: dict[str, Tensor]  # by llama.cpp's names
    data_offset: int  # of the first tensor in the file


def read_header(path: Path) -> Header:
    """The header of a model's file, or of all parts of a split model. Raises ConfigError if it is
    damaged.
    """
    first = read_file(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise damaged(path, "split.count is not a number")
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
        raise damaged(path, f"its parts have {len(tensors)} tensors, not {total}")
    return first._replace(tensors=tensors)


def other_parts(path: Path, count: int) -> Iterator[Path]:
    """Yield the parts after the first part `path`."""
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise refused(
            f"{path} is one of {count} parts, but its name does not show this. Rename the parts to "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    if int(named["number"]) != 1:
        raise refused(
            f"{path} is not the first part. Name {named['stem']}-00001-of-{count:05}.gguf"
        )
    home = path.parent.resolve()
    for number in range(2, int(named["count"]) + 1):
        part = path.with_name(f"{named['stem']}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise refused(f"{part} is missing, but {path.name} needs it. Download the model again")
        check_is_at_home(home, part)
        yield part


def read_file(path: Path) -> Header:
    try:
        stat = path.stat()
        return read_version(path, stat.st_size, stat.st_mtime_ns)
    except OSError as e:
        raise refused(f"{path}: cannot be read ({e.strerror}). Check its permissions") from e


@lru_cache(maxsize=8)
def read_version(path: Path, size: int, changed_at: int) -> Header:
    """The header of a file, cached until size or change time of the file change."""
    if size == 0:
        raise damaged(path, "the file is empty")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return parse(path, data)
    except ValueError as e:  # includes text that is not UTF-8
        raise damaged(path, str(e)) from e


def damaged(path: Path, reason: str) -> ConfigError:
    return refused(f"{path} is not a valid GGUF file ({reason}). Download it again")


def refused(message: str) -> ConfigError:
    """An error for a file that is not used."""
    drop_headers()
    return ConfigError(message)


def drop_headers() -> None:
    """Drop cached headers, because they map their files."""
    read_version.cache_clear()


def parse(path: Path, data: mmap.mmap) -> Header:
    check_version(path, data[:8])
    cursor = Cursor(data, 8)
    num_tensors = cursor.count(MAX_TENSORS, "tensors")
    metadata: dict[str, Value | Array] = {}
    for _ in range(cursor.count(MAX_KEYS, "keys")):
        key = cursor.string(MAX_KEY)
        if key in metadata:
            raise ValueError(f"the key {key!r:.80} occurs twice")
        metadata[key] = cursor.value()
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment = {alignment!r} must be a power of two, at least 8")
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
        raise refused(
            f"{path} does not begin with GGUF. Name a GGUF file, or the folder with config.json"
        )
    if len(head) < 8:
        raise ValueError("the file ends too early")
    if swapped in VERSIONS:
        raise refused(f"{path} is a big-endian GGUF file. Use a little-endian file")
    if version not in VERSIONS:
        raise refused(
            f"{path}: version {version} of GGUF is not supported, only {VERSIONS[0]} and "
            f"{VERSIONS[1]}. Convert the model again"
        )


def read_tensor(path: Path, cursor: Cursor) -> tuple[str, Tensor]:
    """Read a tensor's name and entry; the offset is relative to the first tensor."""
    name = cursor.string(MAX_KEY)
    num_dimensions = int(cursor.number(U32))
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{name!r:.80} has {num_dimensions} dimensions")
    sizes = [int(cursor.number(U64)) for _ in range(num_dimensions)]
    number, offset = int(cursor.number(U32)), int(cursor.number(U64))
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise ValueError(f"{name!r:.80} has the shape {sizes[::-1]}")
    if number not in TYPES:
        supported = ", ".join(type.name for type in TYPES.values())
        raise refused(
            f"{path}: the tensor {name!r:.80} has the type {OTHERS.get(number, f'number {number}')}"
            f". Use another quantization of the model: {supported} are supported"
        )
    type = TYPES[number]
    if sizes[0] % type.width:
        raise ValueError(f"{name!r:.80}: rows of {sizes[0]} values do not fit {type.name} blocks")
    return name, Tensor(tuple(sizes[::-1]), type, path, offset)


def check_places(tensors: dict[str, Tensor], start: int, alignment: int, end: int) -> None:
    """Raise ValueError if a tensor is outside of the file, or overlaps another tensor."""
    free = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset % alignment:
            raise ValueError(f"{name!r:.80} is not aligned to {alignment} bytes")
        if tensor.offset < free:
            raise ValueError(f"{name!r:.80} overlaps another tensor")
        free = tensor.offset + tensor.size
        if free > end:
            raise ValueError(f"{name!r:.80} ends {free - end} bytes beyond the file")
