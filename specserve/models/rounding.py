"""To how many bits a model's linear maps and embedding are rounded, and whether rows are, too."""

from typing import NamedTuple

from specserve.models.experts import is_router
from specserve_kernels.codes import MAX_ROUNDED
from specserve_kernels.quantize import GROUP

WIDTHS = {"w4": 4, "w8": 8, "w8a8": 8}
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"  # beside which all are the layers'


class Rounding(NamedTuple):
    """Bits of a weight in the layers, head and embedding; None: as the checkpoint has it."""

    layers: int | None = None
    head: int | None = None
    with_rows: bool = False  # rows that the layers' maps are multiplied by get 8 bits, too
    embedding: int | None = None

    @classmethod
    def named(cls, layers: str | None, head: str, embedding: str = "none") -> "Rounding":
        """As the config says it; nothing is rounded in a model whose layers are not."""
        if layers is None:
            return cls()
        is_w8a8, of_embedding = layers == "w8a8", WIDTHS.get(embedding)
        return cls(WIDTHS[layers], WIDTHS.get(head), is_w8a8, of_embedding)

    @property
    def words(self) -> str:
        """Of weights that are rounded."""
        rows = f" with activations in {self.layers}" * self.with_rows
        head = f"in {self.head} bits" if self.head else "unrounded"
        return f"maps in {self.layers} bits{rows}, head {head}"

    def bits(self, module: str, width: int) -> int | None:
        """Of a weight with rows of this width: 4 bits need whole groups."""
        return 8 if self.is_odd(module, width) else self.asked(module)

    def rounds_rows(self, module: str, width: int) -> bool:
        is_of_layers = module not in (HEAD, EMBEDDING) and not is_router(module)
        return self.with_rows and is_of_layers and width <= MAX_ROUNDED

    def is_odd(self, module: str, width: int) -> bool:
        return self.asked(module) == 4 and width % GROUP != 0

    def asked(self, module: str) -> int | None:
        if is_router(module):
            return None
        return {HEAD: self.head, EMBEDDING: self.embedding}.get(module, self.layers)


AS_STORED = Rounding()
