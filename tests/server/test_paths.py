"""Paths with more slashes than their routes have."""

from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from specserve.config import ServerConfig
from specserve.server.app import CanonicalPath, make_app
from tests.server.asking import CHAT, COMPLETIONS, RESPONSES, chat_body, completion_body
from tests.server.test_routes import app_with

PATHS = {  # as it is sent -> as it is routed; the models are named tiny, /models/big/ and a//b
    "/v1/chat/completions": "/v1/chat/completions",
    "//v1/chat/completions": "/v1/chat/completions",
    "/v1//responses///": "/v1/responses",
    "//": "/",
    "/v1/models/": "/v1/models",
    "/v1//models//tiny/": "/v1/models/tiny",
    "/v1/models//models/big/": "/v1/models//models/big/",
    "//v1/models/a//b": "/v1/models/a//b",
    "/v1/models//a/b": "/v1/models/a/b",
    "/v1/models/a\n//b": "/v1/models/a\n/b",
    "*": "*",
}


@pytest.mark.parametrize(("given", "path"), PATHS.items())
def test_a_path_is_that_of_its_route(given, path):
    adapters = SimpleNamespace(known=["/models/big/", "a//b"])
    service = SimpleNamespace(name="tiny", adapters=adapters)
    assert CanonicalPath(None, service).path_of(given) == path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (f"/{CHAT}", chat_body(seed=1)),
        (f"{COMPLETIONS}/", completion_body(seed=1)),
        (f"{RESPONSES}//?a=b//", {"input": "a", "max_output_tokens": 4, "seed": 1}),
        ("//v1//chat/completions/?x=/", chat_body(seed=1)),
        ("//tokenize//", {"prompt": "a"}),
    ],
)
def test_more_slashes_reach_the_same_route(server, path, body):
    assert server.post(path, body).status == 200


@pytest.mark.parametrize("path", ["//health", "/metrics/", "/v1/models/?x=1", "//v1/models//tiny/"])
def test_more_slashes_reach_what_only_reports(server, path):
    answer = server.get(path)
    assert (answer.status, answer.headers["location"]) == (200, None)


@pytest.mark.parametrize("path", ["//other.example/", "//other.example/v1/models", "/v1/%2e%2e/"])
def test_other_paths_are_not_found_and_lead_nowhere(server, path):
    answer = server.get(path)
    assert (answer.status, answer.headers["location"]) == (404, None)


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/dashboard/", "../dashboard"),
        ("//docs//", "../../docs"),
        ("//dashboard", None),
        ("//", None),
    ],
)
def test_a_page_is_where_its_relative_links_work(server, path, location):
    answer = server.get(path)
    assert (answer.status, answer.headers["location"]) == (307 if location else 200, location)


def test_slashes_open_nothing_to_clients_without_a_key(tmp_path):
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("known\n")
    admins.write_text("admin\n")
    client = TestClient(app_with(api_key_file=str(keys), admin_key_file=str(admins)))
    paths = "//v1/models", "/v1/models/", "//v1/cache/reset", "/v1/cache/reset/", "//health/live/x"
    for path in paths:
        for method in ("GET", "POST", "PATCH"):
            assert client.request(method, f"http://testserver{path}").status_code == 401
    known = {"Authorization": "Bearer known"}
    refused = client.post("http://testserver//v1//cache/reset/", headers=known)
    assert refused.json()["error"]["code"] == "admin_key_needed"
    assert client.get("http://testserver//health/live/").status_code == 200


def test_the_log_has_the_path_of_the_route(caplog):
    service = SimpleNamespace(limits=ServerConfig(access_log=True), is_ready=True, is_asleep=False)
    with caplog.at_level("INFO"), TestClient(make_app(service)) as client:
        client.get("http://testserver//version//")
        client.get("http://testserver//health/")  # polled: no line
    assert [r.getMessage().split(" ")[:3] for r in caplog.records if "ms" in r.getMessage()] == [
        ["GET", "/version", "200"]
    ]
