"""To how many bits the weights of a model's linear maps are rounded, and whether rows are, too."""

from typing import NamedTuple

from specserve_kernels.codes import MAX_ROUNDED
from specserve_kernels.quantize import GROUP

WIDTHS = {"w4": 4, "w8": 8, "w8a8": 8}


class Rounding(NamedTuple):
    """Bits of a weight in the layers and in the head; None: as the checkpoint has it."""

    layers: int | None = None
    head: int | None = None
    with_rows: bool = False  # rows that the layers' maps are multiplied by get 8 bits, too

    @classmethod
    def named(cls, layers: str | None, head: str) -> "Rounding":
        """As the config says it; the head is rounded only in a model whose layers are."""
        if layers is None:
            return cls()
        return cls(WIDTHS[layers], WIDTHS.get(head), layers == "w8a8")

    def bits(self, module: str, width: int) -> int | None:
        """Of a linear map with rows of this width: 4 bits need whole groups."""
        return 8 if self.is_odd(module, width) else self.asked(module)

    def rounds_rows(self, module: str, width: int) -> bool:
        return self.with_rows and module != "lm_head" and width <= MAX_ROUNDED

    def is_odd(self, module: str, width: int) -> bool:
        return self.asked(module) == 4 and width % GROUP != 0

    def asked(self, module: str) -> int | None:
        return self.head if module == "lm_head" else self.layers


AS_STORED = Rounding()
