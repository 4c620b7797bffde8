"""Formats of tool calls and reasoning, and the parsers for a request's responses."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from specserve.errors import ConfigError
from specserve.text.answer.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    answer_of,
)
from specserve.text.answer.families import FAMILIES, family_of
from specserve.text.answer.parsers import (
    ACTION,
    ARGS,
    CALL_BEGIN,
    CALL_END,
    CALL_ID,
    END_ACTION,
    END_THINK,
    PYTHON_TAG,
    START_ACTION,
    THINK,
    TOOL_CALLS,
    CommandRParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
    ThinkParser,
)
from specserve.text.answer.pythonic import PythonicParser
from specserve.text.answer.response_template import (
    FIELD_KINDS,
    ResponseTemplate,
    TemplateError,
    TemplateParser,
    read_template,
)
from specserve.text.tokenizer import Tokenizer
from specserve.text.tool_prompt import CALL

DEFAULT = "hermes"  # format of enforced calls if the model's format is unknown
THINKING = {  # format of reasoning -> markers around reasoning at the beginning of a response
    "think": (THINK, END_THINK),
    "mistral_think": ("[THINK]", "[/THINK]"),
}
MARKERS = {  # markers that may be special tokens, which detokenized text omits
    "command_r": (START_ACTION, END_ACTION),
    "generic": (CALL_BEGIN, CALL_END),
    "hermes": (CALL_BEGIN, CALL_END),
    "llama3_json": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS, CALL_ID, ARGS),
    "none": (),
    "pythonic": (),
    **THINKING,
}


# Tokens that begin reasoning, and that end it.
REASONING: dict[str, tuple[tuple[str, ...], ...]] = {
    "none": (),
    "template": (),
    **{name: ((begin,), (end,)) for name, (begin, end) in THINKING.items()},
}
HERMES = f"{CALL_BEGIN}\n", f"\n{CALL_END}"  # text around the JSON of a call
UNFRAMED = "none", "command_r", "pythonic"  # formats of calls that no grammar enforces


class Formats(msgspec.Struct, frozen=True):
    """A model's formats of tool calls and reasoning.

    tools      "hermes", "llama3_json", "mistral", "command_r", "pythonic", "template", "generic"
               (Hermes' format, which the server describes to the model) or "none"
    reasoning  "think", "mistral_think", "template" or "none"
    """

    tools: str = "none"
    reasoning: str = "none"
    template: ResponseTemplate | None = None
    has_args: bool = False  # "mistral": with [ARGS]
    has_actions: bool = False  # "command_r": with <|START_ACTION|>
    family: str = ""  # name of the built-in template, if that is used

    @property
    def name(self) -> str:
        """The name of the format of tool calls."""
        return self.family if self.family and self.tools == "template" else self.tools

    @property
    def thinking(self) -> tuple[str, str]:
        """The markers around reasoning at the beginning of a response."""
        return THINKING.get(self.reasoning, THINKING["think"])

    @property
    def has_channels(self) -> bool:
        return self.family == "harmony"

    @property
    def enforced(self) -> str:
        """The format of calls that a grammar enforces."""
        is_framed = self.tools != "template" or self.frame is not None
        return self.tools if is_framed and self.tools not in UNFRAMED else DEFAULT

    @property
    def call(self) -> str:
        """The form of a call in a text that describes tools, see `ChatOptions`."""
        match self.enforced:
            case "llama3_json":
                return '{"name": "%s", "parameters": %s}'
            case "mistral" if self.has_args:
                return f"{TOOL_CALLS}%s{ARGS}%s"
            case "mistral":
                return f'{TOOL_CALLS}[{{"name": "%s", "arguments": %s}}]'
        return CALL

    def around(self, name: str) -> tuple[str, str]:
        """The text before and after the arguments of a call that a grammar enforces."""
        if self.family and (call := FAMILIES[self.family].call) is not None:
            return call[0].replace("{name}", name), call[1]
        begin, end = self.frame or HERMES
        return f'{begin}{{"name": "{name}", "arguments": ', f"}}{end}"

    @property
    def frame(self) -> tuple[str, str] | None:
        """The text before and after the JSON of a call; None if calls do not have this form."""
        if self.family and (call := FAMILIES[self.family].call) is not None:
            return call[0].partition("{name}")[0], call[1]
        if self.template is None:
            return HERMES if self.tools != "template" else None
        fields = self.template.fields.items()
        field = next((f for n, f in fields if FIELD_KINDS[n] == "tool_calls"), None)
        if field is None or not isinstance(field.open, str) or not isinstance(field.close, str):
            return None
        parser = TemplateParser(self.template)
        events = parser.push(f'{field.open}{{"name": "f", "arguments": {{"a": 1}}}}{field.close}')
        calls = answer_of([*events, *parser.finish()]).calls
        is_same = [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}')]
        return (field.open, field.close) if is_same else None

    @property
    def words(self) -> str:
        how = " (described in the system text)" if self.tools == "generic" else ""
        return f"tool calls {self.name}{how}, reasoning {self.reasoning}"


class Wanted(msgspec.Struct, frozen=True):
    """A request's options for parsing its responses.

    tools          parse calls of these tools; if empty, text that looks like a call is content
    is_enforced    a grammar enforces the calls
    is_named       the grammar enforces a function that the caller named
    has_reasoning  report reasoning
    most_calls     maximum number of reported calls; None: all
    """

    tools: Sequence[Mapping[str, Any]] = ()
    is_enforced: bool = False
    is_named: bool = False
    has_reasoning: bool = True
    most_calls: int | None = None


class AnswerReader:
    """Creates the parsers of a request's responses, one per choice."""

    def __init__(self, formats: Formats, wanted: Wanted, prompt: str) -> None:
        """`prompt` is text, because templates may write the beginning of a response."""
        self.formats, self.wanted = formats, wanted
        self.is_inside = prompt.rstrip().endswith(formats.thinking[0])
        self.tools = "none"
        if wanted.tools:
            self.tools = formats.enforced if wanted.is_enforced else formats.tools
        self.reasoning = formats.reasoning
        if self.tools not in ("none", "template") and self.reasoning == "template":
            self.reasoning = "none"  # the grammar does not allow it
        self.template, self.prompt = formats.template, ""
        if self.reasoning == "template" and formats.template is not None:
            self.prompt = formats.template.prefilled(prompt)

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning != "none"

    @property
    def thinks(self) -> bool:
        """Whether reasoning can only begin the response."""
        return self.reasoning in THINKING

    @property
    def is_plain(self) -> bool:
        """Whether all text is content, so that no parsing is needed."""
        return self.tools == self.reasoning == "none"

    @property
    def markers(self) -> Collection[str] | None:
        """The texts of special tokens that a parser needs; None: all."""
        if "template" in (self.tools, self.reasoning):
            return None
        return [*MARKERS[self.tools], *MARKERS[self.reasoning]]

    def parser(self) -> AnswerParser:
        parser = self.call_parser()
        if self.thinks:
            parser = ThinkParser(parser, self.is_inside, self.formats.thinking)
        wanted = self.wanted
        is_all = wanted.has_reasoning and wanted.most_calls is None and not wanted.is_enforced
        return parser if is_all else FilteringParser(parser, wanted)

    def call_parser(self) -> AnswerParser:
        tools = self.wanted.tools
        match self.tools:
            case "hermes" | "generic":
                return HermesParser()
            case "llama3_json":
                return Llama3Parser({tool["function"]["name"] for tool in tools})
            case "mistral":
                return MistralParser()
            case "pythonic":
                return PythonicParser()
            case "command_r":
                return CommandRParser(self.formats.has_actions)
        if "template" not in (self.tools, self.reasoning) or self.template is None:
            return PlainParser()
        asked = {"tool_calls": self.tools, "reasoning": self.reasoning}
        kinds = [kind for kind, format in asked.items() if format == "template"]
        return TemplateParser(self.template.of_kinds(kinds), self.prompt, tools)


class PlainParser:
    """Returns all text as content."""

    num_reasoning = 0

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class FilteringParser:
    """Drops events of another parser that the request does not want."""

    def __init__(self, parser: AnswerParser, wanted: Wanted) -> None:
        self.parser, self.wanted = parser, wanted

    @property
    def num_reasoning(self) -> int:
        return self.parser.num_reasoning

    def push(self, text: str) -> list[Event]:
        return [*filter(self.is_wanted, self.parser.push(text))]

    def finish(self) -> list[Event]:
        return [*filter(self.is_wanted, self.parser.finish())]

    def is_wanted(self, event: Event) -> bool:
        most = self.wanted.most_calls
        match event:
            case Reasoning():
                return self.wanted.has_reasoning
            case CallBegin(index) | CallArguments(index):
                return most is None or index < most
        return not self.wanted.is_enforced  # enforced: content is from a truncated call


def find_formats(
    tool_parser: str,
    reasoning_parser: str,
    source: str,
    tokens: Collection[str],
    response_template: Any = None,
) -> Formats:
    """Detect a model's formats from its chat template, tokens and response template.

    Formats that the config names are not detected. ConfigError if it names a template that cannot
    be used.
    """
    template, family = None, ""
    if response_template is not None and tool_parser in ("auto", "template"):
        try:
            template = read_template(response_template)
        except TemplateError as e:
            if tool_parser == "template":
                raise unusable(str(e)) from e
    if tool_parser == "template" and template is None:
        raise unusable("tokenizer_config.json contains none")
    tools = tool_parser
    if tools == "auto":
        tools = "template" if template is not None else tool_format(source, tokens)
    if tools in FAMILIES:
        tools, family = "template", tools
        template = read_template(FAMILIES[family].template)
    think = reasoning_parser
    if think == "auto":
        has_field = template is not None and (not family or FAMILIES[family].reasoning)
        found = [n for n, (begin, end) in THINKING.items() if begin in tokens or end in source]
        think = "template" if has_field else next(iter(found), "none")
    return Formats(tools, think, template, ARGS in source, START_ACTION in source, family)


def formats_of(
    tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> Formats:
    """Return the formats of a model's tokenizer and chat template, see `find_formats`."""
    template = tokenizer.chat_template
    source = "" if template is None else "\n".join(template.sources)
    known = source, tokenizer.get_vocab(), tokenizer.response_template
    return find_formats(tool_parser, reasoning_parser, *known)


class ReasoningMarkers(NamedTuple):
    """Tokens around reasoning, see `ReasoningBudget`."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


def reasoning_markers(formats: Formats, tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """Return the tokens around a model's reasoning.

    None without reasoning, or if a marker is several tokens, because the model can write these
    tokens in other ways.
    """
    vocabulary = tokenizer.get_vocab()
    texts = REASONING[formats.reasoning]
    if formats.reasoning == "template" and formats.family:
        texts = FAMILIES[formats.family].reasoning
    if not texts or not all(text in vocabulary for each in texts for text in each):
        return None
    opening, closing = (tuple(vocabulary[text] for text in each) for each in texts)
    return ReasoningMarkers(opening, closing)


def unusable(reason: str) -> ConfigError:
    return ConfigError(
        f"server.tool_parser = 'template': the model's response template cannot be used: {reason}. "
        "Set another parser, or 'none'."
    )


def tool_format(source: str, tokens: Collection[str]) -> str:
    if (family := family_of(source)) is not None:
        return family
    if CALL_BEGIN in source:
        return "hermes"
    if TOOL_CALLS in source:
        return "mistral"
    if "tool_name" in source and (START_ACTION in source or ACTION in source):
        return "command_r"
    if "tools" in source and (PYTHON_TAG in source or PYTHON_TAG in tokens):
        return "llama3_json"
    return "generic"
