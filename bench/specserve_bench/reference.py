"""Pages of the documentation made from types, and the hook by which mkdocs includes them."""

import inspect
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from inspect import get_annotations
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

import specserve
from specserve.cli import command as cli
from specserve.config import KNOBS, SECTIONS, Config, description, toml_value
from specserve.server import docs_page
from specserve.server.routes import described

CODE = re.compile(r"`([^`\n]+)`")
FIELD = re.compile(r"^(\w+)  +(\S.*(?:\n {8,}\S.*)*)\n?", re.MULTILINE)  # of a docstring


def python() -> str:
    """Everything that `from specserve import ...` has, and the types of its fields."""
    names = dict[type, list[str]]()
    for name in sorted(set(specserve.__all__) - {"__version__"}, key=str.lower):
        names.setdefault(getattr(specserve, name), []).append(name)
    parts = [
        "# Python reference",
        "Made from the code. All of it is imported from `specserve`, but for the types at the end, "
        "which are those of fields.",
    ]
    todo, done = [*names], list[type]()
    while todo:
        each = todo.pop(0)
        if each not in done:
            done.append(each)
            todo += structs(each)
            parts += [f"## {', '.join(names.get(each, [each.__name__]))}", *thing(each)]
    return "\n\n".join(parts) + "\n"


def thing(of: type) -> Iterable[str]:
    """What a class is, its fields, and its methods that say what they do."""
    docs = (vars(c).get("__doc__") for c in of.__mro__ if c.__module__.startswith("specserve"))
    text, told = prose(next(filter(None, docs), None))
    is_struct = issubclass(of, msgspec.Struct)
    if "__init__" in vars(of) and not is_struct:
        yield code(f"{of.__name__}{signature(of)}")
    if text:
        yield text
    if is_struct or get_annotations(of):
        yield fields(of, told)
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
    """Parameters and what is returned, one parameter a line where they are many."""
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
    """A type as it is written, without limits and modules."""
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


def fields(of: type, told: dict[str, str]) -> str:
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
        rows.append((f"`{name}`", f"`{kind_words(kinds[name])}`", value, told.get(name, "")))
    head = ["field", "type", "default", "what it is"]
    keep = [k for k in range(4) if any(row[k] for row in rows)]
    return table([head[k] for k in keep], [[row[k] for k in keep] for row in rows])


def structs(of: Any) -> Iterable[type]:
    """The structs among a type's fields."""
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
    found = {name: " ".join(told.split()) for name, told in FIELD.findall(words)}
    if len(found) < 2:
        return words, {}
    return inspect.cleandoc(FIELD.sub("", words)), found


def http() -> str:
    """Routes and types of the server, as at its /docs."""
    document = described()
    parts = ["# HTTP reference", "Made from the code, as `/docs` and `/openapi.json` of a server."]
    parts += ["## Routes"]
    parts += [
        docs_page.route(method, path, told)
        for path, methods in document["paths"].items()
        for method, told in methods.items()
    ]
    parts.append("## Types")
    schemas = document["components"]["schemas"]
    parts += [docs_page.component(name, schemas[name]) for name in sorted(schemas)]
    html = CODE.sub(r"<code>\1</code>", "\n\n".join(parts[2:]))  # where Markdown is not read
    return "\n\n".join([*parts[:2], html]) + "\n"


def settings() -> str:
    """Every key of a config, with its default and meaning."""
    parts = [
        "# Settings",
        "Made from the code, as `specserve config show` prints them. A key goes into a TOML file "
        "(`--config file.toml`), or after `--set`, as in `--set memory.block_size=32`.",
    ]
    config = Config()
    for section in SECTIONS:
        keys = [key for key in KNOBS if key.startswith(f"{section}.")]
        rows = [(f"`{key}`", default(config, key), description(key)) for key in keys]
        parts += [f"## {section}", SECTIONS[section].__doc__ or ""]
        parts.append(table(("key", "default", "what it is"), rows))
    return "\n\n".join(parts) + "\n"


def default(config: Config, key: str) -> str:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return "unset" if value is None else f"`{toml_value(value)}`"


def commands() -> str:
    """The help of every command."""
    parts = ["# Commands", "Made from the code: what `--help` says."]
    for words, parser in parsers():
        parts += [f"## {words}", code(parser.format_help().strip(), "text")]
    return "\n\n".join(parts) + "\n"


def parsers() -> Iterable[tuple[str, ArgumentParser]]:
    """The parser of each command, below the words that call it."""
    yield from below("specserve", cli.parser({}))
    for entry in sorted(entry_points(group="specserve.commands"), key=lambda e: e.name):
        module = inspect.getmodule(entry.load())
        yield from below(f"specserve {entry.name}", module.parser())  # type: ignore[union-attr]


def below(words: str, parser: ArgumentParser) -> Iterable[tuple[str, ArgumentParser]]:
    inner = [a for a in parser._actions if isinstance(a.choices, dict)]
    if not inner:
        yield words, parser
    for action in inner:
        for name, each in action.choices.items():  # type: ignore[union-attr]
            yield from below(f"{words} {name}", each)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [
        [*head],
        ["---"] * len([*head]),
        *([cell.replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


PAGES: dict[str, Callable[[], str]] = {
    "reference/python.md": python,
    "reference/http.md": http,
    "reference/settings.md": settings,
    "reference/commands.md": commands,
}


def on_files(files: Any, config: Any) -> Any:
    """A hook of mkdocs: the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
