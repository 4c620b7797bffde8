"""The id of a request: in its answer, whatever that is, and in the lines about it."""

import http.client
import json
import logging
import re

import pytest

from specserve import logs
from specserve.server import routes
from specserve.server.connection import HEADER, id_of
from tests.checkpoints import tiny_checkpoint
from tests.server.asking import CHAT, COMPLETIONS, head, saying
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess, eventually
from tests.server.test_tokens import STUCK, chat_with

NAME = "X-Request-Id"
MADE = re.compile(r"req-[0-9a-f]{32}")
PAGE = "https://chat.example"
TAKEN = {
    "one character": b"7",
    "the longest": b"a" * 128,
    "a space within": b"a b",
    "signs": b'!"#[]{}~',
}
REPLACED = {
    "nothing": b"",
    "too long": b"a" * 129,
    "a space before": b" a",
    "a space after": b"a ",
    "a line break": b"a\nb",
    "an escape": b"a\x1b[2J",
    "no ASCII": "é".encode(),
}


@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_an_id_that_can_be_shown_is_taken(given):
    assert id_of([(b"host", b"a"), (HEADER, given)]) == given.decode()


@pytest.mark.parametrize("given", REPLACED.values(), ids=REPLACED)
def test_any_other_is_replaced(given):
    assert MADE.fullmatch(id_of([(HEADER, given)]))


def test_each_request_without_one_gets_another():
    assert MADE.fullmatch(id_of([])) and id_of([]) != id_of([])


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("ids") / "stderr"


@pytest.fixture(scope="module")
def guarded(folder, log, tmp_path_factory):
    """A server with a key, an origin, and tight bounds."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("KEY\n")
    settings = {
        "server.access_log": "true",
        "server.cors_origins": json.dumps([PAGE]),
        "server.header_seconds": 0.5,
        "server.max_header_bytes": 2000,
    }
    with (
        log.open("w") as stderr,
        ServerProcess(folder, f"--api-key-file={keys}", stderr=stderr, **settings) as server,
    ):
        server.headers = {"Authorization": "Bearer KEY"}
        yield server


ANSWERS = {
    "an answer": ("POST", COMPLETIONS, saying(2), {}, 200),
    "a stream": ("POST", COMPLETIONS, saying(2, stream=True), {}, 200),
    "a probe": ("GET", "/health/live", None, {}, 200),
    "a page": ("GET", "/", None, {}, 200),
    "no valid field": ("POST", COMPLETIONS, saying(0), {}, 400),
    "no key": ("GET", "/v1/models", None, {"Authorization": ""}, 401),
    "another page's origin": ("GET", "/v1/models", None, {"Origin": "https://other.example"}, 403),
    "no route": ("GET", "/nowhere", None, {}, 404),
    "another method": ("DELETE", COMPLETIONS, None, {}, 405),
}


@pytest.mark.parametrize("asked", ANSWERS.values(), ids=ANSWERS)
def test_every_answer_has_the_id_of_its_request(guarded, asked):
    method, path, body, headers, status = asked
    for given, told in ({NAME: "mine-7"}, re.compile("mine-7")), ({}, MADE):
        answer = guarded.ask(method, path, body, headers | given)
        assert answer.status == status
        assert told.fullmatch(answer.headers[NAME])


def test_a_page_may_read_it(guarded):
    answer = guarded.get("/v1/models", headers={"Origin": PAGE})
    assert answer.headers["Access-Control-Expose-Headers"] == NAME


REFUSALS = {
    "no HTTP": (b"\x00\x00\r\n\r\n", "- -", 400, MADE),
    "too large headers": (head(f"{NAME}: mine", "X: " + "a" * 3000), f"POST {COMPLETIONS}", 431, 0),
    "slow headers": (
        f"GET /v1/models?key=SECRET HTTP/1.1\r\n{NAME}: mine\r\nX".encode(),
        "GET /v1/models",
        408,
        0,
    ),
    "too large headers of a path with more slashes": (
        f"GET //version//?x HTTP/1.1\r\n{NAME}: mine\r\nX: {'a' * 3000}\r\n\r\n".encode(),
        "GET /version",
        431,
        0,
    ),
    "a tunnel": (f"CONNECT a:1 HTTP/1.1\r\n{NAME}: mine\r\n\r\n".encode(), "CONNECT a:1", 405, 0),
}


def refused(server, sent):
    with server.connect() as client:
        client.sendall(sent)
        response = http.client.HTTPResponse(client)
        response.begin()
        response.read()
        return response


@pytest.mark.parametrize("asked", REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused_before_it_is_a_request_has_one_and_a_line(guarded, log, asked):
    sent, request, status, expected = asked
    begin = log.stat().st_size
    response = refused(guarded, sent)
    id = response.headers[NAME]
    assert response.status == status
    assert expected.fullmatch(id) if expected else id == "mine"
    line = re.compile(rf"^\S+ \S+ {re.escape(request)}.* {status} \d+ ms \[{id}\]$", re.M)
    eventually(lambda: line.search(log.read_bytes()[begin:].decode()))
    assert "SECRET" not in log.read_text()


def test_a_slow_request_has_no_id_of_the_one_before_it(guarded):
    with guarded.connect() as client:
        client.sendall(f"GET /health/live HTTP/1.1\r\nHost: a\r\n{NAME}: mine\r\n\r\n".encode())
        first = http.client.HTTPResponse(client)
        first.begin()
        first.read()
        client.sendall(b"\r\n")
        second = http.client.HTTPResponse(client)
        second.begin()
    assert (first.headers[NAME], second.status) == ("mine", 408)
    assert MADE.fullmatch(second.headers[NAME])


def test_the_line_of_a_request_ends_with_its_id(guarded, log):
    guarded.post(COMPLETIONS, saying(2), headers={NAME: "of a line"})
    eventually(lambda: re.search(r"POST \S+ 200 .* length \[of a line\]\n", log.read_text()))


def test_the_line_of_a_template_that_was_too_slow_has_the_id(tmp_path):
    folder, log = tiny_checkpoint(tmp_path / "stuck"), tmp_path / "stderr"
    (folder / "chat_template.jinja").write_text(STUCK)
    settings = {"server.template_seconds": 0.3}
    with log.open("w") as stderr, ServerProcess(folder, stderr=stderr, **settings) as server:
        answer = server.post(CHAT, chat_with("power"), headers={NAME: "slow one"})
        assert (answer.status, answer.headers[NAME]) == (400, "slow one")
        eventually(lambda: "is killed and replaced [slow one]\n" in log.read_text())


def test_a_bugs_answer_and_traceback_have_the_id(folder, monkeypatch, capsys):
    monkeypatch.setattr(routes, "card", lambda service: 1 / 0)
    monkeypatch.setattr(logging.root, "handlers", [])
    logs.configure("text")
    with server_threads(folder) as server:
        answer = server.get("/v1/models", headers={NAME: "of a bug"})
        assert (answer.status, answer.headers[NAME]) == (500, "of a bug")
        said = []
        eventually(lambda: said.append(capsys.readouterr().err) or "ZeroDivision" in said[-1])
    assert "Exception in ASGI application [of a bug]\nTraceback" in "".join(said)
