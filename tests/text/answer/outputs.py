"""Texts as models of these families write them, and what they mean.

parser's name -> [(text, events with calls' ids left out)]
"""

from specserve.text.answer.events import CallArguments, CallBegin, Content, Reasoning, joined
from specserve.text.answer.formats import AnswerReader, Formats, Wanted
from specserve.text.answer.response_template import read_template

WEATHER = '{"city": "Paris", "days": [{"}": "\\"]\\\\"}]}'


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (tool("get_weather", city={"type": "string"}, days={"type": "integer"}), tool("now"))


def call(index, name, arguments):
    return [CallBegin(index, "", name), CallArguments(index, arguments)]


TWO = [*call(0, "get_weather", WEATHER), *call(1, "now", "{}")]

HERMES = [
    (
        "Let me look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [Content("Let me look."), *TWO],
    ),
    (
        f'<tool_call>{{"arguments":{WEATHER},"name":"get_weather"}}</tool_call> Done. ',
        [*call(0, "get_weather", WEATHER), Content("Done. ")],
    ),
    (  # without arguments, with arguments in a string, and without an end
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": null}'
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}',
        [*call(0, "now", "{}"), *call(1, "now", "{}"), *call(2, "get_weather", '{"city": "Oslo"}')],
    ),
    ("a < b, <tool, <tool_cal", [Content("a < b, <tool, <tool_cal")]),
    (" \n <tool_call> {'name': 1} </tool_call> \n", None),
    ('<tool_call>{"city": "Paris"}</tool_call>', None),
    ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
    ('<tool_call>{"name": "no\\ud800w", "arguments": {}}</tool_call>', None),
    ('<tool_call>{"name": "now", "argum', None),
    (  # a call that goes wrong once it has begun
        '<tool_call>{"name": "now", "arguments": {"a": 1} oops}</tool_call>',
        [*call(0, "now", '{"a": 1}'), Content("oops}</tool_call>")],
    ),
    ('<tool_call>{"name": "now", "arguments": {"a": [1, ', call(0, "now", '{"a": [1, ')),
]

LLAMA3 = [
    (
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; '
        '{"name": "now", "parameters": {}}',
        TWO,
    ),
    (
        f'\n<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {WEATHER}}};'
        '{"name": "now"}',
        TWO,
    ),
    ('I see. <|python_tag|>{"name": "other"}', [Content("I see."), *call(0, "other", "{}")]),
    ('{"name": "Ada", "parameters": {}}', None),  # JSON that was asked for
    ('{"city": "Paris", "name": "now"}', None),
    ('<|python_tag|>print("now")', None),
    ('{"name": "now"}; and more', [*call(0, "now", "{}"), Content("; and more")]),
    ("  ", None),
]

MISTRAL = [
    (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
        '{"name": "now", "arguments": {}}]',
        TWO,
    ),
    (f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}", TWO),
    (
        f"Well.[TOOL_CALLS]get_weather{WEATHER}",
        [Content("Well."), *call(0, "get_weather", WEATHER)],
    ),
    ('[TOOL_CALLS]{"name": "now", "arguments": {}}', call(0, "now", "{}")),
    ("[TOOL_CALLS]get_weather(Paris)", None),
    ("[TOOL_CALLS][[[a(", None),
    ("[TOOL_CALLS][]", None),
    ('[TOOL_CALLS][{"name": "now"}, oops', [*call(0, "now", "{}"), Content(", oops")]),
]

COMMAND_R = [
    (
        'Plan: I look.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n'
        f'        "parameters": {WEATHER}\n    }},\n    {{"tool_name": "now"}}\n]```\nDone.',
        [Content("Plan: I look."), *TWO, Content("Done.")],
    ),
    ('Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```', []),
    (
        'Action:```json[{"tool_name": "directly-answer", "parameters": {"a": 1}},'
        '{"parameters": {}, "tool_name": "now"}]',
        call(0, "now", "{}"),
    ),
    ("Action: jump", None),
    ("Action: ```python\n[1]```", None),
    ("Action: ```json\n[]\n```", None),
    ('Action: ```json\n{"tool_name": "now"}```', None),
    ('Action: ```json\n[{"name": "now"}]```', None),
    ('Action: ```json\n[{"tool_name": "now"} oops', [*call(0, "now", "{}"), Content("oops")]),
]
COMMAND_R7B = [
    (
        'I look.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        f'"parameters": {WEATHER}}},\n    {{"tool_call_id": "1", "tool_name": "now", '
        '"parameters": {}}\n]<|END_ACTION|>',
        [Content("I look."), *TWO],
    ),
    ('Action: ```json\n[{"tool_name": "now"}]```', None),
]

THINK = [
    (
        '<think>\nHm, <tool_call> or not?\n</think>\n\nYes.<tool_call>{"name": "now"}</tool_call>',
        [Reasoning("Hm, <tool_call> or not?"), Content("Yes."), *call(0, "now", "{}")],
    ),
    ("<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
    ("<think>Hm, </thin ", [Reasoning("Hm, </thin ")]),
    (" \n<thinking>Yes.", None),
    ("Yes. <think>No.</think>", None),
]
BRACKETS = [
    (
        "[THINK]Hm, <think>?[/THINK]Yes.[TOOL_CALLS]now[ARGS]{}",
        [Reasoning("Hm, <think>?"), Content("Yes."), *call(0, "now", "{}")],
    ),
    ("<think>No.</think>", None),
]
INSIDE = [
    ("\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Content("Yes.")]),
    ("Hm.", [Reasoning("Hm.")]),
]

JSON_TEMPLATE = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {
            "open": "<think>",
            "close": "</think>",
            "repeats": True,
            "join": "; ",
        },
        "content": {"close": "<|im_end|>", "repeats": True, "join": ""},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
TEMPLATED = [
    (
        "<think>\nHm.\n</think>\n\nLet me look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>',
        [
            Reasoning("Hm."),
            Content("Let me look."),
            *call(0, "get_weather", '{"city": "Paris", "days": 2}'),
            *call(1, "now", "{}"),
        ],
    ),
    ("Yes.", [Content("Yes.")]),
    (
        "<think>A.</think> Yes. <think> B.</think>",
        [Reasoning("A."), Content("Yes."), Reasoning("; B.")],
    ),
    ("<tool_call>{'name': 1}</tool_call>", None),
    ('<tool_call>{"name": "now", "arguments": {}', None),
]

XML_TEMPLATE = {
    "start_anchor": ["<|assistant|>", "<|bot|>"],
    "fields": {
        "thinking": {
            "open_pattern": r"<\|channel\|>(?:analysis|thought)<\|message\|>",
            "close": "<|end|>",
        },
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>[\w.]+)>",
            "close": "</function>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>",
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
TAGGED = [
    (
        "<|channel|>analysis<|message|> Hm. <|end|><function=get_weather><parameter=city>7"
        "</parameter><parameter=days>7</parameter></function>"
        "<|channel|>final<|message|>Yes.<|return|>",
        [Reasoning("Hm."), *call(0, "get_weather", '{"city": "7", "days": 7}'), Content("Yes.")],
    ),
    ("<function=now></function>", call(0, "now", "{}")),
]

LAX_TEMPLATE = {
    "start_anchor": "<start_of_turn>model\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
LAX = [
    (
        'Hi. <|tool_call>call:get_weather{city:<|"|>{a: "b"}<|"|>,days:2}<tool_call|>',
        [Content("Hi."), *call(0, "get_weather", '{"city": "{a: \\"b\\"}", "days": 2}')],
    ),
    ('<|tool_call>call:now{<|"|>}<tool_call|>', None),
]

PREFIX_TEMPLATE = {  # a delimiter is the beginning of another one
    "start_anchor": "A:",
    "fields": {
        "content": {"open": "<t>x", "close": "</t>"},
        "thinking": {"open": "<t>", "close": ["</t>", "</t></t>"]},
    },
}
PREFIXED = [("<t>Hm.</t></t><t>xYes.</t>", [Reasoning("Hm."), Content("Yes.")])]

CASES = {
    "hermes": (Formats("hermes"), HERMES, ""),
    "llama3": (Formats("llama3_json"), LLAMA3, ""),
    "mistral": (Formats("mistral"), MISTRAL, ""),
    "command_r": (Formats("command_r"), COMMAND_R, ""),
    "command_r7b": (Formats("command_r", has_actions=True), COMMAND_R7B, ""),
    "think": (Formats("hermes", "think"), THINK, "user: hi\nassistant: "),
    "brackets": (Formats("mistral", "mistral_think", has_args=True), BRACKETS, "[/INST]"),
    "inside": (Formats("hermes", "think"), INSIDE, "user: hi\nassistant: <think>\n"),
    **{
        name: (Formats("template", "template", read_template(written)), cases, prompt)
        for name, written, cases, prompt in [
            ("json", JSON_TEMPLATE, TEMPLATED, "<|im_start|>assistant\n"),
            ("xml", XML_TEMPLATE, TAGGED, "<|assistant|>"),
            ("lax", LAX_TEMPLATE, LAX, "<start_of_turn>model\n"),
            ("prefix", PREFIX_TEMPLATE, PREFIXED, "A:"),
        ]
    },
}
EACH = [
    (f"{name}-{i}", formats, prompt, text, [Content(text)] if want is None else want)
    for name, (formats, cases, prompt) in CASES.items()
    for i, (text, want) in enumerate(cases)
]


def read(formats, prompt, pieces, **wanted):
    """The events of an answer that comes in these pieces, and its parser."""
    parser = AnswerReader(formats, Wanted(TOOLS, **wanted), prompt).parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()]), parser


def without_ids(events):
    return [CallBegin(e.index, "", e.name) if isinstance(e, CallBegin) else e for e in events]
