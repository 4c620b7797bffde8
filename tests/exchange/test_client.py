"""The HTTP process's end of the engine's socket."""

import asyncio
from types import SimpleNamespace

import pytest

from specserve.errors import EngineDied
from specserve.exchange.client import EngineClient
from specserve.exchange.frames import Frames
from specserve.exchange.messages import Failed, Ready, decode_commands, frame
from specserve.exchange.speculation_state import CostState, RowCost, SpeculationState

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


class Wire:
    """Keeps the commands that a client sends."""

    def __init__(self):
        self.frames, self.sent = Frames(), []

    def write(self, data):
        self.sent += map(decode_commands, self.frames.feed(data))


def test_all_who_ask_for_the_state_in_one_turn_share_an_answer():
    async def run():
        engine, wire = EngineClient((None, None)), Wire()
        engine.connection_made(wire)
        asking = [asyncio.create_task(engine.speculation()) for _ in range(3)]
        await asyncio.sleep(0)
        asking[0].cancel()
        await asyncio.sleep(0)
        assert [commands.tell_speculation for commands in wire.sent] == [True]
        engine.data_received(frame(state))
        return [await asked for asked in asking[1:]]

    costs = CostState([RowCost(4, 0.5, True)], 0.0, 0.0, 1.0)
    state = SpeculationState(sources=("ngram",), costs={"target": costs})
    assert asyncio.run(run()) == [state] * 2


def test_who_asks_a_dead_engine_for_its_state_is_told_so():
    async def run():
        engine = EngineClient((None, None))
        asking = asyncio.create_task(engine.speculation())
        await asyncio.sleep(0)
        engine.connection_lost(None)
        for late in (asking, engine.speculation()):
            with pytest.raises(EngineDied):
                await late

    asyncio.run(run())


def test_the_engine_can_be_ended_after_its_event_loop():
    ends = []

    async def make():
        client = EngineClient((SimpleNamespace(end=lambda: ends.append(1)), None))
        client.connection_made(object())  # nothing can be asked of it once the loop is closed
        return client

    asyncio.run(make()).kill()
    assert ends == [1]
