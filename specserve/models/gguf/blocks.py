"""The types of tensors in a GGUF file: a row is blocks of a few values that share their scales."""

from typing import NamedTuple


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


def find_type(number: int) -> Type:
    """ValueError for a type that is not supported."""
    if number not in TYPES:
        name = OTHERS.get(number, f"number {number}")
        supported = ", ".join(type.name for type in TYPES.values())
        raise ValueError(f"has the type {name}, which is not supported: {supported} are")
    return TYPES[number]
