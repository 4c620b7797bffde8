"""Short names for the parts of JSON schemas. Texts and lists are bounded, so that a text that a
model draws at random ends.
"""

from typing import Any, NamedTuple

Schema = dict[str, Any]


class Maybe(NamedTuple):
    """A property that an object may lack."""

    schema: Schema


def text(most: int = 10, least: int = 0) -> Schema:
    return {"type": "string", **({"minLength": least} if least else {}), "maxLength": most}


def match(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def form(name: str) -> Schema:
    return {"type": "string", "format": name}


def one(*values: Any) -> Schema:
    return {"enum": [*values]}


def const(value: Any) -> Schema:
    return {"const": value}


def whole(least: int = 0, most: int = 1000) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def number(least: float = 0, most: float = 100) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def flag() -> Schema:
    return {"type": "boolean"}


def many(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})} | {
        "maxItems": most
    }


def row(*items: Schema) -> Schema:
    """A list with an item of each."""
    return {
        "type": "array",
        "prefixItems": [*items],
        "items": False,
        "minItems": len(items),
    }


def record(fields: dict[str, Schema | Maybe] | None = None, /, **more: Schema | Maybe) -> Schema:
    """An object of these properties alone."""
    every = (fields or {}) | more
    schemas = {k: v.schema if isinstance(v, Maybe) else v for k, v in every.items()}
    required = [k for k, v in every.items() if not isinstance(v, Maybe)]
    rest = {"required": required} if required else {}
    return {"type": "object", "properties": schemas, **rest, "additionalProperties": False}


def maybe(schema: Schema) -> Maybe:
    return Maybe(schema)


def mapping(values: Schema, names: str = "^[a-z]{1,8}$", most: int = 2) -> Schema:
    """An object of any properties whose names match."""
    return {
        "type": "object",
        "patternProperties": {names: values},
        "additionalProperties": False,
        "maxProperties": most,
    }


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def all_of(*schemas: Schema) -> Schema:
    return {"allOf": [*schemas]}


def or_null(schema: Schema) -> Schema:
    return any_of(schema, {"type": "null"})


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def defining(schema: Schema, **definitions: Schema) -> Schema:
    return schema | {"$defs": definitions}
