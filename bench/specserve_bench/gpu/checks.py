"""Tests marked `gpu`, and the errors that they have measured, by op."""

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any
from xml.etree import ElementTree

from specserve_bench.gpu.record import Record
from specserve_bench.suite import machine

GRACE = 15  # seconds for a report


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("parts", nargs="+", help="of the tests, as pytest's arguments")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=540)
    args = p.parse_args(argv)
    deadline = monotonic() + args.seconds
    record = Record(args.out, machine(f"pytest {'; '.join(args.parts)}"))
    tests: list[dict[str, Any]] = []
    codes = []
    for part in args.parts:  # each in a process of its own, as a fault would fail all that follow
        code, some = run(part, deadline)
        codes.append(code)
        tests += some
        record.put("tests", tests)
    failed = [t["name"] for t in tests if t["outcome"] != "passed"]
    num_passed = len(tests) - len(failed)
    record.put("summary", {"passed": num_passed, "not passed": failed, "codes": codes})
    record.put("worst", worst(tests))
    for op, error in record.figures["worst"].items():
        print(f"{op:40} {error:.2e}")
    print(f"{num_passed} passed, {len(failed)} not: {', '.join(failed[:10])}")
    record.save(done=not any(codes) and bool(tests) and not failed)
    return max(codes, key=abs)


def run(part: str, deadline: float) -> tuple[int, list[dict[str, Any]]]:
    """pytest's exit status, and the tests that it has come to by then."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        command = ["pytest", *shlex.split(part), *options, f"--junitxml={report}"]
        process = subprocess.Popen([sys.executable, "-m", *command])
        for last_word in (signal.SIGINT, signal.SIGKILL):  # at the first it still writes its report
            try:
                process.wait(max(GRACE, deadline - monotonic()))
                break
            except subprocess.TimeoutExpired:
                process.send_signal(last_word)
        code = process.wait()
        return code, read(report) if report.exists() else []


def read(report: Path) -> list[dict[str, Any]]:
    """Every test with its outcome and what it recorded."""
    tests = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcomes = [x.tag for x in case if x.tag in ("failure", "error", "skipped")]
        messages = [x.get("message", "")[:2000] for x in case if x.tag in outcomes]
        recorded: dict[str, str] = {}
        for x in case.iter("property"):
            name, value = x.get("name", ""), x.get("value", "")
            is_error = name == "error" and name in recorded
            recorded[name] = str(max(float(recorded[name]), float(value))) if is_error else value
        tests.append(
            {
                "name": case.get("name"),
                "seconds": float(case.get("time", 0)),
                "outcome": outcomes[0] if outcomes else "passed",
                **({"message": messages[0]} if messages else {}),
                **recorded,
            }
        )
    return tests


def worst(tests: list[dict[str, Any]]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for test in tests:
        if "op" in test and "error" in test:
            errors[test["op"]] = max(errors.get(test["op"], 0.0), float(test["error"]))
    return errors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
