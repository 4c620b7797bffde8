"""The engine's side of the socket, with a scripted other side."""

import gc

import pytest
from msgspec import structs

from specserve.config import load_config
from specserve.engine import process
from specserve.engine.build import Loaded
from specserve.engine.engine import Engine
from specserve.engine.process import Control, serve
from specserve.exchange.messages import (
    Add,
    Caller,
    EngineCommands,
    EngineStart,
    Loading,
    Ready,
    ResumeState,
    encode,
    packed,
)
from tests.checkpoints import tiny_checkpoint
from tests.engine.engines import engine_for, load_small
from tests.engine.test_engine import greedy


class Script:
    """Delivers commands before each step, keeps the reports, and then closes the connection."""

    def __init__(self, *steps):
        self.steps, self.reports, self.waits = list(steps), [], []

    def receive(self, wait):
        self.waits.append(wait)
        if not self.steps:
            raise EOFError
        return [encode(commands) for commands in self.steps.pop(0)]

    def send(self, report):
        self.reports.append(report)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_small(tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=3))


def run(target, *steps):
    script = Script(*steps)
    with pytest.raises(EOFError):
        serve(script, Control(Loaded(engine_for(target), (None, None), 0, "none", {})))
    return script


def asked(id, num_tokens):
    return Add(id, packed([5, 17, 42]), greedy(num_tokens), [0])


def test_who_is_let_go_of_holds_nothing_after_the_very_next_step(target):
    both, end = EngineCommands([asked(7, 99), asked(8, 99)], []), EngineCommands([], [7])
    script = run(target, [both], [], [], [end], [])
    ids = [[e.id for e in report.outputs] for report in script.reports]
    assert ids == [[], [7, 8], [7, 8], [7, 8], [8], [8]]
    assert [r.num_running for r in script.reports] == [0, 2, 2, 2, 1, 1]
    assert [r.blocks["target"] for r in script.reports[3:]] == [2, 1, 1]


def test_who_waits_is_let_go_of_before_it_ever_runs(target):
    script = run(target, [EngineCommands([asked(1, 9)], []), EngineCommands([], [1])], [])
    assert [r.outputs for r in script.reports] == [[], [], []]


def test_it_sleeps_only_while_there_is_nothing_to_do(target):
    script = run(target, [EngineCommands([asked(1, 2)], [])], [], [])
    assert script.waits == [True, False, True, True]
    assert script.reports[2].outputs[0].finish_reason == "length"


def test_ids_that_the_model_does_not_know_end_their_request_and_no_process(target):
    bad = Add(7, packed([5, 10**6]), greedy(2), [0, 1])
    script = run(target, [EngineCommands([bad, asked(9, 2)], [])], [], [])
    outputs = [output for report in script.reports for output in report.outputs]
    refused = [o for o in outputs if o.id in (7, 8)]
    found = [(o.finish_reason, "1000000 is out of range" in o.failure, o.blamed) for o in refused]
    assert found == [("error", True, "prompt")] * 2, "a request's own mistake, not a full server"
    assert [len(o.tokens) for o in outputs if o.id == 9] == [1, 1]


def test_what_an_order_says_of_its_caller_and_its_blocks_reaches_the_request(target, monkeypatch):
    asks, caller, keys = [], Caller(7, 3), {"target": [b"key"]}
    order = structs.replace(asked(7, 1), keys=keys, caller=caller, resume=ResumeState([3], 1))

    def add_choices(engine, *args, resume, adapter):
        asks.append((*args, resume, adapter))

    monkeypatch.setattr(Engine, "add_choices", add_choices)
    run(target, [EngineCommands([order], [])])
    each = order.samplings, 7, keys, caller, order.resume, order.adapter
    assert asks == [([5, 17, 42], *each)]


class FreezeCounts:
    """A link that keeps, for each message, how many objects collections leave alone."""

    def __init__(self):
        self.by_message = {}

    def send(self, message):
        self.by_message[type(message)] = gc.get_freeze_count()

    def receive(self, wait):
        raise EOFError


def test_collections_in_service_leave_alone_what_start_up_made(tmp_path):
    counts, folder = FreezeCounts(), tiny_checkpoint(tmp_path, seed=3)
    settings = {"memory.kv_bytes": 1 << 24, "model.path": str(folder), "drafter.name": "none"}
    gc.unfreeze()
    with pytest.raises(EOFError):
        process.run(counts, EngineStart(load_config(None, settings)))
    gc.unfreeze()
    assert counts.by_message[Loading] == 0
    assert counts.by_message[Ready] > len(gc.get_objects()) / 2
