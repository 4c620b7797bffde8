"""`make gpu-check` without a GPU: the results it keeps, continues, and reports as failed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from specserve_bench.gpu import attends, checks, figures, record, stages, text, toolchain
from specserve_bench.gpu.figures import Kernel, gaps
from specserve_bench.gpu.record import Record
from specserve_kernels.cuda.ops import CudaOps
from tests.bench.hurry import hurried
from tests.kernels.builds import interpreted

ROOT = stages.ROOT


def test_a_record_goes_on_where_it_was_left(tmp_path):
    file = tmp_path / "gpu-x.json"
    Record(file, {"gpu": "one"}).put("a", 1)
    again = Record(file, {"gpu": "one"})
    assert "a" in again and "b" not in again
    assert not record.load(file)["done"]
    again.put("b", [2.5])
    again.save(done=True)
    assert record.load(file)["done"]
    data = json.loads(file.read_text())
    assert (data["figures"], data["machine"]) == ({"a": 1, "b": [2.5]}, {"gpu": "one"})


def test_a_record_of_another_source_is_begun_anew(tmp_path, monkeypatch):
    file = tmp_path / "gpu-x.json"
    Record(file, {}).put("a", 1)
    monkeypatch.setattr(record, "source_digest", lambda: "another")
    assert "a" not in Record(file, {})


DONE = """
import sys
from pathlib import Path
from specserve_bench.gpu.record import Record
record = Record(Path(sys.argv[sys.argv.index("--out") + 1]), {})
record.put("summary", "all is well")
record.save(done=True)
"""
# Prints its number, and those of a child in a session of its own and of an orphan, and stays.
STAYS = """
import os, subprocess, sys, time
from pathlib import Path
from specserve_bench.gpu.record import Record
record = Record(Path(sys.argv[sys.argv.index("--out") + 1]), {})
record.put("summary", "half of it")
stay = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(stay, start_new_session=True)
start = f"import subprocess; print(subprocess.Popen({stay}, stdout=subprocess.DEVNULL).pid)"
orphan = subprocess.check_output([sys.executable, "-c", start], text=True)
record.put("pids", [os.getpid(), child.pid, int(orphan)])
time.sleep(600)
"""
STAGES = {  # what a stage does -> its state
    "done": (DONE, "done"),
    "failed": ("raise SystemExit(1)", "failed"),
    "undone": ("", "failed"),
    "late": ("raise SystemExit(3)", "unfinished"),
    "stays": (STAYS, "unfinished"),
}
DRIVER = """
import sys
from specserve_bench.gpu import stages
{more}
stages.check_machine = lambda environment: None
stages.LEAST = 1
stages.STAGES = {{name: stages.Stage(limit, [name]) for name, limit in {limits}.items()}}
sys.exit(stages.main(sys.argv[1:]))
"""
# A stage has its limit as soon as it stays.
HURRY = """
import subprocess, time
from pathlib import Path
from tests.bench.hurry import hurried

def stays(args):
    file = Path(args[args.index("--out") + 1]) if "--out" in args else None
    return file is not None and file.exists() and '"pids"' in file.read_text()

subprocess.Popen, time.monotonic = hurried(stays)
"""


def driver(tmp_path, limits, *options, more=""):
    """A process that runs these stages, each of which may take so many seconds."""
    for name in limits:
        (tmp_path / f"{name}.py").write_text(STAGES[name][0])
    path = [str(tmp_path), *(str(ROOT / folder) for folder in ("", "kernels", "drafters", "bench"))]
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            DRIVER.format(limits=limits, more=more),
            "--out",
            str(tmp_path),
            *options,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def run_stages(tmp_path, limits, *options):
    """Its exit status, and the lines of JSON that it has printed, by stage."""
    process = driver(tmp_path, limits, *options, more=HURRY)
    out, _ = process.communicate()
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return process.returncode, {line["stage"]: line for line in lines}


def states(lines):
    return {name: line["state"] for name, line in lines.items()}


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_every_stage_is_run_whatever_the_one_before_it_did_and_leaves_a_line_of_json(tmp_path):
    limits = {"failed": 30, "undone": 30, "late": 30, "done": 30}
    code, lines = run_stages(tmp_path, limits)
    assert (code, states(lines)) == (1, {name: STAGES[name][1] for name in limits})
    assert lines["done"]["summary"] == "all is well"
    kept = (tmp_path / "gpu-check.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == list(lines.values())


def test_a_stage_at_its_limit_is_ended_with_all_that_it_started_and_keeps_its_results(tmp_path):
    code, lines = run_stages(tmp_path, {"stays": 20, "done": 30})
    assert (code, states(lines)) == (1, {"stays": "unfinished", "done": "done"})
    assert 20 <= lines["stays"]["seconds"] < 40
    figures = json.loads((tmp_path / "gpu-stays.json").read_text())["figures"]
    assert lines["stays"]["summary"] == figures["summary"] == "half of it"
    assert len(figures["pids"]) == 3 and all(map(is_gone, figures["pids"]))


def test_the_deadline_ends_a_stage_before_its_limit_and_begins_no_other(tmp_path):
    code, lines = run_stages(tmp_path, {"stays": 600, "done": 600}, "--seconds", "60")
    assert (code, states(lines)) == (1, {"stays": "unfinished", "done": "not begun"})
    assert 50 < lines["stays"]["seconds"] < 80


def end(process, pids):
    """Kill the processes that a test has left, so that it fails instead of waiting for them."""
    for pid in [process.pid, *pids]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_driver_that_is_stopped_leaves_no_process_behind(number, tmp_path):
    process = driver(tmp_path, {"stays": 600})
    pids = pids_of(tmp_path / "gpu-stays.json")
    try:
        process.send_signal(number)
        process.wait(30)
        assert len(pids) == 3 and all(map(is_gone, pids))
    finally:
        end(process, pids)


# An interrupt at the one place where `Popen.wait` has taken its lock, and would not give it back.
INTERRUPTED = """
import subprocess

class Interrupted(subprocess.Popen):
    def wait(self, timeout=None):
        if timeout is None:
            return super().wait()
        self._waitpid_lock.acquire()
        raise KeyboardInterrupt

subprocess.Popen = Interrupted
"""


def test_an_interrupt_ends_the_driver_wherever_it_comes(tmp_path):
    process = driver(tmp_path, {"stays": 600}, more=INTERRUPTED)
    try:
        assert process.wait(30) == -signal.SIGINT
    finally:
        end(process, [])


def test_a_stage_ends_with_a_driver_that_is_killed(tmp_path):
    process = driver(tmp_path, {"stays": 600})
    pids = pids_of(tmp_path / "gpu-stays.json")
    try:
        process.kill()
        assert waited_for(lambda: is_gone(pids[0]))
    finally:
        end(process, pids)


def pids_of(file):
    """The process ids in the record, as soon as it has them."""

    def read():
        return file.exists() and json.loads(file.read_text())["figures"].get("pids")

    return waited_for(read)


def waited_for(question, seconds=30):
    end = monotonic() + seconds
    while monotonic() < end:
        if answer := question():
            return answer
        sleep(0.02)
    raise AssertionError("it does not come")


def test_what_is_done_for_this_source_is_kept(tmp_path):
    for options, state in (((), "done"), ((), "kept"), (("--again",), "done")):
        code, lines = run_stages(tmp_path, {"done": 30}, *options)
        assert (code, states(lines)) == (0, {"done": state})
        assert lines["done"]["summary"] == "all is well"


def test_what_runs_first_is_who_attends_then_the_text_then_the_steps_then_the_kernels():
    assert [*stages.STAGES][:4] == ["attends", "text", "steps", "kernels"]
    assert sum(stages.STAGES[name].seconds for name in ("attends", "text", "steps")) < 400


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no wheels there"):
        stages.main(["--out", str(tmp_path), "--wheels", str(tmp_path)])


def test_a_stage_that_nobody_knows_is_refused_before_any_is_run(tmp_path):
    with pytest.raises(
        SystemExit, match="no stage figure: there are attends, text, steps, kernels"
    ):
        stages.main(["--out", str(tmp_path / "out"), "compile", "figure"])
    assert not (tmp_path / "out").exists()


def test_the_stages_take_nothing_but_the_standard_library_to_begin():
    code = "import sys; import specserve_bench.gpu.stages; print(*sys.modules)"
    done = stages.subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(stages.ROOT / "bench")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "msgspec", "numpy", "specserve"} & set(done.stdout.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize(
    ("needed", "complaint"),
    [
        (("torch", "no_such_module"), "lacks no_such_module: name another"),
        (("torch",), "no NVIDIA"),
    ],
)
def test_a_machine_where_nothing_can_be_checked_is_refused(needed, complaint, monkeypatch):
    monkeypatch.setattr(stages, "NEEDED", needed)
    with pytest.raises(SystemExit, match=complaint):
        stages.check_machine(dict(stages.os.environ))


TESTS = """
import pytest, time

@pytest.mark.parametrize("error", [0.002, 0.003])
def test_a(error, record_property):
    record_property("op", "attention")
    record_property("error", error / 2)
    record_property("error", error)

def test_b(): assert 1 + 1 == 3, "too far off"

@pytest.mark.skip(reason="no GPU")
def test_c(): pass

@pytest.fixture
def broken(): raise ValueError("no room")

def test_d(broken): pass

def test_e(): time.sleep({seconds})
"""


@pytest.mark.parametrize(
    "more", [" -n 2 --dist worksteal", pytest.param("", marks=pytest.mark.slow)]
)
def test_checks_keep_each_test_as_it_ends_and_the_worst_error_of_each_op(tmp_path, more):
    (tmp_path / "test_some.py").write_text(TESTS.replace("{seconds}", "0"))
    code, tests = checks.run(f"{tmp_path / 'test_some.py'}{more}", monotonic() + 60)
    tests.sort(key=lambda t: t["name"])
    outcomes = ["passed", "passed", "failed", "skipped early", "failed early", "passed"]
    assert [t["outcome"] for t in tests] == outcomes
    assert "too far off" in tests[2]["message"] and "no room" in tests[4]["message"]
    assert checks.worst(tests) == {"attention": 0.003}
    said = checks.summary(tests, [code])
    assert (code, said["passed"], said["first of them"]) == (1, 3, ["test_b", "test_c", "test_d"])


def test_checks_out_of_time_keep_what_they_have_come_to(tmp_path, monkeypatch):
    def has_come_to_the_last(command):
        return Path(command[-1]).read_text().count("\n") == 5

    made, _ = hurried(has_come_to_the_last)
    monkeypatch.setattr(subprocess, "Popen", made)
    (tmp_path / "test_slow.py").write_text(TESTS.replace("{seconds}", "600"))
    code, tests = checks.run(str(tmp_path / "test_slow.py"), monotonic() + 60)
    assert code is None
    assert [t["name"] for t in tests] == [
        "test_a[0.002]",
        "test_a[0.003]",
        "test_b",
        "test_c",
        "test_d",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
def test_checks_that_are_skipped_are_not_done(tmp_path):
    out = tmp_path / "gpu-kernels.json"
    checks.main(["tests/kernels/test_gpu.py", "--out", str(out)])
    data = json.loads(out.read_text())
    assert data["figures"]["summary"]["passed"] == 0
    assert data["figures"]["summary"]["not passed"] > 0
    assert not data["done"]


def test_gaps_are_what_no_kernel_fills():
    kernels = [Kernel("a", 0, 1000), Kernel("b", 1500, 2000), Kernel("a", 1800, 4000)]
    got = gaps([*kernels, Kernel("b", 5000, 5500)], steps=2)
    assert got["launches"] == 2
    assert got["busy ms by kernel"] == {"a": 1.6, "b": 0.5}
    assert got["idle ms before kernel"] == {"b": 0.75, "a": 0.0}
    assert (got["busy ms"], got["idle ms"]) == (2.1, 0.75)


def test_the_figures_can_be_stopped_and_gone_on_with(tmp_path, one_thread):
    command = ["--size", "trial", "--out", str(tmp_path / "gpu-figures.json")]
    assert figures.main([*command, "--seconds", "0"]) == record.UNFINISHED
    assert figures.main(command) == 0
    data = json.loads((tmp_path / "gpu-figures.json").read_text())
    assert data["done"] and data["machine"]["command"]
    names = data["figures"]
    assert names["qwen3-0.6b step: 4 rows x 2 requests, context 4194304"].startswith("left out")
    assert names["qwen3-0.6b step: 4 rows x 2 requests, context 40"]["over"] > 0
    assert names["qwen3-0.6b gaps: 32 rows"]["busy ms"] > 0
    assert all(us > 0 for us in names["map of 96 x 64, us"]["w4 g32, 128 rows"])
    assert len(names["qwen3-0.6b TTFT of 20 tokens"]["ms"]) == 3


def test_a_figure_that_fails_is_told_and_the_others_are_taken(tmp_path):
    def fails():
        raise ValueError("too large")

    kept = Record(tmp_path / "gpu-figures.json", {})
    assert not figures.take(kept, "one", fails)
    assert not figures.take(kept, "two", lambda: 2)
    assert kept.figures == {"one": {"error": "ValueError: too large"}, "two": 2}


def test_a_fault_of_the_device_ends_the_process_that_met_it(tmp_path):
    def fault():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    assert figures.take(Record(tmp_path / "gpu-figures.json", {}), "one", fault)


def test_the_toolkit_is_found_with_its_libraries(tmp_path, monkeypatch):
    home = tmp_path / "toolkit"
    for file in ("include/cuda_runtime.h", "lib64/libcudart.so.13", "lib64/stubs/libcuda.so"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    got = toolchain.toolchain(tmp_path)
    links = toolchain.Path(got["FLASHINFER_EXTRA_LDFLAGS"].removeprefix("-L"))
    assert got["CUDA_HOME"] == str(home)
    assert links.is_relative_to(tmp_path)
    assert (links / "libcudart.so").resolve() == home / "lib64/libcudart.so.13"
    assert (links / "libcuda.so").resolve() == home / "lib64/stubs/libcuda.so"


@pytest.mark.skipif(interpreted is None, reason="the fake FlashInfer computes on the CPU")
def test_who_attends_is_asked_of_steps_that_have_run(monkeypatch):
    tiny = {"hidden_size": 32, "vocab_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(attends, "SMALL", tiny | {"num_hidden_layers": 1})
    want = {attends.name_of(*kind): name for kind, name in attends.EXPECTED.items()}
    assert attends.attending(interpreted) == want
    without = CudaOps(torch.device("cpu"), None)
    assert attends.who_attends(without, 64, torch.bfloat16) == "Triton"


def test_texts_are_compared_up_to_where_they_part():
    got = text.compared([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]])
    assert got == {"requests": 2, "same": 1, "median in common": 0.75, "in common": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("dtype", "common", "is_right"),
    [("fp32", 0.99, False), ("fp32", 1.0, True), ("bf16", 0.5, True), ("bf16", 0.1, False)],
)
def test_the_text_is_the_cpus_own_in_fp32_and_long_like_it_in_bf16(dtype, common, is_right):
    figure = {"requests": 4, "same": 4 if common == 1 else 1, "median in common": common}
    assert text.is_alike(figure, dtype) is is_right
