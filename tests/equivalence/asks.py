"""What the cells ask for: each value of the parameter axis, made for a text that it has to change.

A probe is the tokens of a request without the parameter, with the same prompt, seed and way to
draw. An ask's `is_met(said, probe)` tells whether its output shows what the parameter is for.
"""

import json
import re
from collections.abc import Callable

import jsonschema
import msgspec
from llguidance import LLMatcher

from specserve.exchange.sampling_params import SamplingParams, resolve
from specserve.text.answer.events import answer_of
from specserve.text.answer.formats import Formats
from specserve.text.answer.parsers import HermesParser
from specserve.text.defaults import GenerationDefaults
from specserve.text.grammars.tools import CallGrammar
from tests.equivalence.columns import Asked
from tests.equivalence.pair import END, VOCAB, spoken

MAX_TOKENS = 36
TAG = {"enum": ["on", "off"]}
WORD = {"type": "string", "maxLength": 6}
NAME = {"type": "string", "minLength": 4, "maxLength": 12}
SCHEMA = {"type": "array", "prefixItems": [TAG, WORD, TAG, WORD, TAG], "minItems": 5, "maxItems": 5}
REGEX = "(yes|no|it is)( (yes|no|it is)){5,7}!"
LETTERS = "[a-z ]{10,60}"
SAY = {"type": "object", "properties": {"tag": TAG, "word": NAME}, "required": ["tag", "word"]}
SAY |= {"additionalProperties": False}
TOOLS = [{"function": {"name": name, "parameters": SAY}} for name in ("say", "shout")]
LONG = 120  # tokens, enough for any of these texts
DRAWN = {
    "greedy": {"temperature": 0.0},
    "T=0.7": {"temperature": 0.7},
    "T=1 with top_p, top_k, min_p": {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
}


def always(said, probe):
    return True


def changes(said, probe):
    """It is no beginning of the probe."""
    own = said.choices[0].token_ids
    return own != probe[: len(own)]


class Ask(msgspec.Struct, frozen=True):
    """One request of a cell. `given` are fields of SamplingParams, `edits` those of Sampling."""

    given: dict = {}
    edits: dict = {}
    eos: tuple[int, ...] = ()  # the model's end of text
    is_met: Callable = always
    ends_in_block: bool = False  # at least one such ask of a cell ends within accepted guesses

    def asked(self, prompt, drawn, seed, salt, arrives=0):
        usual = {"max_tokens": MAX_TOKENS, "seed": seed, "cache_salt": salt} | DRAWN[drawn]
        params = SamplingParams(**usual | self.given)
        sampling = resolve(params, GenerationDefaults(eos_token_ids=self.eos), LONG)
        return Asked(prompt, params, msgspec.structs.replace(sampling, **self.edits), arrives)


def asks(is_met=changes, **given):
    return Ask(given, is_met=is_met)


def nothing(probe, text):
    return [Ask(is_met=lambda said, probe: said.choices[0].token_ids == probe)]


def presence_penalty(probe, text):
    return [asks(presence_penalty=x) for x in (2.0, -1.5)]


def frequency_penalty(probe, text):
    return [asks(frequency_penalty=x) for x in (1.0, -0.7)]


def repetition_penalty(probe, text):
    return [asks(repetition_penalty=x) for x in (1.5, 0.8)]


def logit_bias(probe, text):
    return [asks(logit_bias={probe[3]: -100.0, probe[6]: -4.0, probe[1]: 1.0, VOCAB - 1: 2.0})]


def stop_string(probe, text):
    """Its first place decides, not its place among the strings."""
    word, early = (new_text(text, n * len(text) // 3) for n in (2, 1))
    several = ("never said", word, early, early + "?!")
    return [
        asks(ends_with_stop, stop=word),
        asks(ends_with_stop, stop=several, include_stop_str_in_output=True),
    ]


def ends_with_stop(said, probe):
    own = said.choices[0]
    return own.finish_reason == "stop" and isinstance(own.stop_reason, str)


def stop_id(probe, text):
    ends = {new_token(probe, 5), new_token(probe, 15)}
    return [asks(ends_with_id, stop_token_ids=(end,)) for end in sorted(ends)]


def ends_with_id(said, probe):
    own = said.choices[0]
    return own.stop_reason == own.token_ids[-1] and own.token_ids == probe[: len(own.token_ids)]


def min_tokens(probe, text):
    """Many ids would end the text, so that it mostly ends as soon as it may. A stop string is drawn
    as any text, and passed over.
    """
    ends, word = tuple({probe[2], probe[4], *spoken()[::3]}), new_text(text, len(text) // 4)
    return [
        *[asks(ends_late, stop_token_ids=ends, min_tokens=least) for least in (6, 13, 20)],
        asks(lambda said, probe: word in said.choices[0].text, stop=word, min_tokens=20),
    ]


def ends_late(said, probe):
    own = said.choices[0]
    return own.finish_reason == "stop" and own.token_ids != probe[: len(own.token_ids)]


def bad_words(probe, text):
    words = (probe[3],), tuple(probe[5:7]), tuple(probe[8:11])
    return [Ask(edits={"bad_words": (word, (VOCAB - 1, 5))}, is_met=changes) for word in words]


def allowed_ids(probe, text):
    return [asks(allowed_token_ids=tuple(i for i in range(VOCAB) if i % 4 != probe[4] % 4))]


def logprobs(probe, text):
    return [asks(has_logprobs, logprobs=k) for k in (3, 0)]


def has_logprobs(said, probe):
    own = said.choices[0]
    return len(own.logprobs) == len(own.token_ids)


def choices(probe, text):
    return [asks(have_seeds, n=3)]


def have_seeds(said, probe):
    """And texts of their own, unless greedy: then there is one text, the probe's."""
    texts = {tuple(c.token_ids) for c in said.choices}
    return len({c.seed for c in said.choices}) == 3 and (len(texts) > 1 or texts == {(*probe,)})


def ignore_eos(probe, text):
    eos = (new_token(probe, 8),)
    return [Ask({"ignore_eos": True}, eos=eos, is_met=goes_on), Ask(eos=eos, is_met=ends_of_itself)]


def goes_on(said, probe):
    return said.choices[0].token_ids == probe


def ends_of_itself(said, probe):
    own = said.choices[0]
    is_whole = own.token_ids == probe
    return not is_whole and own.finish_reason == "stop" and own.stop_reason is None


def max_tokens(probe, text):
    """Several, of which one is bound to fall within a block of accepted guesses."""
    most = 14, 19, 24, 29
    return [Ask({"max_tokens": n}, is_met=has_length, ends_in_block=True) for n in most]


def has_length(said, probe):
    own = said.choices[0]
    return own.finish_reason == "length" and own.token_ids == probe[: len(own.token_ids)]


def ruled(grammar, is_met, **given):
    return Ask(given, {"grammar": grammar}, eos=(END,), is_met=is_met)


def json_schema(probe, text):
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
    return [ruled(grammar, is_valid, max_tokens=LONG)]


def is_valid(said, probe):
    own = said.choices[0]
    jsonschema.validate(json.loads(own.text), SCHEMA)
    return own.finish_reason == "stop" and own.token_ids[-1] == END


def regex(probe, text):
    """The second is cut off."""
    grammars = (LLMatcher.grammar_from_regex(regex) for regex in (REGEX, LETTERS))
    each = zip(grammars, (matches, begins), (LONG, 20), strict=True)
    return [ruled(grammar, is_met, max_tokens=most) for grammar, is_met, most in each]


def matches(said, probe):
    return re.fullmatch(REGEX, said.choices[0].text) is not None


def begins(said, probe):
    own = said.choices[0]
    return own.finish_reason == "length" and re.fullmatch("[a-z ]+", own.text) is not None


def forced_function(probe, text):
    return [ruled(CallGrammar(Formats(), TOOLS[1:], {}).enforced(False), calls, max_tokens=LONG)]


def tool_call(probe, text):
    """One or more, of any of the tools; the second is cut off."""
    grammar = CallGrammar(Formats(), TOOLS, {}).enforced()
    return [ruled(grammar, calls, max_tokens=LONG), ruled(grammar, begins_call, max_tokens=24)]


def calls(said, probe):
    parser = HermesParser()
    answer = answer_of([*parser.push(said.choices[0].text), *parser.finish()])
    first = answer.calls[0]
    jsonschema.validate(json.loads(first.arguments), TOOLS[0]["function"]["parameters"])
    return first.name in ("say", "shout")


def begins_call(said, probe):
    own = said.choices[0]
    return own.finish_reason == "length" and own.text.startswith("<tool_call>")


def logprobs_under_a_mask(probe, text):
    """They are the model's own, to which what is forbidden may be the likeliest."""
    each = (LLMatcher.grammar_from_regex(regex) for regex in (REGEX, LETTERS))
    return [ruled(grammar, has_unlikely_logprobs, logprobs=2) for grammar in each]


def has_unlikely_logprobs(said, probe):
    return has_logprobs(said, probe) and any(x.rank > 2 for x in said.choices[0].logprobs)


ASKED = {
    "nothing": nothing,
    "presence penalty": presence_penalty,
    "frequency penalty": frequency_penalty,
    "repetition penalty": repetition_penalty,
    "logit_bias": logit_bias,
    "stop string": stop_string,
    "stop id": stop_id,
    "min_tokens": min_tokens,
    "bad_words": bad_words,
    "allowed ids": allowed_ids,
    "logprobs": logprobs,
    "n=3": choices,
    "ignore_eos": ignore_eos,
    "max_tokens in a block": max_tokens,
    "JSON schema": json_schema,
    "regex": regex,
    "tool call": tool_call,
    "forced function": forced_function,
    "logprobs under a mask": logprobs_under_a_mask,
}


def new_token(probe, place):
    """One that is not before `place`, or as late as there is one."""
    at = [i for i, token in enumerate(probe) if token not in probe[:i]]
    return probe[min((i for i in at if i >= place), default=max(at))]


def new_text(text, place):
    """Two characters that are not before `place`, or as late as there are such."""
    at = [i for i in range(1, len(text) - 1) if text.find(text[i : i + 2]) == i]
    at = [i for i in at if "\ufffd" not in text[i : i + 2]]
    start = min((i for i in at if i >= place), default=max(at))
    return text[start : start + 2]
