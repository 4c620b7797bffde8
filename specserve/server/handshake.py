"""TLS handshakes of new connections, and a line in the log for each that fails."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import NoReturn

from specserve.logs import Seldom

SECONDS = 1.0  # between two lines: anybody can make many handshakes fail
PAUSE = 0.1  # seconds, after a connection that could not be accepted

log = logging.getLogger("specserve.tls")
log.addFilter(Seldom(SECONDS))


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
                log.warning("a connection could not be accepted: %s", e)
                await asyncio.sleep(PAUSE)
                continue
            if len(self.handshakes) >= self.most:
                client.close()
                log.info("TLS handshake of %s refused: %d go on already", address[0], self.most)
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
            log.info("TLS handshake of %s port %s failed: %s", host, port, self.reason(e))

    def reason(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLError):
            if error.reason == "HTTP_REQUEST":
                return "plain HTTP, where this port has HTTPS: ask by https://"
            return (error.reason or str(error)).replace("_", " ").lower()
        if isinstance(error, ConnectionAbortedError):
            return f"it has not ended within {self.seconds:g} s"
        return "the client has closed the connection"
