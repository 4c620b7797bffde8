"""A pytest plugin: each test's outcome is a line of JSON as soon as it is known."""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file that gets a line for each test")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None and not hasattr(config, "workerinput"):  # of xdist, which reports to one
        config.pluginmanager.register(Outcomes(file), "outcomes")


class Outcome:
    seconds, outcome, message = 0.0, "passed", ""


class Outcomes:
    """Adds up a test's phases: set-up, call, tear-down. Several tests may run at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.running: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.running.setdefault(report.nodeid, Outcome())
        test.seconds += report.duration
        if report.outcome != "passed" and test.outcome == "passed":
            test.outcome = report.outcome if report.when == "call" else f"{report.outcome} early"
            test.message = str(report.longrepr)[-2000:]
        if report.when == "teardown":
            self.write(report, self.running.pop(report.nodeid))

    def write(self, report: pytest.TestReport, test: Outcome) -> None:
        line: dict[str, Any] = {
            "name": report.nodeid.rpartition("::")[2],
            "seconds": round(test.seconds, 3),
            "outcome": test.outcome,
            **({"message": test.message} if test.message else {}),
            **recorded(report.user_properties),
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def recorded(properties: list[tuple[str, object]]) -> dict[str, object]:
    """The properties that a test recorded; of several errors, the largest."""
    values: dict[str, Any] = {}
    for name, value in properties:
        values[name] = max(values[name], value) if name == "error" and name in values else value
    return values
