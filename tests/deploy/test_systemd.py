"""The systemd unit: systemd takes it, and the server runs under what it forbids."""

import ctypes
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from specserve.cli import command as cli
from specserve.config import ServerConfig
from specserve.server.serve import ENGINE_DIED, FLUSH_SECONDS
from tests.server.server_process import ServerProcess

UNIT = Path(__file__).parents[2] / "deploy/systemd/specserve.service"
PROGRAM = "/opt/specserve/bin/specserve"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze: the unit is NOT verified"
)


def settings(file=UNIT):
    found = defaultdict(list)
    for key, value in re.findall(r"^(\w+)=(.*)$", file.read_text(), re.MULTILINE):
        found[key].append(value)
    return found


@pytest.fixture
def unit(tmp_path):
    """The unit with a program that is here, and its drop-ins."""
    (tmp_path / "specserve.service.d").mkdir()
    for file in UNIT, *UNIT.parent.glob("specserve.service.d/*.conf"):
        copy = tmp_path / file.relative_to(UNIT.parent)
        copy.write_text(file.read_text().replace(PROGRAM, sys.executable))
    return tmp_path / UNIT.name


def analyze(*args):
    done = subprocess.run(["systemd-analyze", *map(str, args)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@needs_systemd
def test_systemd_understands_every_line(unit):
    assert analyze("verify", "--man=no", unit) == (0, "")


@needs_systemd
def test_systemd_counts_the_unit_among_the_least_exposed(unit):
    code, told = analyze("security", "--offline=true", "--threshold=20", "--no-pager", unit)
    if "unrecognized option" in told:
        pytest.skip("this systemd-analyze knows no thresholds: the exposure is NOT checked")
    assert code == 0, told  # 20: 2.0 of 10


def test_the_unit_runs_what_specserve_takes():
    [command] = settings()["ExecStart"]
    program, *words = command.split()
    args = cli.parser({}).parse_args([word for word in words if word != "$SPECSERVE_ARGS"])
    assert program == PROGRAM
    assert (*map(str, args.config), args.api_key_file) == (
        "/etc/specserve/config.toml",
        "%d/api-keys",
    )
    assert settings()["LoadCredential"] == ["api-keys:/etc/specserve/api-keys"]


def test_the_drop_in_for_https_adds_the_two_files_that_it_loads_to_the_command():
    its = settings(UNIT.parent / "specserve.service.d/tls.conf")
    [usual], [reset, command] = settings()["ExecStart"], its["ExecStart"]
    flags = "--tls-certificate-file %d/tls-certificate --tls-key-file %d/tls-key"
    assert (reset, command) == ("", usual.replace(" $", f" {flags} $"))
    assert [each.partition(":")[0] for each in its["LoadCredential"]] == [
        "tls-certificate",
        "tls-key",
    ]
    args = cli.parser({}).parse_args(command.replace(" $SPECSERVE_ARGS", "").split()[1:])
    assert args.tls_certificate_file == "%d/tls-certificate"
    assert args.tls_key_file == "%d/tls-key"


def test_the_unit_leaves_time_to_drain_and_starts_again_what_may_go_well():
    found = settings()
    [seconds] = map(int, found["TimeoutStopSec"])
    assert seconds > ServerConfig().drain_seconds + FLUSH_SECONDS
    assert found["Restart"] == ["on-failure"]
    final = {int(code) for code in found["RestartPreventExitStatus"][0].split()}
    assert final == {1, 2} and ENGINE_DIED not in final


FORBID = """
import ctypes, os, sys
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
assert ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "specserve", *sys.argv[1:]])
"""


class Forbidden(ServerProcess):
    """A server whose processes may not make memory executable that they have written."""

    program = sys.executable, "-c", FORBID


PR_GET_MDWE = 66


@pytest.mark.skipif(
    ctypes.CDLL(None).prctl(PR_GET_MDWE, 0, 0, 0, 0) < 0,
    reason="Linux before 6.3: whether the server needs executable memory is NOT checked",
)
def test_the_server_runs_where_written_memory_is_never_executable():
    assert settings()["MemoryDenyWriteExecute"] == ["yes"]
    chat = {"messages": [{"role": "user", "content": "What does shutil.copytree do?"}]}
    with Forbidden(None) as server:
        asked = chat | {"max_tokens": 16, "temperature": 0}
        for more in {}, {"response_format": {"type": "json_object"}}:
            answer = server.post("/v1/chat/completions", asked | more)
            assert answer.status == 200 and answer.body["choices"][0]["message"]["content"]
