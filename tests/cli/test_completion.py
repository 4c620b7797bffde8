"""What a shell offers for the command's arguments; bash itself asks."""

import subprocess
import sys

import pytest

from specserve.cli import command as cli

ASK = """
source "$2"
complete -p specserve >&2
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete specserve
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The file of what `specserve completion bash` prints."""
    path = tmp_path_factory.mktemp("script") / "specserve.bash"
    with path.open("w") as file:
        command = [sys.executable, "-m", "specserve", "completion", "bash"]
        subprocess.run(command, stdout=file, check=True)
    return path


@pytest.fixture
def offered(script, tmp_path, monkeypatch):
    """The words that bash offers at the end of a line, in a folder with one file and one folder."""
    command, folder = tmp_path / "bin" / "specserve", tmp_path / "here"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m specserve "$@"\n')
    command.chmod(0o755)
    (folder / "models").mkdir(parents=True)
    (folder / "mine.toml").touch()
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")

    def ask(line):
        args = ["bash", "--norc", "-c", ASK, "bash", line, script]
        done = subprocess.run(args, capture_output=True, text=True, cwd=folder)
        assert "-F _python_argcomplete specserve" in done.stderr, done.stderr
        return {word.strip() for word in done.stdout.splitlines()} - {""}

    return ask


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("s", {"serve"}),
        ("be", {"bench"}),
        ("serve --draft-", {"--draft-model", "--draft-head", "--draft-quantize"}),
        ("serve --drafter ", {"none", "auto", "ngram", "model", "eagle"}),
        ("generate --draft-quantize w8", {"w8", "w8a8"}),
        ("quantize m t --to ", {"w8a8", "w8", "w4"}),
        ("config show --set server.tool", {"server.tool_parser="}),
        ("config show --set memory.kv_dtype=", {"auto", "int8", "fp8"}),
        ("config show --set memory.prefix_cache=", {"true", "false"}),
        ("config show --set nonsense=", set()),
        ("chat --config m", {"mine.toml", "models/"}),
        ("serve --draft-model mo", {"models/"}),
        ("serve --draft-head mo", {"models/"}),
        ("chat --draft-head mo", {"models/"}),
        ("generate --draft-head mo", {"models/"}),
        ("serve --port m", set()),
        ("completion ba", {"bash"}),
    ],
)
def test_what_may_follow_is_offered(offered, line, words):
    assert offered(f"specserve {line}") == words


def test_a_command_of_another_package_is_completed_by_its_own_parser(offered):
    assert {"latency", "load", "show"} <= offered("specserve bench ")
    assert offered("specserve bench latency --work") == {"--workloads"}
    assert offered("specserve doctor --qu") == {"--quantize"}


def test_a_command_without_a_parser_is_not_run(offered, tmp_path, monkeypatch):
    info = tmp_path / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specserve.commands]\nextra = extra_command:main\n")
    (tmp_path / "extra_command.py").write_text("def main(argv):\n    open('ran', 'w')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert offered("specserve ex") == {"extra"}
    assert offered("specserve extra ") == set()
    assert not (tmp_path / "here" / "ran").exists()


@pytest.mark.parametrize(
    ("shell", "line"), [("zsh", "#compdef specserve"), ("fish", "complete --command specserve")]
)
def test_other_shells_have_a_script(capsys, shell, line):
    assert cli.main(["completion", shell]) == 0
    assert line in capsys.readouterr().out


def test_only_a_shell_that_asks_pays_for_completion():
    code = "import sys; from specserve.cli import command; command.main(['config', 'check']); "
    code += "sys.exit('argcomplete' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
