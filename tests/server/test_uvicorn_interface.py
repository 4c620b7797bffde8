"""A uvicorn or httptools that has changed is refused at start-up, by name and with a remedy."""

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from httptools import HttpParserUpgrade
from packaging.requirements import Requirement

from specserve.errors import ConfigError
from specserve.server import uvicorn_interface
from specserve.server.uvicorn_interface import (
    METHODS,
    REMEDY,
    HttpToolsProtocol,
    RequestResponseCycle,
    check,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", METHODS[HttpToolsProtocol])
def test_a_method_that_is_gone_is_reported_with_versions_and_remedy(monkeypatch, name):
    monkeypatch.delattr(HttpToolsProtocol, name)
    installed = f"uvicorn {version('uvicorn')} with httptools {version('httptools')}"
    with pytest.raises(ConfigError) as refusal:
        check()
    assert str(refusal.value).startswith(installed)
    assert f"HttpToolsProtocol.{name}" in str(refusal.value)
    assert "pip install" in str(refusal.value)


def test_another_parameter_is_reported(monkeypatch):
    monkeypatch.setattr(HttpToolsProtocol, "on_body", lambda self, body, is_last: None)
    with pytest.raises(ConfigError, match=r"HttpToolsProtocol\.on_body changed"):
        check()


def test_an_attribute_that_no_method_sets_is_reported(monkeypatch):
    def without_keep_alive(self):
        self.body, self.message_event, self.disconnected = b"", None, False
        self.response_complete = self.response_started = self.chunked_encoding = False

    for name in ("__init__", "send", "receive", "run_asgi"):
        monkeypatch.setattr(RequestResponseCycle, name, without_keep_alive)
    with pytest.raises(ConfigError, match=r"because RequestResponseCycle\.keep_alive changed"):
        check()


@pytest.mark.parametrize("args", [(), ("24",), (0,)])
def test_a_parser_that_does_not_report_where_an_upgrade_ends_is_refused(monkeypatch, args):
    class Parser:
        def __init__(self, protocol):
            pass

        def feed_data(self, data):
            raise HttpParserUpgrade(*args)

    monkeypatch.setattr(uvicorn_interface, "HttpRequestParser", Parser)
    with pytest.raises(ConfigError, match=r"because httptools\.HttpParserUpgrade changed"):
        check()


def test_a_server_does_not_start_with_a_uvicorn_that_has_changed():
    code = (
        "import uvicorn.protocols.http.httptools_impl as impl\n"
        "del impl.RequestResponseCycle\n"
        "import specserve.server.connection"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: uvicorn" in done.stderr and "RequestResponseCycle" in done.stderr


@pytest.mark.parametrize("name", ["uvicorn", "httptools", "starlette"])
def test_a_package_is_bounded_to_versions_that_were_tested(name):
    required = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}[name]
    assert version(name) in required.specifier
    assert {"<", ">="} == {s.operator for s in required.specifier}
    if name != "starlette":  # nothing but what it documents is used of it
        remedies = [Requirement(text) for text in REMEDY.split("'")[1::2]]
        assert required in remedies
