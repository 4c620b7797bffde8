"""/openapi.json says what the routes take and answer, and /docs shows it."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from specserve.server.openapi import field_lines
from specserve.server.pages import PAGES, PARTS
from specserve.server.routes import OPERATIONS
from tests.server.asking import CHAT, COMPLETIONS, MESSAGES, chat_body, completion_body
from tests.server.test_bodies import ORDINARY
from tests.server.test_routes import app_with


@pytest.fixture(scope="module")
def document(server):
    answer = server.get("/openapi.json")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    return answer.body


def test_the_document_has_every_route_and_no_other(document):
    described = {
        (method.upper(), path) for path, its in document["paths"].items() for method in its
    }
    app = app_with()
    routes = [r for r in app.routes if r.path not in PAGES | PARTS]  # files for people
    served = {(m, r.path.replace(":path", "")) for r in routes for m in r.methods - {"HEAD"}}
    assert described == served and len(served) == len(OPERATIONS)


def test_every_type_is_a_schema_and_every_name_is_one_of_them(document):
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    named = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert named and named <= schemas.keys()
    assert schemas.keys() - named == {"ChatMessage"} - named


def closed(schema):
    """The schema without any other field in any object."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    is_struct = isinstance(schema.get("properties"), dict) and "title" in schema
    return inner | ({"additionalProperties": False} if is_struct else {})


def check(document, name, value):
    components = {"schemas": closed(document["components"]["schemas"])}
    schema = {"$ref": f"#/components/schemas/{name}", "components": components}
    Draft202012Validator(schema).validate(value)


ALL = {"return_token_ids": True, "return_speculation_details": True, "prompt_logprobs": 2}
ASKED = {
    "a chat": (CHAT, chat_body()),
    "a chat with everything": (CHAT, chat_body(logprobs=True, top_logprobs=2, n=2, **ALL)),
    "a chat that ends": (CHAT, chat_body(ignore_eos=False, stop=["e"])),
    "a completion": (COMPLETIONS, completion_body()),
    "a completion with everything": (
        COMPLETIONS,
        completion_body(logprobs=2, echo=True, n=2, **ALL),
    ),
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
NAMES = {
    CHAT: ("ChatCompletion", "ChatCompletionChunk"),
    COMPLETIONS: ("Completion", "CompletionChunk"),
}


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
def test_answers_and_chunks_have_the_fields_that_the_document_names(document, server, path, body):
    answer, chunk = NAMES[path]
    check(document, answer, server.post(path, body).body)
    *chunks, done = server.stream(path, body | STREAMED)
    assert done == "[DONE]" and len(chunks) > 2
    for each in chunks:
        check(document, chunk, each)


OTHERS = {
    "/v1/models": "ModelList",
    "/v1/models/tiny": "ModelCard",
    "/v1/speculation": "SpeculationStatus",
    "/health": "Status",
    "/version": "Version",
    "/v1/nothing": "Error",
    CHAT: "Error",
}


def test_the_other_answers_have_them_too(document, server, presets):
    server.post(CHAT, chat_body(max_tokens=60))  # there is a plan to tell
    for each in (server, presets["model"]):
        for path, name in OTHERS.items():
            check(document, name, each.get(path).body)
    check(document, "TokenizeResponse", server.post("/tokenize", {"messages": MESSAGES}).body)
    check(document, "DetokenizeResponse", server.post("/detokenize", {"tokens": [5]}).body)


def body_schema(document, path):
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"] | {"components": document["components"]}


@pytest.mark.parametrize("path", ORDINARY)
def test_a_body_that_is_answered_fits_its_schema_and_a_misspelling_fits_nobodys(document, path):
    schema = Draft202012Validator(body_schema(document, path))
    schema.validate(ORDINARY[path])
    with pytest.raises(ValidationError, match="promptt"):
        schema.validate(ORDINARY[path] | {"promptt": "a"})


@pytest.mark.parametrize("path", ORDINARY)
def test_every_field_of_a_body_may_be_null_but_those_it_requires(document, server, path):
    schema = body_schema(document, path)
    name = schema["$ref"].rpartition("/")[2]
    component = document["components"]["schemas"][name]
    asked = ORDINARY[path] | {"stream": None, "stream_options": None, "model": None, "slo": None}
    given = {"prompt": "a"} if path == "/tokenize" else {}
    given |= {field: asked[field] for field in component["required"]}
    body = dict.fromkeys(component["properties"]) | given
    Draft202012Validator(schema).validate(body)
    assert server.post(path, body).status == 200
    for field in component["required"]:
        del body[field]
        assert server.post(path, body).status == 400
        with pytest.raises(ValidationError):
            Draft202012Validator(schema).validate(body)


def test_fields_are_described_by_the_docstrings_of_their_types(document):
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["top_k"]["description"].startswith("sample from the k most likely tokens; 0")
    assert fields["bad_words"]["description"].endswith("and after one space")
    plain = [name for name, field in fields.items() if "description" not in field]
    assert all("enum" in fields[name] for name in plain), plain  # those that are not supported


def test_a_line_of_a_docstring_is_a_field_and_two_spaces_before_the_words():
    class Kind:
        """What it is.

        one     first
                and more
        other   second

        Words that are  no field.
        """

    assert field_lines(Kind) == {"one": "first and more", "other": "second"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.words = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name == "href"]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_shows_the_document_and_asks_nobody_for_anything(document, server):
    answer = server.get("/docs")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = Page(answer.body)
    schemas = document["components"]["schemas"]
    assert set(page.words) >= {*document["paths"], *schemas, *schemas["ChatBody"]["properties"]}
    assert sorted(page.ids) == sorted(schemas)
    assert {link.removeprefix("#") for link in page.links} <= {"openapi.json", *schemas}
    assert {"#ChatCompletionChunk", "#CompletionChunk", "#TextDelta"} <= {*page.links}
    assert "in the query; the parts to wake up" in answer.body and "in the path" in answer.body
    assert not any(tag in ("script", "img", "iframe", "link", "form") for tag, _ in page.tags)
    assert not any({"src", "style", "onclick"} & attributes.keys() for _, attributes in page.tags)


def test_the_pages_policy_allows_its_own_style_and_nothing_else(server):
    answer = server.get("/docs")
    [style] = re.findall(r"<style>(.*?)</style>", answer.body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[:2] == ["default-src 'none'", f"style-src 'sha256-{digest}'"]
    assert "prefers-color-scheme" in style or "color-scheme: light dark" in style
