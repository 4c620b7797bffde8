"""oneOf whose schemas cannot fit the same value, as anyOf: llguidance proves that of few."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

VALUES = {"const", "default", "enum", "examples"}  # keywords whose values are no schemas


def with_any_of(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema with anyOf in place of each oneOf of objects that a property tells apart: all of
    them require it, and each has other strings for it. Pydantic writes unions so.
    """
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [with_any_of(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    is_union = "anyOf" not in schema and are_apart(schema.get("oneOf"), root)
    return {
        "anyOf" if key == "oneOf" and is_union else key: (
            value if key in VALUES else with_any_of(value, root)
        )
        for key, value in schema.items()
    }


def are_apart(schemas: Any, root: Mapping[str, Any]) -> bool:
    if not isinstance(schemas, Sequence) or isinstance(schemas, str):
        return False
    each = [strings_of(target(schema, root)) for schema in schemas]
    return any(
        all(a[name].isdisjoint(b[name]) for a, b in combinations(each, 2))
        for name in (each[0] if each else ())
        if all(name in strings for strings in each)
    )


def target(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema refers to within the root, or itself."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def strings_of(schema: Any) -> dict[str, set[str]]:
    """The strings that each property may be, of those that an object has to have and that may be
    only certain strings.
    """
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        return {}
    found = {name: values_of(properties.get(name)) for name in required if isinstance(name, str)}
    return {name: {*values} for name, values in found.items() if values is not None}


def values_of(schema: Any) -> list[str] | None:
    """All that a value may be, if these are strings."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    is_known = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return values if is_known else None
