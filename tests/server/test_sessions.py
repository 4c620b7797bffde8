"""KV of conversations on disk: saved, pinned, found after a restart, and never by another key."""

import signal

import pytest

from tests.server.server_process import ServerProcess

BLOCK = 8192  # bytes of 16 tokens
TEXT = "a b c d e f g h " * 12
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "admin").write_text("boss cache\n")
    (folder / "users").write_text("ann\nbob\n")
    (folder / "swapped").write_text("bob\nann\n")
    return folder


def started(model, keys, disk, users="users", **settings):
    """A server whose pool holds about one conversation."""
    settings = {
        "memory.kv_bytes": 40 * BLOCK,
        "memory.host_bytes": 40 * BLOCK,
        "memory.disk_path": disk,
        "memory.disk_bytes": 200 * BLOCK,
        "server.admin_key_file": keys / "admin",
        "server.api_key_file": keys / users,
        "scheduler.max_model_len": 400,
        "scheduler.max_running": 4,
        "speculation.max_nodes": 0,
        **settings,
    }
    return ServerProcess(model, "--served-model-name=tiny", **settings)


def ask(server, key="ann", **more):
    """The text, and the prompt's tokens found in the cache."""
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0} | more
    told = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    assert told.status == 200, told.body
    return told.body["choices"][0]["text"], told.body["usage"]["prompt_tokens_details"]


def cached(server, key="ann", **more):
    text, details = ask(server, key, **more)
    return text, details["cached_tokens"] if details else 0


def task(server, action, headers=ADMIN, **body):
    return server.post(f"/v1/cache/{action}", body, headers=headers)


def end(server):
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


def test_a_saved_conversation_serves_only_its_key_after_a_restart(folder, keys, tmp_path):
    with started(folder, keys, tmp_path) as server:
        text, before = cached(server, prompt_cache_key="talk")
        assert before == 0
        told = task(server, "save", prompt_cache_key="talk")
        assert told.status == 200 and told.body["blocks_on_disk"] == told.body["blocks"] > 5
        server.process.kill()
    with started(folder, keys, tmp_path, "swapped") as server:
        assert cached(server, "bob") == (text, 0)
        again, hits = cached(server, "ann")
        assert again == text and hits == 16 * (told.body["blocks"] - 1), "the last has output"
        assert loads(server) > 5
    with started(folder, keys, tmp_path) as server:
        assert cached(server, cache_salt="other")[1] == 0
        loaded = task(server, "load", prompt_cache_key="talk")
        assert loaded.status == 200 and loaded.body["blocks_in_memory"] == told.body["blocks"]
        assert cached(server)[1] == hits
        server.post("/v1/cache/reset", {}, headers=ADMIN)
        assert cached(server)[1] == 0
        assert task(server, "load", prompt_cache_key="talk").status == 404


def test_sigterm_writes_pinned_conversations_only(folder, keys, tmp_path):
    with started(folder, keys, tmp_path) as server:
        text, _ = cached(server, prompt_cache_key="pinned")
        cached(server, prompt="x y z " * 30, prompt_cache_key="other")
        assert task(server, "pin", prompt_cache_key="pinned").status == 200
        end(server)
    with started(folder, keys, tmp_path) as server:
        assert cached(server, prompt="x y z " * 30)[1] == 0
        again, hits = cached(server)
        assert again == text and hits > 90
        assert task(server, "pin", prompt_cache_key="pinned", pinned=False).status == 200
        end(server)


def loads(server):
    """Blocks that came from disk."""
    lines = server.get("/metrics", headers=ADMIN).body.splitlines()
    series = 'specserve_kv_tier_hits_total{engine="0",model_name="tiny",tier="disk"}'
    return next(float(line.split()[1]) for line in lines if line.startswith(series))


REFUSED = {
    "no name": ({}, 400, "prompt_cache_key is missing"),
    "an unknown name": ({"prompt_cache_key": "nobody"}, 404, "no conversation 'nobody' is known"),
    "an unknown field": ({"prompt_cache_key": "x", "key": 1}, 400, "key"),
}


def test_tasks_are_refused_with_a_reason(folder, keys, tmp_path, server):
    with started(folder, keys, tmp_path) as own:
        for action in ("save", "load", "pin"):
            for body, status, words in REFUSED.values():
                told = task(own, action, **body)
                assert told.status == status and words in told.body["error"]["message"]
            told = task(own, action, headers={"Authorization": "Bearer ann"}, prompt_cache_key="x")
            assert told.status == 403
        with pytest.raises(AssertionError, match="in use by another process"):
            started(folder, keys, tmp_path).__enter__()
    told = task(server, "save", headers={}, prompt_cache_key="x")
    assert told.status == 403 and "admin" in told.body["error"]["message"]
