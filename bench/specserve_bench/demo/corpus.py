"""Training text of the demo models: the standard library's source, and questions about it.

Both come from the running interpreter's installation (PSF licence). Source is parsed and not
imported; the few modules without source are imported and inspected.
"""

import ast
import builtins
import importlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# Left out of training; evaluation and workloads read them.
EVALUATION_FILES = (
    *("colorsys.py", "graphlib.py", "sched.py", "fractions.py", "queue.py", "netrc.py"),
    *("quopri.py", "stringprep.py", "zipapp.py", "json/encoder.py", "email/quoprimime.py"),
    "concurrent/futures/thread.py",
)
# Not read: generated tables, data, programs, and packages that newer versions have removed.
SKIPPED = {"site-packages", "pydoc_data", "idlelib", "lib2to3", "distutils", "turtledemo"}
NOT_ASKED_ABOUT = SKIPPED | {"test", "tests", "encodings", "ensurepip", "unittest"}
ALIASES = {"posixpath": "os.path", "_collections_abc": "collections.abc", "_pydecimal": "decimal"}
MAX_ARGUMENTS = 12
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")


class Symbol(NamedTuple):
    """A public function or class, and its documentation."""

    name: str  # dotted, as imported: shutil.copytree
    signature: str  # (src, dst, symlinks=False)
    call: str  # with its required arguments: shutil.copytree(src, dst)
    summary: str  # the docstring's first sentence
    more: str  # the rest of its first paragraph; may be empty


def library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(folder: Path) -> list[str]:
    """Every readable source file for training, relative to the library's folder, in order."""
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    wanted = (p.as_posix() for p in paths if not SKIPPED & set(p.parts))
    return sorted(name for name in wanted if name not in EVALUATION_FILES)


def read_source(path: Path) -> str | None:
    """None where it is not UTF-8, as some of the library's own test data is not."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def symbols(folder: Path) -> list[Symbol]:
    """Every symbol that there are questions about, sorted by name, without duplicates."""
    found = {s.name: s for s in [*symbols_of_sources(folder), *symbols_without_source()]}
    return [found[name] for name in sorted(found)]


def symbols_of_sources(folder: Path) -> Iterator[Symbol]:
    for name in source_files(folder):
        parts = Path(name).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        module = ALIASES.get(module, module)
        text = read_source(folder / name)
        if text is None or NOT_ASKED_ABOUT & set(parts) or is_private(module):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from described(f"{module}.{node.name}", node)


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") for part in dotted.split("."))


def described(
    name: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> Iterator[Symbol]:
    if isinstance(node, ast.ClassDef):
        inits = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
        arguments = next((init.args for init in inits), None)
        if arguments is not None:
            arguments.args = arguments.args[1:]  # self
    else:
        arguments = node.args
    signature = "()" if arguments is None else f"({ast.unparse(arguments)})"
    needed = [] if arguments is None else required(arguments)
    yield from symbol(name, signature, needed, ast.get_docstring(node))


def required(arguments: ast.arguments) -> list[str]:
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    given = positional[: len(positional) - len(arguments.defaults)]
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return given + [f"{a.arg}={a.arg}" for a, default in defaults if default is None]


def symbols_without_source() -> Iterator[Symbol]:
    for name in ("math", "itertools", "time", "zlib", "binascii", "array", "cmath", "errno"):
        module = importlib.import_module(name)
        yield from (s for key in sorted(vars(module)) for s in inspected(name, module, key))
    for key in sorted(vars(builtins)):
        yield from inspected("", builtins, key)
    for kind in (str, bytes, list, dict, set, tuple, int, float):
        yield from (s for key in sorted(vars(kind)) for s in inspected(kind.__name__, kind, key))


def inspected(owner: str, holder: ModuleType | type, key: str) -> Iterator[Symbol]:
    value = getattr(holder, key)
    if key.startswith("_") or not callable(value):
        return
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):  # many builtins have no signature
        return
    parameters = [p for p in parameters if p.name != "self"]
    signature = str(inspect.Signature(parameters)) if parameters else "()"
    needed = [
        p.name if p.kind is not p.KEYWORD_ONLY else f"{p.name}={p.name}"
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    yield from symbol(f"{owner}.{key}".lstrip("."), signature, needed, inspect.getdoc(value))


def symbol(name: str, signature: str, needed: list[str], doc: str | None) -> Iterator[Symbol]:
    """The symbol, unless it is private, undocumented, or too long to ask about."""
    if is_private(name) or not doc or len(needed) > MAX_ARGUMENTS or len(signature) > 200:
        return
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    sentences = SENTENCE_END.split(paragraph)
    summary, more = sentences[0], " ".join(sentences[1:])
    if 3 <= len(summary.split()) <= 40:
        yield Symbol(name, signature, f"{name}({', '.join(needed)})", summary, more[:300])


class Phrasings(NamedTuple):
    """Ways to ask one kind of question; `{}` stands for its subject."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]


PURPOSE = Phrasings(
    (
        "What does {} do?",
        "What is {} for?",
        "Explain {}.",
        "Describe {} in a sentence or two.",
        "Tell me about {}.",
        "I found {} in some code. What is it?",
        "{}: what does it do?",
        "What is the purpose of {}?",
    ),
    ("Can you tell me what {} does?", "When would I use {}?", "Please explain what {} is for."),
)
SIGNATURE = Phrasings(
    (
        "Show the signature of {}.",
        "What arguments does {} take?",
        "How is {} declared?",
        "Which parameters does {} have?",
    ),
    ("What is the signature of {}?", "List the parameters of {}."),
)
CALL = Phrasings(
    (
        "Write a call of {}.",
        "How do I call {}?",
        "Show me how {} is used.",
        "Give an example call of {}.",
    ),
    ("What does a call of {} look like?",),
)
NAME = Phrasings(
    (
        "Which function or class is described like this? {}",
        "What in the standard library does this? {}",
        "Name what is documented as follows: {}",
    ),
    ("What am I looking for? {}",),
)


class Turn(NamedTuple):
    question: str
    answer: str


def turns(symbol: Symbol) -> Iterator[Turn]:
    """All training questions about a symbol, with their answers; held-out phrasings stay out."""
    purpose = f"{symbol.summary} {symbol.more}".strip()
    signature = f"```python\n{symbol.name}{symbol.signature}\n```"
    call = f"```python\n{symbol.call}\n```"
    name = f"That is `{symbol.name}`."
    for phrasings, about, answer in (
        (PURPOSE, symbol.name, purpose),
        (SIGNATURE, symbol.name, signature),
        (CALL, symbol.name, call),
        (NAME, symbol.summary, name),
    ):
        yield from (Turn(p.format(about), answer) for p in phrasings.training)
