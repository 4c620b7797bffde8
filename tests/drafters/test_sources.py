"""All sources have one protocol, and state as data what they need."""

import ast
from array import array
from inspect import signature
from pathlib import Path

import pytest

from specserve_drafters.base import AUTO_SOURCES, SOURCES, DraftSource, SourceRequest, make_source

ROOT = Path(__file__).parents[2]
METHODS = [name for name, value in vars(DraftSource).items() if callable(value)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_of_the_list_has_the_protocol(name):
    source = make_source(name)
    assert source.name == name and name in AUTO_SOURCES and isinstance(source, DraftSource)
    for method in METHODS:
        own, of_all = getattr(type(source), method), getattr(DraftSource, method)
        assert [*signature(own).parameters] == [*signature(of_all).parameters], method
    text = array("i", [1, 2, 3, 1, 2])
    source.begin(SourceRequest(7, text, 5, prediction=text))
    assert source.needs_rules == (name == "grammar")
    assert source.needs_prediction == (name == "prediction")
    source.forget(7)
    source.reset()


def test_no_code_asks_for_the_type_of_a_source_or_lists_names():
    """Nor does the speculator import a source."""
    files = [*(ROOT / "specserve/speculation").glob("*.py"), ROOT / "specserve/engine/build.py"]
    modules = {path.partition(":")[0] for path in SOURCES.values()}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                assert "ource" not in ast.unparse(node), file.name
                assert "drafter" not in ast.unparse(node), file.name
            if isinstance(node, ast.ImportFrom):
                assert node.module not in modules, (file.name, node.module)
            if isinstance(node, ast.Constant):
                assert node.value not in SOURCES, (file.name, node.value)
