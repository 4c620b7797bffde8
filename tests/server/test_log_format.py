"""Lines on stderr as JSON objects, and the texts of requests where they are asked for."""

import json
import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from specserve import logs
from tests.checkpoints import tiny_checkpoint
from tests.server.asking import COMPLETIONS, saying, streaming
from tests.server.in_process import server_threads
from tests.server.server_process import ServerProcess, eventually

NOISY = '''
import os
import sys
import threading
import warnings
from specserve_drafters import Draft
from specserve_drafters.base import Options


class Noisy:
    """Prints, warns, fails in a thread, and then fails."""

    needs_executor = False
    Options = Options

    def __init__(self, options):
        print("printed\\nand", "more", file=sys.stderr)
        os.write(2, b"native words \\xff\\n")
        warnings.warn("beware")
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()

    def propose(self, items):
        raise LookupError("no guess")
'''
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
JSON = {"server.access_log": "true", "server.log_format": "json"}


@pytest.fixture(scope="module")
def noisy(folder, tmp_path_factory):
    """A server that has said all kinds of things, and all lines that it wrote until its end."""
    path = tmp_path_factory.mktemp("noisy")
    (path / "noisy.py").write_text(NOISY)
    file, env = path / "stderr", {"PYTHONPATH": str(path)}
    with (
        file.open("w") as stderr,
        ServerProcess(folder, "--drafter=noisy:Noisy", env=env, stderr=stderr, **JSON) as server,
    ):
        server.ask("POST", COMPLETIONS, saying(4, num_prompt=3), {"X-Request-Id": "one"})
        server.get("/v1/models?key=SECRET", headers={"Authorization": "Bearer SECRET"})
        with streaming(server, saying(400)):
            pass
        (engine,) = server.engines()
        server.kill_engines(1)
        eventually(lambda: server.engines() - {engine})
        eventually(lambda: server.get("/health").status == 200)
        with server.connect() as client:
            client.sendall(b"\0\r\n\r\n")
            client.recv(1000)
        server.signal()
        assert server.exit_code() == 0
        yield SimpleNamespace(said=server.said, raw=file.read_text())


@pytest.fixture(scope="module")
def lines(noisy):
    return [json.loads(line) for line in noisy.raw.splitlines()]


def said(lines, words, **fields):
    """The lines whose message has these words."""
    return [
        line
        for line in lines
        if words in line["message"] and all(line.get(k) == v for k, v in fields.items())
    ]


def test_every_line_is_an_object_with_time_level_logger_and_message(lines):
    assert all(TIME.fullmatch(line["time"]) for line in lines)
    assert all({"level", "logger", "message"} <= line.keys() for line in lines)
    assert {line["level"] for line in lines} == {"info", "warning", "error", "critical"}


def test_the_line_of_a_request_has_its_fields(lines):
    [line] = said(lines, "POST", request_id="one")
    assert (line["logger"], line["level"]) == ("specserve.access", "info")
    assert line["duration_ms"] >= line["ttft_ms"] > 0
    told = "method", "path", "status", "prompt_tokens", "completion_tokens", "finish_reason"
    assert [line[name] for name in told] == ["POST", COMPLETIONS, 200, 3, 4, "length"]
    assert line["client_left"] is False
    assert "prompt" not in line and "text" not in line


def test_a_client_that_left_is_a_field(lines):
    [line] = [line for line in lines if line.get("client_left")]
    assert line["finish_reason"] == "abort"


def test_a_request_without_tokens_has_no_fields_of_them(lines):
    [line] = said(lines, "GET /v1/models 200")
    assert "prompt_tokens" not in line and "SECRET" not in json.dumps(lines)


def test_a_refusal_before_a_request_is_an_object_too(lines):
    [line] = said(lines, "- - 400")
    assert line["request_id"].startswith("req-") and line["status"] == 400


def test_what_the_engine_process_says_is_objects(lines):
    assert said(lines, "printed", logger="stderr", level="info")
    assert said(lines, "and more", logger="stderr")
    assert said(lines, "native words \\xff", logger="stderr")
    assert said(lines, "beware", logger="py.warnings", level="warning")
    error, *_ = said(lines, "no guess", logger="specserve", level="error")
    assert error["traceback"].startswith("Traceback") and "LookupError" in error["traceback"]
    thread, *_ = said(lines, "uncaught exception", level="critical")
    assert "ZeroDivisionError" in thread["traceback"]


def test_the_start_is_one_object_with_its_phases(lines):
    first, *_ = said(lines, "start-up")
    assert {"imports", "tokenizer", "pool"} <= first["phases"].keys()
    assert not said(lines, "─")


def test_a_restart_is_an_error(lines):
    assert said(lines, "Engine process exited (signal 9)", level="error")


def test_stdout_has_the_introduction_as_it_is(noisy):
    assert any(line.startswith("ready in ") for line in noisy.said)


def test_an_error_that_ends_the_command_is_an_object(tmp_path):
    command = [sys.executable, "-m", "specserve", "serve", str(tmp_path), "--port=0"]
    done = subprocess.run(
        [*command, "--set=server.log_format=json"], capture_output=True, text=True, check=False
    )
    [line] = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1 and line["level"] == "error"
    assert line["message"].startswith("error: ") and str(tmp_path) in line["message"]


PROMPT = "the cat\n\x1b[2J" + 3000 * "a"


def test_texts_are_fields_where_they_are_asked_for(logged):
    answer, line = logged("json")
    fields = json.loads(line)
    assert fields["prompt"] == PROMPT[:2000]
    assert fields["text"] == answer and "\x1b" not in line


def test_texts_are_in_a_line_of_text_with_control_characters_escaped(logged):
    answer, line = logged("text")
    [prompt, text] = re.search(r", prompt (\".*\"), text (\".*\") \[req-", line).groups()
    assert json.loads(prompt) == PROMPT[:2000]
    assert line.isprintable() and text == logs.quoted(answer)


@pytest.fixture
def logged(tmp_path, monkeypatch, capsys):
    """The text of an answer, and its request's line."""
    monkeypatch.setattr(logging.root, "handlers", [])
    folder = tiny_checkpoint(tmp_path, seed=1, max_position_embeddings=4096)

    def logged(log_format):
        logs.configure(log_format)
        settings = {"server.access_log": True, "server.log_texts": True}
        with server_threads(folder, **settings, **{"server.log_format": log_format}) as server:
            body = saying(4, temperature=0) | {"prompt": PROMPT}
            answer = server.post(COMPLETIONS, body)
            assert answer.status == 200, answer.body
            said = []
            eventually(lambda: said.append(capsys.readouterr().err) or "POST" in said[-1])
        return answer.body["choices"][0]["text"], "".join(said).splitlines()[-1]

    return logged


def test_a_librarys_own_handler_is_taken_away(monkeypatch):
    logger = logging.getLogger("tests.a_library")
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    for module, name in (sys, "stderr"), (sys, "excepthook"), (logging.root, "handlers"):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("threading.excepthook", None)
    monkeypatch.setattr(logging.root.manager, "loggerDict", {"tests.a_library": logger})
    logs.take_over()
    logging.captureWarnings(False)
    assert not logger.handlers and logger.propagate
