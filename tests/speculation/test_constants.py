"""The constants of drafting and planning: one place, and each with a unit, a range and a reason."""

import ast
import re
from pathlib import Path

import pytest

from specserve import speculation
from specserve.speculation import constants

FOLDER = Path(speculation.__file__).parent
PLANNING = "adaptive_speculator", "costs", "draft_depth", "planner", "recycler"
NUMBER = r"[0-9.e-]+"
FORM = re.compile(
    rf"# (?P<unit>[a-z ]+); (?P<low>{NUMBER}) to (?P<high>{NUMBER}); (?P<reason>[a-z].{{20,}}"
    r"(\n# .+)*)\n(?P<name>[A-Z_]+) = "
)


def constants_of(path):
    """Names of the numbers that a module defines for itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name) and t.id.isupper())


FOUND = {m["name"]: m for m in FORM.finditer((FOLDER / "constants.py").read_text())}


def test_every_constant_has_a_unit_a_range_and_a_reason():
    names = {name for name in vars(constants) if name.isupper()}
    assert len(names) > 30 and names == {*FOUND}


@pytest.mark.parametrize("name", FOUND)
def test_a_constant_is_within_its_range(name):
    value, found = getattr(constants, name), FOUND[name]
    values = value if isinstance(value, tuple) else (value,)
    assert all(float(found["low"]) <= each <= float(found["high"]) for each in values)


def test_no_module_of_planning_defines_another_constant():
    assert {name: [*constants_of(FOLDER / f"{name}.py")] for name in PLANNING} == {
        name: [] for name in PLANNING
    }
