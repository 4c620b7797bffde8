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
from specserve_bench.gpu.stages import REHEARSED
from specserve_bench.machine import add_allow_dirty, exit_if_dirty
from specserve_bench.suite import machine

FINE = {"passed", "skipped", "skipped early"}  # outcomes


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("parts", nargs="+", help="of the tests, as pytest's arguments")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=540)
    p.add_argument("--rehearse", action="store_true")
    add_allow_dirty(p)
    args = p.parse_args(argv)
    exit_if_dirty(f"--out {args.out}", args.allow_dirty or args.rehearse)
    deadline, parts = monotonic() + args.seconds, [REHEARSED] if args.rehearse else args.parts
    record = Record(args.out, machine(f"pytest {'; '.join(parts)}"))
    tests: list[dict[str, Any]] = []
    codes: list[int | None] = []
    for part in parts:  # each in a process of its own, as a fault would fail all that follow
        code, some = run(part, deadline)
        codes.append(code)
        tests += some
        for test in some:
            if test["outcome"] not in FINE:
                record.put(f"{test['name']}: {test['outcome']}", test.get("message", ""))
    record.put("worst", worst(tests))
    record.put("slowest, s", slowest(tests))
    record.put("summary", summary(tests, codes))
    outcomes = {t["outcome"] for t in tests}
    is_passed = "passed" in outcomes and outcomes <= FINE
    record.finish(done=not any(codes) and None not in codes and is_passed)
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
    failed = [t["name"] for t in tests if t["outcome"] not in FINE]
    passed = [t["name"] for t in tests if t["outcome"] == "passed"]
    return {
        "passed": len(passed),
        "skipped": len(tests) - len(passed) - len(failed),
        "not passed": len(failed),
        "first of them": failed[:5],
        "codes": codes,
    }


def slowest(tests: list[dict[str, Any]]) -> dict[str, float]:
    by_time = sorted(tests, key=lambda test: -test["seconds"])
    return {test["name"]: test["seconds"] for test in by_time[:10]}


def worst(tests: list[dict[str, Any]]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for test in tests:
        if "op" in test and "error" in test:
            errors[test["op"]] = max(errors.get(test["op"], 0.0), float(test["error"]))
    return errors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
