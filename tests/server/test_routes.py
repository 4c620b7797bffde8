"""The routes beside the two that generate, and who is let in."""

import contextlib
import http.client
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from starlette.testclient import TestClient

from specserve.config import ServerConfig
from specserve.errors import ConfigError
from specserve.server.app import make_app
from specserve.server.connection import canonical
from specserve.server.pages import PAGES, PARTS
from specserve.server.routes import LIVENESS, OPEN
from specserve.version import VERSION
from tests.checkpoints import tiny_tokenizer
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    chat_body,
    completion_body,
    rendered,
)
from tests.server.in_process import server_threads


def test_the_model_is_listed_by_its_served_name(server):
    [card] = server.get("/v1/models").body["data"]
    assert card["id"] == "tiny" and card["object"] == "model" and card["max_model_len"] == 512
    assert (card["drafter"], card["max_nodes"]) == ("auto", 63) and "scaled" not in card
    assert card["kv_dtype"] == "fp32" and "draft_weights" not in card and "demo" not in card
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert card["defaults"] == neutral | {"repetition_penalty": 1.0}
    form = {"bits": 32, "group": None}
    maps = [form | {"number": 8}, form | {"number": 1, "is_head": True}]
    assert card["weights"] == {"maps": maps, "num_bytes": 4 * 115_072}
    assert server.get("/v1/models/tiny").body == card
    assert server.get("/v1/models").body["object"] == "list"
    assert abs(server.post(CHAT, chat_body()).body["created"] - card["created"]) < 3600


def test_the_weights_of_the_draft_model_are_reported_next_to_the_targets(presets):
    [card] = presets["model"].get("/v1/models").body["data"]
    assert card["draft_weights"] == card["weights"]  # they are the same model's
    assert "draft_weights" not in presets["ngram"].get("/v1/models").body["data"][0]


def test_a_server_without_draft_tokens_reports_so_everywhere(presets):
    server = presets["off"]
    [card] = server.get("/v1/models").body["data"]
    state = server.get("/v1/speculation").body
    assert [card[key] for key in ("drafter", "max_nodes", "sources")] == ["none", 0, []]
    assert [state[key] for key in ("max_nodes", "max_step_nodes", "sources")] == [0, 0, []]
    answer = server.post(CHAT, chat_body()).body
    assert answer["metrics"]["speculative_decoding"] is None


def test_a_model_is_called_by_its_name_or_not_at_all(server):
    assert server.post(CHAT, chat_body(model="tiny")).body["model"] == "tiny"
    assert server.post(CHAT, chat_body(model=None)).body["model"] == "tiny"


REFUSED = {
    "a route": ("GET", "/v1/nothing", None, 404, None),
    "images": ("POST", "/v1/images/generations", {"prompt": "x"}, 404, None),
    "a method": ("GET", CHAT, None, 405, None),
    "another method": ("DELETE", "/v1/models/tiny", None, 405, None),
    "a model": ("GET", "/v1/models/org/other", None, 404, "model_not_found"),
    "a model to ask": ("POST", CHAT, chat_body(model="x"), 404, "model_not_found"),
    "a model to tokenize": (
        "POST",
        "/tokenize",
        {"model": "x", "prompt": ""},
        404,
        "model_not_found",
    ),
    "no JSON": ("POST", CHAT, b"{", 400, None),
    "no object": ("POST", COMPLETIONS, [], 400, None),
}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"), REFUSED.values(), ids=REFUSED
)
def test_all_refusals_have_one_shape(server, method, path, body, status, code):
    answer = server.ask(method, path, body)
    error = answer.body.pop("error")
    assert (answer.status, answer.body) == (status, {})
    assert {key: type(value) for key, value in error.items()} == {
        "message": str,
        "type": str,
        "param": str if code else type(None),
        "code": str if code else type(None),
    }
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert ("allow" in answer.headers) == (status == 405)


def test_a_wrong_method_is_told_all_that_its_path_takes(server):
    answer = server.ask("DELETE", "/v1/speculation")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, PATCH")
    message = answer.body["error"]["message"]
    assert message == "DELETE /v1/speculation: wrong method. Use GET or HEAD or PATCH"


NOT_SERVED = """
/v1/audio/speech /v1/audio/transcriptions /v1/images/generations /v1/images/edits
/v1/moderations /v1/files /v1/files/f/content /v1/uploads /v1/batches /v1/fine_tuning/jobs
/v1/assistants /v1/threads /v1/threads/t/runs /v1/vector_stores /v1/classify /rerankers
/v1/videos /v1/realtime /v1/conversations /v1/evals /v1/containers
/generate /v1/chat /v1 /v2/chat/completions /v1/chat/completions/x /V1/models
"""


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_what_is_not_served_is_not_found_and_the_answer_says_what_is(server, method):
    for path in NOT_SERVED.split():
        answer = server.ask(method, path, {"input": "x"} if method == "POST" else None)
        assert answer.status == 404, path
        message = answer.body["error"].pop("message")
        assert answer.body == {
            "error": {"type": "invalid_request_error", "param": None, "code": None}
        }
        assert message.startswith(f"{method} {path}: not found. The nearest route is /")
        assert message.endswith("; /openapi.json has all routes") and len(message) < 200


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", CHAT),
        ("/v1/embedding", "/v1/embeddings"),
        ("/v1/complete", COMPLETIONS),
    ],
)
def test_the_nearest_route_is_reported(server, path, near):
    message = server.ask("POST", path, {}).body["error"]["message"]
    assert f"The nearest route is {near};" in message


def test_a_base_url_without_v1_is_reported(server):
    answer = server.ask("POST", "/chat/completions", chat_body())
    assert answer.status == 404
    assert "Use /v1/chat/completions: the client's base URL" in answer.body["error"]["message"]


def test_text_becomes_tokens_and_tokens_text(server):
    text = "the cat, café 🙂\n"
    said = server.post("/tokenize", {"model": "tiny", "prompt": text}).body
    assert said["tokens"] == tiny_tokenizer()(text)["input_ids"]
    assert (said["count"], said["max_model_len"]) == (len(said["tokens"]), 512)
    assert server.post("/detokenize", {"tokens": said["tokens"]}).body == {"prompt": text}


def test_a_conversation_becomes_the_tokens_that_the_model_reads(server):
    said = server.post("/tokenize", {"messages": MESSAGES}).body
    assert said["tokens"] == tiny_tokenizer()(rendered())["input_ids"]


TOKENIZE = {
    "neither": ("/tokenize", {}, "prompt"),
    "both": ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    "a misspelling": ("/tokenize", {"promt": "a"}, "promt"),
    "no tokens": ("/detokenize", {}, "tokens"),
    "text": ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
}


@pytest.mark.parametrize(("path", "body", "param"), TOKENIZE.values(), ids=TOKENIZE)
def test_tokenize_refuses_what_it_cannot_read(server, path, body, param):
    answer = server.post(path, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)


def test_health_and_version_answer(server):
    for path in "/health", "/health/ready", "/health/live", "/ping":
        assert server.get(path).status == 200
    assert server.get("/version").body == {"version": VERSION}


SERIES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
vllm:cache_config_info vllm:num_preemptions_total vllm:prompt_tokens_total
vllm:generation_tokens_total vllm:request_success_total vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:time_to_first_token_seconds_bucket
vllm:inter_token_latency_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
vllm:request_prefill_time_seconds_bucket vllm:request_decode_time_seconds_bucket
vllm:request_inference_time_seconds_bucket vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket vllm:request_params_max_tokens_bucket
vllm:iteration_tokens_total_bucket specserve_kv_blocks specserve_rows_total
specserve_step_rows_total
specserve_wasted_rows_total specserve_drafter_errors_total specserve_step_seconds_bucket
specserve_draft_seconds_bucket specserve_verify_seconds_bucket specserve_drafter_info
"""


def test_the_series_have_the_names_that_boards_read(server):
    server.post(CHAT, chat_body())
    answer = server.get("/metrics")
    names = {line.partition("{")[0] for line in answer.body.splitlines() if line[0] != "#"}
    assert answer.headers["content-type"].startswith("text/plain")
    assert set(SERIES.split()) <= names
    assert {name.partition("_")[0].partition(":")[0] for name in names} == {"vllm", "specserve"}


TOTALS = {
    "vllm:prompt_tokens_total": {},
    "vllm:generation_tokens_total": {},
    "vllm:spec_decode_num_draft_tokens_total": {},
    "vllm:spec_decode_num_accepted_tokens_total": {},
    "vllm:request_success_total": {"finished_reason": "length"},
    "vllm:e2e_request_latency_seconds_count": {},
}


def totals(server):
    labels = {"model_name": "tiny", "engine": "0"}
    return [server.metric(name, **labels, **more) for name, more in TOTALS.items()]


def test_the_counters_move_with_what_was_said(presets):
    server = presets["model"]
    before = totals(server)
    answer = server.post(CHAT, chat_body(max_tokens=60)).body
    moved = [b - a for a, b in zip(before, totals(server), strict=True)]
    usage, said = answer["usage"], answer["metrics"]["speculative_decoding"]
    assert moved[:2] == [usage["prompt_tokens"], usage["completion_tokens"]]
    assert moved[2:4] == [said["num_draft_tokens"], said["num_accepted_draft_tokens"]]
    assert moved[4:] == [1, 1]


def test_ends_are_counted_from_zero_so_that_the_first_error_is_a_rise(presets):
    name = "vllm:request_success_total"
    assert presets["model"].metric(name, finished_reason="error") == 0


def test_rows_are_counted_by_what_they_were_for(presets):
    server, kinds = presets["model"], ("prompts", "roots", "guesses")
    name = "specserve_step_rows_total"
    server.post("/v1/cache/reset", {})
    before = [server.metric(name, kind=kind) for kind in kinds]
    all_before = server.metric("specserve_rows_total")
    answer = server.post(CHAT, chat_body(max_tokens=60)).body
    moved = [server.metric(name, kind=k) - n for k, n in zip(kinds, before, strict=True)]
    usage, said = answer["usage"], answer["metrics"]["speculative_decoding"]
    assert moved[0] == usage["prompt_tokens"] and moved[2] == said["num_draft_tokens"]
    assert sum(moved) == server.metric("specserve_rows_total") - all_before
    assert moved[1] + 1 + said["num_accepted_draft_tokens"] == usage["completion_tokens"]


def test_a_prompt_without_an_answer_counts_as_a_request(presets):
    server, alone = presets["model"], completion_body(max_tokens=0, echo=True)
    server.post(COMPLETIONS, alone)
    before = totals(server)
    usage = server.post(COMPLETIONS, alone).body["usage"]
    moved = [b - a for a, b in zip(before, totals(server), strict=True)]
    assert moved == [usage["prompt_tokens"], 0, 0, 0, 1, 1]


def test_accepted_draft_tokens_are_counted_by_their_depth(presets):
    server = presets["model"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    before = [server.metric(name, position=at) for at in range(8)]
    answer = server.post(CHAT, chat_body(max_tokens=60)).body
    moved = [server.metric(name, position=at) - n for at, n in enumerate(before)]
    histogram = answer["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert moved == [sum(histogram[at + 1 :]) for at in range(8)] and moved[1] > 0


def app_with(**limits):
    """The application with nothing behind its guards."""
    names = {"name": "tiny", "adapters": SimpleNamespace(known={})}
    is_so = {"is_alive": True, "is_ready": True, "is_asleep": False}
    return make_app(SimpleNamespace(limits=ServerConfig(**limits), **names, **is_so))


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# for the frontend\n\nfirst\n  second \n")
    return file


@pytest.mark.parametrize(
    "authorization", [None, "Bearer other", "Bearer", "Bearer #", "Basic first", "first"]
)
def test_without_a_key_every_route_that_reports_of_this_server_is_shut(keys, authorization):
    app = app_with(api_key_file=str(keys))
    client = TestClient(app, headers={"Authorization": authorization} if authorization else None)
    assert {LIVENESS, "/docs", "/openapi.json", *PAGES, *PARTS} == OPEN
    for path in [*{route.path for route in app.routes} - OPEN, "/v1/nothing", "/page/nothing"]:
        for method in ("GET", "POST", "OPTIONS"):
            answer = client.request(method, path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            error = answer.json()["error"]
            message = error if path.startswith("/api/") else error["message"]
            assert "no valid API key" in message
    assert client.get(LIVENESS).json() == {"status": "alive"}
    assert {client.get(path).status_code for path in OPEN} == {200}


@pytest.mark.parametrize("authorization", ["Bearer first", "bearer second", "Bearer  second"])
def test_any_key_of_the_file_opens(keys, authorization):
    client = TestClient(app_with(api_key_file=str(keys)))
    assert client.get("/health", headers={"Authorization": authorization}).status_code == 200


def test_a_page_of_another_origin_is_let_in_only_where_it_is_named(server, keys):
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    for method in ("OPTIONS", "POST"):  # browsers send simple requests without asking first
        answer = server.ask(method, CHAT, chat_body(), headers=asked)
        assert answer.status == 403 and "access-control-allow-origin" not in answer.headers
        assert answer.body["error"]["code"] == "origin_not_allowed"
    limits = {"cors_origins": ("https://chat.example",), "api_key_file": str(keys)}
    client = TestClient(app_with(**limits))
    answer = client.options(CHAT, headers=asked)  # a browser asks without the key
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    other = client.options(CHAT, headers=asked | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert client.get("/v1/models", headers=asked).status_code == 401


@pytest.mark.parametrize("text", ["", "# none\n", "sk-a  # Alice\n", "sk-ä\n", "\ufeffsk-a\n"])
def test_a_file_that_holds_what_no_header_can_is_refused(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"keys(: | contains )"):
        app_with(api_key_file=str(file))


METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]
SPELLINGS = {  # other ways to write a path, as proxies, browsers and attackers do
    "as it is": lambda path: path,
    "a slash at its end": lambda path: f"{path}/",
    "two slashes at its beginning": lambda path: f"/{path}",
    "every slash twice": lambda path: path.replace("/", "//"),
    "a character encoded": lambda path: f"/{path[1:-1]}%{ord(path[-1]):02x}",
    "every character encoded": lambda path: "/" + "".join(f"%{ord(c):02X}" for c in path[1:]),
    "slashes encoded": lambda path: "/" + path[1:].replace("/", "%2F"),
    "encoded twice": lambda path: f"/{path[1:-1]}%25{ord(path[-1]):02x}",
    "upper case": str.upper,
    "a query": lambda path: f"{path}?path={LIVENESS}",
    "a parameter": lambda path: f"{path};{LIVENESS}",
    "below liveness": lambda path: f"{LIVENESS}{path}",
    "back from liveness": lambda path: f"{LIVENESS}/..{path}",
    "back from liveness, encoded": lambda path: f"{LIVENESS}%2f..{path}",
    "an end that C would see": lambda path: f"{path}%00{LIVENESS}",
    "with its host": lambda path: f"http://localhost{path}",
    "with a key": lambda path: f"http://first@localhost{path}",
}


@pytest.fixture(scope="module")
def locked(folder, tmp_path_factory):
    """A server that wants a key, and a connection to it."""
    keys = tmp_path_factory.mktemp("locked") / "keys"
    keys.write_text("first\n")
    with server_threads(folder, **{"server.api_key_file": str(keys)}) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        with contextlib.closing(connection):
            yield server, connection


def asked_bare(connection, method, path):
    """The status of a request, with its path sent as it is written, and the body."""
    connection.request(method, path, headers={"Content-Length": "0"})
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_method_and_no_spelling_of_a_path_opens_a_route_without_a_key(locked, spelling):
    _, connection = locked
    app = make_app(SimpleNamespace(limits=ServerConfig(), is_alive=True, is_ready=True))
    paths = {route.path.replace("{id:path}", "m") for route in app.routes}
    assert len(paths) > 20
    for path in paths - OPEN:
        for method in METHODS:
            status, body = asked_bare(connection, method, SPELLINGS[spelling](path))
            assert status == 401, (method, path)
            assert b"no valid API key" in body or method == "HEAD"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_is_open_is_so_by_its_own_path_alone(locked, spelling):
    _, connection = locked
    for path in sorted(OPEN):
        asked = SPELLINGS[spelling](path)
        target = urlsplit(asked).path if "://" in asked else asked.partition("?")[0]
        is_open = canonical(unquote(target)) in OPEN
        for method in METHODS:
            status, _ = asked_bare(connection, method, asked)
            assert status in ((200, 307, 405) if is_open else (401,)), (method, asked)


def test_with_a_key_the_same_server_answers(locked):
    server, _ = locked
    assert server.get("/v1/models", headers={"Authorization": "Bearer first"}).status == 200
