"""Versioned frames of bounded length, and a child process's blocking end of a socket."""

import socket
from collections.abc import Iterator
from struct import Struct

import msgspec

VERSION = 1  # of the messages; ends of different versions stop at once
MAX_BYTES = 1 << 28
HEADER = Struct("<II")  # version, bytes that follow


def pack(payload: bytes) -> bytes:
    assert len(payload) <= MAX_BYTES, f"a frame of {len(payload)} bytes is too long to send"
    return HEADER.pack(VERSION, len(payload)) + payload


class Frames:
    """Splits the bytes of a socket into frames."""

    def __init__(self) -> None:
        self.pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that these bytes complete; RuntimeError for a wrong version or length."""
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


CHUNK = 1 << 20
encode = msgspec.msgpack.Encoder().encode


class Link:
    """A child process's end of a socket, blocking; EOFError once the parent has closed its end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.frames = sock, Frames()

    def receive(self, wait: bool) -> list[bytes]:
        """The frames that have arrived; waits for at least one if `wait`."""
        got: list[bytes] = []
        while True:
            try:
                data = self.sock.recv(CHUNK, 0 if wait and not got else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return got
            if not data:
                raise EOFError
            got += self.frames.feed(data)

    def send(self, message: msgspec.Struct) -> None:
        self.sock.sendall(pack(encode(message)))
