"""`specserve rank`: runs a rank for the engine of another machine."""

import logging
from collections.abc import Callable
from time import sleep

from specserve.engine.rank_network import HandshakeRefused
from specserve.engine.rank_process import join
from specserve.errors import ConfigError
from specserve_kernels import RankLost

log = logging.getLogger("specserve")

AGAIN = 1.0  # seconds between two attempts to connect


def run_rank(
    address: tuple[str, int],
    secret: bytes,
    rank: int,
    model: str | None,
    pause: Callable[[float], None] = sleep,
) -> None:
    """Join the engine at an address, again and again: a new engine process may have replaced it.
    ConfigError if this rank cannot run the model, or has another secret.
    """
    is_waiting = False
    while True:
        try:
            join(address, secret, rank, model)
        except HandshakeRefused as e:
            raise ConfigError(f"rank 0 at {address[0]}:{address[1]} refuses this rank: {e}") from e
        except (EOFError, ConnectionResetError, BrokenPipeError, RankLost) as e:
            log.warning("The engine has ended (%s). Joining its successor", e or "closed")
            is_waiting = False
        except OSError as e:
            if not is_waiting:
                log.info("Waiting for rank 0 at %s:%d (%s)", *address, e.strerror or e)
            is_waiting = True
        pause(AGAIN)
