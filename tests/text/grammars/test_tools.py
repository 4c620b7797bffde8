"""Texts that a grammar of tool calls allows, drawn at random, are calls that obey their schemas."""

import json
from random import Random

import jsonschema
import pytest
from tokenizers import AddedToken

from specserve.text.answer.events import answer_of
from specserve.text.answer.formats import AnswerReader, Formats, Wanted
from specserve.text.answer.response_template import read_template
from specserve.text.grammars.compiled import GrammarError, compile_grammar, vocabulary_of
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, json_form
from specserve.text.grammars.tools import CallGrammar, special_tokens
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS, tiny_tokenizer
from tests.text.answer.outputs import JSON_TEMPLATE

SIZE = 340
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # no special tokens, as Qwen's
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NODE = {
    "properties": {"at": {"$ref": "#/$defs/place"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "boolean"}},
}
SCHEMAS = {"weather": CITY, "node": NODE, "now": None}
TOOLS = tuple(
    {"type": "function", "function": {"name": name} | ({"parameters": s} if s else {})}
    for name, s in SCHEMAS.items()
)
FORMATS = {
    "hermes": Formats("hermes"),
    "llama3": Formats("llama3_json"),
    "mistral": Formats("mistral"),
    "newer mistral": Formats("mistral", has_args=True),
    "template": Formats("template", "template", read_template(JSON_TEMPLATE)),
    "none": Formats(),
    "thinking": Formats("hermes", "think"),
}
each_format = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
each_tokenizer = pytest.mark.parametrize("has_tokens", [True, False])


@pytest.fixture(scope="module")
def tokenizers():
    """With tokens of their own for the markers, and without."""
    plain = tiny_tokenizer().backend_tokenizer.to_str()
    made = []
    for has_tokens in (False, True):
        backend = tiny_tokenizer().backend_tokenizer.from_str(plain)
        if has_tokens:
            backend.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
            backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
        made.append(Tokenizer(backend))
    return made


@pytest.fixture(scope="module")
def vocabularies(tokenizers):
    return [vocabulary_of(t, SIZE, [t.get_vocab()[EOS]]) for t in tokenizers]


@pytest.fixture
def tokenizer(tokenizers, has_tokens):
    return tokenizers[has_tokens]


@pytest.fixture
def vocabulary(vocabularies, has_tokens):
    return vocabularies[has_tokens]


def calls_of(formats, tokenizer, tools=TOOLS, **how):
    return CallGrammar(formats, tools, special_tokens(tokenizer, formats), **how)


def draw(tokenizer, vocabulary, grammar, seed, most=400):
    """A text that the grammar allows, and whether it is complete."""
    matcher, random, ids = compile_grammar(vocabulary, grammar), Random(seed), []
    end = tokenizer.get_vocab()[EOS]
    while len(ids) < most and not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(SIZE) if bits[i // 8] >> i % 8 & 1]
        token = end if end in allowed and random.random() < 0.5 else random.choice(allowed)
        if token == end:
            return tokenizer.decode(ids, False), True
        ids.append(token)
        assert matcher.consume_token(token), matcher.get_error()
    return tokenizer.decode(ids, False), matcher.is_accepting()


def read(formats, text, is_enforced=True, prompt=""):
    parser = AnswerReader(formats, Wanted(TOOLS, is_enforced), prompt).parser()
    return answer_of([*parser.push(text), *parser.finish()])


def check(call):
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name] or {"maxProperties": 0})


def accepts(tokenizer, vocabulary, grammar, text):
    matcher = compile_grammar(vocabulary, grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@each_format
@each_tokenizer
def test_drawn_texts_are_calls_that_obey_their_schemas(formats, tokenizer, vocabulary):
    grammar, called, numbers = calls_of(formats, tokenizer).enforced(), set(), set()
    for seed in range(12):
        text, is_complete = draw(tokenizer, vocabulary, grammar, seed)
        if not is_complete:
            continue
        answer = read(formats, text)
        assert answer.calls and not answer.content, text
        for call in answer.calls:
            check(call)
            called.add(call.name)
        numbers.add(len(answer.calls) > 1)
    assert len(called) > 1 and numbers == {True, False}


@each_format
@each_tokenizer
def test_one_call_is_one(formats, tokenizer, vocabulary):
    grammar = calls_of(formats, tokenizer, TOOLS[:1]).enforced(is_parallel=False)
    complete = 0
    for seed in range(4):
        text, is_complete = draw(tokenizer, vocabulary, grammar, seed)
        answer = read(formats, text)
        assert [call.name for call in answer.calls] == ["weather"] and not answer.content
        complete += is_complete
    assert complete


WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>',
    "llama3": '{{"name": "weather", "parameters": {}}}',
    "mistral": '[TOOL_CALLS][{{"name": "weather", "arguments": {}}}]',
    "newer mistral": "[TOOL_CALLS]weather[ARGS]{}",
    "template": '<tool_call>{{"name": "weather", "arguments": {}}}</tool_call>',
    "thinking": '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>',
}
GOOD, BAD = '{"city": "Oslo", "days": 3}', '{"city": "Rome", "days": 3}'


@pytest.mark.parametrize("name", WRITTEN)
@each_tokenizer
def test_calls_as_the_models_write_them_are_allowed(name, tokenizer, vocabulary):
    grammar = calls_of(FORMATS[name], tokenizer).enforced()
    assert accepts(tokenizer, vocabulary, grammar, WRITTEN[name].format(GOOD))
    assert not accepts(tokenizer, vocabulary, grammar, WRITTEN[name].format(BAD))
    assert not accepts(tokenizer, vocabulary, grammar, "No.")


@pytest.mark.parametrize("name", WRITTEN)
@each_tokenizer
def test_of_strict_tools_only_calls_are_held_to_schemas(name, tokenizer, vocabulary):
    formats, good, bad = FORMATS[name], *(WRITTEN[name].format(a) for a in (GOOD, BAD))
    strict, free = ({"weather"}, {"node"})
    held, other = (
        calls_of(formats, tokenizer, strict=frozenset(names)).triggered()
        for names in (strict, free)
    )
    texts = ["", "No {calls} [at] <all>.", good, bad, "Well. " + good, "Well. " + bad]
    if name == "llama3" and "<|python_tag|>" in tokenizer.get_vocab():
        texts[4:] = ["Well. <|python_tag|>" + text for text in (good, bad)]
    elif name == "llama3":
        texts[4:] = ["", bad]  # there are no calls after other text
    allowed = [accepts(tokenizer, vocabulary, held, text) for text in texts]
    assert allowed == [True, True, True, False, True, False]
    assert all(accepts(tokenizer, vocabulary, other, text) for text in texts)


@pytest.mark.parametrize("name", ["hermes", "mistral", "newer mistral"])
@each_tokenizer
def test_an_answer_is_calls_or_of_a_form(name, tokenizer, vocabulary):
    form, strict = json_form(StructuredOutputsParams(json=NODE)), frozenset(["weather"])
    grammar = calls_of(FORMATS[name], tokenizer, strict=strict).or_form(form)
    good, bad = (WRITTEN[name].format(a) for a in (GOOD, BAD))
    texts = ['{"at": true}', good, bad, '{"at": 1}', "Well.", f'{{"at": true}}{good}', ""]
    allowed = [accepts(tokenizer, vocabulary, grammar, text) for text in texts]
    assert allowed == [True, True, False, False, False, False, False]
    free = calls_of(FORMATS[name], tokenizer).or_form(form)
    assert accepts(tokenizer, vocabulary, free, bad)


@pytest.mark.parametrize("is_strict", [False, True])
def test_arguments_are_closed_and_those_of_strict_tools_at_every_depth(
    tokenizers, vocabularies, is_strict
):
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {"properties": {"at": point, "tags": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    strict = frozenset(["f"] if is_strict else [])
    grammar = calls_of(Formats("hermes"), tokenizers[0], (tool,), strict=strict).enforced()
    called = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    texts = ['{"at": {"x": 1}, "tags": {}}', '{"tags": {"a": 1}}', '{"at": {"y": 1}}', '{"y": 1}']
    allowed = [accepts(tokenizers[0], vocabularies[0], grammar, called.format(t)) for t in texts]
    assert allowed == [True, not is_strict, False, False]


def test_a_strict_tool_that_is_open_is_refused_by_name(tokenizers):
    schema = {"properties": {"a": {"type": "object", "additionalProperties": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    calls = calls_of(Formats("hermes"), tokenizers[0], (tool,), strict=frozenset(["f"]))
    with pytest.raises(GrammarError, match="parameters of f: additionalProperties: a strict"):
        calls.triggered()
    assert calls_of(Formats("hermes"), tokenizers[0], (tool,)).enforced()


@each_tokenizer
def test_a_model_that_thinks_may_do_so_first(tokenizer, vocabulary):
    formats, good = FORMATS["thinking"], WRITTEN["hermes"].format(GOOD)
    thought = "<think>\nA {call}?\n</think>\n\n"
    strict = frozenset(["weather"])
    outside = calls_of(formats, tokenizer, thinks=True, strict=strict)
    inside = calls_of(formats, tokenizer, thinks=True, is_inside=True, strict=strict)
    for grammar in (outside.enforced(), outside.triggered()):
        assert accepts(tokenizer, vocabulary, grammar, thought + good)
        assert accepts(tokenizer, vocabulary, grammar, good)
        assert not accepts(tokenizer, vocabulary, grammar, thought + good.replace("Oslo", "Rome"))
    for grammar in (inside.enforced(), inside.triggered()):
        assert accepts(tokenizer, vocabulary, grammar, thought.removeprefix("<think>") + good)
    assert not accepts(tokenizer, vocabulary, inside.enforced(), "A call?")


def test_tokens_that_are_no_text_are_those_that_llguidance_says(tokenizers, vocabularies):
    for tokenizer, vocabulary in zip(tokenizers, vocabularies, strict=True):
        found = special_tokens(tokenizer, Formats("hermes"))
        vocab = tokenizer.get_vocab()
        markers = {m: vocab[m] for m in (*SPECIAL, *ADDED) if m in vocab}
        assert found == {m: i for m, i in markers.items() if vocabulary.is_special_token(i)}


def test_a_schema_that_is_too_deep_is_refused(tokenizers):
    deep = {}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(GrammarError, match="deep"):
        calls_of(Formats("hermes"), tokenizers[0], (tool,)).enforced()


def test_all_formats_are_here():
    assert {f.enforced for f in FORMATS.values()} == {
        *("hermes", "llama3_json", "mistral", "template")
    }
    assert {*WRITTEN} | {"none"} == {*FORMATS}


def test_an_error_in_a_schema_does_not_name_lines_of_the_grammar(tokenizers, vocabularies):
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/nope"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = calls_of(Formats("hermes"), tokenizers[0], (tool,)).enforced()
    with pytest.raises(GrammarError, match=r"^Pointer '/nope' does not exist"):
        compile_grammar(vocabularies[0], grammar)
