"""Binding the server's port, before anything heavy is imported or loaded."""

import socket

from specserve.config import ServerConfig
from specserve.errors import ConfigError

BACKLOG = 2048  # connections that the kernel queues until they are accepted


def listen(limits: ServerConfig) -> socket.socket:
    """A listening socket; ConfigError if the port cannot be bound."""
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    try:
        return socket.create_server(
            (limits.host, limits.port), family=family, backlog=min(limits.max_connections, BACKLOG)
        )
    except OSError as e:
        raise ConfigError(
            f"cannot listen at {limits.host} port {limits.port} ({e.strerror or e}): take another "
            "--port or --host, or --port 0 for any that is free"
        ) from e
