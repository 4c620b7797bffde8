"""An adapter as requests name it."""

import msgspec


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """Names are the HTTP process's own: what is known by one may change."""

    folder: str  # where it can be read, for as long as its content is this
    digest: str  # SHA-256 of what it does to the model, in hexadecimal
    rank: int
