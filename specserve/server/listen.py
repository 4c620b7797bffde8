"""Binds the server's port, before heavy imports and loading."""

import socket
from ipaddress import ip_address

from specserve.config import ServerConfig
from specserve.errors import ConfigError

BACKLOG = 2048  # connections that the kernel queues until they are accepted


def listen(limits: ServerConfig) -> socket.socket:
    """Return a listening socket.

    ConfigError if the port cannot be bound, or if other machines could use a server without API
    keys.
    """
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    try:
        check_reach(limits)
        return socket.create_server(
            (limits.host, limits.port), family=family, backlog=min(limits.max_connections, BACKLOG)
        )
    except OSError as e:
        raise ConfigError(
            f"cannot listen at {limits.host} port {limits.port} ({e.strerror or e}). Choose "
            "another --port or --host, or --port 0 for any free port"
        ) from e


def check_reach(limits: ServerConfig) -> None:
    """ConfigError if other machines can reach the host, without API keys or `allow_no_keys`."""
    if limits.api_key_file is None and not limits.allow_no_keys and not is_loopback(limits.host):
        raise ConfigError(
            f"server.host = {limits.host!r} lets other machines use the server without an API key. "
            "Set a key file (--api-key-file FILE), or allow this (--allow-no-keys)"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the addresses of a host. OSError if it has none."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ip_address(address[0]).is_loopback for *_, address in addresses)
