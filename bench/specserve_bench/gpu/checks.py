"""Runs the tests marked `gpu` and records the errors that they measure, by op."""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from specserve_bench.gpu import processes
from specserve_bench.gpu.record import UNFINISHED, Record
from specserve_bench.suite import machine


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("parts", nargs="+", help="of the tests, as pytest's arguments")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=540)
    args = p.parse_args(argv)
    deadline = monotonic() + args.seconds
    record = Record(args.out, machine(f"pytest {'; '.join(args.parts)}"))
    tests: list[dict[str, Any]] = []
    codes: list[int | None] = []
    for part in args.parts:  # each in a process of its own, as a fault would fail all that follow
        code, some = run(part, deadline)
        codes.append(code)
        tests += some
        record.put("tests", tests)
        record.put("worst", worst(tests))
        record.put("summary", summary(tests, codes))
    print(json.dumps(record.figures["summary"]))
    for op, error in record.figures["worst"].items():
        print(f"{op:40} {error:.2e}")
    is_passed = bool(tests) and all(t["outcome"] == "passed" for t in tests)
    record.save(done=not any(codes) and None not in codes and is_passed)
    return UNFINISHED if None in codes else max(code or 0 for code in codes)


def run(part: str, deadline: float) -> tuple[int | None, list[dict[str, Any]]]:
    """pytest's exit status, None at the deadline, and the outcomes of the tests run until then."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "outcomes")
        lines.touch()
        options = ["-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        options += ["-p", "specserve_bench.gpu.reporting", "--outcomes", str(lines)]
        command = [sys.executable, "-m", "pytest", *shlex.split(part), *options]
        code = processes.run(command, max(0.0, deadline - monotonic()))
        return code, [json.loads(line) for line in lines.read_text().splitlines()]


def summary(tests: list[dict[str, Any]], codes: list[int | None]) -> dict[str, Any]:
    failed = [t["name"] for t in tests if t["outcome"] != "passed"]
    return {
        "passed": len(tests) - len(failed),
        "not passed": len(failed),
        "first of them": failed[:5],
        "codes": codes,
    }


def worst(tests: list[dict[str, Any]]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for test in tests:
        if "op" in test and "error" in test:
            errors[test["op"]] = max(errors.get(test["op"], 0.0), float(test["error"]))
    return errors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
