"""Tests marked `gpu`, and the errors that they have measured, by op."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from specserve_bench.gpu.record import Record
from specserve_bench.suite import machine


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser()
    p.add_argument("tests")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=int, default=540)
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        command = ["pytest", args.tests, *options, f"--junitxml={report}"]
        code = subprocess.run([sys.executable, "-m", *command]).returncode
        tests = read(report)
    record = Record(args.out, machine(" ".join(command[:-1])))
    record.put("tests", tests)
    failed = [t["name"] for t in tests if t["outcome"] != "passed"]
    record.put("summary", {"passed": len(tests) - len(failed), "not passed": failed})
    record.put("worst", worst(tests))
    for op, error in record.figures["worst"].items():
        print(f"{op:40} {error:.2e}")
    print(f"{len(tests) - len(failed)} passed, {len(failed)} not: {', '.join(failed[:10])}")
    record.save(done=code == 0 and bool(tests) and not failed)
    return code


def read(report: Path) -> list[dict[str, Any]]:
    """Every test with its outcome and what it recorded."""
    tests = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcomes = [x.tag for x in case if x.tag in ("failure", "error", "skipped")]
        messages = [x.get("message", "")[:2000] for x in case if x.tag in outcomes]
        recorded = {x.get("name"): x.get("value") for x in case.iter("property")}
        tests.append(
            {
                "name": case.get("name"),
                "seconds": float(case.get("time", 0)),
                "outcome": outcomes[0] if outcomes else "passed",
                **({"message": messages[0]} if messages else {}),
                **{str(name): value for name, value in recorded.items()},
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
