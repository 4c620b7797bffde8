"""The forms of a model's weights in memory: their quantization and size."""

import msgspec


class MapForm(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The form of some linear maps. Fused maps count as one."""

    bits: int  # per weight
    group: int | None  # columns that share a scale; None: a whole row, or there is no scale
    number: int  # of maps
    activation_bits: int | None = None  # quantization of activations; None: not quantized
    has_offsets: bool = False  # in addition to scales
    is_head: bool = False

    @property
    def words(self) -> str:
        kind = f" in groups of {self.group}" if self.group else " in rows" * (self.bits <= 8)
        offsets = " with offsets" * self.has_offsets
        rounded = f", activations in {self.activation_bits} bits" if self.activation_bits else ""
        layers = f"{self.number} linear layer{'s' * (self.number != 1)}"
        maps = "LM head" if self.is_head else layers
        return f"{self.bits} bits{kind}{offsets}{rounded} ({maps})"


class WeightForms(msgspec.Struct, frozen=True, omit_defaults=True):
    maps: tuple[MapForm, ...] = ()  # in ascending order, the head last
    num_bytes: int = 0  # of all weights, scales included
    num_odd: int = 0  # maps in 8 bits instead of 4: the group size does not divide their width
    embedding_bits: int | None = None  # per value of the embedding; None: not quantized

    @property
    def words(self) -> str:
        forms = "; ".join(form.words for form in self.maps)
        odd = (
            f"; 8 bits instead of 4 in {self.num_odd} of these layers, "
            "because 64 does not divide their width"
        )
        table = f"; embedding in {self.embedding_bits} bits" if self.embedding_bits else ""
        return f"{self.num_bytes / 2**20:.0f} MiB: {forms}{odd if self.num_odd else ''}{table}"

    @property
    def num_rounding(self) -> int:
        """The number of maps with quantized activations."""
        return sum(form.number for form in self.maps if form.activation_bits)

    @property
    def activation_words(self) -> str:
        if not self.num_rounding:
            return "all activations stay in the model's dtype"
        number = sum(form.number for form in self.maps)
        others = ", others in the model's dtype" * (self.num_rounding < number)
        has_groups = any(form.group for form in self.maps if form.activation_bits)
        how = f"8-bit integer activations (dynamic, per token{' and group' * has_groups})"
        return f"{self.num_rounding} of {number} linear layers have {how}{others}"
