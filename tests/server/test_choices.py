"""Choices of one prompt, prefixes that are found again, salts and priorities, over HTTP."""

import asyncio
from types import SimpleNamespace

import pytest
from openai import OpenAI

from specserve import SamplingParams
from specserve.errors import EngineDied
from specserve.exchange.client import EngineClient
from specserve.exchange.messages import EngineCommands, encode
from specserve.exchange.sampling_params import Sampling, Slo, choices_of, mix64
from specserve.exchange.spawn import Spawned
from tests.server.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    chat_body,
    completion_body,
    streamed,
    whole,
)
from tests.server.in_process import server_threads

LONG = "the cat sat on the mat. " * 12


def cached(server, body):
    answer = server.post(COMPLETIONS, body).body
    details, timings = answer["usage"]["prompt_tokens_details"], answer["timings"]
    assert timings["cache_n"] == details["cached_tokens"]
    return details["cached_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_choice_says_what_it_would_say_alone(server, path):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": ["the cat", LONG]}
    asked = prompt | {"temperature": 1, "seed": 11, "max_tokens": 30}
    together = whole(server, path, asked | {"n": 3})
    assert together == streamed(server, path, asked | {"n": 3})
    alone = [whole(server, path, asked | {"seed": mix64(11, c)}) for c in range(3)]
    num_prompts = len(alone[0][0])
    assert together[0] == [alone[c][0][p] for p in range(num_prompts) for c in range(3)]
    assert together[1]["prompt_tokens"] == alone[0][1]["prompt_tokens"]
    counts = [usage["completion_tokens"] for _, usage in alone]
    assert together[1]["completion_tokens"] == sum(counts)


def test_beams_are_those_of_the_offline_api_best_first(server, llm):
    asked = {"n": 2, "best_of": 4, "max_tokens": 12, "length_penalty": 0.5}
    body = asked | {"prompt": ["the cat", LONG], "use_beam_search": True}
    choices, usage = whole(server, COMPLETIONS, body)
    texts = [text for text, _, _ in choices]
    params = SamplingParams(use_beam_search=True, **asked)
    want = [choice.text for o in llm.generate(body["prompt"], params) for choice in o.choices]
    assert texts == want and len({*texts[:2]}) == 2
    assert usage["completion_tokens"] == 2 * 4 * 12
    assert server.post(COMPLETIONS, body | {"stream": True}).status == 400
    assert server.post(COMPLETIONS, body | {"temperature": 1}).status == 400


def test_times_of_beams_are_those_of_their_search(server):
    names = "time_to_first_token", "request_time_per_output_token", "e2e_request_latency"

    def sums():
        found = [server.metric(f"vllm:{name}_seconds_sum") for name in names]
        return [*found, server.metric("vllm:prefix_cache_queries_total")]

    body = completion_body(use_beam_search=True, best_of=3, max_tokens=21, temperature=0)
    before, answer = sums(), server.post(COMPLETIONS, body).body
    ttft, tpot, latency, queries = (b - a for a, b in zip(before, sums(), strict=True))
    assert ttft + 20 * tpot == pytest.approx(latency)
    assert 0 < ttft < latency / 2
    assert queries == answer["usage"]["prompt_tokens"]
    times = answer["metrics"]
    mean = 20 * times["mean_itl_ms"]
    assert mean <= times["generation_time_ms"] < 2 * mean  # beams are read one after the other
    assert 3 * mean == pytest.approx(20e3 * tpot)


def test_choices_come_side_by_side(server):
    chunks = server.stream(COMPLETIONS, completion_body(n=3, temperature=1, seed=1))
    order = [c["index"] for chunk in chunks[:-1] for c in chunk["choices"]]
    assert {*order} == {0, 1, 2} and sorted(order) != order


def test_a_prefix_is_found_again_and_not_after_a_reset(server):
    body = completion_body(prompt=LONG, max_tokens=4, cache_salt="test of the reset")
    assert cached(server, body) == 0
    num_prompt = server.post("/tokenize", {"prompt": LONG}).body["count"]
    assert cached(server, body) == num_prompt - 1
    assert server.post("/v1/cache/reset", {}).body == {"status": "reset"}
    assert cached(server, body) == 0
    assert server.get("/v1/cache/reset").status == 405


def test_a_reset_that_nobody_can_do_is_an_error():
    async def reset(died):
        engine = EngineClient(Spawned(None, None))
        engine.ready.set_result(None)
        if died:
            engine.died.set()
        else:
            engine.loop.call_later(0.01, engine.connection_lost, None)
        await engine.reset_cache()

    for died in (False, True):
        with pytest.raises(EngineDied):
            asyncio.run(reset(died))


def test_generated_text_is_found_by_the_next_turn_of_a_chat(server):
    salt = {"cache_salt": "a chat of its own"}
    answer = server.post(CHAT, chat_body(max_tokens=40, ignore_eos=True) | salt).body
    said = answer["choices"][0]["message"]["content"]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": said},
        {"role": "user", "content": "go on"},
    ]
    again = server.post(CHAT, chat_body(messages=turns) | salt).body["usage"]
    assert 64 <= again["prompt_tokens_details"]["cached_tokens"] <= answer["usage"]["total_tokens"]


def test_a_draft_at_anothers_prompt_is_a_miss(server):
    body = completion_body(prompt=LONG, max_tokens=4)
    mine, other = {"cache_salt": "mine"}, {"cache_salt": "other"}
    assert cached(server, body | mine) == 0
    assert cached(server, body | other) == 0
    assert cached(server, body | mine) > 0


def test_looked_up_and_found_tokens_are_counted(server):
    body = completion_body(prompt=LONG, max_tokens=4, cache_salt="of the counters")
    names = [f"vllm:prefix_cache_{what}_total" for what in ("queries", "hits")]
    before = [server.metric(name) for name in names]
    found = cached(server, body) + cached(server, body)
    after = [server.metric(name) for name in names]
    num_prompt = server.post("/tokenize", {"prompt": LONG}).body["count"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * num_prompt, found]
    assert found > 0


def test_what_is_cached_is_not_in_use(server):
    server.post(COMPLETIONS, completion_body(prompt=LONG))
    held = {
        h: server.metric("specserve_kv_blocks", holder=h) for h in ("target", "draft", "cached")
    }
    assert held["cached"] > 0 and held["target"] == held["draft"] == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, 129, 1.5)),
        *(("priority", value) for value in (2**31, "high", 0.5)),
        *(("cache_salt", value) for value in (7, "x" * 1025)),
    ],
)
def test_wrong_values_are_refused_by_name(server, field, value):
    answer = server.post(COMPLETIONS, completion_body(**{field: value}))
    assert (answer.status, answer.body["error"]["param"]) == (400, field)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_no_client_goes_before_the_rest_unless_the_operator_lets_it(server, path):
    asked = chat_body if path == CHAT else completion_body
    error = server.post(path, asked(priority=-1)).body["error"]
    assert error["param"] == "priority"
    assert (
        "priority = -1 is below" in error["message"] and "server.min_priority" in error["message"]
    )
    assert server.post(path, asked(priority=0)).status == 200
    assert server.post(path, asked(priority=2**31 - 1)).status == 200


def test_the_operator_says_how_urgent_a_request_may_be(folder):
    with server_threads(folder, **{"server.min_priority": -5}) as server:
        assert server.post(COMPLETIONS, completion_body(priority=-5)).status == 200
        refusal = server.post(COMPLETIONS, completion_body(priority=-6))
    assert (
        refusal.status == 400
        and "-6 is below the minimum of this server, -5" in refusal.body["error"]["message"]
    )


def test_without_a_word_of_the_operator_clients_set_no_target_for_tokens(server):
    answer = server.post(COMPLETIONS, completion_body(slo={"tpot_ms": 1e6}))
    assert answer.status == 400 and "server.min_tpot_ms" in answer.body["error"]["message"]


def test_a_program_of_its_own_may_ask_for_any_priority_and_target(llm):
    params = SamplingParams(priority=-(2**31), slo=Slo(tpot_ms=1e-3), max_tokens=2)
    assert llm.generate("the cat", params)[0].token_ids


def test_more_choices_than_may_wait_are_refused_by_their_field(server):
    answer = server.post(COMPLETIONS, completion_body(prompt=["a"] * 9, n=128))
    assert (answer.status, answer.body["error"]["param"]) == (400, "n")


def test_openais_client_gets_all_choices(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=4, max_tokens=9, temperature=1, seed=5
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in answer.choices}) == 4
    client.close()


def test_what_choices_have_in_common_is_sent_once_and_stop_strings_never():
    engine = SimpleNamespace(loop=None, live={-1: None}, held=[], is_up=True, next_id=0, adds=[])
    engine.died, engine.flush_soon = asyncio.Event(), lambda: None
    stop, ids = tuple("z" * 1024 for _ in range(16)), frozenset(range(1024))
    given = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 7}
    sampling = Sampling(max_tokens=1, stop=stop, stop_ids=ids, **given)
    EngineClient.add(engine, [1], choices_of(sampling, 128), [None] * 128)
    [add] = engine.adds
    assert [s.seed for s in add.samplings] == [mix64(7, c) for c in range(128)]
    assert all((s.stop, s.stop_ids) == ((), ids) for s in add.samplings)
    assert len(encode(EngineCommands(engine.adds, []))) < 10_000


def test_prompts_count_once_and_choices_as_requests(server):
    names = ["vllm:prompt_tokens_total", "vllm:request_prompt_tokens_count"]
    before = [server.metric(name) for name in names]
    answer = server.post(COMPLETIONS, completion_body(prompt=["a", LONG], n=3)).body
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        answer["usage"]["prompt_tokens"],
        6,
    ]


def test_choices_of_a_single_token_have_no_rates(server):
    answer = server.post(COMPLETIONS, completion_body(n=3, max_tokens=1)).body
    assert answer["metrics"]["tokens_per_second"] is None
    assert answer["timings"]["predicted_per_second"] is None


def test_each_choice_ends_at_its_own_time(server):
    body = completion_body(n=6, temperature=1, seed=3, max_tokens=200, stop=["a", "e"])
    choices = [c for chunk in server.stream(COMPLETIONS, body)[:-1] for c in chunk["choices"]]
    ended_at = {c["index"]: i for i, c in enumerate(choices) if c["finish_reason"]}
    said_after = [c["index"] for c in choices[min(ended_at.values()) + 1 :]]
    assert len(ended_at) == 6 and len({*said_after}) >= 2
    assert whole(server, COMPLETIONS, body)[0] == streamed(server, COMPLETIONS, body)[0]


def test_fallbacks_are_reported_each_request_and_counted(presets):
    server, body = presets["model"], chat_body(cache_salt="new", max_tokens=30, n=2)
    body["messages"] = [{"role": "user", "content": 3 * LONG}]
    before = server.metric("specserve_draft_fallbacks_total")
    said = server.post(CHAT, body).body["metrics"]["speculative_decoding"]
    after = server.metric("specserve_draft_fallbacks_total")
    assert after - before == said["num_draft_fallbacks"] > 0
