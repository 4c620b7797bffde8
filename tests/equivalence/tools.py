"""`make equivalence-tools`: 300 conversations with tools have the same calls with every drafter.

Each conversation is streamed over HTTP, at T = 0 or 1, in two turns: the second has the results of
the first turn's calls. Compared are the calls, the concatenation of all deltas, the finish reasons
and the usage with those of a server without a drafter. `tenth` runs every tenth conversation.
"""

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tests.checkpoints import tiny_checkpoint
from tests.models.eagle_heads import write_head
from tests.server.in_process import server_threads

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
NUM, CONCURRENT = 300, 6
SOME = {"enum": ["Rome", "Paris", "a b", 'c "d"']}
CITY = {
    "type": "object",
    "properties": {"city": SOME, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
}
CITY |= {"required": ["city", "days"], "additionalProperties": False}
FLAGS = {"type": "object", "properties": {"on": {"type": "boolean"}, "of": {"enum": ["x", "yy"]}}}
FLAGS |= {"required": ["on"], "additionalProperties": False}
FUNCTIONS = {"weather": CITY, "switch": FLAGS}
COLUMNS = {  # drafter -> settings; {draft} and {head} are folders
    "none": {"drafter.name": "none"},
    "ngram": {"drafter.name": "ngram"},
    "model": {"drafter.name": "model", "drafter.model": "{draft}", "speculation.max_nodes": 8},
    "eagle": {"drafter.name": "eagle", "drafter.head": "{head}", "speculation.max_nodes": 8},
    "auto": {"drafter.name": "auto", "drafter.model": "{draft}", "drafter.head": "{head}"},
}
TEMPLATE = (  # shows tools in no format that the server knows
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def asked(i):
    """The path and the body of a conversation's first turn."""
    path = MESSAGES if i % 3 == 2 else CHAT
    names = [*FUNCTIONS][: 1 + i % 2]
    user = {"role": "user", "content": f"the cat {i} sat on the mat"}
    body = {"messages": [user], "temperature": i // 3 % 2, "seed": i, "max_tokens": 120}
    choice = ("required", "named", "auto")[i // 6 % 3]
    if path == MESSAGES:
        tools = [{"name": name, "input_schema": FUNCTIONS[name]} for name in names]
        kinds = {"required": {"type": "any"}, "named": {"type": "tool", "name": names[-1]}}
        return path, body | {"tools": tools, "tool_choice": kinds.get(choice, {"type": "auto"})}
    functions = [{"name": name, "parameters": FUNCTIONS[name]} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    named = {"type": "function", "function": {"name": names[-1]}}
    chosen = {"required": "required", "named": named}.get(choice, "auto")
    more = {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": i % 5 > 0}
    return path, body | more | {"stream_options": {"include_usage": True}}


def chat_turn(events):
    """The text, calls, reasons and usage of a stream of chunks, and the messages that follow."""
    text, calls, reasons, usage = "", [], [], None
    for chunk in events:
        if chunk == "[DONE]":
            break
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] * bool(choice["finish_reason"])
            for delta in choice["delta"].get("tool_calls", ()):
                if "id" in delta:
                    calls.append([delta["function"]["name"], ""])
                calls[delta["index"]][1] += delta["function"].get("arguments", "")
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "22"} for call in made]
    said = {"role": "assistant", "content": text or None} | ({"tool_calls": made} if made else {})
    counts = {key: usage[key] for key in ("prompt_tokens", "completion_tokens")}
    more = [said, *(results or [{"role": "user", "content": "and"}])]
    return (text, calls, reasons, counts), more


def message_turn(events):
    """The same of a stream of Anthropic's events."""
    blocks, texts, end = [], [], None
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                delta = event["delta"]
                texts[-1] += delta.get("text") or delta.get("partial_json") or ""
            case "message_delta":
                end = event
    content, results = [], []
    for n, (block, text) in enumerate(zip(blocks, texts, strict=True)):
        if block["type"] == "text":
            content.append({"type": "text", "text": text})
            continue
        given = json.loads(text) if end["delta"]["stop_reason"] == "tool_use" else {}
        call = {"type": "tool_use", "id": f"c{n}", "name": block["name"], "input": given}
        content.append(call)
        results.append({"type": "tool_result", "tool_use_id": f"c{n}", "content": "22"})
    calls = [
        [block["name"], text]
        for block, text in zip(blocks, texts, strict=True)
        if block["type"] == "tool_use"
    ]
    said = "".join(text for b, text in zip(blocks, texts, strict=True) if b["type"] == "text")
    usage = end["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    counts = {"prompt_tokens": num_prompt, "completion_tokens": usage["output_tokens"]}
    more = [{"role": "assistant", "content": content or "a"}]
    more.append({"role": "user", "content": results or "and"})
    return (said, calls, [end["delta"]["stop_reason"]], counts), more


def conversation(server, i):
    """What is compared of the two turns of a conversation."""
    path, body = asked(i)
    read = message_turn if path == MESSAGES else chat_turn
    told = []
    for _ in range(2):
        turn, more = read(server.stream(path, body))
        told.append(turn)
        body = body | {"messages": [*body["messages"], *more]}
    return told


@contextmanager
def models():
    """The folders of a random target, of a draft model that is a layer of it, and of a head."""
    with TemporaryDirectory() as root:
        folders = {name: Path(root) / name for name in ("target", "draft", "head")}
        sizes = {"max_position_embeddings": 4096}
        tiny_checkpoint(folders["target"], seed=1, **sizes)
        tiny_checkpoint(folders["draft"], seed=1, num_hidden_layers=1, **sizes)
        write_head(folders["head"], eagle_aux_hidden_state_layer_ids=[0, 1])
        for name in ("target", "draft"):
            (folders[name] / "chat_template.jinja").write_text(TEMPLATE)
        yield {name: str(folder) for name, folder in folders.items()}


def column(folders, drafter, numbers):
    """The conversations with a drafter, and the number of its accepted draft tokens."""
    given = COLUMNS[drafter].items()
    settings = {k: v.format(**folders) if isinstance(v, str) else v for k, v in given}
    with (
        server_threads(folders["target"], **settings) as server,
        ThreadPoolExecutor(CONCURRENT) as pool,
    ):
        told = [*pool.map(lambda i: conversation(server, i), numbers)]
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    return told, int(accepted)


def check(drafters, numbers):
    """The failures, and facts about each column."""
    failures, facts = [], {}
    with models() as folders:
        want, _ = column(folders, "none", numbers)
        turns = [turn for talk in want for turn in talk]
        reasons = Counter(reason for turn in turns for reason in turn[2])
        facts["none"] = f"{sum(len(t[1]) for t in turns)} calls, finish reasons {dict(reasons)}"
        for drafter in drafters:
            told, accepted = column(folders, drafter, numbers)
            for i, own, its in zip(numbers, want, told, strict=True):
                if its != own:
                    failures.append(f"{drafter}, conversation {i}: {its}, not {own}")
            if not accepted:
                failures.append(f"{drafter}: no draft token was accepted")
            facts[drafter] = f"{accepted} draft tokens accepted"
    return failures, facts


def main():
    start = perf_counter()
    numbers = range(0, NUM, 10 if "tenth" in sys.argv else 1)
    failures, facts = check([name for name in COLUMNS if name != "none"], numbers)
    print(*failures, sep="\n")
    for drafter, fact in facts.items():
        print(f"{drafter}: {fact}")
    print(
        f"{len(numbers)} conversations with {len(facts) - 1} drafters, {len(failures)} "
        f"differences, in {perf_counter() - start:.0f} s"
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
