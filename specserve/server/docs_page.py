"""GET /docs: shows the OpenAPI document as one page, without scripts."""

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec

from specserve.server.pages import headers

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --dim: #777 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, .type { font: 14px/1.5 ui-monospace, monospace }
h1 small, .dim { color: var(--dim); font-weight: normal }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer }
summary b { display: inline-block; min-width: 3.2rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0 }
tr + tr td { border-top: 1px solid var(--soft) }
td:first-child { white-space: nowrap }
:target { background: var(--soft) }
"""
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = headers(f"style-src 'sha256-{DIGEST}'")
LIMITS = {  # keywords of JSON schema -> their text on the page
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "up to {} characters",
    "minItems": "at least {}",
    "maxItems": "up to {}",
    "maxProperties": "up to {}",
}


def page(document: dict[str, Any]) -> str:
    info, schemas = document["info"], document["components"]["schemas"]
    routes = "".join(
        route(method, path, described)
        for path, methods in document["paths"].items()
        for method, described in methods.items()
    )
    types = "".join(component(name, schemas[name]) for name in sorted(schemas))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(info["title"])}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(info["title"])} <small>{escape(info["version"])}</small></h1>
<p>{escape(info["description"])}</p>
<p>For programs: <a href="openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>
{routes}<h2>Types</h2>
{types}</body>
</html>
"""


def route(method: str, path: str, its: dict[str, Any]) -> str:
    rows = [(code(p["name"]), kind(p["schema"]), place(p)) for p in its.get("parameters", ())]
    if "requestBody" in its:
        rows += [("body", kind(json_schema(its["requestBody"]["content"])), "JSON")]
    for status, response in its["responses"].items():
        for media, content in response["content"].items():
            what = kind(reported_for(content["schema"]))
            rows.append((status, what, f"{escape(media)}: {escape(response['description'])}"))
    title = f"<b>{method.upper()}</b> {code(path)} <span class=dim>{escape(its['summary'])}</span>"
    return f"<details><summary>{title}</summary>{table(rows)}</details>\n"


def place(parameter: dict[str, Any]) -> str:
    """Return where a request has this parameter, and its meaning."""
    words = [f"in the {parameter['in']}", escape(parameter.get("description", ""))]
    return "; ".join(filter(None, words))


def reported_for(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a response that the page shows: for a stream, the schema of its data."""
    data = schema.get("properties", {}).get("data", {})
    shown: dict[str, Any] = data.get("contentSchema", schema)
    return shown


def json_schema(content: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def component(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (code(field), kind(its), note(its, field in required))
        for field, its in schema.get("properties", {}).items()
    ]
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    body = table(rows) if rows else f"<p>{kind(schema)}</p>"
    return f'<h3 id="{escape(name)}">{escape(name)}</h3>{about}{body}\n'


def note(schema: dict[str, Any], is_required: bool) -> str:
    words = ["<b>required</b>"] if is_required else []
    if "description" in schema:
        words.append(escape(schema["description"]))
    if schema.get("default") is not None:
        words.append(f"default {value(schema['default'])}")
    return "; ".join(words)


def kind(schema: dict[str, Any]) -> str:
    return f"<span class=type>{' or '.join(alternatives(schema))}</span>"


def alternatives(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the types of a value, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        yield f'<a href="#{name}">{name}</a>'
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from alternatives({n: v for n, v in schema.items() if n == "type"} | each)
    elif "enum" in schema:
        yield from map(value, schema["enum"])
    elif "const" in schema:
        yield value(schema["const"])
    else:
        yield plain(schema)


def plain(schema: dict[str, Any]) -> str:
    type = schema.get("type", "anything")
    name = type if isinstance(type, str) else " or ".join(type)
    if "items" in schema:
        name = f"list of {' or '.join(alternatives(schema['items']))}"
    elif isinstance(inner := schema.get("additionalProperties"), dict) and inner:
        name = f"object of {' or '.join(alternatives(inner))}"
    limits = [form.format(schema[key]) for key, form in LIMITS.items() if key in schema]
    return f"{name} <span class=dim>({escape(', '.join(limits))})</span>" if limits else name


def value(of: Any) -> str:
    return code(msgspec.json.encode(of).decode())


def code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def table(rows: list[tuple[str, str, str]]) -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
