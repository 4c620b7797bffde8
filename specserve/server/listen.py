"""Binding the server's port, before anything heavy is imported or loaded."""

import socket
from ipaddress import ip_address

from specserve.config import ServerConfig
from specserve.errors import ConfigError

BACKLOG = 2048  # connections that the kernel queues until they are accepted


def listen(limits: ServerConfig) -> socket.socket:
    """A listening socket; ConfigError if the port cannot be bound, or if other machines could reach
    a server that needs no API keys.
    """
    family = socket.AF_INET6 if ":" in limits.host else socket.AF_INET
    try:
        check_reach(limits)
        return socket.create_server(
            (limits.host, limits.port), family=family, backlog=min(limits.max_connections, BACKLOG)
        )
    except OSError as e:
        raise ConfigError(
            f"cannot listen at {limits.host} port {limits.port} ({e.strerror or e}): take another "
            "--port or --host, or --port 0 for any that is free"
        ) from e


def check_reach(limits: ServerConfig) -> None:
    """ConfigError where other machines can reach the host, and neither are there keys nor is the
    server allowed to do without.
    """
    if limits.api_key_file is None and not limits.allow_no_keys and not is_loopback(limits.host):
        raise ConfigError(
            f"server.host = {limits.host!r} can be reached by other machines, and no API key is "
            "needed: name a file with keys (--api-key-file FILE), or allow everybody who reaches "
            "it to use it (--allow-no-keys)"
        )


def is_loopback(host: str) -> bool:
    """Whether all addresses of a host are those of this machine alone; OSError if it has none."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ip_address(address[0]).is_loopback for *_, address in addresses)
