"""Reading numbers and strings from a mapped GGUF file, never beyond its end."""

import mmap
import struct

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
