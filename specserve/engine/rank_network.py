"""Connections between ranks of several machines: TCP, with a shared secret.

Both ends of a connection prove that they have the secret, and never send it. Later data is neither
encrypted nor authenticated, so the network between the machines must be private.
"""

import hashlib
import hmac
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from specserve.errors import ConfigError

NONCE = 32  # bytes
HELLO = Struct("<IH")  # fields of Hello
SECONDS = 5.0  # most seconds of a handshake
LEAST_SECRET = 16  # bytes
FROM_RANK, FROM_LISTENER = b"specserve rank", b"specserve listener"


class Hello(NamedTuple):
    """What a rank sends first on a connection."""

    rank: int
    port: int  # where it waits for higher ranks; 0 on connections for tensors


class HandshakeRefused(Exception):
    """The other end has another secret, or is no rank."""


def read_secret(file: str | None) -> bytes:
    """Return the secret in a file. ConfigError if it is missing, short or readable by others."""
    if file is None:
        raise ConfigError(
            "parallel.address needs parallel.secret_file, a file that all machines have. Create "
            "one with: umask 077; head -c 32 /dev/urandom | base64 > FILE"
        )
    try:
        mode, secret = Path(file).stat().st_mode, Path(file).read_bytes().strip()
    except OSError as e:
        raise ConfigError(f"parallel.secret_file: {file} cannot be read ({e.strerror})") from e
    if mode & 0o077:
        raise ConfigError(f"parallel.secret_file: other users may read {file}. Run chmod 600 on it")
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"parallel.secret_file: {file} has fewer than {LEAST_SECRET} bytes. Use a longer secret"
        )
    return secret


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"parallel.address = {text!r} is not HOST:PORT. Write e.g. 10.0.0.1:29500"
        )
    return host.strip("[]"), int(port)


def proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), hashlib.sha256)


def connect(address: tuple[str, int], secret: bytes, hello: Hello) -> socket.socket:
    """Return a connection with a listener. OSError if nothing listens there; HandshakeRefused if
    it does not have the secret.
    """
    sock = socket.create_connection(address, SECONDS)
    try:
        theirs, mine, said = receive(sock, NONCE), secrets.token_bytes(NONCE), HELLO.pack(*hello)
        sock.sendall(mine + said + proof(secret, FROM_RANK, theirs, mine, said))
        expected = proof(secret, FROM_LISTENER, mine, theirs)
        if not hmac.compare_digest(receive(sock, len(expected)), expected):
            raise HandshakeRefused("the other end has another secret")
    except BaseException:
        sock.close()
        raise
    return ready(sock)


class RankListener:
    """Waits for ranks on one interface."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        """ConfigError if the address is not one of this machine, or is in use."""
        self.secret = secret
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self.sock = socket.create_server(address, family=family, backlog=64)
        except OSError as e:
            raise ConfigError(
                f"parallel.address = {address[0]}:{address[1]} cannot be used ({e.strerror}). Name "
                "an address of this machine and a free port"
            ) from e

    @property
    def port(self) -> int:
        port: int = self.sock.getsockname()[1]
        return port

    def accept(self) -> tuple[socket.socket, Hello]:
        """Return the next connection of a rank. Others are closed."""
        while True:
            sock, _ = self.sock.accept()
            sock.settimeout(SECONDS)
            with suppress(OSError, EOFError, HandshakeRefused):
                return ready(sock), self.greeted(sock)
            sock.close()

    def greeted(self, sock: socket.socket) -> Hello:
        mine = secrets.token_bytes(NONCE)
        sock.settimeout(SECONDS)
        sock.sendall(mine)
        theirs, said = receive(sock, NONCE), receive(sock, HELLO.size)
        expected = proof(self.secret, FROM_RANK, mine, theirs, said)
        if not hmac.compare_digest(receive(sock, len(expected)), expected):
            raise HandshakeRefused("a rank has another secret")
        sock.sendall(proof(self.secret, FROM_LISTENER, theirs, mine))
        sock.settimeout(None)
        return Hello(*HELLO.unpack(said))

    def close(self) -> None:
        self.sock.close()


def ready(sock: socket.socket) -> socket.socket:
    """Let a connection wait for as long as it takes, and send small messages at once."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def receive(sock: socket.socket, number: int) -> bytes:
    """Receive a number of bytes; EOFError if the connection ends before."""
    data = b""
    while len(data) < number:
        part = sock.recv(number - len(data))
        if not part:
            raise EOFError
        data += part
    return data
