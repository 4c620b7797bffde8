"""The openai package, as its users call it, gets the answers and the errors that it knows."""

import asyncio
from types import SimpleNamespace

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from starlette.testclient import TestClient

from specserve.config import ServerConfig
from specserve.server.app import make_app

MESSAGES = [{"role": "user", "content": "the cat sat on the mat"}]
ASKED = {"model": "tiny", "temperature": 0.8, "seed": 3, "max_tokens": 40}
CHAT = ASKED | {"messages": MESSAGES}
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_models_are_listed_and_shown(client):
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny") == model


def test_a_chat_streams_what_it_answers_whole(client):
    answer = client.chat.completions.create(**CHAT)
    *chunks, end, last = client.chat.completions.create(**CHAT, stream=True, stream_options=USAGE)
    [choice], [final] = answer.choices, end.choices
    assert "".join(c.choices[0].delta.content for c in chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == choice.message.role == "assistant"
    assert final.finish_reason == choice.finish_reason == "length"
    assert (last.choices, last.usage.total_tokens) == ([], answer.usage.total_tokens)
    assert answer.usage.completion_tokens == 40
    assert last.usage.prompt_tokens_details.cached_tokens == 23  # of 24, of the first answer


def test_a_completion_streams_what_it_answers_whole(client):
    asked = ASKED | {"prompt": ["the cat", "def read"]}
    answer = client.completions.create(**asked)
    *chunks, last = client.completions.create(**asked, stream=True, stream_options=USAGE)
    said = [chunk.choices[0] for chunk in chunks]
    for choice in answer.choices:
        mine = [c for c in said if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason in ("stop", "length")
    assert (last.choices, last.usage.total_tokens) == ([], answer.usage.total_tokens)


def test_the_stream_helper_puts_an_answer_together(client):
    asked = CHAT | {"stop": ["at", "o"], "max_tokens": 400}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    [want] = client.chat.completions.create(**asked).choices
    assert choice.message.content == want.message.content
    assert choice.finish_reason == want.finish_reason == "stop"
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_what_is_ours_comes_along(client):
    answer = client.chat.completions.create(
        **CHAT, extra_body={"top_k": 1, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": []}
    )
    assert answer.choices[0].seed == 3 and answer.system_fingerprint
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] > 0
    assert answer.timings["predicted_n"] == 40


def test_what_clients_add_to_an_answer_changes_nothing_when_it_is_sent_back(client):
    def ask(added, added_to_call):
        call = {"name": "now", "arguments": "{}"} | added_to_call
        calls = [{"id": "1", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "the mat", "tool_calls": calls} | added
        asked = CHAT | {"messages": [*MESSAGES, answer, *MESSAGES]}
        return client.chat.completions.create(**asked).choices[0].message.content

    added = {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}}
    assert ask(added, {"parsed_arguments": {"a": 1}}) == ask({}, {})


def test_many_at_once_are_answered_as_one_by_one(server, client):
    async def ask(asked):
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as many:
            calls = [many.chat.completions.create(**a) for a in asked]
            return [a.choices[0].message.content for a in await asyncio.gather(*calls)]

    asked = [CHAT | {"seed": seed} for seed in range(8)]
    one_by_one = [client.chat.completions.create(**a) for a in asked]
    assert asyncio.run(ask(asked)) == [a.choices[0].message.content for a in one_by_one]


def test_a_stream_that_is_left_ends_the_request(server, client):
    asked = CHAT | {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()


ERRORS = {
    "a wrong value": ({"temperature": -1}, openai.BadRequestError, "temperature", None),
    "an unknown field": (
        {"extra_body": {"temprature": 1}},
        openai.BadRequestError,
        "temprature",
        "unknown_parameter",
    ),
    "what is not built": (
        {"extra_body": {"no_stop_trim": True}},
        openai.BadRequestError,
        "no_stop_trim",
        None,
    ),
    "a model": ({"model": "x"}, openai.NotFoundError, "model", "model_not_found"),
    "a long prompt": (
        {"messages": [{"role": "user", "content": "the cat " * 300}]},
        openai.BadRequestError,
        "messages",
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "kind", "param", "code"), ERRORS.values(), ids=ERRORS)
def test_a_refusal_is_the_exception_of_its_kind(client, asked, kind, param, code, stream):
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**CHAT | asked, stream=stream)
    error = raised.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, code)
    assert error.body["message"] in str(error)


def test_a_route_that_is_not_there_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model="tiny", input="x")


@pytest.mark.parametrize(("key", "kind"), [("x", openai.AuthenticationError), ("known", None)])
def test_a_key_is_authentication(tmp_path, key, kind):
    keys = tmp_path / "keys"
    keys.write_text("known")
    limits = ServerConfig(api_key_file=str(keys))
    app = make_app(SimpleNamespace(limits=limits))
    client = OpenAI(base_url="http://here/v1", api_key=key, http_client=TestClient(app))
    # Past the guard there is no model, but there is no moderation either.
    with client, pytest.raises(kind or openai.NotFoundError) as raised:
        client.moderations.create(model="tiny", input="x")
    assert raised.value.code == ("invalid_api_key" if kind else None)
