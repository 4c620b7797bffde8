"""Downloads from a hub: a local server with the routes that the hub's client asks for."""

import json
import os
import subprocess
import sys
from functools import partial
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from tests.models.gguf_files import write

COMMIT, TOKEN = "0" * 40, "hf_secret"


class Hub(BaseHTTPRequestHandler):
    """The repositories org/name in a folder. Those called gated need TOKEN."""

    def __init__(self, folder, asked, *args):
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path).strip("/")
        self.asked.append(path)
        org, name, *rest = path.removeprefix("api/models/").split("/")
        repo = self.folder / org / name
        if not repo.is_dir():
            return self.respond(404, b"", {"X-Error-Code": "RepoNotFound"})
        if name == "gated" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.respond(401, b"", {"X-Error-Code": "GatedRepo"})
        files = sorted(str(f.relative_to(repo)) for f in repo.rglob("*") if f.is_file())
        if rest[:1] == ["resolve"]:
            return self.send(repo.joinpath(*rest[2:]))
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": f, "size": (repo / f).stat().st_size, "oid": "0"}
                for f in files
            ]
            return self.respond(200, json.dumps(entries).encode())
        told = {"id": f"{org}/{name}", "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
        self.respond(200, json.dumps(told).encode())

    def send(self, file):
        if not file.is_file():
            return self.respond(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        self.respond(200, content, {"ETag": f'"{sha256(content).hexdigest()}"'})

    def respond(self, status, content, headers=None):
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub with org/m-GGUF, of several types, and org/gated. Yields its environment."""
    folder, asked = tmp_path_factory.mktemp("hub"), []
    small = {"num_hidden_layers": 1}
    file = write(folder / "a", "llama", **small).file
    for name in ("org/m-GGUF/m-Q4_K_M.gguf", "org/m-GGUF/m-Q8_0.gguf", "org/gated/m-Q8_0.gguf"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file.read_bytes())
    for part in write(folder / "b", "llama", parts=8, **small).file.parent.glob("*.gguf"):
        named = part.name.replace("model-", "m-F16-")
        (folder / "org" / "m-GGUF" / "F16").mkdir(exist_ok=True)
        part.rename(folder / "org" / "m-GGUF" / "F16" / named)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, asked))
    Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "HF_HUB_DISABLE_XET": "1",
    }
    server.shutdown()
    server.server_close()


RESOLVE = """
import sys
from specserve.errors import ConfigError
from specserve.models.folder import resolve
from specserve.models.source import open_source
for path in sys.argv[1:]:
    try:
        file = resolve(path)
        open_source(file).check()
        print(file)
    except ConfigError as e:
        print(e)
"""


def resolved(environment, *paths, **others):
    """What a new process finds, because the hub's client reads its environment once."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | environment | others
    command = [sys.executable, "-W", "ignore", "-c", RESOLVE, *paths]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert not done.returncode and "Retrying" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_models_of_a_hub_are_downloaded_once_and_found_without_it(hub):
    paths = ["org/m-GGUF", "org/m-GGUF:Q8_0", "org/m-GGUF:f16", "org/m-GGUF:Q2_K", "org/none:Q8_0"]
    usual, asked, split, other, none = resolved(hub, *paths)
    assert Path(usual).name == "m-Q4_K_M.gguf"
    assert Path(asked).name == "m-Q8_0.gguf"
    assert Path(split).parts[-2:] == ("F16", "m-F16-00001-of-00002.gguf")
    assert other.startswith("org/m-GGUF:Q2_K is not in the repository. It has F16, Q4_K_M, Q8_0")
    assert none.startswith("org/none:Q8_0 is neither a local folder nor an accessible hub model")
    again = resolved(hub, *paths[:3], HF_HUB_OFFLINE="1")
    assert again == [usual, asked, split]
    unreachable = {**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert resolved(unreachable, "org/m-GGUF:Q8_0") == [asked]


def test_a_gated_model_needs_a_token(hub):
    [refused] = resolved(hub, "org/gated:Q8_0")
    assert "org/gated:Q8_0 is neither" in refused and "hf auth login" in refused
    [file] = resolved(hub, "org/gated:Q8_0", HF_TOKEN=TOKEN)
    assert Path(file).name == "m-Q8_0.gguf"
