"""What a request's outputs add up to."""

import gc

import pytest

from specserve.api.outputs import Generation, Logprob, prompt_tables
from specserve.exchange.messages import StepOutput, TokenLogprobs
from specserve.exchange.sampling_params import Pooling, Sampling, pooled
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS, tiny_tokenizer

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


EOS_ID = TOKENIZER.get_vocab()[EOS]


@pytest.mark.parametrize(
    ("asked", "want"),
    [
        ({"eos_ids": frozenset([EOS_ID])}, ("ab", "stop", None)),
        ({"eos_ids": frozenset([EOS_ID]), "stop": (EOS,)}, ("ab", "stop", EOS)),
        ({"eos_ids": frozenset([EOS_ID]), "stop": (f"b{EOS}",)}, ("a", "stop", f"b{EOS}")),
        ({"stop": ("z",)}, ("ab", "stop", EOS_ID)),
        ({"stop": (EOS,), "include_stop_str_in_output": True}, (f"ab{EOS}", "stop", EOS)),
        ({"include_stop_str_in_output": True}, ("ab", "stop", EOS_ID)),
    ],
)
def test_a_stop_string_may_contain_the_token_that_ends_the_text(asked, want):
    assert ended([*TOKENIZER.encode("ab"), EOS_ID], "stop", **asked) == want


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


@pytest.mark.parametrize("is_asked_meanwhile", [False, True])
@pytest.mark.parametrize("most", [9, 0])
def test_a_prompts_logprobs_are_reported_once_all_have_come(is_asked_meanwhile, most):
    prompt, each = [5, 6, 7, 8], [TokenLogprobs(-0.5 - i, 1, [6 + i], [-0.5]) for i in range(3)]
    sampling = Sampling(**PLAIN | {"max_tokens": most, "prompt_logprobs": 1})
    generation = Generation(1, prompt, sampling, TOKENIZER)
    for part in (each[:1], each[1:2]):
        told = StepOutput(1, [], None, False, 0, 0, 0.0, prompt_logprobs=part)
        assert (generation.push(told), generation.is_done) == ("", False)
        assert not generation.first_token_at and not generation.steps
        assert not is_asked_meanwhile or generation.prompt_logprob_tables() is None
    last = StepOutput(1, [9], None, False, 0, 0, 0.0, prompt_logprobs=each[2:])
    generation.push(last)
    assert generation.prompt_logprob_tables() == prompt_tables(prompt, each, TOKENIZER)
    assert (generation.token_ids, generation.is_done) == (([9], False) if most else ([], True))


def test_logprobs_are_nothing_that_the_garbage_collector_looks_at():
    """Hundreds of thousands of them would make each of its runs hold up all streams."""
    told = TokenLogprobs(-0.5, 1, [6], [-0.5]), Logprob(-0.5, 1, "a")
    assert not any(map(gc.is_tracked, told))


def test_a_prompt_that_was_pooled_is_queued_no_more():
    """It has no tokens, and would count as waiting until all inputs of its request are done."""
    generation = Generation(1, [1], pooled(Pooling("last")), TOKENIZER)
    assert generation.is_queued
    generation.push(StepOutput(1, [], "stop", False, 0, 0, 0.0, pooled=bytes(4)))
    assert not generation.is_queued
