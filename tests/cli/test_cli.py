import json
import os
import subprocess
import sys

import pytest

import specserve
from specserve.cli import command as cli
from specserve.errors import RequestError
from specserve.models import preflight
from specserve.version import VERSION
from tests.checkpoints import tiny_checkpoint
from tests.fake_llm import FakeLLM, FakeParams


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(preflight, "check", lambda config: None)  # there is no model
    monkeypatch.setitem(vars(specserve), "LLM", FakeLLM)
    monkeypatch.setitem(vars(specserve), "SamplingParams", FakeParams)
    return FakeLLM


def command(*args, **options):
    """The command in a process of its own, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "specserve", *args], capture_output=True, text=True, **options
    )


def test_text_goes_to_stdout_and_the_footer_to_stderr(fake, capsys):
    assert cli.main(["generate", "abc", "--model", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "cba\n"
    assert err.splitlines()[-1] == (
        "[2 tokens | TTFT 40 ms | 20.0 tokens/s | acceptance length 1.50"
        " | drafter ngram | ended by stop]"
    )


def test_the_footer_leaves_out_what_was_not_measured(fake, capsys):
    assert cli.main(["generate", "abc", "--model", "m", "--drafter", "none"]) == 0
    assert "acceptance" not in capsys.readouterr().err


def test_several_prompts_come_one_after_the_other(fake, capsys):
    assert cli.main(["generate", "abc", "xyz", "--model", "m"]) == 0
    assert capsys.readouterr().out == "cba\nzyx\n"


def test_json_is_one_object_a_prompt_and_nothing_else(fake, capsys):
    assert cli.main(["generate", "abc", "xyz", "--model", "m", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["cba", "zyx"]
    assert err == ""
    assert not fake.last.progress


def test_flags_reach_the_engine(fake, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[memory]\nblock_size = 8")
    flags = "--model m --draft-model d --drafter model --max-tokens 3 --temperature 0.5 --seed 9 "
    flags += "--quantize w4 --draft-quantize w8"
    settings = ["--set", "speculation.max_nodes=4", "--config", str(path)]
    assert cli.main(["generate", "a", *flags.split(), *settings]) == 0
    llm = fake.last
    assert (llm.model, llm.draft_model, llm.drafter) == ("m", "d", "model")
    assert (llm.quantize, llm.draft_quantize) == ("w4", "w8")
    assert (llm.config, llm.set) == ([path], {"speculation.max_nodes": 4})
    assert llm.params == FakeParams(max_tokens=3, temperature=0.5, seed=9)
    assert llm.is_closed


def test_a_head_reaches_the_engine(fake):
    assert cli.main(["generate", "a", "--model=m", "--draft-model=d", "--draft-head=h"]) == 0
    assert (fake.last.draft_model, fake.last.draft_head) == ("d", "h")


def test_the_model_may_stand_in_the_file(fake, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\npath = "m"')
    assert cli.main(["generate", "a", "--config", str(path)]) == 0
    assert fake.last.model == "m"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["generate", "a", "--model", "m", "--drafter", "model"], "--draft-model"),
        (["generate", "a", "--model", "m", "--set", "memory.blocksize=1"], "memory.block_size?"),
        (["generate", "a", "--model", "m", "--config", "gone.toml"], "gone.toml"),
        (["config", "check", "--set", "nonsense"], "section.key=value"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(fake, capsys, args, complaint):
    assert cli.main(args) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    ("args", "origin"),
    [
        (["serve", "--port=99999"], "--port: server.port = 99999"),
        (["serve", "m", "--served-model-name=\n"], "--served-model-name: server.served_model"),
        (["serve", "--tool-call-parser=a"], "--tool-parser: server.tool_parser = 'a'"),
        (["serve", "--reasoning-parser=a"], "--reasoning-parser: server.reasoning_parser = 'a'"),
        (
            ["serve", "--enable-auto-tool-choice", "--tool-parser=none"],
            "--enable-auto-tool-choice contradicts server.tool_parser = 'none'",
        ),
        (["serve", "--enable-auto-tool-choice", "--port=-1"], "--port: server.port = -1"),
        (["serve", "--demo-compute=gpt-9"], "--demo-compute: model.demo_compute = 'gpt-9'"),
        (
            ["serve", "m", "--demo-compute=qwen3-0.6b"],
            "MODEL, --demo-compute: model.demo_compute = 'qwen3-0.6b' works only with the demo",
        ),
        (["serve", ""], "MODEL: model.path = ''"),
        (["serve", "--host=0.0.0.0", "--set=server.port=-1"], "--set: server.port = -1"),
        (["generate", "a", "--model="], "--model: model.path = ''"),
        (["serve", "m", "--draft-quantize=w4"], "--draft-quantize: drafter.quantize = 'w4' needs"),
        (
            ["chat", "--drafter=ngram", "--draft-quantize=w8"],
            "--draft-quantize, --drafter: drafter",
        ),
        (
            ["chat", "--set=model.quantize_head=w4"],
            "--set: model.quantize_head = 'w4' has no effect",
        ),
        (
            ["chat", "--set=model.quantize_embedding=w8"],
            "--set: model.quantize_embedding = 'w8' has no effect",
        ),
        (
            ["chat", "--drafter=none", "--draft-quantize=w8"],
            "--draft-quantize, --drafter: drafter.name = 'none' does not use drafter.quantize",
        ),
        (
            ["chat", "--quantize=none"],
            "--quantize: model.quantize = 'none' is invalid: it must be one of w8a8, w8, w4; --set "
            "model.quantize= leaves it unset (",
        ),
        (
            ["serve", "--drafter=none", "--draft-model=d"],
            "--draft-model, --drafter: drafter.name = 'none' does not use drafter.model = 'd'",
        ),
        (["chat", "--draft-model=d", "--drafter=ngram"], "--draft-model, --drafter: drafter.name"),
        (["serve", "m", "--draft-head="], "--draft-head: drafter.head = ''"),
        (
            ["chat", "--draft-head=h", "--drafter=model", "--draft-model=d"],
            "--draft-head, --drafter: drafter.name = 'model' does not use drafter.head = 'h'",
        ),
        (
            ["generate", "a", "--draft-head=h", "--drafter=ngram"],
            "--draft-head, --drafter: drafter.name = 'ngram' does not use drafter.head = 'h'",
        ),
        (
            ["serve", "--demo-compute=qwen3-0.6b", "--draft-head=h"],
            "--demo-compute, --draft-head: model.demo_compute = 'qwen3-0.6b' works only "
            "with the demo models, and drafter.head = 'h' names another model",
        ),
        (
            ["chat", "--draft-head=h", "--draft-quantize=w8"],
            "--draft-quantize: drafter.quantize = 'w8' needs a draft model",
        ),
        (["chat", "--draft-model=d", "--set=drafter.name=ngram"], "--set, --draft-model: drafter"),
    ],
)
def test_a_mistake_is_blamed_on_what_was_typed(capsys, args, origin):
    assert cli.main(args) == 1
    assert capsys.readouterr().err.startswith(f"error: {origin}")


@pytest.mark.parametrize("command", [["generate", "a"], ["chat"]])
@pytest.mark.parametrize(
    ("flag", "value", "range"),
    [
        ("--max-tokens", "0", "1 or more"),
        ("--temperature", "-1.0", "0, or 0.0001 to 10000"),
        ("--temperature", "1e-05", "0, or 0.0001 to 10000"),
        ("--temperature", "nan", "0, or 0.0001 to 10000"),
        ("--seed", str(2**63), "-2^63 to 2^63 - 1"),
        ("--seed", str(-(2**63) - 1), "-2^63 to 2^63 - 1"),
    ],
)
def test_a_sampling_parameter_is_refused_before_a_model_is_loaded(
    fake, monkeypatch, capsys, command, flag, value, range
):
    monkeypatch.setattr(fake, "__init__", lambda *_, **__: pytest.fail("it is loaded"))
    assert cli.main([*command, "--model=m", f"{flag}={value}"]) == 1
    assert capsys.readouterr().err == f"error: {flag} {value} is invalid. Pass {range}\n"


def test_an_output_on_a_full_disk_asks_for_space():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specserve", "config", "show"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: the output: the disk is full. Free some space\n",
    )


@pytest.mark.parametrize("how", [["--json"], []])
def test_a_demos_cost_is_passed_on(fake, how):
    assert (
        cli.main(["generate", "a", "--demo-compute=qwen3-0.6b", "--set=model.threads=1", *how]) == 0
    )
    assert fake.last.set == {"model.demo_compute": "qwen3-0.6b", "model.threads": 1}
    assert fake.last.model is None


@pytest.mark.parametrize(
    ("error", "code"), [(RequestError("too long"), 1), (KeyboardInterrupt(), 130)]
)
def test_what_stops_a_stream_closes_the_engine(fake, monkeypatch, error, code):
    def stream(self, prompt, params):
        yield "a", [1]
        raise error

    monkeypatch.setattr(fake, "stream", stream)
    assert cli.main(["generate", "a", "--model", "m"]) == code
    assert fake.last.is_closed


@pytest.mark.parametrize("args", [["serve"], ["generate", "a"], ["chat"], ["config", "show"]])
def test_an_unknown_flag_shows_the_usage_of_its_command(capsys, args):
    with pytest.raises(SystemExit) as e:
        cli.main([*args, "--prot=8001"])
    told = capsys.readouterr().err
    assert e.value.code == 2 and told.startswith(f"usage: specserve {args[0]} ")
    assert told.endswith(f"\nspecserve {args[0]}: error: unrecognized arguments: --prot=8001\n")


FLAGS = {  # of `vllm serve`
    ("--max-model-len=99",): "\n--max-model-len: use --set scheduler.max_model_len=...\n",
    ("--speculative-config", "{}"): "\n--speculative-config: use --drafter, and --draft-model or ",
    ("--api-key", "secret"): "\n--api-key: write the key to a file and pass --api-key-file FILE\n",
    ("--model=m",): "\n--model: name the model without a flag: specserve serve MODEL\n",
}


@pytest.mark.parametrize(("flag", "words"), FLAGS.items(), ids=lambda given: str(given[0]))
def test_a_flag_of_another_server_is_reported_what_to_give_instead(capsys, flag, words):
    with pytest.raises(SystemExit):
        cli.main(["serve", *flag])
    assert words in capsys.readouterr().err


def test_an_interrupt_is_no_traceback_however_early_it_comes(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "ensure_streams", interrupt)
    assert cli.main(["config", "show"]) == cli.INTERRUPTED == 130


def test_a_bug_of_ours_is_not_dressed_up_as_an_error(fake, monkeypatch):
    monkeypatch.setattr(fake, "generate", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate", "a", "--model", "m", "--json"])


def test_config_show_prints_what_holds_and_check_says_ok(capsys):
    assert cli.main(["config", "show", "--set", "memory.block_size=4"]) == 0
    assert "block_size = 4  #" in capsys.readouterr().out
    assert cli.main(["config", "check"]) == 0
    assert capsys.readouterr().out.startswith("OK: settings, drafter and drafter options are valid")


def test_another_package_can_add_a_command(tmp_path, monkeypatch):
    info = tmp_path / "extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specserve.commands]\nextra = extra_command:main\n")
    (tmp_path / "extra_command.py").write_text("def main(argv):\n    return len(argv)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["extra", "--one", "two", "--help"]) == 3


def test_a_reader_that_leaves_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "specserve", "config", "show"], stdout=writer, stderr=-1, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_does_not_pay_for_torch():
    code = "import sys, specserve.cli.command as _; print(*(n in sys.modules for n in %r))"
    code %= (("torch", "numpy"),)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_version_is_printed():
    assert command("--version").stdout == f"specserve {VERSION}\n"


def test_a_tiny_model_generates_end_to_end(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny")
    args = ["--model", str(folder), "--max-tokens", "3", "--temperature", "0", "--json"]
    done = command("generate", "def read", *args)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert len(output["token_ids"]) == output["usage"]["completion_tokens"] == 3
    assert output["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [("drafter.name=nosuch.module:Class", "nosuch"), ("drafter.options.max_gram=9", "max_gram")],
)
def test_config_check_finds_a_drafter_that_could_not_be_made(setting, complaint, capsys):
    assert cli.main(["config", "check", "--set", setting]) == 1
    assert complaint in capsys.readouterr().err


def test_several_prompts_are_distinguished_on_stderr(fake, capsys):
    assert cli.main(["generate", "abc", "xyz", "--model", "m"]) == 0
    out, err = capsys.readouterr()
    assert out == "cba\nzyx\n"
    assert "[prompt 1 of 2]" in err and "[prompt 2 of 2]" in err
