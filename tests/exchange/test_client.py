"""The HTTP process's end of the engine's socket."""

import asyncio

import pytest

from specserve.exchange.client import EngineClient
from specserve.exchange.messages import Failed, Ready, frame

READY = Ready({}, "none", 320, 512, "bf16", "bf16", "generic", 16, 100, {})


@pytest.mark.parametrize("message", [Failed("out of memory"), READY])
def test_a_server_that_ends_while_the_engine_loads_has_nothing_to_complain_of(message):
    complaints = []

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        engine = EngineClient((None, None))
        engine.ready.cancel()
        await asyncio.sleep(0)  # its callbacks run
        engine.data_received(frame(message))
        engine.connection_lost(None)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert complaints == []
