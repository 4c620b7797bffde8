"""Request bodies for the tests, and readers of answers."""

import contextlib
import json
from http.client import HTTPConnection
from types import SimpleNamespace

from tests.checkpoints import tiny_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = [
    {"role": "system", "content": "Answer with café."},
    {"role": "user", "content": "the cat sat on the mat"},
    {"role": "assistant", "content": "the other cat"},
    {"role": "user", "content": "and the other cat"},
]


def said(choice):
    """A choice's text, whether in a message, a chunk or plain."""
    text = (choice.get("message") or choice.get("delta") or choice).get
    return text("content", choice.get("text")) or ""


def whole(server, path, body):
    """(text, finish_reason, seed) of every choice, and the usage, of a whole answer; what of it was
    cached depends on what was asked before.
    """
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    assert [c["index"] for c in answer.body["choices"]] == [*range(len(answer.body["choices"]))]
    choices = [(said(c), c["finish_reason"], c["seed"]) for c in answer.body["choices"]]
    return choices, counted(answer.body["usage"])


def streamed(server, path, body):
    """The same, put together from a stream."""
    *chunks, done = server.stream(path, body | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]" and chunks[-1]["choices"] == []
    pieces = [c for chunk in chunks for c in chunk["choices"]]
    ends = sorted((c for c in pieces if c["finish_reason"]), key=lambda c: c["index"])
    texts = ["".join(said(c) for c in pieces if c["index"] == end["index"]) for end in ends]
    choices = [(t, e["finish_reason"], e["seed"]) for t, e in zip(texts, ends, strict=True)]
    return choices, counted(chunks[-1]["usage"])


def counted(usage):
    details = usage["prompt_tokens_details"]
    assert 0 <= details["cached_tokens"] < usage["prompt_tokens"] and len(details) == 1
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


def in_process(outputs):
    """The same, of outputs of `LLM`."""
    n, m = (sum(len(ids) for ids in column) for column in zip(*map(ids_of, outputs), strict=True))
    usage = {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}
    return [(o.text, o.finish_reason, o.seed) for o in outputs], usage


def ids_of(output):
    return output.prompt_token_ids, output.token_ids


def chat_body(**asked):
    plain = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return {"messages": MESSAGES} | plain | asked


def completion_body(**asked):
    plain = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return {"prompt": "the cat sat on"} | plain | asked


def rendered(messages=MESSAGES):
    return tiny_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def joined(chunks):
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)


def content_events(chunks):
    return [c for chunk in chunks[:-1] for c in chunk["choices"] if said(c)]


def saying(num_tokens, ms=0, num_prompt=1, **fields):
    """A request of so many tokens, each of which takes so many milliseconds."""
    body = {"prompt": [1] * num_prompt, "max_tokens": num_tokens, "ignore_eos": True}
    return body | ({"seed": ms} if ms else {}) | fields


@contextlib.contextmanager
def started(server, body, path=COMPLETIONS):
    """A connection on which a request has been sent; its answer is not awaited."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body).encode(), dict(server.headers))
        yield connection


def answer_of(connection):
    response = connection.getresponse()
    return SimpleNamespace(status=response.status, body=json.loads(response.read()))


@contextlib.contextmanager
def streaming(server, body):
    """A stream that has begun: its first token is here."""
    with server.open_stream(COMPLETIONS, body) as events:
        next(events)
        yield events


def extra(*args, **kw):
    """The same for the openai client, which has no names for some fields."""
    body = saying(*args, **kw)
    return {"prompt": body.pop("prompt"), "extra_body": body}


def check_overloaded(response, status=503):
    error = response.body["error"]
    assert response.status == status
    assert error["type"] == "service_unavailable" and error["code"].startswith("server_is_")
    assert int(response.headers["Retry-After"]) >= 1


def is_running(server):
    return server.metric("vllm:num_requests_running") == 1


def is_waiting(server, number=1):
    return server.metric("vllm:num_requests_waiting") == number


def head(*headers):
    return "\r\n".join([f"POST {COMPLETIONS} HTTP/1.1", "Host: a", *headers, "", ""]).encode()
