"""A model's chat template: a program in the model's folder that renders messages as text."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from specserve.errors import ConfigError, RequestError
from specserve.text.template_messages import (
    Fields,
    Message,
    fitted,
    plain,
    read_message,
    with_written_arguments,
)
from specserve.text.tool_prompt import CALL, with_tools_as_text, without_system

USED = "default", "tool_use"  # names of templates that are used
# Arguments of every template, which requests cannot set.
OWN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
SPECIAL_TOKENS = (  # names that templates may read
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a message; a template may trim its space


class ChatOptions(msgspec.Struct, frozen=True):
    """Options of rendering a conversation.

    add_generation_prompt   the text ends where a response begins; None: unless it continues a
                            message
    continue_final_message  the text ends inside the last message, which is an assistant message
    chat_template_kwargs    values of variables that the template reads
    tools                   functions that the model may call, in OpenAI's format
    call                    form of a call, for a text that describes the tools to the model
    are_tools_text          describe the tools in the system text, also if the template shows them
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    call: str = CALL
    are_tools_text: bool = False


class ChatTemplate(msgspec.Struct, frozen=True):
    """A template as plain data, so that another process can render it."""

    source: str
    variables: dict[str, str]  # special tokens by name: "bos_token" -> "<s>"
    tool_use: str | None = None  # template for requests with tools; None: the same

    def render(self, messages: Iterable[Message], options: ChatOptions | None = None) -> str:
        """Render the conversation up to the response. RequestError if the template rejects it.

        This function limits neither time nor memory.
        """
        asked = options or ChatOptions()
        chat = [read_message(message) for message in messages]
        if not chat:
            raise RequestError("messages: the list is empty. Send at least one message.")
        continued = continued_text(chat, asked) if asked.continue_final_message else None
        if continued is not None:
            chat[-1] = tagged(chat[-1])
        if asked.tools and (asked.are_tools_text or not self.reads_tools()):
            text = self.run_with_tools_as_text(chat, asked)
        else:
            source = self.sources[-1] if asked.tools else self.source
            text = self.run_either(source, fitted(chat, sandbox().needs_of(source)), asked)
        return text if continued is None else up_to_tag(text, continued)

    def run_with_tools_as_text(self, chat: list[Fields], options: ChatOptions) -> str:
        """Render tools in the system text or, if the template rejects that, in a user's text."""
        source, plain_options = self.source, msgspec.structs.replace(options, tools=None)
        written = with_tools_as_text(chat, options.tools or (), options.call)
        needs = sandbox().needs_of(source)
        try:
            return self.run(source, fitted(written, needs), plain_options)
        except RequestError as e:
            try:
                return self.run(source, fitted(without_system(written), needs), plain_options)
            except RequestError:
                raise e from None

    @property
    def sources(self) -> list[str]:
        return [self.source] if self.tool_use is None else [self.source, self.tool_use]

    def run_either(self, source: str, chat: list[Fields], options: ChatOptions) -> str:
        """Render with call arguments as objects or, if the template rejects these, as text."""
        try:
            return self.run(source, chat, options)
        except RequestError as e:
            written = with_written_arguments(chat)
            if written == chat:
                raise
            try:
                return self.run(source, written, options)
            except RequestError:
                raise e from None

    def run(self, source: str, chat: list[Fields], options: ChatOptions) -> str:
        try:
            given = self.read_kwargs(source, options.chat_template_kwargs)
            adds_prompt = options.add_generation_prompt
            if adds_prompt is None:
                adds_prompt = not options.continue_final_message
            text: str = (
                sandbox()
                .compile_template(source)
                .render(
                    self.variables | given,
                    messages=chat,
                    tools=plain(options.tools or None),
                    documents=None,
                    add_generation_prompt=adds_prompt,
                )
            )
            return text
        except RequestError:
            raise
        except MemoryError:  # the caller may have to end the process
            raise
        except Exception as e:  # a template is a program, and may raise anything
            reason = str(e) or type(e).__name__
            raise RequestError(f"the chat template rejects these messages: {reason:.200}") from e

    def read_kwargs(self, source: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the values for templates. RequestError for a name that the template does not
        read.
        """
        if not given:
            return {}
        names = sorted(sandbox().names_read(source) - OWN - {*SPECIAL_TOKENS, *self.variables})
        for name in given:
            if name not in names:
                known = ", ".join(names) or "none"
                path = f"chat_template_kwargs.{name!s:.100}"
                raise RequestError(
                    f"{path}: the model's chat template does not read this name. It reads: "
                    f"{known:.500}.",
                    path,
                )
        return {name: plain(value) for name, value in given.items()}

    def reads(self, name: str) -> bool:
        """Whether a request can set this variable."""
        with suppress(Exception):  # an invalid template reads no variables
            known = OWN | {*SPECIAL_TOKENS, *self.variables}
            return name not in known and any(name in sandbox().names_read(s) for s in self.sources)
        return False

    def reads_tools(self) -> bool:
        """Whether the template shows tools: it reads `tools`, or is only used with tools."""
        with suppress(Exception):
            return self.tool_use is not None or "tools" in sandbox().names_read(self.source)
        return False

    def prepare(self) -> None:
        """Compile before the first rendering, which raises any error again."""
        for source in self.sources:
            with suppress(Exception):
                sandbox().compile_template(source)
                sandbox().needs_of(source)


def sandbox() -> ModuleType:
    """Import the module that runs templates; importing jinja2 takes 30 ms."""
    from specserve.text import template_sandbox

    return template_sandbox


def continued_text(chat: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
    """Return the text of the last message. RequestError if it cannot be continued."""
    if options.add_generation_prompt:
        raise RequestError(
            "continue_final_message: it excludes add_generation_prompt. Send only one of the two.",
            "continue_final_message",
        )
    path = f"messages[{len(chat) - 1}]"
    if chat[-1].get("role") != "assistant":
        raise RequestError(
            f"{path}.role: the last message has the role {chat[-1].get('role')!s:.50}. "
            "continue_final_message needs an assistant message.",
            f"{path}.role",
        )
    content = chat[-1].get("content")
    part = content[-1] if isinstance(content, list) and content else {"text": content}
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestError(
            f"{path}.content: the message has no text to continue. Send a text content.",
            f"{path}.content",
        )
    return text


def tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """Append the tag to the text of a message."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + TAG}
    *others, part = content
    return {**message, "content": [*others, part | {"text": part["text"] + TAG}]}


def up_to_tag(text: str, continued: str) -> str:
    """Return a conversation's text without the template's text after the last message."""
    at = text.rfind(TAG.strip())
    if at < 0 or continued.strip() not in text:
        raise RequestError(
            "continue_final_message: the model's chat template omits or changes the last message. "
            "Send the request without it.",
            "continue_final_message",
        )
    return text[:at] if text[at:].startswith(TAG) else text[:at].rstrip()


def find_chat_template(
    folder: Path, config: Mapping[str, Any], variables: dict[str, str]
) -> ChatTemplate | None:
    """Find the template in template files, or else in tokenizer_config.json."""
    files = template_files(folder)
    if files:
        named: Any = {name: read_template(files[name]) for name in USED if name in files}
    else:
        named = config.get("chat_template")
    return chat_template_of(named, variables)


def template_files(folder: Path) -> dict[str, Path]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (path := folder / "chat_template.jinja").exists():
        files.setdefault("default", path)
    return files


def chat_template_of(written: Any, variables: dict[str, str]) -> ChatTemplate | None:
    """Create a ChatTemplate from one text, or from templates by name (`default` and `tool_use`)."""
    if isinstance(written, Sequence) and not isinstance(written, str):
        written = {entry["name"]: entry["template"] for entry in written}
    named = written if isinstance(written, Mapping) else {"default": written}
    source, tool_use = (named.get(name) or None for name in USED)
    return None if source is None else ChatTemplate(source, variables, tool_use)


def read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise ConfigError(
            f"{path}: the chat template cannot be read ({e}). Pass a text file, or download the "
            "file again."
        ) from e
