"""The 200 schemas: each compiles, and what its grammar allows obeys it."""

import json
import random
from collections import Counter

import jsonschema
import pytest

from specserve.text.grammars.compiled import compile_grammar
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from specserve_bench.figures.structured import SCHEMAS
from tests.text.grammars.matching import END, draw, tiny_vocabulary

MOST = 4000  # tokens of a text; all but a few have fewer than 500


def drawn(schema, seed):
    grammar = grammar_of(StructuredOutputsParams(json=schema))
    return draw(compile_grammar(tiny_vocabulary(), grammar), random.Random(seed), MOST)


def test_there_are_200_and_no_two_are_alike():
    kinds = Counter(name.partition("/")[0] for name in SCHEMAS)
    assert [*kinds.values()] == [40] * 5
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) == 200


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_text_drawn_at_random_obeys_its_schema(name):
    for seed in range(2):
        text, last = drawn(SCHEMAS[name], seed)
        assert last == END, f"no end within {MOST} tokens: {text[:200]}"
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_a_text_that_disobeys_would_be_seen():
    text, _ = drawn(SCHEMAS["function/age"], 0)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), SCHEMAS["function/plot"])
