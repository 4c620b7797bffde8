"""An engine of the peers' protocol whose times are made up, and which can misbehave."""

import json
import os
import signal
import subprocess
import sys
import time

PYTHON = sys.executable  # tests put an engine in its place
ENGINE = """#!/bin/sh
exec {python} {file} {folder} "$@"
"""
DECODE_MS = {1: 10.0, 2: 8.0, None: 4.0}  # by threads
PROMPT_MS = {1: 30.0, 2: 40.0, None: 20.0}


def fake_python(folder, behavior=""):
    """A file that can be named as the Python of any engine; `behavior` is done on the first run."""
    folder.mkdir(exist_ok=True)
    (folder / "behavior").write_text(behavior)
    script = folder / "python"
    script.write_text(ENGINE.format(python=PYTHON, file=__file__, folder=folder))
    script.chmod(0o755)
    return str(script)


def main(folder, option, *args):
    with open(os.path.join(folder, "behavior")) as file:
        behavior = file.read()
    if option == "-c":  # whether it has the engine's packages
        print(behavior != "lacks the engine")
    else:
        engine(folder, behavior, option, *args)


def engine(folder, behavior, minus_m, module, setup):
    assert (minus_m, module[:30]) == ("-m", "specserve_bench.peers.adapters")
    with open(os.path.join(folder, "started"), "a") as file:
        print(os.getpid(), module, setup, sep="\t", file=file)
    if behavior == "fails to load":
        sys.exit("OSError: no weights here")
    say({"ok": {"version": "7.0"}})
    for line in sys.stdin:
        misbehave(behavior)
        say({"ok": answers(json.loads(line), json.loads(setup))})


def misbehave(behavior):
    if behavior == "raises":
        say({"error": "ValueError: cannot\nspeculate"})
    elif behavior == "hangs":
        time.sleep(1000)
    elif behavior == "crashes":
        print("Fatal error: out of tiles", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif behavior == "has a child":
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, file=sys.stderr, flush=True)


def say(answer):
    print(json.dumps(answer), flush=True)


def answers(asked, setup):
    n, drafting = asked["num_tokens"], setup["drafting"]
    burst = 1 + (drafting["tokens"] if drafting else 0)
    counts = [1] + [burst] * ((n - 1) // burst)
    counts += [n - sum(counts)] if sum(counts) < n else []
    step = DECODE_MS[setup["threads"]] + (burst - 1)
    times = [(PROMPT_MS[setup["threads"]] + i * step) / 1e3 for i in range(len(counts))]
    one = {"token_ids": list(range(n)), "times": times, "counts": counts}
    return [one] * len(asked["prompts"])


if __name__ == "__main__":
    main(*sys.argv[1:])
