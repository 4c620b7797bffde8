"""The HTTP process's end of the engine's socket."""

import asyncio
from socket import socketpair
from subprocess import TimeoutExpired
from types import SimpleNamespace

import msgspec
import pytest

from specserve.errors import EngineDied
from specserve.exchange.client import EngineClient, ended
from specserve.exchange.messages import (
    CostState,
    Failed,
    Frames,
    Ready,
    Report,
    RowCost,
    SpeculationState,
    Stats,
    StepOutput,
    decode_commands,
    frame,
    pack,
)
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.sleep import SLEEP_TAGS, SleepState
from specserve.exchange.sleep_control import SleepControl

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
        assert [commands.report_speculation for commands in wire.sent] == [[0]]
        engine.data_received(frame(state))
        return [await asked for asked in asking[1:]]

    costs = CostState([RowCost(4, 0.5, True)], 0.0, 0.0, 0.0, 1.0)
    state = SpeculationState(sources=("ngram",), costs={"target": costs})
    assert asyncio.run(run()) == [state] * 2


def test_each_tenant_is_reported_the_state_of_its_own():
    async def run():
        engine, wire = EngineClient((None, None)), Wire()
        engine.connection_made(wire)
        asking = [asyncio.create_task(engine.speculation(tenant)) for tenant in (2, 1, 2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [commands.report_speculation for commands in wire.sent] == [[1, 2]]
        for tenant in (1, 2):
            engine.data_received(frame(SpeculationState(tenant=tenant)))
        return [(await asked).tenant for asked in asking]

    assert asyncio.run(run()) == [2, 1, 2]


def test_who_asks_a_dead_engine_for_its_state_is_reported_so():
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


GREEDY = Sampling(max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Clocked:
    """An event loop whose time is set by hand."""

    def __init__(self, loop):
        self.loop, self.now = loop, 1000.0

    def time(self):
        return self.now

    def __getattr__(self, name):
        return getattr(self.loop, name)


def report(*outputs):
    blocks = {"target": 0, "draft": 0, "cached": 0, "free": 1}
    return pack(msgspec.msgpack.encode(Report([*outputs], 0, 0, 0, blocks, Stats())))


def output(id, reason):
    return StepOutput(id, [5], reason, True, 0, 0, 0.0)


def test_silence_counts_from_what_was_asked_or_said_last_and_not_while_nothing_is_owed():
    async def run():
        client = EngineClient((None, None))
        client.loop = clock = Clocked(client.loop)
        client.transport = SimpleNamespace(write=lambda data: None)
        listener = SimpleNamespace(push=lambda output: None)
        assert client.silence == 0  # idle
        (id,) = client.add([1], [GREEDY], [listener])
        await asyncio.sleep(0)
        clock.now += 3
        assert client.silence == 3
        client.data_received(report(output(id, None)))
        assert client.silence == 0
        clock.now += 2
        client.finish(id)  # it has left: the engine still owes an answer to that
        await asyncio.sleep(0)
        client.add([1], [GREEDY], [listener])
        client.finish(id + 1)
        await asyncio.sleep(0)
        assert client.silence == 2
        client.data_received(report())
        clock.now += 100
        assert client.silence == 0
        client.add([1], [GREEDY], [listener])
        await asyncio.sleep(0)
        clock.now += 100
        assert client.silence == 100
        client.sleep_state = SleepState(1, ("weights", "kv_cache"))  # it keeps the request
        assert client.silence == 0

    asyncio.run(run())


def test_where_no_process_can_be_started_for_a_moment_it_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr("specserve.exchange.client.RETRIES", (0.0, 0.0))
    tries = []

    def respawn():
        tries.append(1)
        raise OSError("too many open files")

    async def run():
        process = SimpleNamespace(kill=lambda: None, wait=lambda seconds: -9)
        client = EngineClient((process, None), respawn)
        client.ready.set_result(None)
        client.connection_lost(None)
        await client.died.wait()

    asyncio.run(run())
    assert len(tries) == 3 and caplog.text.count("too many open files") == 3


@pytest.mark.parametrize("asleep", [False, True])
def test_a_sleep_waits_for_a_process_that_loads_and_replaces_one_that_dies(monkeypatch, asleep):
    """One process at a time: the fork server does not start two."""
    monkeypatch.setattr("specserve.exchange.client.PAUSES", (0.0,) * 4)
    theirs = []

    def respawn():
        ours, its = socketpair()
        theirs.append(its)
        return process, ours

    async def started(number):
        while len(theirs) < number:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # it loads; would there be another one?
        assert len(theirs) == number

    async def run():
        client = EngineClient((process, None), respawn)
        client.ready.set_result(READY)
        if asleep:
            client.sleep_state = SleepState(1, SLEEP_TAGS)
        client.connection_lost(None)
        await asyncio.sleep(0.05)
        assert len(theirs) == (not asleep)
        waiting = asyncio.create_task(client.revived())
        await started(1)
        theirs[0].close()
        await started(2)
        theirs[1].sendall(frame(READY))
        await waiting
        assert client.is_up and len(theirs) == 2
        client.respawn = None
        theirs[1].close()
        await client.died.wait()

    process = SimpleNamespace(kill=lambda: None, wait=lambda seconds: -9)
    asyncio.run(asyncio.wait_for(run(), 10))


def test_who_waits_for_an_engine_that_is_being_replaced_is_reported_when_the_client_ends():
    async def run():
        process = SimpleNamespace(kill=lambda: None, wait=lambda seconds: -9, end=lambda: None)
        client = EngineClient((process, None), lambda: None)
        client.ready.set_result(None)
        client.deaths.append(client.loop.time())  # so there is a pause before the next one
        client.connection_lost(None)
        asking = [asyncio.create_task(client.speculation())]
        await asyncio.sleep(0.05)
        client.kill()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(asking[0], 1)

    asyncio.run(run())


def test_a_fork_server_that_does_not_report_of_an_end_is_ended_too():
    done = []

    def wait(seconds=None):
        raise TimeoutExpired("engine", seconds)

    process = SimpleNamespace(kill=lambda: done.append("kill"), wait=wait)
    process.end = lambda: done.append("end")
    assert ended(process) == -9 and done == ["kill", "end"]


def test_a_sleep_takes_place_although_its_caller_is_cancelled():
    """The engine has the command: its state would otherwise be unknown."""

    async def run():
        engine, wire = EngineClient((None, None)), Wire()
        engine.connection_made(wire)
        control = SleepControl(engine)
        for command, state, tags in (
            (control.sleep(1, "keep"), SleepState(1, SLEEP_TAGS), SLEEP_TAGS),
            (control.wake_up(["weights"]), SleepState(1, ("kv_cache",)), ("kv_cache",)),
        ):
            asking = asyncio.create_task(command)
            while engine.sleeping is None:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.sleep(0)
            engine.data_received(frame(state))
            async with control.commands:
                assert control.state.tags == tags

    asyncio.run(asyncio.wait_for(run(), 10))
