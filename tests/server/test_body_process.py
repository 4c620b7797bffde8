"""Large bodies are read in processes of their own, and have limits on their items."""

import asyncio
import json
import os
import signal

import msgspec
import pytest

from specserve.errors import Overloaded, RequestError
from specserve.exchange.fair_queue import owner
from specserve.server.body import LARGE, MANY, check_items, is_short
from specserve.server.body_process import KINDS, read
from specserve.server.bounded_process import Refused
from specserve.server.chat import CHAT
from specserve.server.prompt import NUM_PROCESSES, BodyProcesses

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS, "strict": True}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1.0}'}}
MESSAGES = [
    {"role": "developer", "content": [{"type": "text", "text": 'a "[{" \\ \u00e9 \U0001f600'}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]
FORM = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 1.0, None, "x"]}}}
BODIES = {
    "chat": {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logit_bias": {"5": -1},
        "stop": ["x"],
        "seed": 7,
        "chat_template_kwargs": {"big": 2**70},
        "slo": {"ttft_ms": 5},
    },
    "completion": {
        "prompt": [[1, 2], [3]],
        "response_format": FORM,
        "stream": True,
        "stream_options": {"include_usage": True},
        "features": {},
    },
    "responses": {
        "input": [{"role": "user", "content": "hi"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
    },
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "system": "be brief",
        "max_tokens": 5,
        "thinking": {"type": "enabled", "budget_tokens": 2},
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
    },
    "embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1},
    "score": {"text_1": "a", "text_2": ["b"]},
    "ollama chat": {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "format": "json",
    },
    "ollama generate": {"model": "m", "prompt": "hi", "options": {"seed": 1, "stop": ["x"]}},
    "ollama embed": {"model": "m", "input": ["a"]},
    "tokenize": {"messages": MESSAGES, "tools": [TOOL]},
    "detokenize": {"tokens": [1, 2]},
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_of_a_body_is_the_same_in_another_process(name):
    kind, raw = KINDS[name], json.dumps(BODIES[name]).encode()
    sent = msgspec.json.encode(kind.read(raw))
    assert msgspec.json.decode(sent, type=kind.result) == kind.read(raw)


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (b"{}", 1),
        (b'{"a": [{}, [], [[]]]}', 6),
        (b'{"text": "[[[[{{{{"}', 1),
        (b'{"text": "\\"[[[", "list": []}', 2),
        (b'{"text": "\\\\", "list": [{}]}', 3),
        (b'{"no end: [[[[', 5),
    ],
)
def test_items_are_counted_outside_of_texts(raw, number):
    check_items(raw, number)
    with pytest.raises(RequestError, match=rf"{number} objects and lists\. At most {number - 1} "):
        check_items(raw, number - 1)


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}] * 50},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 50}]},
        {"input": "a", "tools": [{"type": "function", "name": "f"}] * 50},
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"anyOf": [{}] * 50}}}},
    ],
    ids=["items", "parts", "tools", "schema nodes"],
)
def test_a_body_with_too_many_items_is_refused_before_it_is_decoded(body):
    refusal = read(40, "responses", json.dumps(body).encode() + b" not JSON")
    assert isinstance(refusal, Refused) and "server.max_body_items" in refusal.message


def test_the_event_loop_reads_only_short_bodies_of_few_items():
    assert is_short(b"[" * MANY) and not is_short(b"{" * (MANY + 1))
    assert is_short(b" " * LARGE) and not is_short(b" " * (LARGE + 1))


def with_readers(test, most=20_000):
    async def run():
        readers = BodyProcesses(most)
        try:
            await test(readers)
        finally:
            await readers.close()

    asyncio.run(run())


def chat_of(number, **others):
    messages = [{"role": "user", "content": f"{n}"} for n in range(number)]
    return json.dumps({"messages": messages} | others).encode()


def test_large_bodies_are_read_and_refused_as_small_ones_are():
    async def test(readers):
        raw = chat_of(300)
        assert await readers.read(raw, CHAT) == CHAT.read(raw)
        for wrong in (chat_of(300, temprature=1), chat_of(0), b"[1"):
            with pytest.raises(RequestError) as there:
                await readers.read(wrong, CHAT)
            with pytest.raises(RequestError) as here:
                CHAT.read(wrong)
            told = [(str(e.value), e.value.param, e.value.code) for e in (there, here)]
            assert told[0] == told[1]

    with_readers(test)


def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_read(monkeypatch):
    """The kernel ends the process, as it does after SECONDS of CPU time."""

    async def test(readers):
        await readers.read(chat_of(1), CHAT)
        reading = asyncio.create_task(readers.read(chat_of(6000), CHAT))
        while not (at_work := [p for p in readers.processes if p.is_at_work]):
            await asyncio.sleep(0)
        os.kill(at_work[0].process.pid, signal.SIGPROF)
        with pytest.raises(RequestError, match="takes too long to read"):
            await reading
        assert await readers.read(chat_of(3), CHAT) == CHAT.read(chat_of(3))

    with_readers(test)


def test_a_process_that_dies_costs_its_own_body_only():
    async def test(readers):
        await readers.read(chat_of(1), CHAT)
        reading = asyncio.create_task(readers.read(chat_of(6000), CHAT))
        while not (at_work := [p for p in readers.processes if p.is_at_work]):
            await asyncio.sleep(0)
        os.kill(at_work[0].process.pid, signal.SIGKILL)
        with pytest.raises(Overloaded, match=r"ended\. Retry"):
            await reading
        assert await readers.read(chat_of(3), CHAT) == CHAT.read(chat_of(3))

    with_readers(test)


def test_many_bodies_of_one_key_take_one_process_and_another_keys_goes_first():
    async def test(readers):
        done = []

        async def sent(key, raw):
            owner.set(key)
            await readers.read(raw, CHAT)
            done.append(key)

        await readers.read(chat_of(1), CHAT)
        await asyncio.gather(*(p.started.wait() for p in readers.processes))
        many = [asyncio.create_task(sent("many", chat_of(3000))) for _ in range(6)]
        await asyncio.sleep(0)
        assert len([p for p in readers.processes if p.is_at_work]) == 1 < NUM_PROCESSES
        await sent("other", chat_of(200))
        assert done.count("many") <= 1
        await asyncio.gather(*many)

    with_readers(test)
