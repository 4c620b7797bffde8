"""The sandbox of chat templates: jinja2's sandbox, with the functions that templates expect."""

import json
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes, utils
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_items
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specserve.text.template_messages import Needs, WrittenArguments

LENGTH = "length", "count"  # names of the same filter


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """Compile a template in the sandbox: it can neither access the interpreter nor change
    arguments.
    """
    return environment().from_string(source)


@lru_cache(maxsize=8)
def names_read(source: str) -> frozenset[str]:
    """Return the names that a template reads but does not define."""
    sandbox = environment()
    return frozenset(meta.find_undeclared_variables(sandbox.parse(source)) - {*sandbox.globals})


@lru_cache(maxsize=8)
def needs_of(source: str) -> Needs:
    """Derive a template's needs from its code."""
    try:
        code = environment().parse(source)
        tested = [test.node for test in code.find_all(nodes.Test) if test.name == "none"]
        lengths = False
        for compared in code.find_all(nodes.Compare):
            others = [operand.expr for operand in compared.ops]
            values = [other.value for other in others if isinstance(other, nodes.Const)]
            tested += [compared.expr] if None in values else []
            is_length = isinstance(compared.expr, nodes.Filter) and compared.expr.name in LENGTH
            lengths |= is_length and 9 in values
        return Needs(any(map(is_content, tested)), lengths)
    except Exception:  # rendering raises it again
        return Needs()


def is_content(node: nodes.Node) -> bool:
    """Whether an expression reads a message's content."""
    match node:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
    return False


def environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters |= {"tojson": tojson, "items": items}
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


class GenerationTag(Extension):
    """{% generation %}: marks the assistant's text, which only training uses."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Dict:
    """`dict` for templates, without methods that modify arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(utils.Namespace):
    """`namespace` for templates, without names that could access the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = dict(*args[1:], **kwargs)
        for name in given:
            check_name(name)
        utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


def check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: the name {name!r} begins with _. Use another name.")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON for a prompt. The filter of jinja2 would escape it for HTML."""
    if isinstance(value, WrittenArguments):
        return str(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, WrittenArguments) else do_items(value)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
