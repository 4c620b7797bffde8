"""No text that a grammar of a random schema allows has a property that the schema does not name."""

import json
from random import Random

import jsonschema

from specserve.text.grammars.compiled import GrammarError, compile_grammar
from specserve.text.grammars.structured_outputs import StructuredOutputsParams, grammar_of
from tests.checkpoints import tiny_tokenizer
from tests.text.grammars.matching import END, draw, tiny_vocabulary
from tests.text.grammars.random_schemas import closed, random_schema, shares_names

ENDS = {*tiny_tokenizer().convert_tokens_to_ids(['"', "}", "]"]), END}


class Chance(Random):
    """Prefers what ends a string, a list or an object, so that texts are short."""

    def choice(self, ids):
        ends = [i for i in ids if i in ENDS]
        return super().choice(ends if ends and self.random() < 0.3 else ids)


def valid(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_texts_of_random_schemas_obey_them_with_closed_objects():
    num_open = num_closed = 0
    for seed in range(150):
        schema = random_schema(Random(seed))
        try:
            grammar = grammar_of(StructuredOutputsParams(json=schema))
            matcher = compile_grammar(tiny_vocabulary(), grammar)
        except GrammarError as e:
            assert "nsatisfiable" in str(e) or "allows no text" in str(e), (seed, schema)
            continue
        is_shared = shares_names(schema, schema)
        for chance in range(2):
            text, last = draw(matcher, Chance(chance), 400)
            if last == END:
                num_open, num_closed = num_open + 1, num_closed + (not is_shared)
                assert valid(schema, json.loads(text)), (seed, schema, text)
                assert is_shared or valid(closed(schema), json.loads(text)), (seed, schema, text)
    assert num_open > 150 and num_closed > 80
