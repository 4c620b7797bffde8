"""README's commands as they are written, in a new checkout, by a user with empty caches."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
[SERVE] = re.findall(r"^(make serve)", README, re.MULTILINE)
[ASK] = re.findall(r"^curl .*", README, re.MULTILINE)
[ACTIVATE] = re.findall(r"^source .*", README, re.MULTILINE)
ADDRESS = "127.0.0.1", 8000
KEPT = "PIP_", "UV_", "SSL_", "HTTP", "http", "NO_PROXY", "no_proxy"  # where packages come from
SECONDS = 10
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What `git clone` gives, set up; and the environment of its user."""
    with socket.socket() as port:
        if port.connect_ex(ADDRESS) == 0:
            pytest.skip("somebody listens at port 8000: README is NOT checked here")
    home = tmp_path_factory.mktemp("home")
    python = Path(sys.executable).resolve().parent
    env = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    env |= {"HOME": str(home), "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin"}
    folder = home / "specserve"
    subprocess.run(["git", "clone", "-q", ROOT, folder], env=env, check=True)
    told = subprocess.run(["make", "setup"], cwd=folder, env=env, capture_output=True, text=True)
    if told.returncode and "Retrying (Retry(" in told.stderr:
        pytest.skip("no package index answers: README is NOT checked here")
    assert told.returncode == 0, told.stderr[-4000:]
    return folder, env


def test_the_first_answer_comes_within_ten_seconds_of_the_start(checkout):
    folder, env = checkout
    start = perf_counter()
    with subprocess.Popen(
        shlex.split(SERVE), cwd=folder, env=env, stdout=subprocess.PIPE, text=True, process_group=0
    ) as server:
        try:
            for line in server.stdout:
                if "ready in" in line:
                    break
            told = subprocess.check_output([*shlex.split(ASK), "-s"], env=env, text=True)
            seconds = perf_counter() - start
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert told.endswith("data: [DONE]\n\n") and '"error"' not in told
    print(f"the first whole answer came {seconds:.1f} s after the start")
    assert seconds < SECONDS


def test_a_command_of_the_environment_runs(checkout):
    folder, env = checkout
    command = "specserve generate 'with open(path) as f:' --max-tokens=8 --temperature=0"
    told = subprocess.run(
        ["bash", "-c", f"{ACTIVATE} && {command}"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0 and told.stdout.strip(), told.stderr
