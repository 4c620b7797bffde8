"""Objects of a JSON schema: which properties they may have, if several schemas describe one."""

from collections.abc import Mapping, Sequence
from typing import Any

from specserve.text.grammars.compiled import GrammarError
from specserve.text.grammars.keywords import Node, mapping

OBJECT = {"additionalProperties", "patternProperties", "properties", "required"}


def closed(node: Node, is_strict: bool = False) -> dict[str, Any]:
    """The schema of an object without other properties than it names, unless it has
    `additionalProperties` or names none.

    GrammarError for a strict schema that requires a property without describing it.
    """
    names = node.get("properties")
    is_open = "properties" not in node and "patternProperties" not in node
    if is_open or "additionalProperties" in node or not isinstance(names, Mapping | None):
        return {**node}
    required = node.get("required")
    more = required if isinstance(required, Sequence) and not isinstance(required, str) else ()
    unnamed = {name: True for name in more if isinstance(name, str) and name not in (names or {})}
    if unnamed and is_strict:
        raise GrammarError(
            f"required: {next(iter(unnamed))!r:.100} is not among the properties, which a strict "
            "schema describes all: add it to properties, or leave out strict"
        )
    own = {"properties": {**(names or {}), **unnamed}} if names or unnamed else {}
    return {**node, **own, "additionalProperties": False}


def joined(members: Sequence[Node], is_strict: bool = False) -> dict[str, Any]:
    """One schema of the values that obey all of these, whose objects are merged."""
    whole = [m for m in members if len(members) > 1 and is_whole(m)]
    parts = [m for m in members if m not in whole]
    rests = [{k: v for k, v in m.items() if k not in OBJECT} for m in parts]
    first, *others = distinct([rest for rest in rests if rest]) or [{}]
    more = [*others, *whole]
    node = first | merged(parts)
    if whole:  # these decide which others there may be
        node.setdefault("additionalProperties", True)
    return closed(node | ({"allOf": more} if more else {}), is_strict)


def is_whole(member: Node) -> bool:
    """Its own names and patterns decide which properties are additional, so it is not merged."""
    is_limit = member.get("additionalProperties", True) not in (True, {})
    return is_limit and bool(member.get("patternProperties"))


def merged(members: Sequence[Node]) -> dict[str, Any]:
    """The keywords of objects that obey all members."""
    named: dict[str, list[Any]] = {}
    matched: dict[str, list[Any]] = {}
    for member in members:
        for name, schema in mapping(member.get("properties")).items():
            named.setdefault(name, []).append(schema)
        for pattern, schema in mapping(member.get("patternProperties")).items():
            matched.setdefault(pattern, []).append(schema)
    limits = [m for m in members if m.get("additionalProperties", True) is not True]
    for member in limits:
        for names, key in ((named, "properties"), (matched, "patternProperties")):
            for name in names.keys() - mapping(member.get(key)).keys():
                names[name].append(member["additionalProperties"])
    return keywords(members, named, matched)


def keywords(
    members: Sequence[Node], named: dict[str, list[Any]], matched: dict[str, list[Any]]
) -> dict[str, Any]:
    """As one schema has them; without those that no member has."""
    node: dict[str, Any] = {}
    for key, found in (("properties", named), ("patternProperties", matched)):
        if found or any(key in member for member in members):
            node[key] = {name: both(schemas) for name, schemas in found.items()}
    if required := [name for m in members for name in m.get("required", ())]:
        node["required"] = [*dict.fromkeys(required)]
    if others := [m["additionalProperties"] for m in members if "additionalProperties" in m]:
        node["additionalProperties"] = both(others)
    return node


def distinct(schemas: Sequence[Any]) -> list[Any]:
    return [schema for i, schema in enumerate(schemas) if schema not in schemas[:i]]


def both(schemas: Sequence[Any]) -> Any:
    """A schema of the values that obey all of these."""
    if False in schemas:
        return False
    rules = distinct([schema for schema in schemas if schema is not True])
    return (rules[0] if len(rules) == 1 else {"allOf": rules}) if rules else True
