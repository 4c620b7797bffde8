"""Commands that are refused in a line, before torch is imported."""

import json
import subprocess
import sys
from contextlib import contextmanager
from time import perf_counter

HEAVY = "torch", "transformers"
# The command, in a process that cannot import torch and start no other. It is forked for each line
# of JSON: a folder, arguments, and files for stdout and stderr. So modules are imported only once.
COMMANDS_IN_FORKS = f"""
import json, os, sys

class Spared:
    def find_spec(self, name, path=None, target=None):
        assert name not in {HEAVY}, f"{{name}} is imported"

def spawned(config):
    raise AssertionError("a process is started")

sys.meta_path.insert(0, Spared())
from specserve.exchange import spawn
spawn.ForkServer.start = spawned
from specserve.cli.command import main

for line in sys.stdin:
    folder, args, *files = json.loads(line)
    if (child := os.fork()) == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.exit(main(args))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
COMMANDS = {"serve": [], "generate": ["a prompt"], "chat": []}
SECONDS = 30  # far more than it takes on a busy machine


@contextmanager
def refusals(said):
    """A function that runs a command in a folder and returns the one line on stderr; in time,
    without torch. `said` is a folder for what commands print.
    """
    files = said / "stdout", said / "stderr"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def run(folder, command, *args):
        args = [a.removeprefix("--model=") if command == "serve" else a for a in args]
        start = perf_counter()
        asked = [str(folder), [command, *COMMANDS[command], *args], *map(str, files)]
        print(json.dumps(asked), file=process.stdin, flush=True)
        exit_code = process.stdout.readline()
        assert perf_counter() - start < SECONDS
        stdout, stderr = (file.read_text() for file in files)
        assert (exit_code, stdout) == ("1\n", ""), stderr
        assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
        return stderr

    with subprocess.Popen([sys.executable, "-c", COMMANDS_IN_FORKS], **streams) as process:
        yield run
