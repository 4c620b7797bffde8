"""In which forms a model's weights are in memory, as data and in words."""

import msgspec


class MapForm(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """The form of some linear maps. Maps that are multiplied as one count as one."""

    bits: int  # of a number
    group: int | None  # columns that share a scale; None: all of a row, or there is no scale
    number: int  # of maps
    rounds_rows: bool = False  # to 8 bits, before they are multiplied

    @property
    def words(self) -> str:
        kind = f" in groups of {self.group}" if self.group else " in rows" * (self.bits <= 8)
        rows = ", activations in 8 bits" * self.rounds_rows
        return f"{self.bits} bits{kind}{rows} ({self.number} map{'s' * (self.number != 1)})"


class WeightForms(msgspec.Struct, frozen=True, omit_defaults=True):
    maps: tuple[MapForm, ...] = ()  # in ascending order
    num_bytes: int = 0  # of all weights, scales included
    num_odd: int = 0  # of the maps: asked for 4 bits, they have 8, as no group divides their width
    embedding_bits: int | None = None  # of a number of the embedding; None: it is not codes

    @property
    def words(self) -> str:
        forms = ", ".join(form.words for form in self.maps)
        odd = f"; {self.num_odd} of these for lack of whole groups" if self.num_odd else ""
        table = f"; embedding in {self.embedding_bits} bits" if self.embedding_bits else ""
        return f"{self.num_bytes / 2**20:.0f} MiB: {forms}{odd}{table}"
