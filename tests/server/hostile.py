"""Requests that no friend would send, drawn from a seed: the kinds that have hurt other servers.

Each is the bytes of a connection, and the statuses with which a server may answer it.
"""

import base64
import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import msgspec
from msgspec import inspect

from specserve.server.body import UNSET
from specserve.server.chat import ChatBody
from specserve.server.completions import CompletionBody
from specserve.server.responses import ResponsesBody
from specserve.server.texts import DetokenizeBody, TokenizeBody
from tests.server.asking import CHAT, COMPLETIONS
from tests.server.test_bodies import HOSTILE, MALFORMED, MAX_BODY, ORDINARY
from tests.text.grammars.hostile import EVERY, WRITTEN

RESPONSES = "/v1/responses"
VOCABULARY = 320  # of the tiny models


class Request(NamedTuple):
    kind: str
    raw: bytes
    statuses: frozenset[int]


def post(kind: str, path: str, body: object, statuses=(400,)) -> Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    return Request(kind, head.encode() + data, frozenset(statuses))


def bare(kind: str, raw: bytes, *statuses: int) -> Request:
    return Request(kind, raw, frozenset(statuses))


# An answer to a body with these ends at its first token, whatever else it has.
SHORT = {"max_tokens": 1, "stop_token_ids": [*range(VOCABULARY)]}
TALK = [{"role": "user", "content": "a"}]
BODIES = {  # path -> the type of its bodies, and a right one
    CHAT: (ChatBody, {"messages": TALK} | SHORT),
    COMPLETIONS: (CompletionBody, {"prompt": "a"} | SHORT),
    RESPONSES: (ResponsesBody, {"input": "a", "max_output_tokens": 1} | {"stop": "a"}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
NUMBERS = [-1, -2, -(2**31) - 1, -(2**63), 2**53, 2**63, 2**64, 10**40, 10**9, 0.5, 1e-45, 1e308]
NUMBERS += [-1e308, math.nan, math.inf, -math.inf, True, "1", "", "NaN", [], [[1]], {}, {"a": 1}]
ELEMENT = "[]"  # of a list, in a path


@cache
def numbers(path: str) -> list[tuple[str, ...]]:
    """The paths of every integer and float that a body of this route may have, of its type."""
    kind, _ = BODIES[path]
    found = [*dict.fromkeys(numbers_in(inspect.type_info(kind)))]
    hidden = {
        "read_past",
        "replaced",
        "max_tokens" if kind is ResponsesBody else "max_output_tokens",
    }
    return [names for names in found if names[0] not in hidden]


def numbers_in(kind: inspect.Type, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield above
        case inspect.Metadata():
            yield from numbers_in(kind.type, above)
        case inspect.UnionType():
            for part in kind.types:
                yield from numbers_in(part, above)
        case inspect.ListType() | inspect.VarTupleType():
            yield from numbers_in(kind.item_type, (*above, ELEMENT))
        case inspect.DictType():
            yield from numbers_in(kind.value_type, (*above, "1"))
        case inspect.StructType():
            for field in kind.fields:
                yield from numbers_in(field.type, (*above, field.encode_name))


def placed(names: tuple[str, ...], value: object) -> object:
    for name in reversed(names):
        value = [value] if name == ELEMENT else {name: value}
    return value


def is_of_type(path: str, names: tuple[str, ...], value: object) -> bool:
    """Whether the body's own type takes this value in this place."""
    if names[-1] in UNSET and value == -1 and not isinstance(value, bool):
        return True
    try:
        msgspec.convert(placed(names, value), BODIES[path][0], str_keys=True)
    except (msgspec.ValidationError, OverflowError):
        return isinstance(value, list) and not value and ELEMENT in names
    return True


def number(chance: random.Random) -> Request:
    path = chance.choice([path for path in BODIES if numbers(path)])
    names, value = chance.choice(numbers(path)), chance.choice(NUMBERS)
    body = BODIES[path][1] | placed(names, value)
    if is_of_type(path, names, value):  # right by itself; other fields may make it wrong
        late = [408] if names[-1] == "timeout_ms" else []
        return post("a number of its type", path, body, [200, 400, *late])
    return post("a number", path, body)


def choices(chance: random.Random) -> Request:
    many = chance.choice([129, 10**6, 10**9, 2**31, 2**63])
    path = chance.choice([CHAT, COMPLETIONS])
    return post("choices", path, BODIES[path][1] | {chance.choice(["n", "best_of"]): many})


def token_id(chance: random.Random) -> Request:
    bad = chance.choice([-1, VOCABULARY, VOCABULARY + chance.randrange(9), 2**31, 2**63, -(2**63)])
    field = chance.choice(
        ["prompt", "prompts", "stop_token_ids", "allowed_token_ids", "logit_bias"]
    )
    ids = [1, 2, bad][chance.randrange(3) :]
    given = {"prompts": {"prompt": [[1], ids]}, "logit_bias": {"logit_bias": {str(bad): 1}}}
    return post("a token id", COMPLETIONS, BODIES[COMPLETIONS][1] | given.get(field, {field: ids}))


def other_token_id(chance: random.Random) -> Request:
    ids = [1, chance.choice([-1, VOCABULARY, 2**31, 2**64]), 2]
    return post("a token id to decode", "/detokenize", {"tokens": ids})


def known(chance: random.Random) -> Request:
    """Of the table of tests/server/test_bodies.py: templates, media, stops, penalties, ..."""
    path, body = HOSTILE[chance.choice([*HOSTILE])][0]
    return post("a known mistake", path, body)


def malformed(chance: random.Random) -> Request:
    return post("malformed JSON", chance.choice([*BODIES]), MALFORMED[chance.choice([*MALFORMED])])


def deep(chance: random.Random) -> Request:
    levels, (opened, closed) = chance.randrange(2000, 40_000), chance.choice([b"[]", b"{}"])
    begin = bytes([opened]) if opened == ord("[") else b'{"a":'
    field = chance.choice([b"prompt", b"user", b"tools", b"response_format", b"metadata"])
    nested = begin * levels + b"1" + bytes([closed]) * levels
    return post("deep JSON", COMPLETIONS, b'{"prompt": "a", "%b": %b}' % (field, nested))


def template_arguments(chance: random.Random) -> Request:
    names = ["tokenize", "add_generation_prompt", "messages", "tools", "chat_template", "bos_token"]
    names += ["return_dict", "padding", "__class__", "self", "raise_exception", "documents", ""]
    given = {chance.choice(names): chance.choice([True, 1, "x", [], {}])}
    path = chance.choice([CHAT, "/tokenize"])
    return post("template arguments", path, {"messages": TALK, "chat_template_kwargs": given})


def media(url: str) -> Callable[[random.Random], Request]:
    """Contents that are no text and name an address, at which somebody listens."""

    def make(chance: random.Random) -> Request:
        where = chance.choice([url, f"{url}/cat.gguf", "file:///etc/passwd", "data:image/png,AAAA"])
        kind = chance.choice(["image_url", "video_url", "audio_url", "input_audio", "file"])
        part = {"type": kind, kind: chance.choice([where, {"url": where, "data": where}])}
        item = {"type": chance.choice(["input_image", "input_file"]), "image_url": where}
        if chance.random() < 0.5:
            return post("media", RESPONSES, {"input": [{"role": "user", "content": [item]}]})
        return post("media", CHAT, {"messages": [{"role": "user", "content": [part]}]})

    return make


def embeddings(chance: random.Random) -> Request:
    data = base64.b64encode(chance.randbytes(chance.randrange(1, 2000))).decode()
    given = chance.choice([data, [data], [[0.5]]])
    return post("embeddings", COMPLETIONS, {"prompt": "a", "prompt_embeds": given})


def raw_post(*headers: str, body: bytes = b"") -> bytes:
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: a", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


RIGHT = b'{"prompt": "a", "max_tokens": 1}'


def length(chance: random.Random) -> Request:
    """Of a body: far too large, none, two at once, less or more than what comes."""
    size = len(RIGHT)
    huge = chance.choice([MAX_BODY + 1, 10**12, 2**63 - 1])
    return chance.choice(
        [
            bare("a huge length", raw_post(f"Content-Length: {huge}"), 413),
            bare(
                "no length",
                raw_post(
                    f"Content-Length: {chance.choice(['-1', 'x', '', '1e9', '9' * 40, '5, 6'])}"
                ),
                400,
            ),
            bare("two lengths", raw_post("Content-Length: 5", f"Content-Length: {size}"), 400),
            bare(
                "a length and chunks",
                raw_post(f"Content-Length: {size}", "Transfer-Encoding: chunked", body=RIGHT),
                400,
            ),
            bare("a short length", raw_post(f"Content-Length: {size - 3}", body=RIGHT), 400),
            bare("a long length", raw_post(f"Content-Length: {size + 9}", body=RIGHT), 408),
        ]
    )


def chunks(chance: random.Random) -> Request:
    size = chance.choice([b"zz", b"-1", b"F" * 17, b"0x5", b"", b"5 5", b"\x00", b"1" * 400])
    return bare(
        "wrong chunks", raw_post("Transfer-Encoding: chunked", body=size + b"\r\n{}\r\n"), 400
    )


def pipeline(chance: random.Random) -> Request:
    one = b"%b /v1/nothing HTTP/1.1\r\nHost: a\r\n\r\n" % chance.choice([b"GET", b"POST"])
    return bare("a pipeline", one * chance.randrange(2, 200), 404)


def headers(chance: random.Random) -> Request:
    pair = chance.choice([b"x: y\r\n", b"Cookie: " + b"a" * 500 + b"\r\n", b"Host: b\r\n"])
    flood = b"GET /health HTTP/1.1\r\n" + pair * (140_000 // len(pair)) + b"\r\n"
    return bare("a flood of headers", flood, 431)


def protocol(chance: random.Random) -> Request:
    if chance.random() < 0.5:
        return bare(
            "a tunnel", b"CONNECT host:%d HTTP/1.1\r\n\r\n" % chance.randrange(1, 9999), 405
        )
    wish = f"Upgrade: {chance.choice(['h2c', 'websocket', 'TLS/1.2'])}"
    return bare(
        "an upgrade", raw_post("Connection: Upgrade", wish, "Content-Length: 1", body=b"{"), 400
    )


def no_http(chance: random.Random) -> Request:
    tls = b"\x16\x03\x01\x02\x00\x01\x00"
    line = b"GET / HTTP/%b\r\n\r\n" % chance.choice([b"9.9", b"1", b"x", b"1.1.1"])
    junk = b"\x00" + chance.randbytes(chance.randrange(1, 300)) + b"\r\n\r\n"
    return bare("no HTTP", chance.choice([tls + junk, line, junk, b"SSH-2.0-x\r\n\r\n"]), 400)


def no_utf8(chance: random.Random) -> Request:
    bad = chance.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"])
    return post("no UTF-8", COMPLETIONS, b'{"prompt": "a%b"}' % bad)


def route(chance: random.Random) -> Request:
    word = "".join(chance.choices("abc/%.;~+-_@0", k=chance.randrange(1, 40)))
    path = chance.choice(
        [f"/v1/x{word}", f"/x{word}", "/v1/moderations", "/../etc/passwd", "/.env"]
    )
    method = chance.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
    raw = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    return bare("an unknown route", raw.encode(), 404)


def method(chance: random.Random) -> Request:
    word = chance.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "LINK"])
    path = chance.choice([CHAT, COMPLETIONS, RESPONSES, "/v1/models", "/health/live", "/metrics"])
    raw = f"{word} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    return bare("a wrong method", raw.encode(), 405)


ANY = [
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    1e308,
    2**63,
    "a",
    "",
    "\n",
    [],
    ["a"],
    [[1]],
    {},
    {"a": 1},
]
STRING = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 9}}
    | {"b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1, "maxItems": 3}}
    | {"d": {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["x", 2, None]}]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"c": {"oneOf": [{"const": "x"}, {"type": "number", "multipleOf": 3}]}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
KEYWORDS = ["type", "pattern", "$ref", "items", "anyOf", "allOf", "not", "if", "enum", "properties"]


def places(value: object) -> Iterator[tuple]:
    """Everything that can be replaced inside a value: containers and their keys."""
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate(chance: random.Random, body: dict, is_schema: bool = False) -> dict:
    """The body with one to three of its parts replaced by anything, swapped, or nested anew."""
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice([*places(body)])
        other = copy.deepcopy(chance.choice([place[0][place[1]] for place in places(body)]))
        container[key] = chance.choice([copy.deepcopy(chance.choice(ANY)), other, [other] * 3])
        if is_schema and isinstance(container, dict):
            container[chance.choice(KEYWORDS)] = chance.choice([other, "(a*)*b", "#", "#/$defs/c"])
    return body


def mutant(chance: random.Random) -> Request:
    path = chance.choice([*ORDINARY])
    return post("a mutant", path, mutate(chance, ORDINARY[path]), [200, 400, 404])


MILD = [number, number, choices, token_id, other_token_id, known, malformed, deep, embeddings]
MILD += [template_arguments, length, chunks, pipeline, headers, protocol, no_http, no_utf8, route]
MILD += [method, mutant]


def schema(chance: random.Random) -> Request:
    """A mutant of a schema, of a tool or of the answer's form."""
    if chance.random() < 0.5:
        asked = mutate(chance, {"tools": [TOOL], "tool_choice": "required"}, is_schema=True)
    else:
        asked = mutate(chance, {"response_format": FORMAT}, is_schema=True)
    return post("a schema", CHAT, BODIES[CHAT][1] | asked, [200, 400, 503])


def bomb(chance: random.Random) -> Request:
    bombs = EVERY | WRITTEN
    form = bombs[chance.choice([*bombs])]
    asked = {"prompt": "a", "max_tokens": 1, "structured_outputs": form}
    return post("a grammar", COMPLETIONS, asked, [200, 400, 413, 503])


HEAVY = [schema, schema, schema, bomb]


def drawn(seed: int, size: int, kinds: list[Callable[[random.Random], Request]]) -> list[Request]:
    """So many requests of these kinds, each kind as often as the others."""
    chance = random.Random(seed)
    return [kinds[i % len(kinds)](chance) for i in range(size)]
