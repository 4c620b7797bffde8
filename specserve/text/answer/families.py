"""Formats of tool calls and reasoning of model families, as response templates.

They serve models whose tokenizer has no response template of its own. `CONTENT` is the text around
calls. A family's templates of reasoning are only given if it does not use <think>.
"""

from typing import Any, NamedTuple

CONTENT: dict[str, Any] = {"repeats": True, "join": "\n\n"}
NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
NOWHERE = r"(?!)"  # an anchor that no prompt has: prompts contain no part of a call


def xml(open_pattern: str, close_pattern: str, tag_pattern: str) -> dict[str, Any]:
    """Return the field of calls whose arguments are tags."""
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tag_pattern},
        "transform": NAMED,
    }


def named_json(open_pattern: str, close_pattern: str) -> dict[str, Any]:
    """Return the field of calls whose arguments are JSON after the name. They are streamed."""
    return {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "repeats": True,
        "content": "json",
        "transform": NAMED,
    }


def around(*markers: str) -> dict[str, Any]:
    """Return the field of the content, without the markers around sections of calls."""
    return {"close": [*markers], **CONTENT}


def listed(opening: str, closing: str | None, content: str) -> dict[str, Any]:
    """Return the field of a list of calls."""
    close = {} if closing is None else {"close": closing}
    return {"open": opening, **close, "repeats": True, "content": content}


class FormatFamily(NamedTuple):
    """A format of calls, and of reasoning if it does not use <think>.

    needles    texts that the chat template of the family contains
    fields     of the response template, besides the content
    anchor     the beginning of a response in a prompt, for families with reasoning
    content    the field of the content
    reasoning  tokens that begin reasoning, and that end it
    call       texts before and after the arguments of a call that a grammar enforces; None: calls
               are enforced in Hermes' format
    """

    needles: tuple[str, ...]
    fields: dict[str, dict[str, Any]]
    anchor: str | list[str] | None = None
    content: dict[str, Any] = CONTENT
    reasoning: tuple[tuple[str, ...], ...] = ()
    call: tuple[str, str] | None = None

    @property
    def template(self) -> dict[str, Any]:
        anchored: dict[str, Any] = {"start_anchor_pattern": NOWHERE}
        if self.anchor is not None:
            anchored = {"start_anchor": self.anchor}
        return {**anchored, "fields": {**self.fields, "content": self.content}}


FAMILIES = {
    "qwen3_coder": FormatFamily(
        ("<function=", "<parameter="),
        {
            "tool_calls": xml(
                r"<function=(?P<name>[^>\n]+)>",
                "</function>",
                r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            )
        },
        content=around("<tool_call>", "</tool_call>"),
    ),
    "glm": FormatFamily(
        ("<arg_key>", "<arg_value>"),
        {
            "tool_calls": xml(
                r"<tool_call>\s*(?P<name>[^<\s]+)",
                "</tool_call>",
                r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            )
        },
    ),
    "harmony": FormatFamily(
        ("<|channel|>", "<|message|>", "analysis"),
        {
            "reasoning_content": {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": named_json(
                r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+)"
                r"| to=functions\.(?P<name>[\w.-]+)<\|channel\|>(?:commentary|analysis))"
                r"(?:\s*(?:<\|constrain\|>)?json)?\s*<\|message\|>",
                r"<\|(?:call|end|return)\|>",
            ),
        },
        "<|start|>assistant",
        {
            "open_pattern": r"<\|channel\|>(?:final|commentary)\s*<\|message\|>",
            "close": ["<|end|>", "<|return|>"],
            **CONTENT,
        },
        (
            ("<|channel|>", "analysis"),
            ("<|end|>", "<|start|>", "assistant", "<|channel|>"),
        ),
        ("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),
    ),
    "gemma4": FormatFamily(
        ("<|tool_call>",),
        {
            "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": NAMED,
            },
        },
        ["<|turn>model\n", "<tool_response|>"],
        {"close": ["<turn|>", "<|tool_response>", "<eos>"], **CONTENT},
        (("<|channel>", "thought"), ("<channel|>",)),
    ),
    "gemma3": FormatFamily(
        ("```tool_code",), {"tool_calls": listed("```tool_code", "```", "pythonic")}
    ),
    "lfm2": FormatFamily(
        ("<|tool_call_start|>",),
        {"tool_calls": listed("<|tool_call_start|>", "<|tool_call_end|>", "pythonic")},
    ),
    "llama4": FormatFamily(
        ("<|python_start|>",),
        {"tool_calls": listed("<|python_start|>", "<|python_end|>", "pythonic")},
    ),
    "granite": FormatFamily(
        ("<|tool_call|>",), {"tool_calls": listed("<|tool_call|>", None, "json")}
    ),
    "deepseek_v32": FormatFamily(
        ("｜DSML｜", "invoke"),
        {
            "tool_calls": xml(
                r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">',
                "</｜DSML｜invoke>",
                r'<｜DSML｜parameter name="(?P<key>[^"\n]+)"[^>]*>(?P<value>.*?)'
                r"</｜DSML｜parameter>",
            )
        },
        content=around("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    ),
    "deepseek": FormatFamily(
        ("<｜tool▁call▁begin｜>",),
        {
            "tool_calls": named_json(
                r"<｜tool▁call▁begin｜>"
                r"(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
                r"|(?!function<)(?P<name>[^\n<]+)<｜tool▁sep｜>)",
                "<｜tool▁call▁end｜>",
            )
        },
        content=around("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi": FormatFamily(
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        {
            "tool_calls": named_json(
                r"<\|tool_call_begin\|>\s*"
                r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)\s*"
                r"<\|tool_call_argument_begin\|>",
                r"<\|tool_call_end\|>",
            )
        },
        content=around("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "minimax": FormatFamily(
        ("<minimax:tool_call>",),
        {
            "tool_calls": xml(
                r'<invoke name="(?P<name>[^"\n]+)">',
                "</invoke>",
                r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>',
            )
        },
        content=around("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
}


def family_of(source: str) -> str | None:
    """Return the name of the family whose texts a chat template contains; None if there is none."""
    each = FAMILIES.items()
    return next((name for name, its in each if all(n in source for n in its.needles)), None)
