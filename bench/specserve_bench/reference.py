"""`make reference`: write the pages in docs/reference/ from types, docstrings and parsers.

The pages are the same on every machine: they contain no paths, no measured values and no line
breaks that depend on a terminal.
"""

import inspect
import re
import sys
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from html import escape, unescape
from importlib.metadata import EntryPoint, entry_points
from inspect import get_annotations
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

import specserve
from specserve.cli import command as cli
from specserve.config import KNOBS, SECTIONS, Config, description, toml_value
from specserve.server import docs_page
from specserve.server.routes import described

FOLDER = Path("docs/reference")
GENERATED = "`make reference` generates this page from the code."
FIELD = re.compile(r"^(\w+)  +(\S.*(?:\n {8,}\S.*)*)\n?", re.MULTILINE)  # in a docstring


def main(argv: Sequence[str]) -> int:
    folder = Path(argv[0]) if argv else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        (folder / name).write_text(write(), encoding="utf-8")
    return 0


def python() -> str:
    """All names of `from specserve import ...`, and the types of their fields."""
    names = dict[type, list[str]]()
    for name in sorted(set(specserve.__all__) - {"__version__"}, key=str.lower):
        names.setdefault(getattr(specserve, name), []).append(name)
    parts = [
        "# Python reference",
        GENERATED,
        "Import these names from `specserve`.",
    ]
    todo, done = [*names], list[type]()
    while todo:
        each = todo.pop(0)
        if each not in done:
            if len(done) == len(names):
                parts.append("`specserve` does not export the following types of fields.")
            done.append(each)
            todo += structs(each)
            parts += [f"## {', '.join(names.get(each, [each.__name__]))}", *thing(each)]
    return "\n\n".join(parts) + "\n"


def thing(of: type) -> Iterable[str]:
    """The description of a class, its fields, and its methods that have a docstring."""
    docs = (vars(c).get("__doc__") for c in of.__mro__ if c.__module__.startswith("specserve"))
    text, meanings = prose(next(filter(None, docs), None))
    is_struct = issubclass(of, msgspec.Struct)
    if "__init__" in vars(of) and not is_struct:
        yield code(f"{of.__name__}{signature(of)}")
    if text:
        yield text
    if is_struct or get_annotations(of):
        yield fields(of, meanings)
    methods: dict[str, Any] = {}
    for c in reversed(of.__mro__):
        if c is of or c.__module__ == "specserve.api.base":
            methods |= vars(c)
    for name, method in methods.items():
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function) and function.__doc__ and not name.startswith("_"):
            yield f"### {of.__name__}.{name}"
            yield code(f"{name}{signature(function)}")
            yield prose(function.__doc__)[0]


def signature(of: Callable[..., Any]) -> str:
    """Parameters and the returned type, on one line if it is short."""
    found = inspect.signature(of, eval_str=True)
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    given, kinds = [*map(words_of, parameters)], [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        given.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = found.return_annotation
    end = "" if returned in (inspect.Signature.empty, None) else f" -> {kind_words(returned)}"
    line = f"({', '.join(given)}){end}"
    return line if len(line) < 70 else "(\n    " + ",\n    ".join(given) + f",\n){end}"


def words_of(p: inspect.Parameter) -> str:
    stars = "*" * (p.kind is p.VAR_POSITIONAL) or "**" * (p.kind is p.VAR_KEYWORD)
    words = f"{stars}{p.name}: {kind_words(p.annotation)}"
    return words if p.default is p.empty else f"{words} = {p.default!r}"


def kind_words(kind: Any) -> str:
    """The source form of a type, without limits and modules."""
    if get_origin(kind) is Annotated:
        return kind_words(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(kind_words, get_args(kind))))
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    if isinstance(kind, list):  # the parameters of a Callable
        return f"[{', '.join(map(kind_words, kind))}]"
    name = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    if not get_args(kind):
        return {"NoneType": "None", "Ellipsis": "...", "ellipsis": "..."}.get(name, name)
    return f"{name}[{', '.join(map(kind_words, get_args(kind)))}]"


def fields(of: type, meanings: dict[str, str]) -> str:
    """A table of a struct's fields."""
    kinds = get_type_hints(of, include_extras=True)
    defaults = (
        {f.name: f for f in msgspec.structs.fields(of)} if issubclass(of, msgspec.Struct) else {}
    )
    rows = []
    for name in defaults or kinds:
        field = defaults.get(name)
        has_default = field is not None and field.default is not msgspec.NODEFAULT
        value = f"`{field.default!r}`" if field is not None and has_default else ""
        rows.append((f"`{name}`", f"`{kind_words(kinds[name])}`", value, meanings.get(name, "")))
    head = ["field", "type", "default", "meaning"]
    keep = [k for k in range(4) if any(row[k] for row in rows)]
    return table([head[k] for k in keep], [[row[k] for k in keep] for row in rows])


def structs(of: Any) -> Iterable[type]:
    """The structs in the types of a struct's fields."""
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        for kind in get_type_hints(of, include_extras=True).values():
            yield from inside(kind)


def inside(kind: Any) -> Iterable[type]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in get_args(kind):
        yield from inside(part)


def prose(doc: str | None) -> tuple[str, dict[str, str]]:
    """The text of a docstring, and its list of fields."""
    words = inspect.cleandoc(doc or "")
    found = {name: " ".join(meaning.split()) for name, meaning in FIELD.findall(words)}
    if len(found) < 2:
        return words, {}
    return inspect.cleandoc(FIELD.sub("", words)), found


def http() -> str:
    """Routes and types of the server, as on its page /docs."""
    document = described()
    parts = [
        "# HTTP reference",
        GENERATED,
        "A server shows the same at `/docs`, and as JSON at `/openapi.json`.",
        "## Routes",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += [f"### `{method.upper()} {path}`", operation["summary"]]
            parts += rows_of(docs_page.route(method, path, operation), ("", "type", "meaning"))
    parts.append("## Types")
    schemas = document["components"]["schemas"]
    for name in sorted(schemas):
        parts.append(f"### {name}")
        html = docs_page.component(name, schemas[name])
        parts += map(markdown, re.findall(r"<p>(.*?)</p>", html, re.DOTALL))
        parts += rows_of(html, ("field", "type", "meaning"))
    return "\n\n".join(parts) + "\n"


def rows_of(html: str, head: Sequence[str]) -> Iterable[str]:
    """The table of a piece of the page /docs, in Markdown."""
    rows = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in html.split("<tr>")[1:]]
    if rows:
        yield table(head, [map(markdown, row) for row in rows])


def markdown(html: str) -> str:
    """Links and code of the page /docs in Markdown, without its other tags."""
    text = re.sub(r'<a href="#(.*?)">(.*?)</a>', lambda m: f"[{m[2]}](#{m[1].lower()})", html)
    text = re.sub(r"</?code>", "`", text)
    text = " ".join(unescape(re.sub(r"<[^>]*>", "", text)).split())
    pieces = text.split("`")
    pieces[::2] = [piece.replace("<", "&lt;") for piece in pieces[::2]]  # outside of code
    return "`".join(pieces)


def settings() -> str:
    """Every key of a config, with its default and meaning."""
    parts = [
        "# Settings",
        GENERATED,
        "`specserve config show` prints the same. Set a key in a TOML file (`--config file.toml`) "
        "or on the command line (`--set memory.block_size=32`).",
    ]
    config = Config()
    for section in SECTIONS:
        keys = [key for key in KNOBS if key.startswith(f"{section}.")]
        rows = [(f"`{key}`", default(config, key), description(key)) for key in keys]
        parts += [f"## {section}", SECTIONS[section].__doc__ or ""]
        parts.append(table(("key", "default", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def default(config: Config, key: str) -> str:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return "unset" if value is None else f"`{toml_value(value)}`"


def commands() -> str:
    """The arguments of every command."""
    parts = ["# Commands", GENERATED, "`specserve COMMAND --help` prints the same."]
    for words, parser in parsers():
        parts += [f"## {words}", *filter(None, [parser.description])]
        actions = [a for a in parser._actions if "--help" not in a.option_strings]
        rows = [(f"`{argument(a)}`", (a.help or "").replace("%%", "%")) for a in actions]
        parts.append(table(("argument", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def argument(action: Action) -> str:
    """The flags of an argument and the name of its value. `argparse` has other forms per version
    of Python.
    """
    flags = ", ".join(action.option_strings)
    if action.nargs == 0:
        return flags
    choices = "|".join(map(str, action.choices or ()))
    value = action.metavar or choices or (action.dest.upper() if flags else action.dest)
    many = " ..." if action.nargs in ("+", "*") else ""
    return f"{flags} {value}{many}".strip()


def parsers() -> Iterable[tuple[str, ArgumentParser]]:
    """The parser of each command of this package, and the words that call it."""
    yield from below("specserve", cli.parser({}))
    entries = filter(is_own, entry_points(group="specserve.commands"))
    for entry in sorted(entries, key=lambda e: e.name):
        module = inspect.getmodule(entry.load())
        yield from below(f"specserve {entry.name}", module.parser())  # type: ignore[union-attr]


def is_own(entry: EntryPoint) -> bool:
    return entry.value.startswith("specserve_bench.")


def below(words: str, parser: ArgumentParser) -> Iterable[tuple[str, ArgumentParser]]:
    inner = [a for a in parser._actions if isinstance(a.choices, dict)]
    if not inner:
        yield words, parser
    for action in inner:
        for name, each in action.choices.items():  # type: ignore[union-attr]
            yield from below(f"{words} {name}", each)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head], ["---"] * len([*head]), *(map(cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Replace pipes by entities. Renderers differ in how they read a backslash inside backticks."""
    text = re.sub(r"`([^`]*\|[^`]*)`", lambda m: f"<code>{escape(m[1], quote=False)}</code>", text)
    return text.replace("|", "&#124;")


def code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


PAGES: dict[str, Callable[[], str]] = {
    "python.md": python,
    "http.md": http,
    "settings.md": settings,
    "commands.md": commands,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
