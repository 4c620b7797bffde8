"""Sleep of a server: who is refused, and what is kept."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specserve import AsyncLLM, RequestError, SamplingParams
from specserve.errors import Sleeping
from tests.adapters import write_adapter
from tests.checkpoints import tiny_checkpoint
from tests.engine.clock import Clock
from tests.server.asking import COMPLETIONS, completion_body, streamed, whole
from tests.server.in_process import server_threads
from tests.server.server_process import eventually

ADMIN = {"Authorization": "Bearer admin"}
LONG = completion_body(max_tokens=300, temperature=1.0, seed=5)
BEAMS = completion_body(max_tokens=100, use_beam_search=True, best_of=4, n=2, temperature=0, seed=1)
ENDLESS = completion_body(max_tokens=8000, temperature=1.0, seed=5)
SHORT = completion_body(max_tokens=5, seed=1)
AWAKE = {"is_sleeping": False, "level": 0, "tags": []}
BOTH = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return tiny_checkpoint(folder, seed=1, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "admin-keys"
    file.write_text("admin\ncleaner cache\n")
    return file


@pytest.fixture(scope="module")
def server(folder, keys):
    with server_threads(folder, **{"server.admin_key_file": str(keys)}) as server:
        server.headers = ADMIN
        yield server


def slept(server, query=""):
    answer = server.ask("POST", f"/sleep{query}")
    assert answer.status == 200, answer.body
    return answer.body


def woken(server, query=""):
    answer = server.ask("POST", f"/wake_up{query}")
    assert answer.status == 200, answer.body
    return answer.body


def refused(server, body=SHORT):
    answer = server.post(COMPLETIONS, body)
    assert answer.status == 503
    assert answer.body["error"]["code"] == "server_is_sleeping"
    assert answer.headers["retry-after"] == "5"
    return answer.body["error"]["message"]


def test_a_server_that_sleeps_refuses_requests_and_is_healthy(server):
    text = whole(server, COMPLETIONS, LONG)
    assert server.get("/is_sleeping").body == AWAKE
    for query, level in ("", 1), ("?level=2", 2), ("?level=1&mode=keep", 2):
        assert slept(server, query) == {"is_sleeping": True, "level": level, "tags": BOTH}
    assert "Wake it up" in refused(server)
    for path in "/health", "/health/ready", "/ping", "/health/live":
        answer = server.get(path)
        assert (answer.status, answer.body) == (200, {"status": "sleeping"})
    assert server.metric("vllm:engine_sleep_state", sleep_state="discard_all") == 1
    assert server.metric("vllm:engine_sleep_state", sleep_state="awake") == 0
    assert server.metric("vllm:admission_rejections_total", reason="sleeping") == 1
    assert server.post("/tokenize", {"prompt": "the cat"}).status == 200
    assert server.post("/v1/cache/reset", {}).status == 200
    assert server.get("/v1/speculation").status == server.get("/v1/models").status == 200
    assert server.ask("PATCH", "/v1/speculation", {"max_nodes": 2}).status == 503
    assert woken(server, "?tags=weights")["tags"] == ["kv_cache"]
    refused(server)
    assert woken(server, "?tags=weights&tags=kv_cache") == AWAKE == woken(server)
    assert server.get("/health").body == {"status": "ready"}
    assert server.metric("vllm:engine_sleep_state", sleep_state="awake") == 1
    assert whole(server, COMPLETIONS, LONG) == text


def test_kept_requests_continue_with_the_same_text(server):
    want, best = streamed(server, COMPLETIONS, LONG), whole(server, COMPLETIONS, BEAMS)
    with ThreadPoolExecutor(5) as threads:
        answers = [threads.submit(streamed, server, COMPLETIONS, LONG) for _ in range(4)]
        beams = threads.submit(whole, server, COMPLETIONS, BEAMS)
        eventually(lambda: server.metric("vllm:num_requests_running") >= 6)
        slept(server, "?level=2&mode=keep")
        done = [answer.done() for answer in answers]
        tokens = server.metric("vllm:generation_tokens_total")
        time.sleep(0.1)
        assert not any(done), "the requests ended before the sleep"
        assert server.metric("vllm:generation_tokens_total") == tokens
        assert server.held_blocks() == 0
        woken(server)
        assert [answer.result() for answer in answers] == [want] * 4
        assert beams.result() == best
    server.wait_until_idle()


def test_running_requests_are_aborted_by_default(server):
    with ThreadPoolExecutor(2) as threads, server.open_stream(COMPLETIONS, ENDLESS) as events:
        next(events)
        answer = threads.submit(server.post, COMPLETIONS, ENDLESS)
        eventually(lambda: server.metric("vllm:num_requests_running") == 2)
        slept(server)
        last = [event for event in events if event != "[DONE]"][-1]
        assert last["error"]["code"] == "server_is_sleeping"
        assert answer.result().status == 503
    woken(server)
    server.wait_until_idle()


def test_a_sleep_can_wait_for_running_requests(server):
    want = streamed(server, COMPLETIONS, LONG)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(streamed, server, COMPLETIONS, LONG)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1)
        asleep = threads.submit(slept, server, "?mode=wait")
        eventually(lambda: server.post(COMPLETIONS, SHORT).status == 503)
        assert not asleep.done(), "the request had ended"
        assert answer.result() == want
        assert asleep.result()["is_sleeping"]
    woken(server)


WRONG = {
    "/sleep?level=0": "level: '0' is not 1 or 2",
    "/sleep?level=one": "level: 'one' is not 1 or 2",
    "/sleep?level=1&level=2": "level: sent 2 times. Send it once",
    "/sleep?mode=now": "mode: 'now' is unknown. Use abort, wait, keep",
    "/sleep?tags=weights": "tags: unknown. The parameters are level, mode",
    "/wake_up?tags=kv": "tags: ['kv'] must be a list of weights and kv_cache",
    "/wake_up?level=1": "level: unknown. The parameters are tags",
}


def test_wrong_parameters_return_400_and_change_nothing(server):
    for path, why in WRONG.items():
        answer = server.ask("POST", path)
        assert answer.status == 400
        assert why in answer.body["error"]["message"]
    answer = server.post("/sleep", {"level": 2})
    assert answer.status == 400
    assert "Send level, mode in the URL's query" in answer.body["error"]["message"]
    assert server.get("/is_sleeping").body == AWAKE


def test_a_wake_up_without_files_returns_409_and_can_be_repeated(server, folder):
    text, file = whole(server, COMPLETIONS, LONG), folder / "model.safetensors"
    slept(server, "?level=2")
    file.rename(folder / "away")
    answer = server.ask("POST", "/wake_up")
    (folder / "away").rename(file)
    assert answer.status == 409
    assert answer.body["error"]["code"] == "cannot_wake_up"
    assert "model.safetensors" in answer.body["error"]["message"]
    refused(server)
    assert woken(server) == AWAKE
    assert whole(server, COMPLETIONS, LONG) == text


def test_only_admin_keys_with_the_scope_may(server):
    for path in "/sleep", "/wake_up":
        for headers in {}, {"Authorization": "Bearer cleaner"}:
            asked = server.headers
            server.headers = headers
            answer = server.ask("POST", path)
            server.headers = asked
            assert answer.status == 403
            assert answer.body["error"]["code"] == "admin_key_needed"


def test_adapters_stay_loaded(folder, tmp_path, keys):
    adapters = tmp_path / "adapters"
    write_adapter(adapters / "one", folder)
    settings = {"lora.max_loras": 1, "lora.folder": str(adapters)}
    settings["server.admin_key_file"] = str(keys)
    with server_threads(folder, **settings) as server:
        server.headers = ADMIN
        one = {"lora_name": "one", "lora_path": "one"}
        assert server.post("/v1/load_lora_adapter", one).status == 200
        asked = LONG | {"model": "one"}
        text = whole(server, COMPLETIONS, asked)
        assert text != whole(server, COMPLETIONS, LONG)
        slept(server, "?level=2")
        other = one | {"lora_name": "other"}
        assert server.post("/v1/load_lora_adapter", other).status == 503
        woken(server)
        assert whole(server, COMPLETIONS, asked) == text


def test_an_async_llm_sleeps_and_continues_kept_requests(folder):
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=4, ignore_eos=True)
    endless = SamplingParams(max_tokens=8000, ignore_eos=True)

    async def last_of(outputs):
        async for output in outputs:
            last = output
        return last

    async def run():
        settings = {"model.threads": 1, "memory.kv_bytes": 1 << 26}
        async with AsyncLLM(folder, set=settings, enable_sleep_mode=True) as llm:
            want = await last_of(llm.generate("the cat", params))
            stream = llm.generate("the cat", params)
            await anext(stream)
            await llm.sleep(2, mode="keep")
            assert await llm.is_sleeping()
            with pytest.raises(Sleeping):
                await last_of(llm.generate("the cat", params))
            with pytest.raises(RequestError, match="level: 3"):
                await llm.sleep(3)
            await llm.wake_up(["kv_cache"])
            await llm.wake_up(["weights"])
            assert not await llm.is_sleeping()
            assert (await last_of(stream)).text == want.text
            stream = llm.generate("the cat", endless)
            await anext(stream)
            await llm.sleep()
            assert (await last_of(stream)).outputs[0].finish_reason == "abort"

    asyncio.run(run())


def test_costs_and_statistics_of_drafters_are_kept(server, monkeypatch):
    Clock(monkeypatch)  # steps slow enough for n-grams to pay
    whole(server, COMPLETIONS, LONG | {"temperature": 0})
    before = server.get("/v1/speculation").body
    steps = server.metric("specserve_rows_total")
    slept(server, "?level=2")
    woken(server)
    after = server.get("/v1/speculation").body
    assert after["costs"]["target"]["steps"] == before["costs"]["target"]["steps"]
    assert after["calibration"] == before["calibration"] != {}
    assert server.metric("specserve_rows_total") == steps
