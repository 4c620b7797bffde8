"""`PATCH /v1/speculation` and draft models of a running server: who may, and what it does."""

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from specserve.config import ServerConfig
from specserve.errors import ConfigError
from specserve.server.keys import SCOPES, read_admin_keys
from tests.checkpoints import tiny_checkpoint, with_another_token
from tests.server.asking import CHAT, COMPLETIONS, chat_body, completion_body, streamed
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess, eventually
from tests.server.test_routes import app_with

ROOT = Path(__file__).parents[2]
SPECULATION, DRAFT_MODEL = "/v1/speculation", "/v1/speculation/draft-model"
LONG = completion_body(max_tokens=300, temperature=1.0, seed=5)
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    make = tmp_path_factory.mktemp
    return {
        "target": tiny_checkpoint(make("target"), seed=1),
        "same": tiny_checkpoint(make("same"), seed=1),
        "other": tiny_checkpoint(make("other"), seed=2, hidden_size=96, num_hidden_layers=3),
        "words": with_another_token(tiny_checkpoint(make("words"), seed=2)),
    }


@pytest.fixture(scope="module")
def admin_keys(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "admin-keys"
    file.write_text("# of operators\nadmin\ncleaner cache\n\nboth speculation,cache\n")
    return file


@pytest.fixture
def server(folders, admin_keys):
    """One that may be changed, in this process."""
    with server_threads(folders["target"], **admitting(admin_keys)) as server:
        server.headers = ADMIN
        yield server


def admitting(admin_keys):
    return {"server.admin_key_file": str(admin_keys)}


@pytest.fixture
def replacing(folders, admin_keys):
    """One that starts another engine process where one ends."""
    with ServerProcess(folders["target"], f"--admin-key-file={admin_keys}") as server:
        server.headers = ADMIN
        yield server


def state(server):
    told = server.get(SPECULATION).body
    return {key: told[key] for key in ("drafter", "draft_model", "sources", "max_nodes")}


def test_sources_limits_and_the_draft_model_are_changed_while_a_text_is_streamed(server, folders):
    want = streamed(server, COMPLETIONS, LONG)
    assert state(server)["draft_model"] is None
    changes = [
        ("POST", DRAFT_MODEL, {"model": str(folders["other"])}),
        ("PATCH", SPECULATION, {"sources": ["ngram", "model", "suffix"], "max_nodes": 8}),
        ("PATCH", SPECULATION, {"options": {"width": 2}, "max_step_nodes": 16}),
        ("POST", DRAFT_MODEL, {"model": str(folders["same"]), "quantize": None}),
        ("PATCH", SPECULATION, {"drafter": "model"}),
        ("PATCH", SPECULATION, {"drafter": "none"}),
        ("PATCH", SPECULATION, {"drafter": "auto"}),
        ("DELETE", DRAFT_MODEL, None),
    ]
    texts, done = [], threading.Event()

    def ask_on():
        while not done.is_set():
            texts.append(streamed(server, COMPLETIONS, LONG))

    asking = [threading.Thread(target=ask_on) for _ in range(3)]
    for thread in asking:
        thread.start()
    seen = []
    for method, path, body in changes:
        answer = server.ask(method, path, body)
        assert answer.status == 200, answer.body
        assert answer.body["object"] == "speculation"
        seen.append(state(server))
    done.set()
    for thread in asking:
        thread.join()
    assert texts and all(text == want for text in texts)
    assert [each["draft_model"] for each in seen[:5]] == [
        *[folders["other"].name] * 3,
        *[folders["same"].name] * 2,
    ]
    assert seen[1]["sources"] == ["ngram", "model", "suffix"] and seen[1]["max_nodes"] == 8
    assert seen[5] == {"drafter": "none", "draft_model": None, "sources": [], "max_nodes": 0}
    assert seen[6]["draft_model"] == folders["same"].name, "it is kept in mind"
    assert seen[7]["draft_model"] is None and "model" not in seen[7]["sources"]
    [card] = server.get("/v1/models").body["data"]
    assert card["sources"] == seen[7]["sources"] and "draft_weights" not in card
    assert server.get("/metrics").status == 200


def test_the_manuals_example_works(server):
    page = (ROOT / "docs/operations.md").read_text()
    [line] = re.findall(r"^curl -X PATCH .*$", page, re.MULTILINE)
    line = line.replace("http://127.0.0.1:8000", server.url).replace("ADMIN_KEY", "admin")
    told = json.loads(subprocess.check_output([*shlex.split(line), "-s"]))
    assert told["sources"] == ["ngram", "suffix"] and told["max_nodes"] == 8


def test_requests_may_name_the_sources_that_there_are_now(server):
    asked = chat_body(speculation={"sources": ["suffix"]})
    assert server.post(CHAT, asked).status == 400
    server.ask("PATCH", SPECULATION, {"sources": ["ngram", "suffix"]})
    assert server.post(CHAT, asked).status == 200
    server.ask("PATCH", SPECULATION, {"sources": ["ngram"]})
    assert "(known: ngram)" in server.post(CHAT, asked).body["error"]["message"]


def test_a_server_that_began_without_draft_tokens_can_make_some(folders, admin_keys):
    settings = {"drafter.name": "none"} | admitting(admin_keys)
    with server_threads(folders["target"], **settings) as server:
        server.headers = ADMIN
        want = streamed(server, COMPLETIONS, LONG)
        assert server.ask("PATCH", SPECULATION, {"drafter": "auto"}).status == 200
        assert server.post(DRAFT_MODEL, {"model": str(folders["same"])}).status == 200
        assert streamed(server, COMPLETIONS, LONG) == want
        assert server.get("/v1/models").body["data"][0]["max_nodes"] == 63


IN_USE = [({}, "auto"), ({"drafter": "ngram"}, "ngram"), ({"max_nodes": 0}, "none")]


def test_the_metrics_report_of_the_drafter_that_there_is_now(server):
    for change, name in IN_USE:
        server.ask("PATCH", SPECULATION, change)
        series = re.findall(
            r"^specserve_drafter_info{.*", server.get("/metrics").body, re.MULTILINE
        )
        assert len(series) == 1 and f'drafter="{name}"' in series[0] and series[0].endswith(" 1.0")


BROKEN = {
    "no field of that name": ("PATCH", SPECULATION, {"source": ["ngram"]}, "source"),
    "a type": ("PATCH", SPECULATION, {"sources": "ngram"}, "sources"),
    "an unknown source": ("PATCH", SPECULATION, {"sources": ["luck"]}, "source 'luck'"),
    "a module": ("PATCH", SPECULATION, {"drafter": "this"}, "loaded at start-up"),
    "a long name": ("POST", DRAFT_MODEL, {"model": "/" + 5000 * "x"}, "name too long"),
    "code": ("PATCH", SPECULATION, {"drafter": "os:system"}, "loaded at start-up"),
    "too many": ("PATCH", SPECULATION, {"max_nodes": 64}, "max_nodes: "),
    "an unknown option": ("PATCH", SPECULATION, {"options": {"w": 2}}, "`w`"),
    "no JSON": ("PATCH", SPECULATION, b"{", "JSON"),
    "no model": ("POST", DRAFT_MODEL, {}, "model: missing"),
    "a folder that is not there": ("POST", DRAFT_MODEL, {"model": "/no/such"}, "/no/such"),
    "no draft model to remove": ("PATCH", SPECULATION, {"sources": ["model"]}, "draft model"),
}


@pytest.fixture(scope="module")
def kept(folders, admin_keys):
    with ServerProcess(folders["target"], f"--admin-key-file={admin_keys}") as server:
        server.headers = ADMIN
        yield server


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_is_refused_and_changes_nothing(kept, name):
    method, path, body, why = BROKEN[name]
    before = state(kept)
    answer = kept.ask(method, path, body)
    assert answer.status == 400 and why in answer.body["error"]["message"]
    assert state(kept) == before


def test_a_broken_or_foreign_draft_model_is_an_error_to_who_sent_it_alone(kept, folders, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(folders["same"], cut)
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    want = streamed(kept, COMPLETIONS, LONG)
    before, engine = state(kept), kept.engine_pid
    with kept.open_stream(COMPLETIONS, LONG) as events:
        next(events)
        for folder in (cut, folders["words"], tmp_path):
            assert kept.post(DRAFT_MODEL, {"model": str(folder)}).status == 400
        assert "[DONE]" in [*events][-1]
    assert streamed(kept, COMPLETIONS, LONG) == want
    assert (state(kept), kept.engine_pid) == (before, engine)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_a_draft_models_folder_is_an_error_at_once(kept, folders, tmp_path, name):
    folder = tmp_path / "piped"
    shutil.copytree(folders["same"], folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    answer = kept.post(DRAFT_MODEL, {"model": str(folder)})
    assert answer.status == 400 and f"{name} is a" in answer.body["error"]["message"]
    assert kept.ask("PATCH", SPECULATION, {}).status == 200, "a later change is not held up"


def test_each_change_and_each_refusal_is_a_line_of_the_log(folders, admin_keys, tmp_path):
    file, started = tmp_path / "stderr", f"--admin-key-file={admin_keys}"
    other = str(folders["other"])
    asked = [
        ("PATCH", SPECULATION, {"sources": ["ngram"], "max_nodes": 8}),
        ("PATCH", SPECULATION, {"sources": ["luck\x1b\n"]}),
        ("POST", DRAFT_MODEL, {"model": other, "quantize": "w8"}),
        ("PATCH", SPECULATION, {"options": {"width": 2}}),
        ("PATCH", SPECULATION, {"source": []}),
        ("PATCH", SPECULATION, {}),
    ]
    with (
        file.open("w") as stderr,
        ServerProcess(folders["target"], started, stderr=stderr) as server,
    ):
        for number, (method, path, body) in enumerate(asked):
            server.ask(method, path, body, ADMIN | {"X-Request-Id": f"ask-{number}"})
    lines = [line for line in file.read_text().splitlines() if "speculation" in line]
    for number, (line, words) in enumerate(zip(lines, CHANGES, strict=True)):
        assert words.format(model=json.dumps(other)) in line and line.endswith(f" [ask-{number}]")
    assert lines[1].isprintable() and "admin" not in file.read_text()


CHANGES = [
    'changed: sources ["ngram", "grammar", "prediction"] -> ["ngram"]; max_nodes 63 -> 8 [',
    "is unchanged: unknown drafter or source 'luck\\x1b\\n'",
    'changed: draft_model null -> {model}; quantize null -> "w8"; '
    'sources ["ngram"] -> ["ngram", "model"] [',
    'changed: options {{}} -> {{"width": 2}} [',
    "is unchanged: unknown field",
    "changed: nothing differs [",
]


def test_another_engine_process_draft_tokens_as_the_one_before_was_reported(replacing, folders):
    replacing.post(DRAFT_MODEL, {"model": str(folders["same"]), "quantize": "w8"})
    replacing.ask("PATCH", SPECULATION, {"sources": ["suffix", "model"], "max_nodes": 5})
    before, want = state(replacing), streamed(replacing, COMPLETIONS, LONG)
    replacing.kill_engines(1)
    assert streamed(replacing, COMPLETIONS, LONG) == want
    assert state(replacing) == before


def test_an_engine_process_that_lacks_the_draft_model_begins_as_the_first(
    replacing, folders, tmp_path
):
    at_first, copy = state(replacing), tmp_path / "copy"
    shutil.copytree(folders["same"], copy)
    replacing.post(DRAFT_MODEL, {"model": str(copy)})
    shutil.rmtree(copy)
    want = streamed(replacing, COMPLETIONS, LONG)
    replacing.kill_engines(1)
    assert streamed(replacing, COMPLETIONS, LONG) == want
    eventually(lambda: state(replacing) == at_first)


SCOPED = {
    ("PATCH", SPECULATION): "speculation",
    ("POST", DRAFT_MODEL): "speculation",
    ("DELETE", DRAFT_MODEL): "speculation",
    ("POST", "/v1/cache/reset"): "cache",
    ("POST", "/sleep"): "sleep",
    ("POST", "/wake_up"): "sleep",
}


LET_IN = 500  # as nothing is behind the guards


def client_with(key, **limits):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return TestClient(app_with(**limits), headers=headers, raise_server_exceptions=False)


def test_without_a_file_of_admin_keys_nobody_changes_who_draft_tokens(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    for client in client_with(None), client_with("first", api_key_file=str(keys)):
        for (method, path), scope in SCOPED.items():
            answer = client.request(method, path, json={})
            if scope == "cache":
                assert answer.status_code == LET_IN
                continue
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "admin_key_needed"
            assert "--admin-key-file" in answer.json()["error"]["message"]


ALLOWED = {
    "admin": {"speculation", "cache", "sleep"},
    "cleaner": {"cache"},
    "both": {"speculation", "cache"},
    "first": set(),  # an API key, where there are any
    "other": set(),
    None: set(),
}


@pytest.mark.parametrize("key", ALLOWED)
@pytest.mark.parametrize("has_api_keys", [False, True])
def test_a_key_may_do_what_its_scopes_say(admin_keys, tmp_path, key, has_api_keys):
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    of_users = {"api_key_file": str(keys)} if has_api_keys else {}
    client = client_with(key, admin_key_file=str(admin_keys), **of_users)
    is_unknown = has_api_keys and key in ("other", None)
    for (method, path), scope in SCOPED.items():
        status = client.request(method, path, json={}).status_code
        refused = 401 if is_unknown else 403
        assert status == (LET_IN if scope in ALLOWED[key] else refused)
    assert client.get("/health").status_code == (401 if is_unknown else 200)
    answer = client.post(COMPLETIONS, json={"prompt": "a"})
    generates = answer.status_code
    is_user = not has_api_keys or key == "first"
    assert generates == (LET_IN if is_user else 401), "an admin key generates nothing"
    if generates == 401:
        is_admin = bool(ALLOWED[key])
        assert ("this is an admin key" in answer.json()["error"]["message"]) == is_admin


def test_a_file_of_admin_keys_names_keys_and_their_scopes(admin_keys, tmp_path):
    told = read_admin_keys(admin_keys)
    assert told == {
        "admin": frozenset(SCOPES),
        "cleaner": frozenset({"cache"}),
        "both": frozenset({"speculation", "cache"}),
    }
    for text, why in {
        "": "no admin key",
        "key all": "the unknown scope 'all'",
        "kéy": "not printable ASCII",
        "key cache,": "the unknown scope ''",
    }.items():
        (tmp_path / "keys").write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_admin_keys(tmp_path / "keys")
    assert ServerConfig().admin_key_file is None
