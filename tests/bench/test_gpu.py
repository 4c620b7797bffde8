"""`make gpu-check` without a GPU: the results it keeps, continues, and reports as failed."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from specserve_bench.gpu import (
    bits,
    checks,
    flashinfer,
    head,
    record,
    stage,
    stages,
    sweep,
    text,
    toolchain,
)
from specserve_bench.gpu import wheels as wheels_module
from specserve_bench.gpu.record import Record
from specserve_bench.gpu.sweep import Kernel, gaps
from tests.bench.hurry import hurried
from tests.checkpoints import TEXT, tiny_checkpoint, tiny_tokenizer
from tests.demo.test_train_head import CONFIG
from tests.kernels import fake_flashinfer
from tests.kernels.builds import INTERPRETED

ROOT = stages.ROOT


def test_a_record_goes_on_where_it_was_left(tmp_path):
    file = tmp_path / "gpu-x.jsonl"
    Record(file, {"gpu": "one"}).put("a", 1)
    again = Record(file, {"gpu": "one"})
    assert "a" in again and "b" not in again
    assert not record.load(file).done
    again.put("b", [2.5])
    again.put("a", 3)
    again.finish(done=True)
    assert record.load(file) == ({"a": 3, "b": [2.5]}, True)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0] == {"machine": {"gpu": "one"}, "source": record.source_digest()}
    assert lines[1:] == [
        {"name": "a", "figure": 1},
        {"name": "b", "figure": [2.5]},
        {"name": "a", "figure": 3},
        {"done": True},
    ]


def test_a_figure_that_was_cut_is_left_out(tmp_path):
    """A process may be killed in the middle of a line."""
    file = tmp_path / "gpu-x.jsonl"
    Record(file, {}).put("a", 1)
    with file.open("a") as f:
        f.write('{"name": "b", "fig')
    assert record.load(file).figures == {"a": 1}
    Record(file, {}).put("c", 2)
    assert record.load(file).figures == {"a": 1, "c": 2}


def test_a_record_of_another_source_is_begun_anew(tmp_path, monkeypatch):
    file = tmp_path / "gpu-x.jsonl"
    Record(file, {}).put("a", 1)
    monkeypatch.setattr(record, "source_digest", lambda: "another")
    assert "a" not in Record(file, {})


DONE = """
import sys
from pathlib import Path
from specserve_bench.gpu.record import Record
record = Record(Path(sys.argv[sys.argv.index("--out") + 1]), {})
record.put("summary", "all is well")
record.finish(done=True)
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
stages.check_machine = lambda environment, rehearse: None
stages.LEAST = 1
each = {{name: stages.GpuStage(limit, [name]) for name, limit in {limits}.items()}}
stages.STAGES = stages.KNOWN = each
sys.exit(stages.main(sys.argv[1:]))
"""
# A stage has its limit as soon as it stays.
HURRY = """
import subprocess, time
from pathlib import Path
from tests.bench.hurry import hurried
from tests.checkpoints import TEXT, tiny_checkpoint, tiny_tokenizer
from tests.demo.test_train_head import CONFIG

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
            "--allow-dirty",
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
    figures = record.load(tmp_path / "gpu-stays.jsonl").figures
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
    pids = pids_of(tmp_path / "gpu-stays.jsonl")
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
    pids = pids_of(tmp_path / "gpu-stays.jsonl")
    try:
        process.kill()
        assert waited_for(lambda: is_gone(pids[0]))
    finally:
        end(process, pids)


def pids_of(file):
    """The process ids in the record, as soon as it has them."""

    def read():
        known = record.load(file)
        return known and known.figures.get("pids")

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


def test_one_run_takes_540_seconds_and_leaves_at_most_8_files():
    assert sum(each.seconds for each in stages.STAGES.values()) + 30 == stages.DEADLINE == 540
    assert len(stages.STAGES) + len(["gpu-check.jsonl"]) <= 8
    assert next(iter(stages.STAGES)) == "ceilings"


def test_the_wheels_are_listed_with_their_sizes_and_fit():
    names = {wheel.requirement.partition("==")[0] for wheel in wheels_module.wheels()}
    lacking = {"argcomplete", "httptools", "llguidance", "msgspec", "starlette", "uvicorn"}
    assert lacking | {"flashinfer-python", "pytest-rerunfailures"} <= names
    assert sum(wheel.megabytes for wheel in wheels_module.wheels()) <= wheels_module.MOST_MB
    assert all("==" in wheel.requirement for wheel in wheels_module.wheels())


def test_results_need_a_folder(tmp_path):
    (file := tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="File exists; name a folder"):
        stages.main(["ceilings", "--rehearse", "--out", str(file)])


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no wheels there"):
        stages.main(["--out", str(tmp_path), "--wheels", str(tmp_path)])


def test_a_stage_that_nobody_knows_is_refused_before_any_is_run(tmp_path):
    with pytest.raises(
        SystemExit, match="no stage figure: there are ceilings, tests, text, figures"
    ):
        stages.main(["--out", str(tmp_path / "out"), "bits", "figure"])
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


# Prints the packages that our own modules import, after all modules that a stage runs.
IMPORTS = """
import ast, importlib, sys
from pathlib import Path
root, *names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
found = set()
for module in [*sys.modules.values()]:
    file = Path(getattr(module, "__file__", None) or "/")
    if file.suffix == ".py" and file.is_relative_to(root) and "site-packages" not in file.parts:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
print(*found - sys.stdlib_module_names)
"""


def test_a_machine_is_refused_at_the_start_if_it_lacks_what_any_stage_imports():
    commands = [stage.command for stage in stages.KNOWN.values()]
    given = [
        ROOT / word for each in commands for word in " ".join(each).split() if "tests/" in word
    ]
    tests = [f for file in given for f in (file.glob("test_*.py") if file.is_dir() else [file])]
    names = {command[0] for command in commands}
    names |= {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in tests}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(ROOT), *sorted(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {"kernels", "specserve", "specserve_bench", "specserve_drafters", "specserve_kernels"}
    assert len(names) > 30
    assert set(done.stdout.split()) - ours - {"tests"} <= set(stages.NEEDED)


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
    assert (code, said["passed"], said["skipped"]) == (1, 3, 1)
    assert said["first of them"] == ["test_b", "test_d"]


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
    out = tmp_path / "gpu-sizes.jsonl"
    checks.main(["tests/kernels/test_gpu.py -k place", "--out", str(out)])
    figures, done = record.load(out)
    assert figures["summary"]["passed"] == 0 < figures["summary"]["skipped"]
    assert not done


def test_gaps_are_what_no_kernel_fills():
    kernels = [Kernel("a", 0, 1000), Kernel("b", 1500, 2000), Kernel("a", 1800, 4000)]
    got = gaps([*kernels, Kernel("b", 5000, 5500)], steps=2)
    assert got["launches"] == 2
    assert got["busy ms by kernel"] == {"a": 1.6, "b": 0.5}
    assert got["idle ms before kernel"] == {"b": 0.75, "a": 0.0}
    assert (got["busy ms"], got["idle ms"]) == (2.1, 0.75)


def test_the_sweep_can_be_stopped_and_gone_on_with(tmp_path, one_thread):
    file = tmp_path / "gpu-sweep.jsonl"
    command = ["--rehearse", "--out", str(file)]
    assert sweep.main([*command, "--seconds", "0"]) == record.UNFINISHED
    assert sweep.main(command) == 0
    names, done = record.load(file)
    assert done
    assert names["qwen3-0.6b step: 4 rows x 2 requests, context 4194304"].startswith("left out")
    assert names["qwen3-0.6b step: 4 rows x 2 requests, context 40"]["over"] > 0
    assert names["qwen3-0.6b gaps: 32 rows"]["busy ms"] > 0
    assert all(us > 0 for us in names["map of 96 x 64, us"]["w4 g32, 128 rows"])
    assert len(names["qwen3-0.6b TTFT of 20 tokens"]["ms"]) == 3


def test_a_figure_that_fails_is_reported_and_the_others_are_taken(tmp_path):
    def fails():
        raise ValueError("too large")

    kept = Record(tmp_path / "gpu-x.jsonl", {})
    figures = {"one": fails, "two": lambda: {"ms": 2}}
    assert stage.take_each(kept, figures.items(), 10) == 1
    assert not record.load(kept.file).done
    assert kept.figures == {"one": {"error": "ValueError: too large"}, "two": {"ms": 2}}
    assert stage.failed(kept) == ["one"]


def test_a_fault_of_the_device_ends_the_process_that_met_it(tmp_path):
    def fault():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    kept = Record(tmp_path / "gpu-x.jsonl", {})
    figures = {"one": fault, "two": lambda: 2}
    assert stage.take_each(kept, figures.items(), 10) == record.UNFINISHED
    assert [*kept.figures] == ["one"]


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


@INTERPRETED
def test_flashinfers_kernels_are_built_by_one_step(monkeypatch):
    monkeypatch.setattr(flashinfer, "load_flashinfer", lambda: fake_flashinfer)
    before = len(fake_flashinfer.built)
    flashinfer.compile_for(64, torch.device("cpu"))
    assert len(fake_flashinfer.built) > before


def test_texts_are_compared_up_to_where_they_part():
    got = text.compared([[1, 2, 3, 4], [5, 6], [7]], [[1, 2, 9, 4], [5, 6], [7, 8]])
    told = {"requests": 3, "same": 1, "tokens": 7, "first differences": [2, 1]}
    assert got == told | {"first differences": [2, 2]}


def test_rows_with_other_bits_are_listed():
    def figure(unpadded, padded):
        each = zip(("unpadded", "padded"), (unpadded, padded), strict=True)
        return {k: {"same bits": off == 0, "largest difference": off} for k, off in each}

    figures = {"1 rows": figure(0.0, 0.0), "2 rows": figure(0.5, 0.0), "3 rows": figure(2.0, 1.0)}
    assert bits.summary(figures | {"4 rows": {"error": "x"}}) == {
        "unpadded": {"other bits": [2, 3], "largest difference": 2.0},
        "padded": {"other bits": [3], "largest difference": 1.0},
    }


@pytest.mark.slow
def test_a_rehearsal_has_every_figure_that_the_docs_quote(tmp_path):
    """All stages of one run, on a CPU with small shapes: no import, path or flag is missing."""
    command = [sys.executable, "-m", "specserve_bench.gpu", "--rehearse", "--seconds", "1500"]
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "drafters", "bench"))
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    quoted = QUOTED.findall((ROOT / "docs/gpu.md").read_text())
    assert {name for name, *_ in quoted} == {*stages.STAGES}
    for name, figure, fields in quoted:
        found = record.load(tmp_path / f"gpu-{name}.jsonl").figures[figure]
        missing = [field for field in re.findall(r"`([^`]+)`", fields) if field not in found]
        assert not missing, (name, figure, missing)
    assert {file.name for file in tmp_path.iterdir()} == {
        "gpu-check.jsonl",
        *(f"gpu-{name}.jsonl" for name in stages.STAGES),
    }


# A row of the table of figures: stage, figure, fields.
QUOTED = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| ((?:`[^`]+`(?:, )?)*)", re.MULTILINE)


@pytest.mark.slow
def test_a_head_is_trained_in_parts(tmp_path):
    target, texts = tiny_checkpoint(tmp_path / "target", num_hidden_layers=4), tmp_path / "texts"
    tiny_tokenizer().save_pretrained(target)
    (texts / "more").mkdir(parents=True)
    (texts / "one.txt").write_text(TEXT * 20)
    (texts / "more" / "two.md").write_text(TEXT * 20)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = [str(texts), str(tmp_path / "out"), "--target", str(target), "--device", "cpu"]
    command += ["--config", str(config)]
    assert head.main([*command, "--seconds", "0.5"]) == record.UNFINISHED
    assert head.main([*command, "--seconds", "300"]) == 0
    assert (tmp_path / "out" / "target-head" / "model.safetensors").exists()


def test_a_folder_without_texts_trains_no_head(tmp_path):
    with pytest.raises(SystemExit, match="no files that end in"):
        head.main([str(tmp_path), str(tmp_path / "out")])
