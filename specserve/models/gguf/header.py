"""A GGUF file's header: what it says of the model, and where each tensor lies.

A row of a quantized tensor is blocks of a few values that share their scales.
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
    width: int  # values in a block
    size: int  # its bytes

    @property
    def is_plain(self) -> bool:
        return self.width == 1


TYPES = {  # by number
    0: Type("F32", 1, 4),
    1: Type("F16", 1, 2),
    2: Type("Q4_0", 32, 18),
    3: Type("Q4_1", 32, 20),
    6: Type("Q5_0", 32, 22),
    7: Type("Q5_1", 32, 24),
    8: Type("Q8_0", 32, 34),
    12: Type("Q4_K", 256, 144),
    13: Type("Q5_K", 256, 176),
    14: Type("Q6_K", 256, 210),
    30: Type("BF16", 1, 2),
}
OTHERS = {  # names of types that are not supported, for messages
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
QUANTIZED = tuple(type.name for type in TYPES.values() if not type.is_plain)


LITTLE_ENDIAN = {  # by the number of a type of value
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
MAX_ARRAY = 1 << 24  # elements: a hundred times what a vocabulary has

Value = int | float | bool | str


class Cursor:
    """A place in a file, which every read moves forward; ValueError for what cannot be there."""

    def __init__(self, data: mmap.mmap, position: int = 0) -> None:
        self.data, self.position = data, position

    def skip(self, size: int) -> int:
        """Where the skipped bytes begin."""
        start = self.position
        if size > len(self.data) - start:
            raise ValueError("it ends too early")
        self.position = start + size
        return start

    def number(self, kind: int) -> int | float | bool:
        form = LITTLE_ENDIAN[kind]
        value: int | float | bool = form.unpack_from(self.data, self.skip(form.size))[0]
        return value

    def count(self, most: int, what: str) -> int:
        """A number of things to come."""
        value = int(self.number(U64))
        if value > most:
            raise ValueError(f"{value} {what}, and at most {most} may be")
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
    """An array of a file, decoded when it is asked for."""

    def __init__(self, data: mmap.mmap, kind: int, count: int, start: int) -> None:
        self.data, self.kind, self.count, self.start = data, kind, count, start

    def __repr__(self) -> str:
        return f"an array of {self.count}"

    def strings(self) -> list[str]:
        if self.kind != STRING:
            raise ValueError("it is no array of strings")
        cursor = Cursor(self.data, self.start)
        return [cursor.string() for _ in range(self.count)]

    def numbers(self) -> list[int | float | bool]:
        if self.kind == STRING:
            raise ValueError("it is no array of numbers")
        form = f"<{self.count}{LITTLE_ENDIAN[self.kind].format[-1]}"
        return list(struct.unpack_from(form, self.data, self.start))


def shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-06, where float64 would show 9.999999974752427e-07."""
    pack = LITTLE_ENDIAN[FLOAT32].pack
    decimals = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((d for d in decimals if pack(d) == pack(value)), value)


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
    metadata: dict[str, Value | Array] = {}
    for _ in range(cursor.count(MAX_KEYS, "keys")):
        key = cursor.string(MAX_KEY)
        if key in metadata:
            raise ValueError(f"the key {key!r:.80} is there twice")
        metadata[key] = cursor.value()
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
    if number not in TYPES:
        supported = ", ".join(type.name for type in TYPES.values())
        raise ConfigError(
            f"{path}: the tensor {name!r:.80} has the type {OTHERS.get(number, f'number {number}')}"
            f", which is not supported: {supported} are; take another quantization of the model"
        )
    type = TYPES[number]
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
