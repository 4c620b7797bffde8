"""How cached tokens of two servers are counted and held against each other."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from specserve.errors import ConfigError
from specserve_bench.figures import replicas
from specserve_bench.figures.__main__ import main
from specserve_bench.results import ratio


class Echo(BaseHTTPRequestHandler):
    """Answers a chat with the number of its messages; all but the last of them are cached."""

    asked: list[int]

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        self.asked.append([m["content"] for m in messages])
        usage = {"prompt_tokens": len(messages), "completion_tokens": 1}
        usage["prompt_tokens_details"] = {"cached_tokens": len(messages) - 1}
        choice = {"message": {"role": "assistant", "content": f"answer {len(messages)}"}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice], "usage": usage}).encode())

    def log_message(self, *args):
        pass


@contextmanager
def echo():
    Echo.asked = []
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_conversations_begin_with_one_file_and_grow_by_turns_and_answers(monkeypatch):
    monkeypatch.setattr(replicas, "CONVERSATIONS", 2)
    with echo() as url:
        turns = list(replicas.talk(url, 0, 0))
    assert [size for turn in turns for size, _ in turn] == [
        2 * number + 1 for number in range(replicas.NUM_TURNS) for _ in range(2)
    ]
    firsts = {asked[0] for asked in Echo.asked}
    assert len(firsts) == 2
    one, other = (first.partition("file.")[2][:300] for first in firsts)
    assert one == other
    assert Echo.asked[-1][1::2] == [f"answer {2 * n + 1}" for n in range(replicas.NUM_TURNS - 1)]


def test_a_row_reports_shares_of_medians_and_the_ratio_of_rounds():
    cached = {"random": [40, 50, 60], "cache_aware": [80, 90, 150]}
    row = {
        "pool": "half",
        "prompt_tokens": [100, 100, 200],
        "cached_tokens": cached,
        "times_as_many": ratio(cached["cache_aware"], cached["random"]),
        "wanted": 1.5,
    }
    cells = "| the file and half of the conversations | 50% | 90% | 2.00 (1.80-2.50) "
    line = replicas.table({"rows": [row]}).splitlines()[2]
    assert line.startswith(cells) and line.endswith("| at least 1.5 |")


def test_a_router_that_is_not_there_or_does_not_start_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--router nowhere: no such program; install"):
        main(["replicas", "--router", "nowhere"])
    program = tmp_path / "router"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    with (
        pytest.raises(ConfigError, match="did not become ready"),
        replicas.routed(str(program), [], []),
    ):
        pass
