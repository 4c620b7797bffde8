"""The pages as files: what browsers are told of them, and what they may load."""

import re
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from specserve.config import ServerConfig
from specserve.server.app import make_app
from specserve.server.pages import FOLDER, PAGES, PARTS, sent

FILES = PAGES | PARTS
MOST = 120_000  # bytes of all of them
MOST_LINES = 400  # of one of them
CSP = "content-security-policy"
NAMESPACE = "http://www.w3.org/2000/svg"


def client(base="http://127.0.0.1:8000", **limits):
    limits = ServerConfig(**limits)
    return TestClient(
        make_app(SimpleNamespace(limits=limits, is_alive=True, is_asleep=False)), base_url=base
    )


@pytest.mark.parametrize("path", FILES)
def test_a_page_may_load_and_run_what_is_of_this_server_alone(path):
    answer = client().get(path)
    assert answer.status_code == 200 and answer.content == sent(FILES[path])
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
    assert answer.headers["content-type"].startswith(kinds[FILES[path].rpartition(".")[2]])
    policy = dict(d.strip().split(" ", 1) for d in answer.headers[CSP].split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_has_not_changed_is_not_sent_again():
    first = client().get("/")
    again = client().get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for told in (f"W/{first.headers['etag']}", f'"a", {first.headers["etag"]}'):  # of proxies
        assert client().get("/", headers={"If-None-Match": told}).status_code == 304
    other = client().get("/", headers={"If-None-Match": '"other"'})
    assert other.content == first.content
    assert client().get("/dashboard").headers["etag"] != first.headers["etag"]


def test_all_files_are_served_and_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {*FILES.values()} == {path.relative_to(FOLDER).as_posix() for path in files}
    assert {path.parent.parent for path in files} == {FOLDER}
    assert sum(len(sent(name)) for name in {*FILES.values()}) < MOST
    assert all(len(path.read_text().splitlines()) < MOST_LINES for path in files)


@pytest.mark.parametrize("name", sorted({*FILES.values()}))
def test_files_are_sent_without_comments_and_indentation(name):
    text = (FOLDER / name).read_text()
    lines = [line.strip(" ") for line in text.split("\n")]
    assert sent(name).decode().split("\n") == ["" if ln[:2] == "//" else ln for ln in lines]


@pytest.mark.parametrize("name", sorted({*FILES.values()}))
def test_a_file_names_no_other_server_and_no_file_that_is_missing(name):
    text = (FOLDER / name).read_text()
    assert not re.search(r"(https?:)?//[\w.]+\.\w", text.replace(NAMESPACE, ""))
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=\"|javascript:", text)
    folder = (FOLDER / name).parent
    imported = [(folder / path).resolve() for path in re.findall(r'from "(\.[^"]+)"', text)]
    linked = [FOLDER / path for path in re.findall(r'"page/([^"]+)"', text)]
    assert all(path.is_file() for path in imported + linked)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


@pytest.mark.parametrize("own", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000", "box.lan:8000"])
def test_the_servers_own_pages_may_ask_it(own):
    answer = client(f"http://{own}", host="Box.lan").get(
        "/health/live", headers={"Origin": f"http://{own}"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:8000", "http://evil.example:8000"),  # which leads to this address
        ("127.0.0.1:8000", "http://127.0.0.1:8001"),
        ("127.0.0.1:8000", "http://127.0.0.1.evil.example:8000"),
        ("127.0.0.1:8000", "http://a@127.0.0.1:8000"),
        ("127.0.0.1:8000", "null"),
        ("127.0.0.1:8000", "http://[::1"),
        ("localhost.evil.example", "http://localhost.evil.example"),
    ],
)
def test_pages_of_other_servers_may_not(host, origin):
    headers = {"Origin": origin, "Host": host}
    answer = client().get("/health/live", headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_not_allowed"
