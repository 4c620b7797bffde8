"""What the tests ask, and what they take out of answers."""

from tests.checkpoints import tiny_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "Answer with café."},
    {"role": "user", "content": "the cat sat on the mat"},
    {"role": "assistant", "content": "the other cat"},
    {"role": "user", "content": "and the other cat"},
]


def said(choice):
    """What a caller hears of a choice, whether in a message, a chunk or plain."""
    text = (choice.get("message") or choice.get("delta") or choice).get
    return text("content", choice.get("text")) or ""


def whole(server, path, body):
    """(text, finish_reason, seed) of every choice, and the usage, of a whole answer."""
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    assert [c["index"] for c in answer.body["choices"]] == [*range(len(answer.body["choices"]))]
    choices = [(said(c), c["finish_reason"], c["seed"]) for c in answer.body["choices"]]
    return choices, answer.body["usage"]


def streamed(server, path, body):
    """The same, put together from a stream."""
    *chunks, done = server.stream(path, body | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]" and chunks[-1]["choices"] == []
    pieces = [c for chunk in chunks for c in chunk["choices"]]
    ends = sorted((c for c in pieces if c["finish_reason"]), key=lambda c: c["index"])
    texts = ["".join(said(c) for c in pieces if c["index"] == end["index"]) for end in ends]
    choices = [(t, e["finish_reason"], e["seed"]) for t, e in zip(texts, ends, strict=True)]
    return choices, chunks[-1]["usage"]


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
