"""HTTPS by the operator's certificate, which may be renewed while the server runs."""

import asyncio
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from specserve.config import ServerConfig
from specserve.errors import ConfigError

RENEWAL_SECONDS = 5.0  # between looks at the files

# NO_CERTIFICATE_ASSIGNED: key and certificate are of different algorithms.
MISMATCHES = "KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"

log = logging.getLogger("specserve")


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
        if error.reason in MISMATCHES:
            return (
                f"{self.key}: is no key of the certificate {self.certificate}: name the one that "
                "it was made with"
            )
        if not has_certificates(self.certificate):
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
            await asyncio.sleep(RENEWAL_SECONDS)
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


def has_certificates(file: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError:
        return False
    return True


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
