"""What answers tell of tokens: logprobs of both routes, echoed prompts, and the best choices."""

import itertools
import math

import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs
from transformers import AutoModelForCausalLM

from specserve import SamplingParams
from specserve.errors import RequestError
from specserve.exchange.messages import TokenLogprobs
from specserve.exchange.sampling_params import mix64
from specserve.server.completions import check_reported
from specserve.server.logprobs import (
    Namer,
    ScoredTokens,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_starts,
)
from specserve.text.tokenizer import Tokenizer
from tests.checkpoints import EOS, tiny_tokenizer
from tests.server.asking import CHAT, COMPLETIONS, MESSAGES, chat_body, completion_body, said
from tests.text.test_tokenizer_parity import metaspace

PROMPT = "the cat sat on é 🙂 mat"
WARM = {"temperature": 1.5, "seed": 1, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_tokenizer().backend_tokenizer)


def asked(path, **fields):
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    told = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    return body | WARM | told | fields


def answered(server, path, body):
    """The choices of a whole answer."""
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return answer.body["choices"]


def put_together(chunks):
    """Text, and logprobs or None, of every choice of a stream."""
    choices = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            text, told = choices.setdefault(choice["index"], ("", {}))
            for name, values in (choice["logprobs"] or {}).items():
                told[name] = told[name] + values if name in told and values else values
            choices[choice["index"]] = text + said(choice), told
    return [choices[i] for i in range(len(choices))]


WAYS = {
    "alone": {},
    "choices": {"n": 3},
    "special tokens": {"skip_special_tokens": False, "max_tokens": 200},
    "an end of text": {"ignore_eos": False, "max_tokens": 300, "temperature": 2},
    "no likeliest ones": {"logprobs": True, "top_logprobs": 0},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_stream_reports_what_a_whole_answer_does(server, path, way):
    body = asked(path, **way)
    if path == COMPLETIONS and "top_logprobs" in body:
        body |= {"logprobs": 0}
    choices = answered(server, path, body)
    chunks = server.stream(path, body)
    assert put_together(chunks) == [(said(c), c["logprobs"]) for c in choices]
    for chunk in chunks[:-1]:  # every token in the chunk of its step
        assert all(c["finish_reason"] or c["logprobs"] for c in chunk["choices"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("keeps_stop", [False, True])
def test_tokens_around_a_stop_string_are_reported(server, path, keeps_stop):
    free = answered(server, path, asked(path))[0]
    middle = len(said(free)) // 2
    stop = said(free)[middle : middle + 3]
    body = asked(path, stop=[stop, "never to come"], include_stop_str_in_output=keeps_stop)
    [choice] = answered(server, path, body | {"return_token_ids": True})
    assert choice["finish_reason"] == "stop" and said(choice).endswith(stop) == keeps_stop
    names = [t["token"] for t in choice["logprobs"]["content"]] if path == CHAT else None
    names = names or choice["logprobs"]["tokens"]
    assert len(names) == len(choice["token_ids"])
    assert put_together(server.stream(path, body)) == [(said(choice), choice["logprobs"])]


def test_a_chats_tokens_have_the_bytes_of_its_text(server, llm):
    answer = server.post(CHAT, asked(CHAT, skip_special_tokens=False, max_tokens=200)).body
    [choice] = ChatCompletion.model_validate(answer, strict=True).choices
    content = choice.logprobs.content
    text = b"".join(bytes(t.bytes) for t in content)
    assert text.decode(errors="replace") == choice.message.content
    assert choice.logprobs.refusal is None
    [output] = llm.chat(MESSAGES, SamplingParams(**WARM | {"max_tokens": 200}, logprobs=2))
    for told, token, table in zip(content, output.token_ids, output.logprobs, strict=True):
        assert told.logprob == table[token].logprob <= 0
        likeliest = sorted(table.values(), key=lambda entry: entry.rank)[:2]
        assert [t.logprob for t in told.top_logprobs] == [entry.logprob for entry in likeliest]
        if "\ufffd" not in table[token].decoded_token:
            assert told.token == table[token].decoded_token
    parts = [
        t.token
        for t in content
        if b"\xef\xbf\xbd" in bytes(t.bytes).decode("utf-8", "replace").encode()
    ]
    assert parts and all(part.startswith("\\x") for part in parts)


def test_a_completions_tokens_stand_where_they_say(server):
    body = asked(COMPLETIONS, max_tokens=200, skip_special_tokens=False)
    answer = server.post(COMPLETIONS, body).body
    [choice] = Completion.model_validate(answer, strict=True).choices
    told = choice.logprobs
    each = zip(told.tokens, told.text_offset, told.token_logprobs, told.top_logprobs, strict=True)
    for token, offset, logprob, top in each:
        if not token.startswith("\\x"):
            assert choice.text[offset:].lstrip("\ufffd").startswith(token), (token, offset)
        assert top[token] >= logprob and 1 <= len(top) <= 3
    assert told.text_offset[-1] > 50


def test_a_stop_token_is_reported_and_stands_at_the_texts_end(server):
    [free] = answered(server, COMPLETIONS, asked(COMPLETIONS, return_token_ids=True))
    stop = free["token_ids"][30]
    body = asked(COMPLETIONS, stop_token_ids=[stop], return_token_ids=True)
    [choice] = answered(server, COMPLETIONS, body)
    assert choice["token_ids"][-1] == choice["stop_reason"] == stop
    told = {name: values[: len(choice["token_ids"])] for name, values in free["logprobs"].items()}
    told["text_offset"][-1] = len(choice["text"])
    assert choice["logprobs"] == told and len(choice["text"]) > 5
    assert put_together(server.stream(COMPLETIONS, body)) == [(choice["text"], choice["logprobs"])]


def test_chunks_are_those_that_the_openai_package_knows(server):
    for chunk in server.stream(CHAT, asked(CHAT))[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for chunk in server.stream(COMPLETIONS, asked(COMPLETIONS))[:-2]:
        Logprobs.model_validate(chunk["choices"][0]["logprobs"], strict=True)


def test_neither_the_text_nor_other_requests_change(server):
    for path in (CHAT, COMPLETIONS):
        plain = asked(path) | {"logprobs": None, "top_logprobs": None}
        [told], [untold] = answered(server, path, asked(path)), answered(server, path, plain)
        assert said(told) == said(untold) and untold["logprobs"] is None
        assert all(
            c["logprobs"] is None for e in server.stream(path, plain)[:-1] for c in e["choices"]
        )


def test_an_echo_is_the_prompt_and_then_the_text(server):
    told = asked(COMPLETIONS, max_tokens=8)
    [choice] = answered(server, COMPLETIONS, told)
    [echoed] = answered(server, COMPLETIONS, told | {"echo": True})
    assert echoed["text"] == PROMPT + choice["text"]
    plain = told | {"echo": True, "logprobs": None}
    [untold] = answered(server, COMPLETIONS, plain)
    assert (untold["text"], untold["logprobs"]) == (echoed["text"], None)
    mine, its = echoed["logprobs"], choice["logprobs"]
    num_prompt = len(mine["tokens"]) - 8
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert mine[name][num_prompt:] == its[name]
    assert mine["text_offset"][num_prompt:] == [len(PROMPT) + at for at in its["text_offset"]]
    assert mine["token_logprobs"][0] is mine["top_logprobs"][0] is None
    assert None not in mine["token_logprobs"][1:] and mine["text_offset"][0] == 0
    for token, at in zip(mine["tokens"], mine["text_offset"], strict=True):
        assert token.startswith("\\x") or echoed["text"][at:].lstrip("\ufffd").startswith(token)
    for body in (told | {"echo": True}, plain):
        stream = server.stream(COMPLETIONS, body)
        first = stream[0]["choices"][0]
        assert first["text"].startswith(PROMPT)
        [choice] = answered(server, COMPLETIONS, body)
        assert put_together(stream) == [(choice["text"], choice["logprobs"] or {})]


def test_an_echoed_prompt_has_the_logprobs_that_transformers_computes(server, folder):
    ids = [*range(30, 290, 4)]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    [choice] = answered(server, COMPLETIONS, body)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    want = said[range(len(ids) - 1), ids[1:]].tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(want, abs=2e-5)
    most = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
    assert most == pytest.approx(said.max(-1).values.tolist(), abs=2e-5)


def test_every_choice_of_every_prompt_has_its_echo(server):
    prompts = [[5, 6, 7, 8], [9] * 20]
    body = {"prompt": prompts, "echo": True, "n": 3, "logprobs": 1, "max_tokens": 4, "seed": 2}
    choices = answered(server, COMPLETIONS, body)
    assert put_together(server.stream(COMPLETIONS, body)) == [
        (c["text"], c["logprobs"]) for c in choices
    ]
    for i, choice in enumerate(choices):
        prompt = tiny_tokenizer().decode(prompts[i // 3])
        assert choice["text"].startswith(prompt)
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(prompts[i // 3]) + 4 and logprobs[0] is None
        assert logprobs[1:4] == choices[i // 3 * 3]["logprobs"]["token_logprobs"][1:4]
        assert logprobs[-1] < 0


def test_a_stream_that_ends_while_its_long_prompt_is_written_is_whole(server):
    """Writing takes a thread longer than the engine takes for the tokens."""
    prompt = [7 + i % 90 for i in range(220)]
    body = {"prompt": prompt, "echo": True, "n": 3, "logprobs": 20, "max_tokens": 2, "seed": 2}
    body["prompt_logprobs"] = 20
    choices = answered(server, COMPLETIONS, body)
    chunks = server.stream(COMPLETIONS, body)
    assert put_together(chunks) == [(c["text"], c["logprobs"]) for c in choices]
    parts = [c for chunk in chunks[:-1] for c in chunk["choices"] if "prompt_logprobs" in c]
    told = {c["index"]: c["prompt_logprobs"] for c in parts}
    assert len(parts) == 3 and told == {c["index"]: c["prompt_logprobs"] for c in choices}


def test_no_answer_repeats_the_logprobs_of_prompts_without_end():
    def check(sizes, top=20, n=1):
        check_reported(SamplingParams(prompt_logprobs=top, n=n), [[5] * size for size in sizes])

    check([1 << 20])  # as long as any context
    check([1 << 12] * 128, top=1)
    check([100] * 2, n=128, top=20)
    check([1 << 20] * 128, n=128, top=None)
    for sizes, n, field in (([400], 128, "n"), ([400] * 128, 1, "prompt"), ([200] * 2, 128, "n")):
        with pytest.raises(RequestError) as error:
            check(sizes, n=n)
        assert error.value.param == field


def test_a_prompt_alone_is_reported(server):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    full = answered(server, COMPLETIONS, body | {"max_tokens": 1})[0]
    answer = server.post(COMPLETIONS, body | {"max_tokens": 0}).body
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["logprobs"] == {name: v[:-1] for name, v in full["logprobs"].items()}
    for more in ({}, {"logprobs": None}, {"n": 2}):
        stream = server.stream(COMPLETIONS, body | {"max_tokens": 0} | more)
        want = choice["logprobs"] if more.get("logprobs", 1) else {}
        assert put_together(stream) == [(PROMPT, want)] * more.get("n", 1)


def test_an_evaluation_reads_its_continuations(server, llm):
    """As lm-eval's local-completions does: a prompt and its continuation as ids, greedy or not."""
    context = tiny_tokenizer()("the cat sat on the mat")["input_ids"]
    [likely] = llm.generate(context, SamplingParams(temperature=0, max_tokens=4))
    for continuation, is_greedy in ((likely.token_ids, True), ([7, 8, 9], False)):
        body = {"prompt": [context + continuation], "max_tokens": 1, "logprobs": 1, "echo": True}
        [choice] = answered(server, COMPLETIONS, body | {"temperature": 0, "seed": 1234})
        told, begin = choice["logprobs"], len(context)
        tokens, tops = told["token_logprobs"][begin:-1], told["top_logprobs"][begin:-1]
        both = [*zip(tokens, tops, strict=True)]
        assert len(both) == len(continuation) and sum(tokens) < 0
        assert all(logprob == max(top.values()) for logprob, top in both) == is_greedy
        assert all(len(top) == 2 for logprob, top in both if logprob != max(top.values()))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompts_logprobs_are_vllms(server, llm, path):
    body = asked(path, prompt_logprobs=1, max_tokens=3)
    answer = server.post(path, body).body
    got = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    params = SamplingParams(**WARM | {"max_tokens": 3}, prompt_logprobs=1)
    [output] = llm.chat(MESSAGES, params) if path == CHAT else llm.generate(PROMPT, params)
    assert got[0] is None is output.prompt_logprobs[0]
    for told, table in zip(got[1:], output.prompt_logprobs[1:], strict=True):
        assert told == {
            str(id): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
            for id, e in table.items()
        }
    chunks = server.stream(path, body)[:-1]
    where = chunks if path == CHAT else [c for chunk in chunks for c in chunk["choices"]]
    assert [part["prompt_logprobs"] for part in where if "prompt_logprobs" in part] == [got]


def test_the_best_choices_are_given_the_best_first(server):
    plain = {"prompt": ["the cat", "def"], "temperature": 1.5, "seed": 4, "max_tokens": 12}
    all = server.post(COMPLETIONS, plain | {"n": 5, "logprobs": 0}).body
    best = server.post(COMPLETIONS, plain | {"n": 2, "best_of": 5, "echo": False}).body
    assert best["usage"] == all["usage"] | {"prompt_tokens_details": cached(best)}
    assert [c["index"] for c in best["choices"]] == [0, 1, 2, 3]
    for i in range(2):
        each = all["choices"][5 * i : 5 * i + 5]
        means = [mean(c["logprobs"]["token_logprobs"]) for c in each]
        order = sorted(range(5), key=lambda c: (-means[c], c))
        assert order[:2] != [0, 1] or i
        given = best["choices"][2 * i : 2 * i + 2]
        assert [c["text"] for c in given] == [each[c]["text"] for c in order[:2]]
        assert [c["seed"] for c in given] == [mix64(4, c) for c in order[:2]]
        assert all_none(given)
    told = server.post(COMPLETIONS, plain | {"n": 2, "best_of": 5, "logprobs": 0}).body
    means = [mean(c["logprobs"]["token_logprobs"]) for c in told["choices"][:2]]
    assert means == sorted(means, reverse=True)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]


def mean(values):
    return sum(values) / len(values)


def all_none(choices):
    return all(c["logprobs"] is None for c in choices)


def test_tokens_may_be_named_by_their_ids(server):
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [chat] = answered(server, CHAT, asked(CHAT, **more))
    [plain] = answered(server, COMPLETIONS, asked(COMPLETIONS, **more))
    names = [t["token"] for t in chat["logprobs"]["content"]]
    assert names == [f"token_id:{id}" for id in chat["token_ids"]]
    assert plain["logprobs"]["tokens"] == [f"token_id:{id}" for id in plain["token_ids"]]
    each = zip(plain["logprobs"]["tokens"], plain["logprobs"]["top_logprobs"], strict=True)
    assert all(token in top and 2 <= len(top) <= 3 for token, top in each)


REFUSED = {
    "a number in a chat": (CHAT, {"logprobs": 1}, "logprobs"),
    "true in a completion": (COMPLETIONS, {"logprobs": True}, "logprobs"),
    "too many": (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    "too many in a chat": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "likeliest ones of nothing": (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    "a chat's in a completion": (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs"),
    "a chat's echo": (CHAT, {"echo": True}, "echo"),
    "names of nothing": (
        CHAT,
        {"logprobs": None, "top_logprobs": None, "return_tokens_as_token_ids": True},
        "return_tokens_as_token_ids",
    ),
    "fewer than given": (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
    "too many to choose from": (COMPLETIONS, {"best_of": 129}, "best_of"),
    "more than may wait": (COMPLETIONS, {"best_of": 128, "prompt": ["a"] * 128}, "best_of"),
    "the best of a stream": (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    "the best of a chat's stream": (CHAT, {"best_of": 2, "stream": True}, "best_of"),
    "no tokens": (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    "more tokens than none": (
        COMPLETIONS,
        {"max_tokens": 0, "echo": True, "min_tokens": 1},
        "min_tokens",
    ),
    "no tokens in a chat": (CHAT, {"max_tokens": 0}, "max_tokens"),
    "below zero of a prompt": (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
}


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_meaning_is_refused_by_name(server, path, fields, param):
    answer = server.post(path, asked(path) | fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body


def test_what_asks_for_nothing_is_accepted(server):
    off = {"logprobs": False, "best_of": 1, "echo": False, "prompt_logprobs": None}
    for path, body in ((CHAT, chat_body(**off)), (COMPLETIONS, completion_body(**off))):
        [choice] = answered(server, path, body | {"return_tokens_as_token_ids": False})
        assert choice["logprobs"] is None
        assert server.stream(path, body)[-1] == "[DONE]"


NEVER = -math.inf


def test_minus_infinity_is_a_number(tokenizer):
    scored = ScoredTokens([5], [TokenLogprobs(NEVER, 300, [6, 7], [-0.5, NEVER])], [0])
    namer = Namer(tokenizer, 2, has_ids=True)
    [content] = chat_logprobs(scored, namer)
    assert [content.logprob, content.top_logprobs[1].logprob] == [-9999.0, -9999.0]
    form = completion_logprobs(scored, namer)
    assert form.token_logprobs == [-9999.0]
    assert form.top_logprobs == [{"token_id:6": -0.5, "token_id:7": -9999.0, "token_id:5": -9999.0}]
    table = prompt_logprobs([1, 5], scored.logprobs, 1, tokenizer)[1]
    assert {id: entry.logprob for id, entry in table.items()} == {5: -9999.0, 6: -0.5}


def test_of_tokens_with_one_text_the_likelier_is_reported(tokenizer):
    none, other = 318, 319  # ids without text
    scored = ScoredTokens([none], [TokenLogprobs(-3.0, 2, [other], [-1.0])], [0])
    form = completion_logprobs(scored, Namer(tokenizer, 1, has_ids=False))
    assert form.top_logprobs == [{"": -1.0}]


@pytest.mark.parametrize(
    ("text", "ids"),
    [(PROMPT, None), (f"the{EOS}cat", None), ("the cat", [*b"\x01\x02"])],
    ids=["text", "a special token", "other text"],
)
def test_a_prompts_tokens_begin_where_they_stand(tokenizer, text, ids):
    ids = ids or tokenizer.encode(text)
    starts = prompt_starts(ids, text, tokenizer)
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] <= len(text)
    if ids == tokenizer.encode(text):
        ends = itertools.accumulate(tokenizer.token_bytes(id) for id in ids)
        assert starts[1:] == [len(end.decode(errors="ignore")) for end in ends][:-1]


def test_special_tokens_that_a_text_leaves_out_begin_with_the_next(tokenizer):
    eos = tokenizer.get_vocab()[EOS]
    ids = [eos, *tokenizer.encode("the"), eos, *tokenizer.encode(" cat")]
    starts = prompt_starts(ids, "the cat", tokenizer)
    at = ids.index(eos, 1)
    assert starts[0] == starts[1] == 0 and starts[at] == starts[at + 1] == 3


def test_a_space_that_a_tokenizer_adds_is_not_counted():
    spaced = Tokenizer(metaspace())
    ids = spaced.encode("the cat")  # <s> ▁the ▁ c at </s>
    assert [spaced.token_bytes(id) for id in ids[1:3]] == [b" the", b" "]
    assert prompt_starts(ids, "the cat", spaced) == [0, 0, 3, 4, 5, 7]
