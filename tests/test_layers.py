"""The architecture, as a test: a file may import its own layer and those above it in this list."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.thorough import BEGINNING, PATHS

LAYERS = [  # ground floor first
    ("specserve_kernels",),
    ("specserve_drafters",),
    ("specserve.errors", "specserve.config", "specserve.version", "specserve.process"),
    ("specserve.logs",),
    ("specserve.models.hub", "specserve.models.ollama"),
    ("specserve.models.folder",),
    ("specserve.memory",),
    ("specserve.text",),
    ("specserve.models",),
    ("specserve.exchange",),
    ("specserve.speculation.constants",),
    ("specserve.speculation.costs",),
    ("specserve.scheduling",),
    ("specserve.engine.runner",),
    ("specserve.engine.runner",),
    ("specserve.speculation",),
    ("specserve.engine",),
    ("specserve.api", "specserve"),  # `specserve` itself exports what these define
    ("specserve.server",),
    ("specserve.cli", "specserve.__main__"),
    ("specserve_bench.demo", "specserve_bench.machine"),
    ("specserve_bench",),
]
REPOSITORY = Path(__file__).parents[1]
PACKAGES = [
    REPOSITORY / folder
    for folder in (
        "kernels/specserve_kernels",
        "drafters/specserve_drafters",
        "specserve",
        "bench/specserve_bench",
    )
]
FILES = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def nodes_of(path):
    """All nodes of a file, kept because many tests read them and a walk takes long."""
    return [*ast.walk(tree_of(path))]


def attributes(path):
    """Such as `os.nice`, of each attribute that a file names as one of a name."""
    found = [node for node in nodes_of(path) if isinstance(node, ast.Attribute)]
    return {f"{n.value.id}.{n.attr}" for n in found if isinstance(n.value, ast.Name)}


def offences(rule):
    """What `rule` finds in files, by the names of those in which it finds anything."""
    found = {name_of(path): rule(path) for path in FILES}
    return {name: each for name, each in found.items() if each}


def name_of(path):
    package = next(p for p in PACKAGES if p in path.parents)
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def layer(module):
    """The layer of the longest name that covers the module; None for somebody else's."""
    covers = [
        (name, i)
        for i, names in enumerate(LAYERS)
        for name in names
        if f"{module}.".startswith(f"{name}.")
    ]
    return max(covers, key=lambda c: len(c[0]), default=(None, None))[1]


def imports(path):
    """Names that a file imports, also inside of functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that this test can read them"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def is_listed(module):
    """Whether a module of the engine has a place of its own in the list."""
    names = {name for names in LAYERS for name in names} - {"specserve"}
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def test_every_module_has_a_layer():
    names = [name_of(path) for path in FILES]
    assert [name for name in names if not is_listed(name)] == ["specserve.__init__"]


def test_imports_run_downward():
    assert offences(upward_imports) == {}


def upward_imports(path):
    own = layer(name_of(path))
    return [module for module in imports(path) if (layer(module) or 0) > own]


def modules():
    return {name_of(path).removesuffix(".__init__"): path for path in FILES}


def imported_modules(path, known):
    """The known modules that a file imports, also inside of functions and for type checks only."""
    found = set()
    for name in imports(path):
        module = name if name in known else name.rpartition(".")[0]
        found |= {module} & known.keys()
    return found


def cycles(graph):
    """Modules that import each other, by way of others or not: what is left when those that import
    none of the rest, and those that none of the rest imports, are taken out again and again.
    """
    graph = {name: set(found) - {name} for name, found in graph.items()}
    while True:
        used = {name for found in graph.values() for name in found}
        kept = {name for name, found in graph.items() if found & graph.keys() and name in used}
        if len(kept) == len(graph):
            return sorted(kept)
        graph = {name: graph[name] & kept for name in kept}


def test_no_modules_import_each_other_in_a_cycle():
    known = modules()
    assert cycles({name: imported_modules(path, known) for name, path in known.items()}) == []


def test_a_cycle_of_imports_would_be_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert cycles(graph) == ["b", "c"]
    assert cycles(graph | {"c": {"d"}}) == []


def types(path):
    """Names of the classes that a file defines, and of its aliases of types."""
    yield from (node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef))
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_no_type_name_is_defined_twice_in_the_product():
    product = [path for path in FILES if "specserve_bench" not in path.parts]
    count = Counter(name for path in product for name in {*types(path)})
    assert [name for name, number in count.items() if number > 1] == []


def functions():
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return [n for path in FILES for n in nodes_of(path) if isinstance(n, kinds)]


def test_nine_of_ten_functions_have_at_most_20_lines():
    lines = sorted(n.end_lineno - n.lineno + 1 for n in functions())
    assert lines[int(0.9 * len(lines))] <= 20


def test_the_engine_is_below_450_lines():
    """What a step needs beside its order has a module of its own."""
    assert len((REPOSITORY / "specserve/engine/engine.py").read_text().splitlines()) < 450


def assigned(path):
    """Attributes that a file assigns, each with the last name of its object: `x.engine.stats = 1`
    is ("engine", "stats").
    """
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr


def test_only_the_engine_sets_its_attributes():
    engine = REPOSITORY / "specserve/engine/engine.py"
    own = {name for of, name in assigned(engine) if of == "self"}
    others = [path for path in FILES if path != engine]
    assert len(own) > 10
    assert [(path, name) for path in others for name in assigned_to_engine(path) & own] == []


def assigned_to_engine(path):
    return {name for of, name in assigned(path) if of == "engine"}


def test_at_most_six_modules_stand_next_to_the_packages():
    modules = [path for path in (REPOSITORY / "specserve").glob("*.py") if path.stem[:2] != "__"]
    assert len(modules) <= 6


def public_names(path):
    """Names that a file defines for others: types, functions, methods and constants."""
    for node in tree_of(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            kinds = ast.FunctionDef, ast.AsyncFunctionDef
            yield from (node.name, *(each.name for each in node.body if isinstance(each, kinds)))


def test_public_names_become_no_more():
    """For each thousand lines; 65 is wanted."""
    names = [n for path in FILES for n in public_names(path) if not n.startswith("_")]
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    print(f"{len(names)} names, {lines} lines")
    assert 1000 * len(names) / lines <= 96


def test_no_thread_has_a_low_priority():
    """A niced thread that holds the GIL stalls all others while it gets no CPU. Processes may be
    niced.
    """
    assert offences(lowered_priorities) == {}


def lowered_priorities(path):
    forbidden = {"os.setpriority"} | (set() if path.stem.endswith("_process") else {"os.nice"})
    return forbidden & attributes(path)


def test_nothing_unpickles():
    """A model file or a socket that is unpickled runs whatever its author wrote into it."""
    assert offences(unpickling) == {}


def unpickling(path):
    roots = {module.partition(".")[0] for module in imports(path)}
    libraries = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    return roots & libraries | attributes(path) & {"torch.load", "torch.save"}


def test_no_text_is_run_as_code():
    """Nor does anything import what runs texts, or unpickles where its name does not say so."""
    assert offences(run_texts) == {}


def run_texts(path):
    nodes = nodes_of(path)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    libraries = {"code", "codeop", "runpy", "joblib", "numpy.load", "torch.load"}
    words = [node for node in nodes if isinstance(node, ast.keyword)]
    unsafe = [word for word in words if word.arg in ("allow_pickle", "trust_remote_code")]
    allowed = {word.arg for word in unsafe if ast.unparse(word.value) != "False"}
    names &= {"eval", "exec", "compile", "__import__"}
    return names | {*imports(path)} & libraries | allowed


@pytest.mark.parametrize(
    ("rule", "code", "found"),
    [
        (upward_imports, "def f():\n    import specserve.engine", {"specserve.engine"}),
        (lowered_priorities, "os.nice(1); os.setpriority(0, 0, 1)", {"os.nice", "os.setpriority"}),
        (unpickling, "import pickle; torch.load(a.b)", {"pickle", "torch.load"}),
        (run_texts, "from torch import load", {"torch.load"}),
        (run_texts, "eval(f(allow_pickle=y))", {"eval", "allow_pickle"}),
        (run_texts, "f(trust_remote_code=False)", None),
    ],
)
def test_an_offence_would_be_seen(rule, code, found, tmp_path, monkeypatch):
    path = tmp_path / "specserve_kernels" / "new.py"
    path.parent.mkdir()
    path.write_text(code)
    monkeypatch.setitem(globals(), "PACKAGES", [path.parent])
    monkeypatch.setitem(globals(), "FILES", [path])
    seen = {name: {*each} for name, each in offences(rule).items()}
    assert seen == ({"specserve_kernels.new": found} if found else {})


@pytest.mark.parametrize("folder", ["kernels", "drafters", "bench"])
def test_the_folder_of_a_floor_is_no_package(folder):
    assert not (REPOSITORY / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("specserve_kernels.reference", "specserve_drafters.candidates"),
        ("specserve.memory.blocks", "specserve.engine.batch"),
        ("specserve.engine.engine", "specserve.LLM"),
        ("specserve.api.llm", "specserve_bench.figures"),
    ],
)
def test_an_upward_import_would_be_seen(importer, imported):
    assert layer(imported) > layer(importer)


def test_the_files_that_are_left_to_ci_are_there():
    assert [path for path in PATHS | BEGINNING if not path.is_file()] == []


def test_every_module_can_be_imported_without_a_gpu():
    """Nor does importing one need FlashInfer, which no machine without a GPU has."""
    names = [name_of(path).removesuffix(".__init__") for path in FILES]
    names = [name for name in names if not name.endswith("__main__")]
    code = f"import sys; sys.modules['flashinfer'] = None; import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
