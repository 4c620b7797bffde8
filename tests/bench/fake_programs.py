"""llama.cpp's programs, made up: `llama-server` streams the tokens 1, 2, ..., and no model is read.

Run as PROGRAM ARGUMENTS, by scripts that `fake_programs` writes.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

SCRIPT = """#!/bin/sh
exec {python} {file} {name} "$@"
"""
HELD = 3  # this token ends within a character: the server sends it neither at once nor later


def fake_programs(folder, python=sys.executable):
    for name in ("llama-server", "llama-bench"):
        script = folder / name
        script.write_text(SCRIPT.format(python=python, file=__file__, name=name))
        script.chmod(0o755)
    return folder


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    asked = 0

    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked == 1 else 200)  # 503: the model is being loaded
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, body["cache_prompt"], body["ignore_eos"]) == ("/completion", False, True)
        self.send_response(200 if body["prompt"] else 400)
        self.end_headers()
        for total in range(1, body["n_predict"] + 1):
            if not (total == HELD and body["prompt"] == [HELD]):
                self.event({"tokens": [total], "tokens_predicted": total})
        self.event({"tokens": [], "tokens_predicted": body["n_predict"], "stop": True})

    def event(self, fields):
        self.wfile.write(f"data: {json.dumps(fields)}\n\n".encode())

    def log_message(self, *args):
        """Nothing."""


def serve(flags):
    if "broken" in flags["--model"]:
        sys.exit("error: no weights")
    HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()


def bench(flags):
    if "broken" in flags["--model"]:
        sys.exit("warning\nerror: no weights")
    prompt, tokens, depth = (int(flags[f"--n-{name}"]) for name in ("prompt", "gen", "depth"))
    seconds = prompt * 0.01 + tokens * depth * 0.001
    print(json.dumps([{"samples_ns": [round(1e9 * seconds)]}]))


def main(program, *args):
    if args == ("--version",):
        print("noise\nversion: 42 (abcdef)", file=sys.stderr)
        return
    flags = dict(zip(args[::2], args[1::2], strict=True))
    assert flags["--threads"] == "2"
    (serve if program == "llama-server" else bench)(flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
