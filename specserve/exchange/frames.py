"""Bytes to frames and back: each one versioned, and bounded in length."""

from collections.abc import Iterator
from struct import Struct

VERSION = 1  # of the messages; both ends come from the same installation, or they stop at once
MAX_BYTES = 1 << 28
HEADER = Struct("<II")  # version, bytes that follow


def pack(payload: bytes) -> bytes:
    assert len(payload) <= MAX_BYTES, f"a frame of {len(payload)} bytes is too long to send"
    return HEADER.pack(VERSION, len(payload)) + payload


class Frames:
    """What has come through a socket so far, cut where its frames end."""

    def __init__(self) -> None:
        self.pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every frame that is whole with these bytes; RuntimeError for what is none."""
        self.pending += data
        while len(self.pending) >= HEADER.size:
            version, length = HEADER.unpack_from(self.pending)
            if version != VERSION:
                raise RuntimeError(f"a frame of version {version}, and this end speaks {VERSION}")
            if length > MAX_BYTES:
                raise RuntimeError(f"a frame of {length} bytes, and {MAX_BYTES} are allowed")
            end = HEADER.size + length
            if len(self.pending) < end:
                return
            frame = bytes(memoryview(self.pending)[HEADER.size : end])
            del self.pending[:end]
            yield frame
