"""`python -m tests.replay FILE SERVE...`: replays 300 recorded requests.

`SERVE...` is the command of a server with absolute paths, e.g. `CHECKOUT/.venv/bin/python -m
specserve serve MODEL --drafter=ngram --set=speculation.max_nodes=4`. The first run writes the
responses to FILE. Later runs compare theirs with these: whole responses, and streams with their
deltas joined. Ids, times and the wording of errors may differ. The drafter has to be a fixed one:
`auto` chooses by measured times.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

from tests.server.asking import CHAT, COMPLETIONS, RESPONSES
from tests.server.server_process import ServerProcess

NUMBER = 300
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a cat. The cat sat on the mat. The cat",
    "1, 2, 3, 4, 5, 6,",
    "Ångström, café, 東京, 🙂: translate these words.",
    "Repeat after me: alpha beta gamma alpha beta gamma alpha",
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}
NAMED = {"name": "person", "schema": SCHEMA}
TIMED = {"id", "created", "created_at", "completed_at", "metrics", "system_fingerprint", "item_id"}
TIMED |= {"call_id", "response_id", "timings", "obfuscation"}
SECONDS = re.compile(r"(_ms|_seconds|seconds|_at)$")


def requests(number, seed=46):
    """(path, body) of so many requests: seeded, and so the same in each run."""
    random = Random(seed)
    makers = [(COMPLETIONS, completion), (CHAT, chat), (RESPONSES, response)]
    for i in range(number):
        path, make = makers[i % 3]
        body = make(random) | {"seed": random.randrange(1 << 30)}
        if random.random() < 0.1:
            body |= random.choice(WRONG)
        yield path, body


def sampling(random):
    each = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_p": 0.9},
    ]
    return random.choice(each)


def more(random):
    """Of completions and chat."""
    each = [
        {"n": 2},
        {"stop": ["the", "\n\n"]},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"logit_bias": {"40": 5, "41": -100}},
        {"ignore_eos": True, "min_tokens": 8},
        {"top_k": 5, "min_p": 0.05},
        {"repetition_penalty": 1.2},
        {"return_token_ids": True},
        {"bad_words": ["cat"]},
        {"stop_token_ids": [30, 31], "include_stop_str_in_output": True},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "n": 3},
    ]
    picked = random.sample(each, random.randrange(4))
    return {key: value for fields in picked for key, value in fields.items()}


def completion(random):
    fields = random.choice([{}, {"logprobs": 3}, {"echo": True, "logprobs": 1}, {"echo": True}])
    prompt = random.choice([random.choice(TEXTS), random.sample(TEXTS, 2), [5, 6, 7, 8, 9]])
    limits = {"max_tokens": random.randrange(1, 40)}
    return {"prompt": prompt} | limits | sampling(random) | more(random) | fields


def chat(random):
    each = [
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": SCHEMA},
            }
        },
        {"tools": [{"type": "function", "function": TOOL}]},
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        {"structured_outputs": {"regex": "[a-c]{3,9}"}},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    ]
    messages = [{"role": "user", "content": random.choice(TEXTS)}]
    if random.random() < 0.4:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    if random.random() < 0.3:
        past = {"role": "assistant", "content": random.choice(TEXTS)}
        messages += [past, {"role": "user", "content": [{"type": "text", "text": "Go on."}]}]
    limits = {"max_completion_tokens": random.randrange(1, 40)}
    fields = random.choice(each) if random.random() < 0.5 else {}
    return {"messages": messages} | limits | sampling(random) | more(random) | fields


def response(random):
    each = [
        {"instructions": "Be brief."},
        {"stream": True},
        {"text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}},
        {"tools": [{"type": "function"} | TOOL], "tool_choice": "required"},
        {"tools": [{"type": "function"} | TOOL]},
        {"metadata": {"a": "b"}},
        {"store": False, "truncation": "disabled"},
    ]
    said = random.choice(TEXTS)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": said}]}
    picked = random.sample(each, random.randrange(3))
    fields = {key: value for field in picked for key, value in field.items()}
    limits = {"max_output_tokens": random.randrange(1, 40)}
    return {"input": random.choice([said, [item]])} | limits | sampling(random) | fields


WRONG = [
    {"temperature": -1},
    {"model": "no-such-model"},
    {"nonsense": 1, "top_p": 2},
    {"max_tokens": 10**9, "max_completion_tokens": 10**9, "max_output_tokens": 10**9},
    {"tools": 3},
    {"logit_bias": {"99999999": 1}},
    {"prompt": [], "messages": [], "input": []},
]


def ask(server, path, body):
    """What a client gets: the status and the response, or the events joined."""
    if not body.get("stream"):
        found = server.post(path, body)
        return [found.status, plain(found.body)]
    try:
        events = server.stream(path, body)
    except AssertionError as e:  # no stream has begun
        return ["refused", plain(json.loads(e.args[0]))]
    return [200, joined([plain(event) for event in events if event != "[DONE]"])]


def plain(value):
    """Without what differs from run to run."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {k: plain(v) for k, v in value.items() if k not in TIMED and not SECONDS.search(k)}
    if found.keys() >= {"message", "type", "param", "code"}:
        found.pop("message")
    return found


def joined(events):
    """The events with texts that follow each other put together: a step may bring many tokens."""
    found, last = [], None
    for event in events:
        event.pop("sequence_number", None)
        text, shape = delta_of(event)
        if text is not None and last == shape:
            found[-1][1] += text
        else:
            found.append([shape, text or ""])
        last = shape if text is not None else None
    return found


def delta_of(event):
    """The text that an event adds, and the event without it; None if it adds more than text."""
    if isinstance(delta := event.get("delta"), str):
        return delta, json.dumps(event | {"delta": ""}, sort_keys=True)
    choices = event.get("choices") or [{}]
    of = choices[0].get("delta", choices[0])
    key = next((k for k in ("content", "text") if of.get(k)), None)
    rest = {k: v for k, v in choices[0].items() if k not in ("index", "delta", "text") and v}
    if key is None or rest or len(of.keys() - {"index", "finish_reason", "text"}) > 1:
        return None, json.dumps(event, sort_keys=True)
    text, of[key] = of[key], ""
    return text, json.dumps(event, sort_keys=True)


class Command(ServerProcess):
    """A server of any checkout: it must not import from this one's folder."""

    def __init__(self, command):
        self.process = subprocess.Popen(
            [*command, "--port=0", "--set=server.access_log=false"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(command[0]).parent,
        )


def main():
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    file, command = Path(sys.argv[1]), sys.argv[2:]
    with Command(command) as server:
        found = [[path, body, ask(server, path, body)] for path, body in requests(NUMBER)]
    found = json.loads(json.dumps(found))
    if not file.exists():
        file.write_text("\n".join(json.dumps(each) for each in found))
        print(f"{len(found)} recorded")
        return
    before = [json.loads(line) for line in file.read_text().splitlines()]
    differing = [(a, b) for a, b in zip(before, found, strict=True) if a != b]
    for (path, body, was), (_, _, now) in differing[:5]:
        print(path, json.dumps(body), json.dumps(was), json.dumps(now), sep="\n", end="\n\n")
    print(f"{len(found)} replayed, {len(differing)} differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
