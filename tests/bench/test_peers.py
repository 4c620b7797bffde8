"""`specserve bench peers`: processes, sweeps, rounds and tables, with engines that are made up."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from time import monotonic, sleep

import pytest

from specserve.cli.command import main
from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.errors import ConfigError
from specserve.models import parse_config
from specserve.models.gguf.header import read_header
from specserve.text.tokenizer import load_tokenizer
from specserve_bench import bound
from specserve_bench.bound import Cost, Rates, StepSize, cost
from specserve_bench.peers import command, peer, systems
from specserve_bench.peers.cases import (
    PeerCase,
    PeerSizes,
    agreement,
    bound_size,
    make_cases,
    step_ms,
    tokens_per_s,
    tokens_per_step,
    tpot_ms,
    ttft_ms,
)
from specserve_bench.peers.comparison import (
    Lane,
    MeasuredGroup,
    Pick,
    Sweep,
    measure,
)
from specserve_bench.peers.peer import Peer, PeerError, checked_python, has_packages
from specserve_bench.peers.protocol import (
    AUTO,
    DRAFT,
    LOOKUP,
    PeerDrafting,
    Setup,
    Timed,
    write_setup,
)
from specserve_bench.peers.systems import (
    PeerChoice,
    System,
    drafting_choices,
    make_systems,
    thread_choices,
)
from specserve_bench.peers.table import caption, group_result, shown, summary, sweep_summary, table
from tests.bench.fake_engine import PYTHON, fake_python
from tests.checkpoints import tiny_checkpoint
from tests.models import gguf_files

SETUP = Setup("model", 64, 1, 1 << 20, 1, None)
PROMPT = [1, 2, 3]
SMALL_SHAPE = {
    **systems.SHAPES["qwen3-0.6b"],
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
}


def system(folder, behavior="", name="vLLM"):
    return System(name, name.lower(), fake_python(folder, behavior), True, (2, 4), (3,))


def no_rates():
    """For measurements without a bound."""


def starts(folder):
    return [line.split("\t") for line in (folder / "started").read_text().splitlines()]


def state(pid):
    """The letter of a process's state; Z where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def gets_to(pid, letter):
    """Whether a process gets to that state within seconds: signals take their time."""
    deadline = monotonic() + 30
    while state(pid) != letter and monotonic() < deadline:
        sleep(0.01)
    return state(pid) == letter


def timed(times, counts=None, token_ids=None):
    one = Timed(0.0)
    one.times, one.counts = list(times), counts or [1] * len(times)
    one.token_ids = token_ids or [0] * sum(one.counts)
    return one


def test_an_engine_is_stopped_whenever_it_is_not_asked(tmp_path):
    with Peer(system(tmp_path), SETUP, 10) as peer:
        assert peer.version == "7.0"
        pid = peer.process.pid
        assert gets_to(pid, "T")
        [done] = peer.run([PROMPT], 4, is_batch=False)
        assert (done.token_ids, done.times) == ([0, 1, 2, 3], [0.03, 0.04, 0.05, 0.06])
        assert gets_to(pid, "T")
    assert state(pid) == "Z"


@pytest.mark.parametrize(
    ("behavior", "words"),
    [
        ("fails to load", "OSError: no weights here"),
        ("raises", "ValueError: cannot speculate"),
        ("crashes", "Fatal error: out of tiles"),
        ("hangs", r"no answer within 0\.5 s"),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path, behavior, words):
    limit = 0.5 if behavior == "hangs" else 10
    with pytest.raises(PeerError, match=f"^{words}$"):  # noqa: SIM117, either may raise
        with Peer(system(tmp_path, behavior), SETUP, limit) as peer:
            peer.run([PROMPT], 4, is_batch=False)
    assert state(starts(tmp_path)[0][0]) == "Z"


RAISES = """
from types import SimpleNamespace
from specserve.errors import ConfigError
from specserve_bench.peers.protocol import EngineError, serve
def fail(*args):
    raise {error}
serve({load})
"""


LOADS = "fail", "lambda setup: SimpleNamespace(version='1', together=fail)"


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ConfigError('no room: give it some')", "no room: give it some"),
        ("EngineError('no room')", "no room"),
        ("MemoryError('no room')", "MemoryError: no room"),
    ],
)
def test_an_error_of_ours_is_its_sentence_and_any_other_has_its_class(load, error, words):
    code = RAISES.format(load=load, error=error)
    asked = json.dumps({"prompts": [PROMPT], "num_tokens": 2, "is_batch": False})
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(write_setup(SETUP))],
        input=asked,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"error": words}


def test_a_python_that_is_not_there_is_named():
    absent = System("vLLM", "vllm", "/no/such/python", True, (), ())
    with pytest.raises(PeerError, match=r"^/no/such/python: No such file or directory$"):  # noqa: SIM117
        with Peer(absent, SETUP, 10):
            pass


def test_a_python_is_made_absolute_and_its_link_is_not_followed(tmp_path, monkeypatch):
    real = fake_python(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "real"), prepend=":")
    assert checked_python("llama", "./link") == str(tmp_path / "link")
    assert checked_python("llama", "real/python") == real
    assert checked_python("llama", "python") == real


def script(folder, text):
    file = folder / "script"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_a_file_that_is_no_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(peer, "TIMEOUT", 0.2)
    for text, words in [
        ("exit 0", "exit code 0"),
        ("echo oh; echo dear >&2", "dear"),
        ("exec sleep 9", r"no answer within 0\.2 s"),
    ]:
        file = script(tmp_path, text)
        with pytest.raises(ConfigError, match=rf"^--vllm {file}: does not run .*\({words}\)"):
            checked_python("vllm", file)


def test_packages_are_looked_for_where_no_folder_can_be_taken_for_one(tmp_path, monkeypatch):
    (tmp_path / "absent_package").mkdir()
    monkeypatch.chdir(tmp_path)
    assert has_packages("", PYTHON, ("json", "struct"))
    assert not has_packages("", PYTHON, ("json", "absent_package"))


def test_too_few_tokens_are_an_error(tmp_path, monkeypatch):
    with Peer(system(tmp_path), SETUP, 10) as peer:
        monkeypatch.setattr(
            peer, "answer", lambda: [{"token_ids": [1], "times": [1], "counts": [1]}]
        )
        with pytest.raises(PeerError, match="1 tokens came where 4 were asked for"):
            peer.run([PROMPT], 4, is_batch=False)


def test_an_interrupt_ends_the_engines_and_all_that_they_started(tmp_path):
    case = PeerCase("plain", [PROMPT], 4)
    job = Lane(system(tmp_path, "has a child"), case, Pick(PeerChoice(1, None)))

    def start(system, choice, cases):
        return Peer(system, SETUP, 10)

    children = []

    def interrupt(words):
        if words == "round 1 of 5":
            [pid] = {pid for pid, *_ in starts(tmp_path)}
            children.extend([pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([job], start, 5, interrupt, no_rates)
    assert len(children) == 2
    assert all(gets_to(pid, "Z") for pid in children)


def test_an_engine_sees_no_package_and_no_openmp_setting_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with Peer(system(tmp_path), SETUP, 10) as peer:
        variables = Path(f"/proc/{peer.process.pid}/environ").read_text().split("\0")
        folder = Path(os.readlink(f"/proc/{peer.process.pid}/cwd"))
        assert [path.name for path in folder.iterdir()] == ["specserve_bench"]
    assert not [v for v in variables if v.startswith(("OMP_WAIT_POLICY", "PYTHONPATH"))]
    assert not folder.exists()


def test_threads_are_tried_in_powers_of_two_up_to_all_cores(tmp_path):
    assert [c.threads for c in thread_choices(system(tmp_path), 6)] == [1, 2, 4, 6]
    assert [c.threads for c in thread_choices(system(tmp_path), 1)] == [1]
    own = system(tmp_path)._replace(threads=False)
    assert thread_choices(own, 6) == [PeerChoice(None, None)]


def test_each_drafter_is_tried_with_its_limits_and_auto_is_only_ours(tmp_path):
    peer = system(tmp_path)
    lookups = [PeerChoice(2, PeerDrafting(LOOKUP, n)) for n in (2, 4)]
    drafts = [PeerChoice(2, PeerDrafting(DRAFT, 3, "d"))]
    assert drafting_choices(peer, 2, LOOKUP, None) == lookups
    assert drafting_choices(peer, 2, DRAFT, None) == []
    assert drafting_choices(peer, 2, DRAFT, "d") == drafts
    assert drafting_choices(peer, 2, AUTO, "d") == [*lookups, *drafts], "its best fixed setting"
    ours = peer._replace(has_auto=True)
    assert drafting_choices(ours, 2, AUTO, "d") == [PeerChoice(2, PeerDrafting(AUTO, 0, "d"))]


def test_a_sweep_tries_each_choice_once_and_picks_the_best_by_each_figure(tmp_path):
    told, tried = [], system(tmp_path)
    sweep = Sweep(lambda s, c, _: Peer(s, SETUP._replace(threads=c.threads), 10), told.append)
    choices, case = thread_choices(tried, 2), PeerCase("plain", [PROMPT] * 3, 4)
    assert sweep.pick(tried, choices, case, "tpot_ms") == Pick(PeerChoice(2, None))
    assert sweep.pick(tried, choices, case, "ttft_ms") == Pick(PeerChoice(1, None))
    assert told == [
        "vLLM, 1 threads: TPOT 10.0 ms, TTFT 30 ms",
        "vLLM, 2 threads: TPOT 8.0 ms, TTFT 40 ms",
    ]
    assert len(starts(tmp_path)) == 2


def test_a_sweep_passes_over_choices_that_fail(tmp_path):
    sweep = Sweep(lambda s, c, _: Peer(s, SETUP._replace(threads=c.threads), 10), print)
    tried, case = system(tmp_path), PeerCase("plain", [PROMPT], 4)
    bad = PeerChoice(7, None)  # the fake has no times for so many threads, and crashes
    assert sweep.pick(tried, [bad, PeerChoice(1, None)], case, "tpot_ms") == Pick(
        PeerChoice(1, None)
    )
    found = sweep.pick(tried, [bad], case, "tpot_ms")
    assert (found.choice, found.error) == (None, "KeyError: 7")


class Recorded:
    """Peers that write down who ran, and of which `b` fails in its third run."""

    def __init__(self):
        self.ran = ""

    def start(self, system, choice, cases):
        self.name = system.name
        return nullcontext(Recorder(self, system.name))


class Recorder:
    def __init__(self, recorded, name):
        self.recorded, self.name = recorded, name

    def run(self, prompts, num_tokens, is_batch):
        self.recorded.ran += self.name
        if self.name == "b" and self.recorded.ran.count("b") == 3:
            raise PeerError("out of memory")
        return [timed([1, 2])]


def jobs(names, case="plain", error=None):
    choice = None if error else PeerChoice(1, None)
    return [
        Lane(System(n, n, "", True, (), ()), PeerCase(case, [PROMPT], 2), Pick(choice, error))
        for n in names
    ]


def test_each_round_begins_with_another_engine_and_the_first_round_warms_up():
    recorded = Recorded()
    lanes, rates = measure(jobs("ac"), recorded.start, 3, print, lambda: recorded.ran)
    assert recorded.ran == "ac" + "ca" + "ac" + "ca"
    assert [len(lane.rounds) for lane in lanes] == [3, 3]
    assert rates == ["ac", "acca", "accaac"]


def test_an_engine_that_fails_is_left_out_of_later_rounds():
    recorded = Recorded()
    lanes, _ = measure(jobs("abc") + jobs("d", error="absent"), recorded.start, 3, print, no_rates)
    assert recorded.ran == "abc" + "bca" + "cab" + "ac"
    assert [lane.error for lane in lanes] == [None, "out of memory", None, "absent"]


def test_cases_of_the_same_settings_share_a_process():
    names = []

    def start(system, choice, cases):
        names.append((system.name, [case.name for case in cases]))
        return Recorded().start(system, choice, cases)

    measure(jobs("ac") + jobs("a", "prompt"), start, 1, print, no_rates)
    assert names == [("a", ["plain", "prompt"]), ("c", ["plain"])]


def test_figures_come_from_when_tokens_came():
    requests = [timed([0.2, 0.3, 0.5], [1, 2, 1]), timed([0.4, 0.5, 0.6], [1, 1, 2])]
    assert tpot_ms(requests) == pytest.approx((100 + 200 / 3) / 2)
    assert ttft_ms(requests) == pytest.approx(300)
    assert tokens_per_s(requests) == pytest.approx(8 / 0.6)
    assert tokens_per_step(requests) == 6 / 4


def test_a_step_of_a_batch_counts_once_all_requests_have_begun():
    first = timed([0.1, 0.2, 0.3, 1.0, 1.2, 1.4, 9.0, 9.1, 9.2])
    assert step_ms([first, timed([0.95, 1.0, 1.2, 1.4])]) == pytest.approx(200)
    with pytest.raises(ValueError, match="no step has all requests"):
        step_ms([first, timed([5.0, 6.0])])


def test_texts_agree_up_to_where_they_part():
    ours = [timed([1], [4], [1, 2, 3, 4]), timed([1], [4], [5, 6, 7, 8])]
    theirs = [timed([1], [4], [1, 2, 9, 4]), timed([1], [4], [5, 6, 7, 8])]
    assert agreement(theirs, ours) == 0.75


def test_no_two_prompts_begin_alike(tmp_path):
    cases = make_cases(DEMO_TARGET, PeerSizes())
    assert {name: len(c.prompts) for name, c in cases.items()} == {
        "plain": 6,
        "prompt": 3,
        "batch": 32,
        "drafting": 6,
    }
    assert {len(p) for p in cases["batch"].prompts} == {300}
    assert {len(p) for p in cases["prompt"].prompts} == {1000}
    assert len({tuple(p[:16]) for p in cases["batch"].prompts}) == 32


def lane_of(name, *rounds, error=None):
    [lane] = jobs([name], error=error)
    lane.rounds = [[timed([first, first + tpot])] for first, tpot in rounds]
    return lane


def test_the_ratio_is_to_the_best_peer_in_the_same_round():
    lanes = [
        lane_of("specserve", (1, 0.010), (1, 0.020), (1, 0.030)),
        lane_of("slow", (1, 0.050), (1, 0.050), (1, 0.050)),
        lane_of("fast", (2, 0.020), (2, 0.020), (2, 0.040)),
    ]
    by_name = {
        figure["figure"]: figure
        for figure in group_result(MeasuredGroup(lanes, []), None, None, {})
    }
    ratio = by_name["TPOT ms"]["ratio"]
    assert ratio == {"peer": "fast", "median": 0.75, "low": 0.5, "high": 1}
    assert by_name["TTFT 300 ms"]["ratio"]["peer"] == "slow"
    assert by_name["TPOT ms"]["systems"]["fast"]["median"] == pytest.approx(20)


def test_quantized_weights_have_a_ratio_to_those_of_16_bits_which_are_no_peer():
    lanes = [
        lane_of("specserve", (1, 0.010), (1, 0.020)),
        lane_of("specserve, 16 bits", (1, 0.020), (1, 0.020)),
        lane_of("llama.cpp", (1, 0.040), (1, 0.040)),
    ]
    figures = group_result(MeasuredGroup(lanes, []), None, None, {})
    assert figures[0]["ratio"] == {"peer": "llama.cpp", "median": 0.375, "low": 0.25, "high": 0.5}
    text = table({"figures": figures})
    assert "| specserve / 16 bits |" in text
    assert "| 0.75 (0.50 to 1.00), specserve, 16 bits |" in text


def test_of_a_rate_the_best_is_the_highest():
    lanes = [lane_of("specserve", (1, 1)), lane_of("slow", (1, 3)), lane_of("fast", (1, 1))]
    for lane in lanes:
        lane.case = lane.case._replace(name="batch")
    step, rate = group_result(MeasuredGroup(lanes, []), None, None, {})
    assert rate["ratio"] == {"peer": "fast", "median": 1, "low": 1, "high": 1}
    assert step["ratio"]["peer"] == "fast"


def test_the_bound_is_a_row_where_a_figure_is_the_time_of_a_step():
    rates = [Rates(read=1e9, multiply=1e12), Rates(read=2e9, multiply=1e12)]
    costs = {"TPOT ms": Cost(num_bytes=1e8, flops=1e9)}
    figures = group_result(
        MeasuredGroup([lane_of("specserve", (1, 0.2), (1, 0.2))], rates), None, None, costs
    )
    assert figures[0]["bound"] == {"median": 75, "low": 50, "high": 100}
    [_, _, tpot, ttft] = table({"figures": figures}).splitlines()
    assert tpot.endswith("| 75 (50 to 100) | - |") and ttft.endswith("| - | - |")


def test_a_step_of_a_batch_has_the_context_of_each_request_halfway():
    assert bound_size("TPOT ms", PeerSizes()) == StepSize("TPOT ms", (332,), 1)
    assert bound_size("batch step ms", PeerSizes(batch=3)).contexts == (332, 332, 332)
    assert bound_size("TTFT 300 ms", PeerSizes()) is None


def test_a_peer_that_failed_is_a_line_below_the_table_and_no_base_of_ratios():
    lanes = [lane_of("specserve", (1, 0.01)), lane_of("vLLM", error="no such file")]
    text = table({"figures": group_result(MeasuredGroup(lanes, []), DRAFT, "a draft", {})})
    assert text.count("| none | - | - |\n") == 2
    assert text.endswith("\nvLLM: no such file")
    assert "| draft model (a draft): TPOT, ms (lower is better) |" in text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def two_cores(monkeypatch, tmp_path):
    """And an engine that is made up, in place of specserve itself."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(bound, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(bound, "MULTIPLY_SECONDS", 0.001)
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "ours"))


def bench_peers(*args):
    sizes = ["--rounds=2", "--prompts=2", "--batch=3", "--tokens=16", "--timeout=20"]
    return main(["bench", "peers", *map(str, args), *sizes])


def test_the_command_compares_what_there_is(two_cores, checkpoint, tmp_path, capsys):
    args = ["--model", checkpoint, "--draft", checkpoint, "--out", tmp_path / "r.json"]
    args += ["--llama", fake_python(tmp_path / "llama")]
    args += ["--vllm", fake_python(tmp_path / "vllm", "fails to load")]
    args += ["--transformers", fake_python(tmp_path / "transformers", "raises"), "--json"]
    assert bench_peers(*args) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert "vLLM: OSError: no weights here" in printed
    assert "transformers: ValueError: cannot speculate" in printed
    plain = result["figures"][0]
    assert plain["systems"]["specserve"]["median"] == pytest.approx(4)
    assert plain["ratio"] == {"peer": "llama.cpp", "median": 0.5, "low": 0.5, "high": 0.5}
    assert plain["systems"]["llama.cpp"]["setting"] == "2 threads"
    assert result["versions"] == {"specserve": "7.0", "llama.cpp": "7.0", "transformers": "7.0"}
    assert {s["setting"] for s in result["sweep"] if s["system"] == "llama.cpp"} == {
        *("1 threads", "2 threads"),
        *(f"2 threads, lookup {n}" for n in (2, 4, 8, 16)),
        *(f"2 threads, draft {n}" for n in (2, 4, 8)),
    }
    assert {s["draft"] for s in result["sweep"] if " draft " in s["setting"]} == {checkpoint.name}
    kinds = [(f["drafter"], f["draft"]) for f in result["figures"] if f["drafter"]]
    drafts = [("draft", checkpoint.name), ("auto", checkpoint.name)]
    assert list(dict.fromkeys(kinds)) == [("lookup", None), *drafts]
    [auto] = [f for f in result["figures"] if f["drafter"] == "auto"][:1]
    assert auto["systems"]["specserve"]["setting"] == "own threads, auto"
    command = result.pop("machine")["command"]
    assert command.startswith(f"specserve bench peers --model {checkpoint} --draft {checkpoint}")
    assert str(checkpoint) not in json.dumps(result)


def test_the_exit_code_is_1_where_every_engine_failed(
    two_cores, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "broken", "raises"))
    assert bench_peers("--model", checkpoint) == 1
    printed = capsys.readouterr().out
    assert "specserve: ValueError: cannot speculate" in printed
    assert "{" not in printed, "JSON is printed only with --json"


def test_paths_may_be_relative(two_cores, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "model").symlink_to(checkpoint)
    fake_python(tmp_path / "others")
    monkeypatch.chdir(tmp_path)
    args = ["--model=model", "--draft=model", "--transformers=others/python", "--out=r.json"]
    assert bench_peers(*args) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert [f["systems"]["transformers"].get("error") for f in result["figures"]] == [None] * 11
    setups = [json.loads(setup) for *_, setup in starts(tmp_path / "others")]
    assert {s["model"] for s in setups} == {str(checkpoint)}
    drafts = {s["drafting"]["draft"] for s in setups if s["drafting"]}
    assert drafts == {None, str(checkpoint)}


@pytest.mark.parametrize(
    ("behavior", "complaint"),
    [
        (
            None,
            "--vllm vllm/python: not an executable file. Name the Python of an environment",
        ),
        ("lacks the engine", "--vllm vllm/python: it cannot import vllm. Run"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_before_anything_is_measured(
    two_cores, checkpoint, tmp_path, monkeypatch, capsys, behavior, complaint
):
    monkeypatch.chdir(tmp_path)
    if behavior is not None:
        fake_python(tmp_path / "vllm", behavior)
    assert bench_peers("--model", checkpoint, "--vllm=vllm/python") == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {complaint}") and err.count("\n") == 1
    assert not (tmp_path / "ours" / "started").exists()


def test_llama_cpp_needs_gguf_here(two_cores, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert bench_peers("--model", checkpoint, "--llama", fake_python(tmp_path / "llama")) == 1
    assert "pip install 'specserve[bench]'" in capsys.readouterr().err


def test_what_cannot_be_kept_after_all_is_shown(two_cores, checkpoint, capsys):
    assert bench_peers("--model", checkpoint, "--out=/dev/full") == 1
    shown = capsys.readouterr()
    assert "| specserve |" in shown.out
    assert "--out /dev/full: cannot be written" in shown.err


def test_llama_cpp_gets_gguf_files_and_the_others_the_folders(two_cores, checkpoint, tmp_path):
    args = [
        "--model",
        checkpoint,
        "--draft",
        checkpoint,
        "--llama",
        fake_python(tmp_path / "llama"),
    ]
    assert bench_peers(*args, "--transformers", fake_python(tmp_path / "others")) == 0
    setups = {
        name: [json.loads(setup) for *_, setup in starts(tmp_path / name)]
        for name in ("llama", "others")
    }
    assert {Path(s["model"]).suffix for s in setups["llama"]} == {".gguf"}
    assert {s["model"] for s in setups["others"]} == {str(checkpoint)}
    drafts = {s["drafting"]["draft"] for s in setups["others"] if s["drafting"]}
    assert drafts == {None, str(checkpoint)}
    assert max(s["max_requests"] for s in setups["others"]) == 3


def test_engines_are_compared_on_a_gguf_file(two_cores, tmp_path, capsys):
    file = gguf_files.write(tmp_path / "model", "gemma3", **gguf_files.GEMMA3).file
    args = [f"--{name}={fake_python(tmp_path / name)}" for name in ("llama", "ik")]
    assert bench_peers("--gguf", file, *args, "--out", tmp_path / "r.json") == 0
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert [figure["figure"] for figure in figures] == [
        "TPOT ms",
        "TTFT 300 ms",
        "TTFT 1000 ms",
        "TPOT with drafting ms",
        "tokens per step",
    ]
    assert figures[0]["systems"].keys() == {"specserve", "llama.cpp", "ik_llama.cpp"}
    for name in ("ours", "llama", "ik"):
        setups = [json.loads(setup) for *_, setup in starts(tmp_path / name)]
        assert {s["model"] for s in setups} == {str(file)}
        assert any(s["drafting"] for s in setups) == (name != "ik")


def test_the_bytes_of_a_gguf_file_are_those_of_a_step(tmp_path):
    tied = gguf_files.write(tmp_path / "tied", "smollm").file
    sizes = [
        (command.stored_bytes(header), sum(tensor.size for tensor in header.tensors.values()))
        for header in map(read_header, (tied, gguf_files.write(tmp_path / "own", "llama").file))
    ]
    embedding = 320 * 64 // 32 * 34  # of Q8_0
    assert sizes[0][0] == sizes[0][1] and sizes[1][0] == sizes[1][1] - embedding


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gguf=a.gguf", "--model=b", "--quantize=w4"], "--gguf excludes --model, --quantize"),
        (["--shape=qwen3-4b", "--vllm=a"], "--shape excludes --vllm. Remove one of them"),
        (["--shape=qwen3-4b", "--gguf=a.gguf"], "--gguf excludes --shape. Remove one of them"),
        (["--ik=python3"], "--ik: this engine is measured only on a GGUF file"),
        (["--longest=1"], "--longest: measured only on a GGUF file. Add --gguf or --shape"),
    ],
)
def test_what_a_gguf_file_excludes_is_named(flags, complaint, capsys):
    assert bench_peers(*flags) == 1
    assert complaint in capsys.readouterr().err


def test_a_folder_is_no_gguf_file(two_cores, checkpoint, capsys):
    assert bench_peers("--gguf", checkpoint) == 1
    assert "is not a GGUF file. Use --model" in capsys.readouterr().err


def test_a_model_that_llama_cpp_cannot_have_is_a_line_of_the_table(
    two_cores, tmp_path, capsys, monkeypatch
):
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_checkpoint(tmp_path / "linear", rope_parameters=linear)
    args = ["--model", folder, "--llama", fake_python(tmp_path / "llama")]
    assert bench_peers(*args, "--transformers", fake_python(tmp_path / "others")) == 0
    printed = capsys.readouterr().out
    assert "cannot be written as GGUF: its rope_parameters scale positions" in printed
    [tpot] = [row for row in printed.splitlines() if row.startswith("| TPOT, ms")]
    assert "| none | 8 " in tpot


def test_a_signal_to_end_leaves_no_files_and_no_engines(
    two_cores, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        command, "print_on_stderr", lambda text: os.kill(os.getpid(), signal.SIGTERM)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        bench_peers("--model", checkpoint, "--llama", fake_python(tmp_path / "llama"))
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.glob("specserve-*"))
    assert all(gets_to(pid, "Z") for pid, *_ in starts(tmp_path / "ours"))


@pytest.mark.parametrize("flags", [[], ["--vllm=python3"], ["--llama=a", "--transformers=b"]])
def test_quantized_weights_are_compared_with_llama_cpp_alone(flags, capsys):
    assert bench_peers("--quantize=w4", *flags) == 1
    assert "--quantize: only llama.cpp is compared. Add --llama" in capsys.readouterr().err


def test_quantized_weights_are_compared_with_our_own_of_16_bits_too():
    systems = make_systems({"specserve": "a", "llama": "b"}, "w8")
    assert [(s.name, s.quantize) for s in systems] == [
        ("specserve", "w8"),
        ("llama.cpp", "w8"),
        ("specserve, 16 bits", None),
    ]


def test_a_draft_needs_its_model(capsys):
    assert bench_peers("--draft", "somewhere") == 1
    assert "--draft: needs its target model" in capsys.readouterr().err


def test_the_models_without_names_are_the_demo_pair_at_cost(tmp_path, monkeypatch):
    monkeypatch.setitem(systems.SHAPES, "qwen3-0.6b", SMALL_SHAPE)
    monkeypatch.setattr(systems, "TENTH", {"num_hidden_layers": 1})
    chosen = systems.scaled_pair(tmp_path)
    written = json.loads((chosen.target / "config.json").read_text())
    assert (written["vocab_size"], written["num_hidden_layers"]) == (8192, 4)
    assert [draft.label for draft in chosen.drafts] == ["nearly free draft", "draft of a tenth"]
    assert chosen.drafts[0].folder == DEMO_DRAFT
    assert json.loads((chosen.drafts[1].folder / "config.json").read_text())["hidden_size"] == 384


def test_the_draft_of_a_tenth_has_a_tenth_of_the_weights():
    target, draft = (
        parse_config.parse(systems.SHAPES[systems.LIKE] | {"vocab_size": 8192} | changes)
        for changes in ({}, systems.TENTH)
    )
    weights = [cost(config, StepSize("", (0,), 1)).num_bytes for config in (draft, target)]
    assert weights[0] / weights[1] == pytest.approx(0.1, rel=0.02)


def test_a_checkpoint_without_a_tokenizer_gets_the_demos(checkpoint, tmp_path):
    bare, scratch = tmp_path / "bare", tmp_path / "scratch"
    bare.mkdir()
    scratch.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(checkpoint / name, bare / name)
    complete = systems.with_tokenizer(bare, scratch)
    assert load_tokenizer(complete).encode("def f")
    assert (complete / "model.safetensors").read_bytes() == (
        bare / "model.safetensors"
    ).read_bytes()
    assert systems.with_tokenizer(checkpoint, scratch) == checkpoint


@pytest.mark.parametrize(
    ("drafting", "kind", "words"),
    [
        (None, None, ""),
        (PeerDrafting(LOOKUP, 4), LOOKUP, ", 4"),
        (PeerDrafting(DRAFT, 2, "folder"), DRAFT, ", 2"),
        (PeerDrafting(AUTO, 0, "folder"), AUTO, ""),
        (PeerDrafting(DRAFT, 2, "folder"), AUTO, ", draft model 2"),
    ],
)
@pytest.mark.parametrize("threads", [None, 2])
def test_a_cell_adds_the_limit_and_a_drafter_that_is_not_its_rows(drafting, kind, words, threads):
    cell = {
        "median": 1.0,
        "low": 0.5,
        "high": 2.0,
        "setting": PeerChoice(threads, drafting).words(),
    }
    assert shown(cell, kind) == f"1 (0.5 to 2){words}"


def test_the_caption_names_machine_commit_rounds_and_versions():
    machine = {"date": "2026-01-02", "cores": 8, "cpu": "Intel Xeon", "commit": "abc-dirty"}
    result = {"machine": machine, "rounds": 3, "versions": {"specserve": "1.2", "vLLM": "9"}}
    result["figures"] = [{"drafter": None}]
    told = " ".join(caption(result).split())
    assert told.startswith(
        "Measured on an uncommitted tree after commit abc, on 2026-01-02, on 8 cores of an Intel "
        "Xeon. The engines are specserve 1.2, vLLM 9. They took turns in 3 rounds. "
    )
    assert "`auto` not at all" not in told
    older = caption(result | {"figures": [{"draft": None}]})
    assert "`auto` not at all" in " ".join(older.split())


def test_figures_of_the_fastest_setting_become_one_for_each_drafter():
    """Results of older commits have them."""

    def cell(ms, setting):
        return {"median": ms, "low": ms, "high": ms, "setting": f"2 threads, {setting}"}

    figure = {"figure": "TPOT with drafting ms", "bound": None}
    ratio = {"peer": "llama.cpp", "median": 0.5, "low": 0.4, "high": 0.6}
    cells = {"specserve": cell(5, "lookup 16"), "llama.cpp": cell(10, "lookup 4")}
    figures = [
        {**figure, "draft": draft, "systems": cells | {"vLLM": cell(7, "draft 2")}, "ratio": ratio}
        for draft in ("small", "large")
    ]
    told = summary({"figures": figures}).splitlines()[2:]
    ends = [", run 1", ", run 2", " (small)", " (large)", ""]
    kinds = ["n-gram lookup"] * 2 + ["draft model"] * 2 + ["auto"]
    heads = [f"| {k}{e}: TPOT, ms (lower is better)" for k, e in zip(kinds, ends, strict=True)]
    lookup = "**5**, 16 | 10, 4 | not measured | 0.50 (0.40 to 0.60), llama.cpp |"
    draft = "not measured | not measured | 7, 2 | - |"
    auto = "not measured | not measured | not measured | - |"
    rests = [lookup, lookup, draft, draft, auto]
    assert told == [f"{head} | {rest}" for head, rest in zip(heads, rests, strict=True)]
    auto = [figure | {"drafter": "auto", "draft": "small", "systems": {}, "ratio": None}]
    assert len(summary({"figures": auto}).splitlines()) == 3


def test_what_was_tried_is_a_row_for_each_drafter_and_limit():
    sweep = [
        {"system": "specserve", "setting": "own threads", "tpot_ms": 9, "error": None},
        {"system": "specserve", "setting": "own threads, lookup 16", "tpot_ms": 5, "error": None},
        {"system": "vLLM", "setting": "2 threads, draft 2", "tpot_ms": 7, "error": None},
        {"system": "vLLM", "setting": "2 threads, draft 2", "tpot_ms": 8, "error": None},
        {"system": "vLLM", "setting": "2 threads, lookup 2", "tpot_ms": None, "error": "no"},
    ]
    result = {"sweep": sweep, "figures": [{"draft": d} for d in (None, "small", "large")]}
    assert sweep_summary(result).splitlines()[2:] == [
        "| n-gram lookup | 2 | not tried | error |",
        "| n-gram lookup | 16 | 5.0 | not tried |",
        "| draft model, large | 2 | not tried | 8.0 |",
        "| draft model, small | 2 | not tried | 7.0 |",
    ]
