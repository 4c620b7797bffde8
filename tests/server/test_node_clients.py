"""The clients of JavaScript get the same answers streamed and whole, and errors as exceptions."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.calling import describing

HERE = Path(__file__).parent / "node"
MISSING = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
INSTALL = ["npm", "install", "--package-lock=false", "--no-audit", "--no-fund"]
ASKED = {
    "messages": [{"role": "user", "content": "the cat sat on the mat"}],
    "temperature": 0.8,
    "seed": 3,
    "max_tokens": 40,
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def folder_of_clients(tmp_path_factory):
    """Their packages never touch the repository."""
    folder = shutil.copytree(HERE, tmp_path_factory.mktemp("node") / "clients")
    subprocess.run(INSTALL, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def heard(server, folder_of_clients):
    """What the clients say of the server."""
    folder = folder_of_clients
    command = ["node", "clients.mjs", server.url]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


@pytest.mark.parametrize("client", ["openai", "sdk"])
def test_an_answer_is_the_same_streamed_and_whole(server, heard, client):
    answer = server.post("/v1/chat/completions", ASKED).body
    [choice], usage = answer["choices"], answer["usage"]
    assert (
        heard[client]["streamed"]
        == heard[client]["whole"]
        == {
            "text": choice["message"]["content"],
            "reason": choice["finish_reason"],
            "usage": [usage[f"{of}_tokens"] for of in ("prompt", "completion", "total")],
        }
    )


def test_a_response_is_that_of_a_plain_request_streamed_and_whole(server, heard):
    limit = {"max_output_tokens": ASKED["max_tokens"]}
    asked = {key: ASKED[key] for key in ("temperature", "seed")} | limit
    answer = server.post("/v1/responses", asked | {"input": ASKED["messages"]}).body
    [item], told = answer["output"], heard["responses"]
    assert (
        told["streamed"]
        == told["helped"]
        == told["whole"]
        == {
            "text": item["content"][0]["text"],
            "reason": "max_output_tokens",
            "usage": [answer["usage"][f"{of}_tokens"] for of in ("input", "output", "total")],
        }
    )


def test_anthropics_client_reads_messages(server, heard):
    answer = server.post("/v1/messages", ASKED).body
    text = "".join(block["text"] for block in answer["content"])
    told, tokens = heard["anthropic"], answer["usage"]["output_tokens"]
    expected = {"text": text, "reason": answer["stop_reason"], "tokens": tokens}
    assert told["streamed"] == told["whole"] == expected
    assert all(name == "weather" and given["city"] for name, given in told["calls"])
    assert (told["wrong"]["status"], told["nobody"]["status"]) == (400, 404)


def test_the_sdk_reads_responses_too(server, heard):
    limit = {"max_output_tokens": ASKED["max_tokens"], "temperature": 0}
    answer = server.post("/v1/responses", limit | {"input": ASKED["messages"]}).body
    [item], told = answer["output"], heard["sdkResponses"]
    usage = [answer["usage"][f"{of}_tokens"] for of in ("input", "output", "total")]
    expected = {"text": item["content"][0]["text"], "reason": "length", "usage": usage}
    assert told["streamed"] == told["whole"] == expected


def test_a_call_of_a_function_is_the_same_streamed_and_whole(heard):
    called = heard["responses"]["called"]
    assert called["name"] == "weather" and called["arguments"].startswith(called["streamed"])
    assert json.loads(called["streamed"])["city"] in ("Rome", "Paris")


def test_an_error_in_a_stream_is_an_error_of_the_client(paced, folder_of_clients):
    with paced(**{"server.served_model_name": "tiny"}) as server:
        command = ["node", "broken.mjs", server.url]
        node = subprocess.Popen(command, cwd=folder_of_clients, stdout=subprocess.PIPE, text=True)
        assert [node.stdout.readline() for _ in range(3)] == ["begun\n"] * 3
        server.kill_engines()
        raised = json.loads(node.communicate(timeout=20)[0])
    for client in ("openai", "responses", "sdk"):
        assert "engine process has ended" in (raised[client] or ""), raised


ERRORS = {
    "openai": ("BadRequestError", "NotFoundError"),
    "responses": ("BadRequestError", "NotFoundError"),
    "sdk": ("APICallError", "APICallError"),
    "sdkResponses": ("APICallError", "APICallError"),
}


@pytest.mark.parametrize("client", ERRORS)
def test_a_refusal_is_an_exception_that_says_why(heard, client):
    wrong, nobody = heard[client]["wrong"], heard[client]["nobody"]
    assert (wrong["name"], nobody["name"]) == ERRORS[client]
    assert (wrong["status"], nobody["status"]) == (400, 404)
    assert "temperature" in wrong["message"] and "'nobody' is not served" in nobody["message"]


def test_the_clients_call_functions_and_read_forms(calling, folder_of_clients):
    command = ["node", "tools.mjs", *calling]
    told = subprocess.run(
        command, cwd=folder_of_clients, capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr


def test_the_sdks_agent_calls_tools_of_a_model_that_shows_none(folder_of_clients):
    with describing() as server:
        command = ["node", "agent.mjs", f"http://127.0.0.1:{server.port}"]
        options = {"cwd": folder_of_clients, "capture_output": True, "text": True, "timeout": 60}
        told = subprocess.run(command, **options)
    assert told.returncode == 0, told.stderr
