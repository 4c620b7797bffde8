"""Responses with calls, as each family of models writes them.

A conversation is a list of texts and calls. `WRITERS` write it in the format of a family, as the
chat templates of the family do for earlier turns.
"""

import json

PARIS = ("get_weather", {"city": "Paris", "days": 2})
OSLO = ("get_weather", {"city": "Oslo"})
NOW = ("now", {})
PATH = "src/main.py"
CODE = 'def f(x):\n    """Doc "quoted" \\n."""\n    return {"a": [x, 1]}  # <b>&amp;</b>\n'
WRITE = ("write_file", {"path": PATH, "content": CODE, "mode": 420})
RUN = ("run", {"command": "ls -la | grep 'x y' && echo \"done\"", "timeout": 2.5, "quiet": True})
EDITS = {
    "edits": [{"old": "a\tb", "new": "c"}, {"old": "é🙂", "new": ""}],
    "options": {"dry": None},
}
EDIT = ("edit", EDITS)
SEARCH = (
    "search",
    {"query": "how to {brace} [bracket] <tag> 'quote'", "limit": 10, "exact": False},
)
NUMBER = ("search", {"query": "7", "limit": -1, "exact": True})
WORDS = ("search", {"query": "true", "limit": 0, "exact": False})

TOOL_TYPES = {
    "get_weather": {"city": "string", "days": "integer"},
    "now": {},
    "write_file": {"path": "string", "content": "string", "mode": "integer"},
    "run": {"command": "string", "timeout": "number", "quiet": "boolean"},
    "edit": {"edits": "array", "options": "object"},
    "search": {"query": "string", "limit": "integer", "exact": "boolean"},
}
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in types.items()},
            },
        },
    }
    for name, types in TOOL_TYPES.items()
)

CONVERSATIONS = [  # text before the calls, and the calls
    ("", [PARIS]),
    ("", [NOW]),
    ("Let me look.", [PARIS]),
    ("", [PARIS, OSLO]),
    ("I need two things: 1 < 2, and [a](b).", [OSLO, NOW]),
    ("", [WRITE]),
    ("I write the file now.\n\n```python\nprint(1)\n```", [WRITE]),
    ("", [RUN]),
    ("Run it:", [RUN, RUN]),
    ("", [EDIT]),
    ("Wait {", [EDIT, WRITE]),
    ("", [SEARCH]),
    ("", [NUMBER]),
    ("", [WORDS]),
    ("Ça va? 🙂", [SEARCH, NUMBER, WORDS]),
    ("", [NOW, NOW, NOW]),
    ("Step 1.\nStep 2.", [WRITE, RUN]),
    ("<b>bold</b>", [PARIS]),
    ("No call is needed: 3 > 2 and `f(x)` is fine.", []),
    ("An answer\n\nof two parts, with {json: 1} and [lists].", []),
]


def as_tag(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def tags(form):
    return lambda given: "".join(form % (key, as_tag(value)) for key, value in given.items())


def qwen3_coder(text, calls):
    each = tags("<parameter=%s>\n%s\n</parameter>\n")
    written = [f"<tool_call>\n<function={n}>\n{each(a)}</function>\n</tool_call>" for n, a in calls]
    return "\n".join(filter(None, [text, *written]))


def glm(text, calls):
    each = tags("<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n")
    written = [f"<tool_call>{n}\n{each(a)}</tool_call>" for n, a in calls]
    return "\n".join(filter(None, [text, *written]))


def minimax(text, calls):
    each = tags('<parameter name="%s">%s</parameter>\n')
    written = [f'<invoke name="{n}">\n{each(a)}</invoke>\n' for n, a in calls]
    if not written:
        return text
    return f"{text}\n<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def deepseek_v32(text, calls):
    def each(given):
        form = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
        kinds = {key: dumped(isinstance(value, str)) for key, value in given.items()}
        return "".join(form.format(k, kinds[k], as_tag(v)) for k, v in given.items())

    written = [f'<｜DSML｜invoke name="{n}">\n{each(a)}</｜DSML｜invoke>\n' for n, a in calls]
    if not written:
        return text
    body = "".join(written)
    return f"{text}\n\n<｜DSML｜function_calls>\n{body}</｜DSML｜function_calls>"


def deepseek_v3(text, calls):
    form = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    return in_section(text, [form.format(n, dumped(a)) for n, a in calls], "\n")


def deepseek_v31(text, calls):
    form = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return in_section(text, [form.format(n, dumped(a)) for n, a in calls], "")


def in_section(text, written, separator):
    if not written:
        return text
    return f"{text}<｜tool▁calls▁begin｜>{separator.join(written)}<｜tool▁calls▁end｜>"


def kimi(text, calls):
    form = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    written = "".join(form.format(n, i, dumped(a)) for i, (n, a) in enumerate(calls))
    section = f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"
    return text + section * bool(calls)


def harmony(text, calls):
    """Several calls are turns of their own; the end of the last one is an end token."""
    begin = "<|start|>assistant"
    parts = [f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"]
    if text:
        channel = "commentary" if calls else "final"
        end = "<|end|>" if calls else ""
        parts.append(f"<|channel|>{channel}<|message|>{text}{end}")
    for i, (n, a) in enumerate(calls):
        to = f"to=functions.{n}"
        head = f"<|channel|>commentary {to} <|constrain|>json"
        head = f" {to}<|channel|>commentary json" if i % 2 else head
        parts.append(f"{head}<|message|>{dumped(a)}" + "<|call|>" * (i + 1 < len(calls)))
    return begin.join(parts)


def gemma4(text, calls):
    written = [f"<|tool_call>call:{n}{{{loose_fields(a)}}}<tool_call|>" for n, a in calls]
    return f"<|channel>thought\n{THOUGHT}<channel|>{text}{''.join(written)}"


def loose(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{loose_fields(value)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(loose, value))}]"
    return dumped(value)


def loose_fields(given):
    return ",".join(f"{key}:{loose(value)}" for key, value in given.items())


def python_calls(calls):
    each = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"[{', '.join(each)}]"


def lfm2(text, calls):
    return text + f"<|tool_call_start|>{python_calls(calls)}<|tool_call_end|>" * bool(calls)


def llama4(text, calls):
    return text + f"<|python_start|>{python_calls(calls)}<|python_end|>" * bool(calls)


def gemma3(text, calls):
    return text + f"\n```tool_code\n{python_calls(calls)}\n```" * bool(calls)


def granite(text, calls):
    each = [{"name": name, "arguments": given} for name, given in calls]
    return text + f"<|tool_call|>{dumped(each)}" * bool(calls)


def hermes(text, calls):
    each = [{"name": name, "arguments": given} for name, given in calls]
    written = [f"<tool_call>\n{dumped(call)}\n</tool_call>" for call in each]
    return "\n".join(filter(None, [text, *written]))


def mistral(text, calls):
    return text + "".join(f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}" for n, a in calls)


THOUGHT = "The user asks.\nI think: <maybe> {a call}."
WRITERS = {  # format -> the writer of its responses; the name before a space is the parser's
    "qwen3_coder": qwen3_coder,
    "glm": glm,
    "minimax": minimax,
    "deepseek_v32": deepseek_v32,
    "deepseek v3": deepseek_v3,
    "deepseek v3.1": deepseek_v31,
    "kimi": kimi,
    "harmony": harmony,
    "gemma4": gemma4,
    "gemma3": gemma3,
    "lfm2": lfm2,
    "llama4": llama4,
    "granite": granite,
    "hermes": hermes,
    "generic": hermes,
    "mistral": mistral,
}
REASONING = "harmony", "gemma4"  # formats whose writers also write the thought
