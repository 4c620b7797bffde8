"""The text of answers, the numbers with it, and the shape of both."""

import http.client
import json

import pytest

from specserve import LLM, SamplingParams
from specserve.server.stream import event
from tests.checkpoints import tiny_tokenizer
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    chat_body,
    completion_body,
    content_events,
    counted,
    in_process,
    joined,
    rendered,
    said,
    streamed,
    whole,
)
from tests.server.conftest import PRESETS
from tests.server.server_process import SETTINGS

ASKED = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "cool": {"temperature": 0.4, "seed": 1, "max_tokens": 40},
    "warm": {"temperature": 1, "seed": 2, "max_tokens": 60},
    "hot": {"temperature": 2, "seed": 2**53 - 1, "max_tokens": 60},
    "narrow": {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 4, "max_tokens": 60},
    "past the end": {"temperature": 0.9, "seed": 5, "ignore_eos": True, "max_tokens": 80},
}
asked_each = pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)


@asked_each
def test_chat_streamed_whole_and_in_process(server, llm, asked):
    want = in_process(llm.chat(MESSAGES, SamplingParams(**asked | {"seed": 9})))
    body = {"model": "tiny", "messages": MESSAGES} | asked | {"seed": 9}
    assert whole(server, CHAT, body) == streamed(server, CHAT, body) == want


@asked_each
def test_completions_with_the_chat_template_applied_by_hand(server, llm, asked):
    want = whole(server, CHAT, {"messages": MESSAGES, "seed": 1} | asked)
    body = {"prompt": rendered(), "seed": 1} | asked
    assert whole(server, COMPLETIONS, body) == streamed(server, COMPLETIONS, body) == want
    params = SamplingParams(**{"seed": 1} | asked)
    assert in_process(llm.generate(rendered(), params)) == want


def test_a_request_that_asks_for_nothing_gets_the_rest_of_the_context(server):
    [(_, reason, seed)], usage = whole(server, CHAT, {"messages": MESSAGES, "temperature": 0})
    assert reason == "stop" or usage["total_tokens"] == 512
    assert 0 <= seed < 2**53


def test_the_seed_of_an_answer_gives_it_again_and_another_does_not(server):
    [(text, reason, seed)], usage = whole(server, CHAT, chat_body(temperature=1))
    again = streamed(server, CHAT, chat_body(temperature=1, seed=seed))
    assert again == ([(text, reason, seed)], usage)
    [(other, _, drawn)], _ = whole(server, CHAT, chat_body(temperature=1))
    assert drawn != seed and other != text


def test_characters_of_several_tokens_come_whole(server, llm):
    asked = {"temperature": 1.5, "ignore_eos": True, "seed": 1, "max_tokens": 120}
    [(text, _, _)], _ = streamed(server, CHAT, {"messages": MESSAGES} | asked)
    assert any(ord(c) > 0x7F and c != "\ufffd" for c in text)
    [output] = llm.chat(MESSAGES, SamplingParams(**asked))
    assert text == output.text == tiny_tokenizer().decode(output.token_ids, True)


@asked_each
def test_all_say_the_same(presets, asked):
    asked = {"seed": 3} | asked
    bodies = {CHAT: {"messages": MESSAGES} | asked, COMPLETIONS: {"prompt": "the cat"} | asked}
    for path, body in bodies.items():
        answers = [whole(s, path, body) for s in presets.values()]
        answers += [streamed(s, path, body) for s in presets.values()]
        assert all(answer == answers[0] for answer in answers)


def test_all_say_what_the_target_says_alone(presets, plain):
    params = SamplingParams(temperature=0.8, seed=6, max_tokens=60)
    with LLM(plain, drafter="none", set=SETTINGS, progress=False) as llm:
        want = in_process(llm.chat(MESSAGES, params))
    body = {"messages": MESSAGES, "temperature": 0.8, "seed": 6, "max_tokens": 60}
    assert [whole(s, CHAT, body) for s in presets.values()] == [want] * len(presets)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_step_is_one_event_with_all_that_it_brought(presets, preset):
    body = completion_body(max_tokens=60, stream_options={"include_usage": True})
    *chunks, _ = presets[preset].stream(COMPLETIONS, body)
    speculation = chunks[-1]["metrics"]["speculative_decoding"]
    steps = 59 if speculation is None else speculation["num_spec_steps"]
    assert len(content_events(chunks)) == 1 + steps


def test_right_draft_tokens_make_fewer_events(presets):
    body = completion_body(max_tokens=60)
    off, drafted = (presets[n].stream(COMPLETIONS, body)[:-1] for n in ("off", "model"))
    assert len(content_events(off)) == 60 > 1.5 * len(content_events(drafted))


def test_the_fingerprint_does_not_distinguish_them(presets):
    answers = [s.post(CHAT, chat_body()).body for s in presets.values()]
    assert len({a["system_fingerprint"] for a in answers}) == 1


def test_without_a_drafter_there_is_no_speculation_to_report(presets):
    answer = presets["off"].post(CHAT, chat_body()).body
    assert answer["metrics"]["speculative_decoding"] is None
    assert (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (0, 0)
    assert answer["metrics"]["tokens_per_second"] > 0


def test_the_role_comes_with_the_first_text_and_never_again(server):
    *chunks, _ = server.stream(CHAT, chat_body(speculation={"enabled": False}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"]
    assert len(deltas) > 3 and not any("role" in delta for delta in deltas[1:])


def test_the_role_comes_with_a_first_token_whose_text_is_still_held(server):
    first, *chunks, _ = server.stream(CHAT, chat_body())
    text = first["choices"][0]["delta"]["content"]
    held, *later, _ = server.stream(CHAT, chat_body(stop=text + "\0"))
    assert held["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined([held, *later]) == joined([first, *chunks])


def test_an_answer_without_text_still_has_a_role(presets):
    [(text, _, _)], _ = whole(presets["off"], CHAT, chat_body())
    [chunk, _] = presets["off"].stream(CHAT, chat_body(stop=text[0]))
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("path", "body", "prefix", "kind"),
    [
        (CHAT, chat_body(), "chatcmpl-", "chat.completion.chunk"),
        (COMPLETIONS, completion_body(), "cmpl-", "text_completion"),
    ],
)
def test_all_chunks_are_of_one_answer(server, path, body, prefix, kind):
    options = {"stream_options": {"include_usage": True}}
    first, *chunks, _ = server.stream(path, body | options)
    head = {key: first[key] for key in ("id", "created", "model", "system_fingerprint")}
    assert first["id"].startswith(prefix) and first["model"] == "tiny"
    assert all(chunk["object"] == kind and head.items() <= chunk.items() for chunk in chunks)
    *_, other, _ = server.stream(path, body)
    assert other["id"] != first["id"]


def test_text_then_the_reason_then_the_usage_then_done(server):
    *chunks, reason, usage, done = server.stream(
        CHAT, chat_body(stream_options={"include_usage": True})
    )
    assert all(said(c) and c["finish_reason"] is None for x in chunks for c in x["choices"])
    [choice] = reason["choices"]
    assert (choice["delta"], choice["finish_reason"], choice["seed"] >= 0) == ({}, "length", True)
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 24, "[DONE]")


def test_usage_is_null_until_the_last_chunk(server):
    *chunks, last, _ = server.stream(CHAT, chat_body(stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 24
    assert last["metrics"] and last["timings"]
    assert not any("metrics" in chunk or "timings" in chunk for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_without_usage_the_reason_carries_the_numbers(server, options):
    *chunks, last, done = server.stream(CHAT, chat_body(stream_options=options))
    assert done == "[DONE]" and last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == 24 and last["metrics"]
    assert not any("usage" in c for c in [*chunks, last])
    assert not any("metrics" in c or "timings" in c for c in chunks)


def test_usage_may_run_along(strict):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat_body(stream_options=options, seed=5)  # milliseconds a step: all do not come at once
    *chunks, last, _ = strict.stream(CHAT, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < 24 and counts[-1] == 24
    assert last["choices"] == [] and last["usage"] == chunks[-1]["usage"]


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_no_proxy_may_hold_events_back_and_no_client_take_a_cut_for_the_end(server, connection):
    body = chat_body(stream=True)
    headers = server.post(CHAT, body, headers={"Connection": connection}).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
    assert headers["transfer-encoding"] == "chunked"
    assert not {"content-length", "content-encoding"} & {key.lower() for key in headers}
    assert headers.get("connection", "keep-alive") == "keep-alive"


def test_a_connection_outlives_a_stream(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for body in (chat_body(stream=True), chat_body()):
        connection.request("POST", CHAT, json.dumps(body).encode())
        answer = connection.getresponse().read()
    connection.close()
    assert json.loads(answer)["choices"]


def test_events_hold_no_line_end_of_any_client():
    text = "a\u2028b\u2029c\u0085d\ne\r\nf"
    sent = event({"text": text})
    assert len(sent.decode().splitlines()) == 2 and sent.endswith(b"\n\n")
    assert json.loads(sent.removeprefix(b"data: ")) == {"text": text}


def test_choices_come_side_by_side_and_each_is_complete(server):
    prompts = ["the cat", "def read_lines(path)", "and the other"]
    body = completion_body(prompt=prompts, temperature=1, seed=3, max_tokens=40)
    assert streamed(server, COMPLETIONS, body) == whole(server, COMPLETIONS, body)
    *chunks, _ = server.stream(COMPLETIONS, body)
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert set(indices) == {0, 1, 2} and indices != sorted(indices)
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


STOPPED = completion_body(prompt="the cat", ignore_eos=True, max_tokens=60)


@pytest.fixture(scope="module")
def full(presets):
    [(text, _, _)], _ = whole(presets["off"], COMPLETIONS, STOPPED)
    return text


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("is_list", [True, False])
def test_nothing_of_one_ever_leaves(presets, full, preset, size, is_list):
    stop = full[20 : 20 + size]
    body = STOPPED | {"stop": ["never", stop] if is_list else stop, "seed": 0}
    answer = whole(presets[preset], COMPLETIONS, body)
    assert answer == streamed(presets[preset], COMPLETIONS, body)
    assert answer[0] == [(full[: full.index(stop)], "stop", 0)]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_only_began_like_one_is_said(presets, full, preset):
    body = STOPPED | {"stop": [f"{full[-3:]}?never", f"{full[10:14]}?never"], "seed": 0}
    want = [(full, "length", 0)]
    assert whole(presets[preset], COMPLETIONS, body)[0] == want
    assert streamed(presets[preset], COMPLETIONS, body)[0] == want


def test_tokens_after_one_do_not_count(presets, full):
    body = STOPPED | {"stop": full[20:27], "seed": 0}
    counts = [whole(s, COMPLETIONS, body)[1]["completion_tokens"] for s in presets.values()]
    assert len(set(counts)) == 1 and counts[0] < 28


def test_usage_counts_what_tokenize_counts(server):
    prompt = {"prompt": "the cat sat, café"}
    _, usage = whole(server, COMPLETIONS, completion_body(**prompt))
    assert usage["prompt_tokens"] == server.post("/tokenize", prompt).body["count"]
    _, usage = whole(server, CHAT, chat_body())
    count = server.post("/tokenize", {"messages": MESSAGES}).body["count"]
    assert usage == {
        "prompt_tokens": count,
        "completion_tokens": 24,
        "total_tokens": count + 24,
    }


@pytest.mark.parametrize("preset", ["ngram", "model"])
@pytest.mark.parametrize("asked", [ASKED["greedy"], ASKED["cool"], {"max_tokens": 2}])
def test_speculation_adds_up(presets, preset, asked):
    answer = presets[preset].post(CHAT, chat_body(**asked, stop_token_ids=[])).body
    said, timings = answer["metrics"]["speculative_decoding"], answer["timings"]
    histogram, steps = said["acceptance_histogram"], said["num_spec_steps"]
    accepted = said["num_accepted_draft_tokens"]
    assert sum(histogram) == steps and histogram[-1] > 0
    assert sum(n * count for n, count in enumerate(histogram)) == accepted
    num_tokens = answer["usage"]["completion_tokens"] - 1  # the first comes from the prompt
    assert said["mean_acceptance_length"] == pytest.approx(num_tokens / steps)
    assert timings["draft_n"] == said["num_draft_tokens"] >= accepted
    assert timings["draft_n_accepted"] == accepted
    who = {"ngram": ("ngram", 16), "model": ("model", 8)}[preset]
    assert (said["drafter"], said["num_spec_tokens"]) == who


def test_an_acceptance_rate_is_accepted_over_drafted(presets):
    answer = presets["model"].post(CHAT, chat_body(max_tokens=60)).body
    said = answer["metrics"]["speculative_decoding"]
    rate = said["num_accepted_draft_tokens"] / said["num_draft_tokens"]
    assert 0 < said["draft_acceptance_rate"] == pytest.approx(rate)


def test_an_answer_of_one_token_has_no_rates(server):
    answer = server.post(CHAT, chat_body(max_tokens=1)).body
    said = answer["metrics"]["speculative_decoding"]
    assert (said["num_spec_steps"], said["acceptance_histogram"]) == (0, [])
    assert said["mean_acceptance_length"] is said["draft_acceptance_rate"] is None
    assert answer["metrics"]["mean_itl_ms"] is answer["metrics"]["tokens_per_second"] is None
    assert answer["timings"]["predicted_per_second"] is None


def test_milliseconds_agree_with_each_other(server):
    answer = server.post(CHAT, chat_body()).body
    metrics, timings, usage = answer["metrics"], answer["timings"], answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = usage["prompt_tokens"] - cached, usage["completion_tokens"], cached
    assert (timings["prompt_n"], timings["predicted_n"], timings["cache_n"]) == counts
    first = metrics["queue_time_ms"] + timings["prompt_ms"]
    assert metrics["time_to_first_token_ms"] == pytest.approx(first) and first > 0
    assert metrics["generation_time_ms"] == timings["predicted_ms"] > 0
    assert metrics["mean_itl_ms"] == pytest.approx(timings["predicted_ms"] / 23)
    assert timings["predicted_per_second"] == pytest.approx(1e3 / metrics["mean_itl_ms"])
    assert metrics["tokens_per_second"] == timings["predicted_per_second"]


def test_a_stream_and_a_whole_answer_carry_the_same_numbers(presets):
    server = presets["ngram"]  # what auto guesses depends on the time that steps take
    usage = {"stream_options": {"include_usage": True}}
    with_usage = server.stream(CHAT, chat_body() | usage)[-2]
    answers = [
        server.post(CHAT, chat_body()).body,
        with_usage,
        server.stream(CHAT, chat_body())[-2],
    ]
    for part in "metrics", "timings":
        assert len({tuple(answer[part]) for answer in answers}) == 1
    assert len({str(a["metrics"]["speculative_decoding"]) for a in answers}) == 1


def test_choices_are_counted_together(server):
    one = whole(server, COMPLETIONS, completion_body())[1]
    body = completion_body(prompt=["the cat sat on"] * 3)
    answer = server.post(COMPLETIONS, body).body
    assert counted(answer["usage"]) == {key: 3 * count for key, count in one.items()}
    assert answer["timings"]["predicted_n"] == 3 * 24
    said = answer["metrics"]["speculative_decoding"]
    assert said["mean_acceptance_length"] == pytest.approx(3 * 23 / said["num_spec_steps"])
