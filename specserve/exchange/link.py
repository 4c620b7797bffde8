"""A child process's end of the socket pair that ties it to its parent."""

import socket

import msgspec

from specserve.exchange.frames import Frames, pack

CHUNK = 1 << 20
encode = msgspec.msgpack.Encoder().encode


class Link:
    """Blocking, as a child process has nothing else to do; EOFError when the parent has gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.frames = sock, Frames()

    def receive(self, wait: bool) -> list[bytes]:
        """The frames that have come; at least one where `wait` says so."""
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
