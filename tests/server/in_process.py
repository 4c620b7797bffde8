"""The engine process and the server as threads of the process that tests them."""

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import uvloop

from specserve.config import load_config
from specserve.engine import process
from specserve.errors import EngineDied
from specserve.exchange.messages import EngineStart
from specserve.exchange.spawn import Spawned
from specserve.models import preflight
from specserve.server import serve
from specserve.server.listen import listen
from tests.server.server_process import SETTINGS, ServerProcess, eventually


def config_of(folder, file=None, **settings):
    """None is the demo."""
    model = {} if folder is None else {"model.path": str(folder)}
    return load_config(file, SETTINGS | model | settings)


@contextlib.contextmanager
def engine_thread(config):
    """An engine that loads and steps in a thread until the block ends: a `Spawned`."""
    ours, theirs = socket.socketpair()

    def run():
        with contextlib.suppress(EOFError, ConnectionError):
            process.run(process.Link(theirs), EngineStart(config))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Spawned(SimpleNamespace(wait=lambda seconds=0: 0, kill=noop, end=noop), ours)
    finally:
        with contextlib.suppress(OSError):  # it is closed
            theirs.shutdown(socket.SHUT_RDWR)
        thread.join()
        theirs.close()


@contextlib.contextmanager
def server_threads(folder, file=None, **settings):
    """Both halves of a server, ready; what tests ask of a `ServerProcess` can be asked of it.

    `file` is that of --config. It starts in a fifth of the time that a process takes.
    """
    config = config_of(folder, file, **{"server.port": 0} | settings)
    server = ServerProcess.__new__(ServerProcess)
    with listen(config.server) as listener:
        server.port = listener.getsockname()[1]
        server.url = f"http://127.0.0.1:{server.port}"
        with engine_thread(config) as spawned:
            thread = threading.Thread(target=speak, args=(config, spawned, listener))
            thread.start()
            key = key_of(config)
            eventually(lambda: server.get("/health", headers=key).status == 200, seconds=30)
            yield server
        thread.join()  # it ends with the engine


def key_of(config):
    """The header with the first key of the file, if there are keys."""
    file = config.server.api_key_file
    return {"Authorization": f"Bearer {Path(file).read_text().split()[0]}"} if file else {}


def speak(config, spawned, listener):
    with (
        contextlib.suppress(EngineDied),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        folders = preflight.check(config)
        # A thread is the only engine: to look for another one takes 15 seconds.
        engines = SimpleNamespace(start=None, begin_with=noop, release=noop)
        start = serve.Start(config, folders, engines, spawned, listener, time.perf_counter())
        runner.run(serve.run(start))


def noop(*_):
    pass
