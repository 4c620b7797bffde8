"""HTTPS: loads and renews the operator's certificate, and limits handshakes of connections."""

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
handshake_log.addFilter(Seldom(1.0))  # clients can cause many failed handshakes


class TLS:
    """A TLS context, from files that are read again after a change."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.certificate, self.key = certificate, key
        self.versions = self.read_versions()
        self.context = self.loaded()

    def read_versions(self) -> list[tuple[int, int, int]]:
        """Return attributes of the files that differ after a change."""
        with reading(self.certificate):
            first = self.certificate.stat()
        with reading(self.key):
            second = self.key.stat()
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in (first, second)]

    def loaded(self) -> ssl.SSLContext:
        """Return a context with the files. ConfigError if they are not a certificate and a key."""
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
        """Return a message about the invalid file."""
        # NO_CERTIFICATE_ASSIGNED: key and certificate have different algorithms.
        if error.reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
            return (
                f"{self.key} is not the key of the certificate {self.certificate}. Set the key "
                "that belongs to it"
            )
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.certificate)
        except ssl.SSLError:
            return f"{self.certificate} contains no certificate in PEM format. Check the file"
        return f"{self.key} contains no key in PEM format. Check the file"

    def refuse_password(self) -> NoReturn:
        raise ConfigError(
            f"{self.key}: the key is encrypted. Store it without a password (openssl pkey -in KEY "
            "-out PLAIN)"
        )

    async def renew(self) -> NoReturn:
        """Use changed files for new connections. Invalid files are logged once and not used."""
        while True:
            await asyncio.sleep(5.0)
            try:
                self.renew_once()
            except ConfigError as e:
                log.warning("the certificate is not renewed; the old one stays in use: %s", e)

    def renew_once(self) -> None:
        versions = []
        with suppress(ConfigError):  # a missing file is a change, too
            versions = self.read_versions()
        if versions == self.versions:
            return
        self.versions = versions
        self.loaded()  # check first: a wrong key would break the context in use
        self.load(self.context)
        log.info("the certificate is renewed from %s", self.certificate)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Convert an OSError of the block to a ConfigError that names the file."""
    try:
        yield
    except OSError as e:
        raise ConfigError(
            f"{file} cannot be read ({e.strerror}). Check the path and its permissions"
        ) from e


def tls_of(limits: ServerConfig) -> TLS | None:
    """Return the TLS context, or None without TLS. ConfigError for invalid files."""
    if limits.tls_certificate_file is None or limits.tls_key_file is None:
        return None
    return TLS(Path(limits.tls_certificate_file), Path(limits.tls_key_file))


class Handshakes:
    """Accepts connections and performs their TLS handshakes.

    asyncio's own server does not report failed handshakes.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        seconds: float,
        most: int,
        made: Callable[[], asyncio.Protocol],
    ) -> None:
        """Accept connections of `listener`.

        `made` creates the protocol of a connection. A handshake can take up to `seconds`, and at
        most `most` run at once. Afterwards, the protocol counts the connection.
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
        """Return at once; uvicorn requires this method."""

    async def accept(self) -> NoReturn:
        while True:
            try:
                client, address = await self.loop.sock_accept(self.listener)
            except OSError as e:  # e.g. too many open files
                handshake_log.warning("a connection could not be accepted: %s", e)
                await asyncio.sleep(0.1)
                continue
            if len(self.handshakes) >= self.most:
                client.close()
                handshake_log.info(
                    "TLS handshake of %s refused: %d are running", address[0], self.most
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
                return "plain HTTP at an HTTPS port. Use https://"
            return (error.reason or str(error)).replace("_", " ").lower()
        if isinstance(error, ConnectionAbortedError):
            return f"not complete within {self.seconds:g} s"
        return "the client closed the connection"
