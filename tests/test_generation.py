"""What a request's outputs add up to."""

import pytest

from specserve.exchange.sampling_params import Sampling
from specserve.exchange.step_output import StepOutput
from specserve.generation import Generation
from specserve.models.tokenizer import Tokenizer
from tests.checkpoints import tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer().backend_tokenizer)
PLAIN = {"max_tokens": 9, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0}
UNFINISHED = "\ufffd"
HALF = TOKENIZER.encode("🙂")[:2]  # of a character's bytes
END = TOKENIZER.encode("z")


def ended(tokens, reason, **asked):
    generation = Generation(1, [1], Sampling(**PLAIN | asked), TOKENIZER)
    generation.push(StepOutput(1, tokens, reason, True, 0, 0, 0.0))
    return generation.text, generation.finish_reason, generation.stop_reason


@pytest.mark.parametrize(
    ("reason", "told"), [("length", None), ("stop", END[0])], ids=["at max_tokens", "at a stop id"]
)
def test_a_stop_string_in_what_was_held_back_ends_the_text(reason, told):
    tokens = [*TOKENIZER.encode("a"), *HALF, *(END if reason == "stop" else [])]
    assert ended(tokens, reason) == (f"a{UNFINISHED}", reason, told)
    assert ended(tokens, reason, stop=(UNFINISHED,)) == ("a", "stop", UNFINISHED)


def test_a_failure_stays_one():
    assert ended(HALF, "error", stop=(UNFINISHED,)) == ("", "error", None)


def test_a_stop_string_may_come_once_min_tokens_have():
    tokens = TOKENIZER.encode("a") * 3
    for least, want in (
        (0, ("", "stop", "a")),
        (2, ("aa", "stop", "a")),
        (3, ("aaa", "length", None)),
    ):
        assert ended(tokens, "length", stop=("a",), min_tokens=least) == want
