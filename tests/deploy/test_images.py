"""The Dockerfiles, as far as they can be checked where no daemon runs, and the probe in them."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trustme

from specserve.cli import command as cli
from specserve.version import VERSION
from tests.deploy.tools import program
from tests.server.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("deploy/docker/*.Dockerfile"))
PROBE = ROOT / "deploy/docker/probe.py"
each_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)


def instructions(file):
    """(name, arguments) of each, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last_stage(file):
    lines = instructions(file)
    start = max(i for i, (name, _) in enumerate(lines) if name == "FROM")
    return dict(lines[start:])


@each_file
def test_the_image_runs_as_a_user_by_number_and_writes_in_a_volume_alone(file):
    stage = last_stage(file)
    assert stage["USER"] == "10001:10001"
    assert f"HOME={stage['VOLUME']}" in stage["ENV"]
    assert stage["STOPSIGNAL"] == "SIGTERM"


@each_file
def test_the_command_of_the_image_is_one_that_specserve_takes(file):
    stage = last_stage(file)
    command = json.loads(stage["ENTRYPOINT"]) + json.loads(stage["CMD"])
    args = cli.parser({}).parse_args(command[1:])
    assert (command[0], args.host) == ("specserve", "0.0.0.0")
    assert args.api_key_file == "/run/secrets/api-keys", "nobody serves a network without keys"


@each_file
def test_versions_in_the_image_are_those_of_the_project(file):
    text = file.read_text()
    [torch] = re.findall(r"^TORCH := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"\btorch==\S+", text) == [torch]
    assert f'version="{VERSION}"' in text
    bases = {args.split()[0] for name, args in instructions(file) if name == "FROM"} - {"base"}
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases), bases
    installs = re.findall(r"pip install ([^&]*)", text.replace("\\\n", ""))
    assert installs and all(args.startswith("-c constraints.txt") for args in installs)


@each_file
def test_the_image_has_the_packages_that_send_traces(file):
    [extras] = re.findall(r'pip install .*"specserve\[([\w,]+)\] @ file:', file.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "otel" in extras.split(",") and {*extras.split(",")} <= {
        *project["optional-dependencies"]
    }


@pytest.mark.slow
@each_file
def test_hadolint_finds_nothing(file):
    told = subprocess.run([program("hadolint"), file], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def probe(port, *args, **env):
    """As the image runs it: without the packages that are installed."""
    command = [sys.executable, "-IS", PROBE, *map(str, args)]
    env["PORT"] = str(port)
    return subprocess.run(command, env=env, capture_output=True).returncode


def test_the_probe_reports_a_live_and_a_ready_server_from_others(tmp_path):
    keys, others = tmp_path / "keys", tmp_path / "others"
    keys.write_text("# of the test\n\nsecret\nanother\n")
    others.write_text("wrong\n")
    with ServerProcess(None, f"--api-key-file={keys}") as server:
        assert probe(server.port, "/health/live") == 0
        assert probe(server.port, "/health/ready", keys) == 0
        assert probe(server.port, "/health/ready") == 1
        assert probe(server.port, "/health/ready", others) == 1
        assert probe(server.port, "/health/ready", tmp_path / "missing") == 1
    assert probe(server.port, "/health/live") == 1


def test_the_probe_asks_a_server_of_https_whose_certificate_it_does_not_know(tmp_path):
    made = trustme.CA().issue_cert("llm.example")
    made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    both = tmp_path / "both.pem"
    with ServerProcess(None, f"--ssl-certfile={both}", f"--ssl-keyfile={both}") as server:
        assert probe(server.port, "/health/live", SCHEME="https") == 0
        assert probe(server.port, "/health/ready", SCHEME="https") == 0
        assert probe(server.port, "/health/live") == 1
        assert probe(server.port, "/health/live", SCHEME="HTTPS") == 1


@each_file
def test_the_image_has_the_probe_and_asks_it(file):
    stage = last_stage(file)
    copied = [args.split() for name, args in instructions(file) if name == "COPY"]
    assert [f"--chmod=0755 {PROBE.relative_to(ROOT)} /usr/local/bin/specserve-probe".split()] == [
        args for args in copied if args[0].startswith("--chmod")
    ]
    assert shlex.split(stage["HEALTHCHECK"].partition("CMD")[2]) == shlex.split(
        '["specserve-probe", "/health/live"]'
    )
    python = PROBE.read_text().splitlines()[0].removeprefix("#!").split()[0]
    assert f"venv {Path(python).parents[1]}" in file.read_text()


PAGE = (ROOT / "docs/deployment.md").read_text()


INSTALL = (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^docker run .*", INSTALL, re.MULTILINE))
def test_an_image_without_keys_is_published_to_its_own_machine_only(line):
    image, *words = shlex.split(line.partition(f" specserve:{VERSION}-")[2])
    assert image in [file.stem for file in FILES]
    assert cli.parser({}).parse_args(["serve", *words]).allow_no_keys
    assert " -p 127.0.0.1:8000:8000 " in line


@pytest.mark.parametrize("line", re.findall(r"^docker run .*", PAGE, re.MULTILINE))
def test_what_the_page_says_to_run_has_arguments_that_specserve_takes(line):
    image, *words = shlex.split(line.partition(f" specserve:{VERSION}-")[2])
    [file] = [file for file in FILES if file.stem == image]
    stage = last_stage(file)
    command = json.loads(stage["ENTRYPOINT"]) + (words or json.loads(stage["CMD"]))
    args = cli.parser({}).parse_args(command[1:])
    assert f"./keys:{args.api_key_file}:ro" in line
    assert f":{stage['VOLUME']} " in line
