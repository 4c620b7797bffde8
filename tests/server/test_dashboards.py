"""The dashboard and the alert rules name what a running server tells at /metrics."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.server.asking import COMPLETIONS, is_running, is_waiting, saying, started
from tests.server.server_process import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana/specserve.json").read_text())
ALERTS = DEPLOY / "prometheus/alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
OF_PROMETHEUS = {"up"}
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES = {each["name"]: each for each in BOARD["templating"]["list"]}
QUERIES = [target for panel in PANELS for target in panel["targets"]]
RANGES = {"$__rate_interval": "5m"}


def parsed(expression):
    for variable, value in RANGES.items():
        expression = expression.replace(variable, value)
    return promql_parser.parse(expression)


def nodes(expression):
    found = []
    promql_parser.walk(parsed(expression), lambda node: found.append(node))
    return found


def selectors(expression):
    """The names of metrics, and of the labels that are asked of each."""
    for node in nodes(expression):
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name, {matcher.name for matcher in node.matchers.matchers}


def grouping(expression):
    """The labels that series are grouped or matched by."""
    for node in nodes(expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            yield from node.modifier.labels
        if isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            yield from node.modifier.matching.labels if node.modifier.matching else ()
            yield from node.modifier.group_labels or ()


@pytest.fixture(scope="module")
def told(paced_threads):
    """The labels of each series that a server tells, once each kind of thing has happened."""
    tight = {"server.max_queued_requests": 1, "scheduler.max_running": 1}
    tight["memory.host_bytes"] = 1 << 20
    with paced_threads(**tight) as server:
        assert server.post(COMPLETIONS, saying(2)).status == 200
        with started(server, saying(400, ms=50)):
            eventually(lambda: is_running(server))
            with started(server, saying(1)):
                eventually(lambda: is_waiting(server))
                assert server.post(COMPLETIONS, saying(1)).status == 503
        labels = {}
        for line in server.get("/metrics").body.splitlines():
            if series := re.match(r"([\w:]+)\{(.*)\} ", line):
                names = re.findall(r'(\w+)="', series[2])
                labels.setdefault(series[1], set()).update(names)
    return labels


EXPRESSIONS = [target["expr"] for target in QUERIES] + [rule["expr"] for rule in RULES]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_of_an_expression_is_reported(told, expression):
    known = set(SCRAPED)
    for name, labels in selectors(expression):
        assert name in told or name in OF_PROMETHEUS
        its = told.get(name, set()) | SCRAPED
        assert labels <= its
        known |= its
    assert {*grouping(expression)} <= known


@pytest.mark.parametrize("target", QUERIES, ids=lambda target: target["legendFormat"])
def test_every_label_of_a_legend_is_left_by_its_query(told, target):
    wanted = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
    shown = {*grouping(target["expr"])}
    if not shown:  # a series as it is told
        shown = set().union(*(told[name] for name, _ in selectors(target["expr"]))) | SCRAPED
    assert wanted <= shown


def test_every_variable_is_defined_and_asks_for_what_is_reported(told):
    used = {*re.findall(r"\$\{?([a-z]\w*)", json.dumps(BOARD["panels"]))}
    assert used == {*VARIABLES} == {"datasource", "model", "instance"}
    for name in "model", "instance":
        query = VARIABLES[name]["query"]["query"]
        series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        [(metric, labels)] = selectors(series)
        assert labels | {label} <= told[metric] | SCRAPED


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len({*ids}) == len(ids)
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len({*cells}) == len(cells) and max(x for x, _ in cells) < 24


def test_no_datasource_is_baked_in():
    others = [*PANELS, *QUERIES, VARIABLES["model"], VARIABLES["instance"]]
    assert {each["datasource"]["uid"] for each in others} == {"${datasource}"}
    assert VARIABLES["datasource"]["type"] == "datasource"


def test_every_panel_says_what_it_shows():
    assert all(panel["title"] and panel["description"] for panel in PANELS)
    assert [p["title"] for p in BOARD["panels"] if p["type"] == "row"] == [
        "Latency",
        "Load",
        "Draft tokens",
        "Memory",
        "Health",
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_and_says_what_to_do(rule):
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["annotations"]["summary"] and rule["annotations"]["description"]


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


@needs_promtool
@pytest.mark.parametrize("command", [["check", "alerts.yml"], ["test", "alerts_test.yml"]])
def test_promtool_finds_the_rules_valid_and_alerts_fire_when_they_should(command):
    kind, file = command
    done = subprocess.run(
        ["promtool", kind, "rules", file],
        cwd=ALERTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test():
    tests = (ALERTS.parent / "alerts_test.yml").read_text()
    assert {*re.findall(r'alertname="(\w+)", alertstate', tests)} == {r["alert"] for r in RULES}
