"""HTTPS: the operator's certificate, which may be renewed, and the handshakes of connections."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from specserve.config import ServerConfig
from specserve.errors import ConfigError
from specserve.logs import Seldom

log, handshake_log = logging.getLogger("specserve"), logging.getLogger("specserve.tls")
handshake_log.addFilter(Seldom(1.0))  # anybody can make many handshakes fail


class TLS:
    """A context for connections, from files that are read again when they change."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate, self.key = certificate, key
        self.versions = self.read_versions()
        self.context = self.loaded()

    def read_versions(self) -> list[tuple[int, int, int]]:
        """What is different of each file after a change of it."""
        with reading(self.certificate):
            first = self.certificate.stat()
        with reading(self.key):
            second = self.key.stat()
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in (first, second)]

    def loaded(self) -> ssl.SSLContext:
        """A context with the files; ConfigError if they are no certificate and its key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load(context)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        for file in (self.certificate, self.key):
            with reading(file):
                file.read_bytes()
        try:
            context.load_cert_chain(self.certificate, self.key, self.refuse_password)
        except ssl.SSLError as e:
            raise ConfigError(self.complaint(e)) from e

    def complaint(self, error: ssl.SSLError) -> str:
        """Which file is wrong, and how."""
        # NO_CERTIFICATE_ASSIGNED: key and certificate are of different algorithms.
        if error.reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
            return (
                f"{self.key}: is no key of the certificate {self.certificate}: name the one that "
                "it was made with"
            )
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.certificate)
        except ssl.SSLError:
            return f"{self.certificate}: holds no certificate in PEM: check what the file holds"
        return f"{self.key}: holds no key in PEM: check what the file holds"

    def refuse_password(self) -> NoReturn:
        raise ConfigError(
            f"{self.key}: the key is encrypted, and nobody is there to type its password: store it "
            "without (openssl pkey -in KEY -out PLAIN)"
        )

    async def renew(self) -> NoReturn:
        """Take up changed files for connections to come; what is wrong with them is logged once,
        and connections have the certificate before.
        """
        while True:
            await asyncio.sleep(5.0)
            try:
                self.renew_once()
            except ConfigError as e:
                log.warning("the certificate is not renewed, the one before is kept: %s", e)

    def renew_once(self) -> None:
        versions = []
        with suppress(ConfigError):  # a file that is gone is a change, too
            versions = self.read_versions()
        if versions == self.versions:
            return
        self.versions = versions
        self.loaded()  # first apart: a context is broken by a key that is not the certificate's
        self.load(self.context)
        log.info("the certificate is renewed from %s", self.certificate)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that names the file."""
    try:
        yield
    except OSError as e:
        raise ConfigError(
            f"{file}: cannot be read ({e.strerror}): check the path, and who may read it"
        ) from e


def tls_of(limits: ServerConfig) -> TLS | None:
    """None where HTTP is served without TLS; ConfigError for files that cannot be used."""
    if limits.tls_certificate_file is None or limits.tls_key_file is None:
        return None
    return TLS(Path(limits.tls_certificate_file), Path(limits.tls_key_file))


class Handshakes:
    """Accepts connections, and makes their TLS handshakes.

    asyncio's own server tells nobody of a handshake that fails.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        seconds: float,
        most: int,
        made: Callable[[], asyncio.Protocol],
    ) -> None:
        """`made` makes the protocol of a connection. A handshake may take so many `seconds`, and
        `most` of them go on at a time: a connection is counted by its protocol after that.
        """
        listener.setblocking(False)
        self.listener, self.context, self.seconds, self.made = listener, context, seconds, made
        self.most = most
        self.loop = asyncio.get_running_loop()
        self.handshakes = set[asyncio.Task[None]]()
        self.accepting = asyncio.create_task(self.accept())

    def close(self) -> None:
        """Accept no further connections."""
        self.accepting.cancel()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for; uvicorn asks."""

    async def accept(self) -> NoReturn:
        while True:
            try:
                client, address = await self.loop.sock_accept(self.listener)
            except OSError as e:  # as of too many open files
                handshake_log.warning("a connection could not be accepted: %s", e)
                await asyncio.sleep(0.1)
                continue
            if len(self.handshakes) >= self.most:
                client.close()
                handshake_log.info(
                    "TLS handshake of %s refused: %d go on already", address[0], self.most
                )
                continue
            handshake = asyncio.create_task(self.make(client, address))
            self.handshakes.add(handshake)
            handshake.add_done_callback(self.handshakes.discard)

    async def make(self, client: socket.socket, address: tuple[object, ...]) -> None:
        try:
            await self.loop.connect_accepted_socket(
                self.made, client, ssl=self.context, ssl_handshake_timeout=self.seconds
            )
        except OSError as e:
            host, port = address[:2]
            handshake_log.info("TLS handshake of %s port %s failed: %s", host, port, self.reason(e))

    def reason(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLError):
            if error.reason == "HTTP_REQUEST":
                return "plain HTTP, where this port has HTTPS: ask by https://"
            return (error.reason or str(error)).replace("_", " ").lower()
        if isinstance(error, ConnectionAbortedError):
            return f"it has not ended within {self.seconds:g} s"
        return "the client has closed the connection"
