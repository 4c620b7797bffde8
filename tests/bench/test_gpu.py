"""`make gpu-check` without a GPU: what it keeps, goes on with, and says of what failed."""

import json
import sys

import pytest
import torch

from specserve_bench.gpu import checks, figures, record, stages, toolchain
from specserve_bench.gpu.figures import Kernel, gaps
from specserve_bench.gpu.record import Record


def test_a_record_goes_on_where_it_was_left(tmp_path):
    file = tmp_path / "gpu-x.json"
    Record(file, {"gpu": "one"}).put("a", 1)
    again = Record(file, {"gpu": "one"})
    assert "a" in again and "b" not in again
    assert not record.load_done(file)
    again.put("b", [2.5])
    again.save(done=True)
    assert record.load_done(file)
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
Record(Path(sys.argv[sys.argv.index("--out") + 1]), {}).save(done=True)
"""
STAGES = {  # what a stage does -> its state
    "done": (DONE, "done"),
    "failed": ("raise SystemExit(1)", "failed"),
    "late": ("raise SystemExit(3)", "unfinished"),
    "stopped": ("import time; time.sleep(60)", "unfinished"),
}


def run_stages(tmp_path, monkeypatch, capsys, names, *options):
    """The last column of what each stage is said to be, by name."""
    for name in names:
        (tmp_path / f"{name}.py").write_text(STAGES[name][0])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(stages, "STAGES", {name: [name] for name in names})
    monkeypatch.setattr(stages, "check_machine", lambda environment: None)
    code = stages.main(["--out", str(tmp_path), "--limit", "3", *options])
    lines = capsys.readouterr().out.splitlines()[-len(names) :]
    return code, {name: line[10:].split()[0] for name, line in zip(names, lines, strict=True)}


def test_every_stage_is_run_whatever_the_one_before_it_did(tmp_path, monkeypatch, capsys):
    names = ["failed", "late", "stopped", "done"]
    code, said = run_stages(tmp_path, monkeypatch, capsys, names)
    assert (code, said) == (1, {name: STAGES[name][1] for name in names})


def test_what_is_done_for_this_source_is_kept(tmp_path, monkeypatch, capsys):
    assert run_stages(tmp_path, monkeypatch, capsys, ["done"]) == (0, {"done": "done"})
    assert run_stages(tmp_path, monkeypatch, capsys, ["done"]) == (0, {"done": "kept"})
    again = run_stages(tmp_path, monkeypatch, capsys, ["done"], "--again")
    assert again == (0, {"done": "done"})


def test_a_folder_without_wheels_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no wheels there"):
        stages.main(["--out", str(tmp_path), "--wheels", str(tmp_path)])


def test_a_stage_that_nobody_knows_is_refused_before_any_is_run(tmp_path):
    with pytest.raises(SystemExit, match="no stage figure: there are compile, kernels, parity"):
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


REPORT = """<testsuites><testsuite>
<testcase name="test_a" time="1.5"><properties>
  <property name="op" value="attention"/><property name="error" value="0.002"/>
</properties></testcase>
<testcase name="test_b" time="0"><properties>
  <property name="op" value="attention"/><property name="error" value="0.003"/>
</properties><failure message="too far off">trace</failure></testcase>
<testcase name="test_c" time="0"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_checks_read_outcomes_and_the_worst_error_of_each_op(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    tests = checks.read(tmp_path / "report.xml")
    assert [t["outcome"] for t in tests] == ["passed", "failure", "skipped"]
    assert [t.get("message") for t in tests] == [None, "too far off", "no GPU"]
    assert checks.worst(tests) == {"attention": 0.003}


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
def test_checks_that_are_skipped_are_not_done(tmp_path):
    out = tmp_path / "gpu-kernels.json"
    checks.main(["tests/kernels/test_gpu.py", "--out", str(out)])
    data = json.loads(out.read_text())
    assert data["figures"]["summary"]["passed"] == 0
    assert not data["done"]


def test_gaps_are_what_no_kernel_fills():
    kernels = [Kernel("a", 0, 1000), Kernel("b", 1500, 2000), Kernel("a", 1800, 4000)]
    got = gaps([*kernels, Kernel("b", 5000, 5500)], steps=2)
    assert got["launches"] == 2
    assert got["busy ms by kernel"] == {"a": 1.6, "b": 0.5}
    assert got["idle ms before kernel"] == {"b": 0.75, "a": 0.0}
    assert (got["busy ms"], got["idle ms"]) == (2.1, 0.75)


def test_the_figures_can_be_stopped_and_gone_on_with(tmp_path, one_thread):
    command = ["--trial", "--out", str(tmp_path / "gpu-figures.json")]
    assert figures.main([*command, "--seconds", "0"]) == stages.UNFINISHED
    assert figures.main(command) == 0
    data = json.loads((tmp_path / "gpu-figures.json").read_text())
    assert data["done"] and data["machine"]["command"]
    names = data["figures"]
    assert names["qwen3-0.6b step: 4 rows x 2 requests, context 4194304"].startswith("left out")
    assert names["qwen3-0.6b step: 4 rows x 2 requests, context 40"]["over"] > 0
    assert names["qwen3-0.6b gaps: 32 rows"]["busy ms"] > 0
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


def test_checks_out_of_time_keep_what_they_have_come_to(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "GRACE", 4)
    (tmp_path / "test_slow.py").write_text(
        "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n"
    )
    code, tests = checks.run(str(tmp_path / "test_slow.py"), deadline=0.0)
    assert code == 2
    assert ("test_a", "passed") in [(t["name"], t["outcome"]) for t in tests]


def test_the_toolkit_is_found_with_its_libraries(tmp_path, monkeypatch):
    home = tmp_path / "cuda"
    for file in ("include/cuda_runtime.h", "lib64/libcudart.so.13", "lib64/stubs/libcuda.so"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    got = toolchain.toolchain()
    links = toolchain.Path(got["FLASHINFER_EXTRA_LDFLAGS"].removeprefix("-L"))
    assert got["CUDA_HOME"] == str(home)
    assert (links / "libcudart.so").resolve() == home / "lib64/libcudart.so.13"
    assert (links / "libcuda.so").resolve() == home / "lib64/stubs/libcuda.so"
