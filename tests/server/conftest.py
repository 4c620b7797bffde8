"""One server for all tests that leave it as they found it, and one for every preset."""

import sys
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specserve import LLM
from tests.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.server.calling import TEMPLATE, replying
from tests.server.in_process import server_threads
from tests.server.server_process import SETTINGS, ServerProcess

CONFIGS = (Path(__file__).parents[2] / "configs").glob("*.toml")
PRESETS = {
    p.stem: p for p in CONFIGS if "device" not in tomllib.loads(p.read_text()).get("model", {})
}
LONG_NAME = "m" * 4000  # every event carries it: few of them fill the buffers of a connection
STRICT = {
    "scheduler.max_running": 1,
    "scheduler.prefill_chunk": 1,
    "server.max_connections": 300,
    "server.max_header_bytes": 2000,
    "server.header_seconds": 0.8,
    "server.body_seconds": 0.8,
    "server.stall_seconds": 0.5,
    "server.comment_seconds": 0.1,
    "server.max_queued_requests": 4,
    "server.max_queued_tokens": 600,
}
PACER = '''
import time
from specserve_drafters import Draft
from specserve_drafters.base import Options


class Pacer:
    """Guesses nothing; a seed below 10_000 is the milliseconds that a step takes."""

    needs_executor = False
    Options = Options

    def __init__(self, options):
        pass

    def propose(self, items):
        time.sleep(max((i.seed for i in items if i.seed < 10_000), default=0) / 1000)
        return [Draft() for _ in items]
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("served"), seed=1)


@pytest.fixture(scope="session")
def server(folder):
    """One for all tests that leave it as they found it. It drafts with n-grams."""
    with ServerProcess(folder, "--served-model-name=tiny") as server:
        yield server
        assert server.process.poll() is None, "a test has ended the server"


@pytest.fixture(scope="session")
def llm(folder):
    with LLM(folder, set=SETTINGS, progress=False) as llm:
        yield llm


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A checkpoint whose greedy text is printable ASCII, a character or more for every token."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("plain"), seed=1)
    weights, tokenizer = load_file(folder / "model.safetensors"), tiny_tokenizer()
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(320)]
    other = [
        i for i, text in enumerate(texts) if not (text and text.isascii() and text.isprintable())
    ]
    weights["lm_head.weight"][other] = 0  # the best of the others is always above that
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def calling(tmp_path_factory):
    """The URLs of two servers for functions and forms: one whose model is random, so that grammars
    make all calls, and one whose answers are those of tests/server/calling.py.
    """
    folder = tiny_checkpoint(tmp_path_factory.mktemp("calling"), max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"server.served_model_name": "tiny", "server.reasoning_parser": "none"}
    with ServerProcess(folder, **settings) as random, replying() as scripted:
        yield random.url, f"http://127.0.0.1:{scripted.port}"


class Presets(Mapping):
    """Servers by name, each started when it is first asked for: few files ask for all."""

    def __init__(self, servers, stack):
        self.servers, self.stack, self.started = servers, stack, {}

    def __getitem__(self, name):
        if name not in self.started:
            self.started[name] = self.stack.enter_context(self.servers[name]())
        return self.started[name]

    def __iter__(self):
        return iter(self.servers)

    def __len__(self):
        return len(self.servers)


@pytest.fixture(scope="session")
def presets(plain):
    """A server for every file in configs/ that asks for no device, and one whose draft model always
    guesses; all of them threads.
    """
    start = partial(server_threads, plain, **{"server.served_model_name": "tiny"})
    drafting, servers = {"drafter.model": str(plain)}, {}
    for name, path in PRESETS.items():
        drafts = "model" in tomllib.loads(path.read_text())["drafter"]
        servers[name] = partial(start, path, **drafting if drafts else {})
    drafting |= {"drafter.name": "model", "speculation.max_nodes": 8}
    servers["model"] = partial(start, **drafting)
    with ExitStack() as stack:
        yield Presets(servers, stack)


@pytest.fixture(scope="session")
def pacer(tmp_path_factory):
    """The folder of the drafter that paces."""
    path = tmp_path_factory.mktemp("pacer")
    (path / "pacer.py").write_text(PACER)
    return str(path)


@pytest.fixture(scope="session")
def paced(folder, pacer):
    """Starts servers whose steps take as long as requests say."""

    def start(**settings):
        env = {"PYTHONPATH": pacer}
        return ServerProcess(folder, "--drafter=pacer:Pacer", env=env, **settings)

    return start


@pytest.fixture(scope="session")
def paced_threads(folder, pacer):
    """The same, in threads of this process, for what needs no process and holds no bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, pacer])
        yield partial(server_threads, folder, **{"drafter.name": "pacer:Pacer"})


@pytest.fixture(scope="session")
def strict(paced):
    """A server of tight bounds, which shows a token at a time."""
    with paced(**STRICT, **{"server.served_model_name": LONG_NAME}) as server:
        yield server
        assert server.process.poll() is None, "a client has ended the server"
