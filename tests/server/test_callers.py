"""What the engine is told of a caller: a number for the key, the call, the prompts' hashes."""

import asyncio
from threading import get_ident
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from starlette.requests import Request

from specserve.api.input_processor import InputProcessor
from specserve.config import Config
from specserve.exchange.client import EngineClient
from specserve.exchange.messages import Caller, Ready
from specserve.exchange.sampling_params import SamplingParams
from specserve.memory.blocks import KVFormat, prompt_keys
from specserve.server import prompt as prompt_module
from specserve.server.app import KeyGuard
from specserve.server.completion import Arrival, Service, arrival
from specserve.text.defaults import GenerationDefaults
from tests.checkpoints import tiny_tokenizer

FORMATS = {"target": KVFormat("target", 16), "draft": KVFormat("draft", 20)}


@pytest.mark.parametrize(("key", "tenant"), [("first", 0), ("second", 1)])
def test_a_tenant_is_the_place_of_its_key_and_the_key_goes_no_further(key, tenant):
    seen = []

    async def app(scope, receive, send):
        seen.append(arrival(Request(scope)))

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(KeyGuard(app, ["first", "second"], {})(scope, None, None))
    assert [a.tenant for a in seen] == [tenant]


def test_where_no_keys_are_needed_all_are_one_tenant():
    assert arrival(Request({"type": "http"})).tenant == 0


def open_service():
    """A service whose engine keeps what it is asked."""
    engine = SimpleNamespace(live={}, held=[], is_up=True, next_id=0, adds=[], died=asyncio.Event())
    engine.loop, engine.silence, engine.flush_soon = asyncio.get_running_loop(), 0.0, lambda: None
    engine.check_awake = lambda: None
    engine.add = lambda *args: EngineClient.add(engine, *args)
    service = Service(Config(), engine)
    processor = InputProcessor(tiny_tokenizer(), GenerationDefaults(), 9000, 320)
    service.open(
        processor,
        SimpleNamespace(),
        Ready(
            phases={},
            drafter="none",
            vocab_size=320,
            max_model_len=9000,
            dtype="fp32",
            kv_dtype="fp32",
            arithmetic="reference",
            block_size=16,
            num_blocks=100,
            kv_formats=FORMATS,
        ),
    )
    return service


def asked(*calls):
    """The Adds of calls, each with (tenant, prompts)."""

    async def ask_all():
        service = open_service()
        for tenant, prompts in calls:
            params = SamplingParams(n=2, cache_salt="salt")
            resolved = await service.prompts.resolve(params)
            await service.admit(prompts, params, resolved, Arrival(0.0, tenant), "prompt")
        return service.engine.adds

    return asyncio.run(ask_all())


def test_prompts_of_one_http_request_are_one_call():
    adds = asked((0, [[1] * 40, [2] * 40]), (3, [[1] * 40]))
    assert [(a.id, a.caller) for a in adds] == [
        (0, Caller(0, 0)),
        (2, Caller(0, 0)),
        (4, Caller(4, 3)),
    ]


@pytest.mark.parametrize("num_tokens", [1, 100, prompt_module.LONG + 1])
def test_prompts_are_sent_with_the_keys_of_their_blocks(num_tokens):
    prompt = [i % 300 for i in range(num_tokens)]
    [add] = asked((0, [prompt]))
    assert add.keys == prompt_keys(FORMATS, prompt, "salt")
    assert [len(keys) for keys in add.keys.values()] == [num_tokens // 16, num_tokens // 20]


def test_prompts_of_each_key_have_block_keys_of_their_own(monkeypatch):
    formats = {name: replace(of, is_per_tenant=True) for name, of in FORMATS.items()}
    monkeypatch.setitem(globals(), "FORMATS", formats)
    first, second = asked((0, [[1] * 40]), (1, [[1] * 40]))
    assert first.keys == prompt_keys(formats, [1] * 40, "salt")
    assert second.keys == prompt_keys(formats, [1] * 40, "salt", tenant=1)
    assert not {*first.keys["target"]} & {*second.keys["target"]}


def test_long_prompts_are_hashed_next_to_the_event_loop(monkeypatch):
    """Also where many short ones are as long together."""

    async def threads_of(prompts):
        service, seen = open_service(), []
        monkeypatch.setattr(
            prompt_module, "prompt_keys", lambda *args: seen.append(get_ident()) or {}
        )
        params = SamplingParams()
        resolved = await service.prompts.resolve(params)
        await service.admit(prompts, params, resolved, Arrival(0.0), "prompt")
        return {ident == get_ident() for ident in seen}

    assert asyncio.run(threads_of([[1] * 100])) == {True}
    assert asyncio.run(threads_of([[1] * 5000])) == {False}
    assert asyncio.run(threads_of([[1] * 100] * 50)) == {False}
