"""What README and docs/ show of the server is run against one."""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from specserve.config import ServerConfig
from specserve.server.app import make_app
from specserve.server.body import FRONTENDS, HARMLESS, IGNORED
from specserve.server.pages import PARTS
from tests.server.conftest import PRESETS
from tests.server.in_process import server_threads

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
MANUAL = (ROOT / "docs/server.md").read_text()
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
CURLS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
CURLS = sorted({line for line in CURLS if line.startswith("curl ")})
EXAMPLES = [text for kind, text in BLOCKS if kind == "python" and "from openai" in text]
HERE = "http://127.0.0.1:8000"


@pytest.mark.parametrize("line", CURLS)
def test_every_curl_line_streams_an_answer(server, line):
    said = subprocess.check_output(shlex.split(line.replace(HERE, server.url) + " -s"), text=True)
    ends = "data: [DONE]\n\n", 'data: {"type":"message_stop"}\n\n'
    assert said.endswith(ends) and '"error"' not in said


def test_the_line_that_the_server_prints_works(server):
    said = subprocess.check_output([*shlex.split(server.said[-1]), "-s"], text=True)
    assert said.endswith("data: [DONE]\n\n") and '"error"' not in said


def test_a_start_ends_with_what_is_served_how_and_where(server, folder):
    model, drafter, formats, memory, address, page, _ = server.said
    assert model == f"serving {folder} as tiny"
    assert formats == "tool calls generic (described in the system text), reasoning none"
    sources = "auto (sources: ngram, grammar, prediction)"
    assert drafter == f"drafter {sources}, up to 63 draft tokens per request and step"
    assert re.fullmatch(
        r"memory KV of \d+ tokens, in blocks of 64: 18 MiB; up to 512 tokens per request", memory
    )
    assert re.fullmatch(rf"ready in [\d.]+ s at {server.url}", address)
    assert page == f"open {server.url} in a browser, or send a request:"


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("draft-model", "auto (sources: ngram, model, grammar, prediction), up to 63 draft tokens"),
        ("ngram", "ngram, up to 16 draft tokens"),
        ("off", "none, speculation is off"),
    ],
)
def test_a_start_names_all_sources(folder, capfd, preset, words):
    more = {"drafter.model": str(folder)} if preset == "draft-model" else {}
    with server_threads(folder, PRESETS[preset], **more):
        said = capfd.readouterr().out.splitlines()
    assert said[1].removesuffix(" per request and step") == f"drafter {words}"


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_with_the_openai_client_prints_an_answer(server, code):
    said, code = io.StringIO(), code.replace(HERE, server.url).replace("specserve-demo", "tiny")
    with contextlib.redirect_stdout(said):
        exec(compile(code, "an example", "exec"), {})
    assert said.getvalue()


def test_the_manual_names_every_route():
    [table] = re.findall(r"## Routes\n(.*?)\n##", MANUAL, re.DOTALL)
    app = make_app(SimpleNamespace(limits=ServerConfig()))
    routes = {route.path.replace(":path", "") for route in app.routes} - {*PARTS}
    assert set(re.findall(r"`(?:[A-Z]+ )?(/[\w/{}.-]*)`", table)) == routes


def test_the_manual_names_every_field_that_is_read_past():
    [listed] = re.findall(r"^\| (.*); `name` in a message \| ignored \|$", MANUAL, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) == HARMLESS
    [table] = re.findall(r"inside \| ignored fields \|\n.*?\n(.*?)\n\n", MANUAL, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", table)) - {"input"} == set().union(*IGNORED.values())
    [listed] = re.findall(r"^\| (.*) \| ignored, and listed in the .*$", MANUAL, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", listed)) == FRONTENDS
