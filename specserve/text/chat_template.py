"""A model's chat template: a program in the model's folder that turns messages into text."""

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

USED = "default", "tool_use"  # of templates with names
# Arguments of every template; nobody else may give them.
OWN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
SPECIAL_TOKENS = (  # names that templates may read
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a message; a template may trim its space


class ChatOptions(msgspec.Struct, frozen=True):
    """How a conversation becomes text.

    add_generation_prompt   it ends where an answer begins; None: unless a message is continued
    continue_final_message  it ends inside the last message, which is an assistant's
    chat_template_kwargs    values of names that the template reads
    tools                   functions that the model may call, as OpenAI describes them
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None


class ChatTemplate(msgspec.Struct, frozen=True):
    """A template as plain data, so that another process can render it."""

    source: str
    variables: dict[str, str]  # special tokens by their names: "bos_token" -> "<s>"
    tool_use: str | None = None  # source of the template for requests with tools; None: the same

    def render(self, messages: Iterable[Message], options: ChatOptions | None = None) -> str:
        """The conversation as text, up to where the answer begins; RequestError if it is refused.

        Neither time nor memory is bounded here.
        """
        asked = options or ChatOptions()
        chat = [read_message(message) for message in messages]
        if not chat:
            raise RequestError("messages: give at least one")
        continued = continued_text(chat, asked) if asked.continue_final_message else None
        if continued is not None:
            chat[-1] = tagged(chat[-1])
        source = self.sources[-1] if asked.tools else self.source
        text = self.run_either(source, fitted(chat, sandbox().needs_of(source)), asked)
        return text if continued is None else up_to_tag(text, continued)

    @property
    def sources(self) -> list[str]:
        return [self.source] if self.tool_use is None else [self.source, self.tool_use]

    def run_either(self, source: str, chat: list[Fields], options: ChatOptions) -> str:
        """With the arguments of calls as objects or, if the template refuses these, as text."""
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
        except MemoryError:  # its caller may have to end the process
            raise
        except Exception as e:  # a template is a program, and may raise anything
            reason = str(e) or type(e).__name__
            raise RequestError(f"the chat template refuses these messages: {reason:.200}") from e

    def read_kwargs(self, source: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values as templates see them; RequestError for a name that is not the template's."""
        if not given:
            return {}
        names = sorted(sandbox().names_read(source) - OWN - {*SPECIAL_TOKENS, *self.variables})
        for name in given:
            if name not in names:
                known = ", ".join(names) or "none"
                path = f"chat_template_kwargs.{name!s:.100}"
                raise RequestError(
                    f"{path}: the model's chat template reads no such name of a request; it reads "
                    f"{known:.500}",
                    path,
                )
        return {name: plain(value) for name, value in given.items()}

    def reads(self, name: str) -> bool:
        """Whether a request can give this name a value."""
        with suppress(Exception):  # a template that is no valid program reads none
            known = OWN | {*SPECIAL_TOKENS, *self.variables}
            return name not in known and any(name in sandbox().names_read(s) for s in self.sources)
        return False

    def reads_tools(self) -> bool:
        """Whether the template for requests with tools shows them to the model."""
        with suppress(Exception):
            return "tools" in sandbox().names_read(self.sources[-1])
        return False

    def prepare(self) -> None:
        """Compile ahead of the first rendering, which raises any error again."""
        for source in self.sources:
            with suppress(Exception):
                sandbox().compile_template(source)
                sandbox().needs_of(source)


def sandbox() -> ModuleType:
    """The module that runs templates; jinja2's import costs 30 ms."""
    from specserve.text import template_sandbox

    return template_sandbox


def continued_text(chat: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
    """What stands in the last message so far; RequestError if it cannot be continued."""
    if options.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt: a text ends inside the last message "
            "or where another begins; send one of them",
            "continue_final_message",
        )
    path = f"messages[{len(chat) - 1}]"
    if chat[-1].get("role") != "assistant":
        raise RequestError(
            f"{path}.role: only an assistant's message can be continued, and the last one is of "
            f"{chat[-1].get('role')!s:.50}",
            f"{path}.role",
        )
    content = chat[-1].get("content")
    part = content[-1] if isinstance(content, list) and content else {"text": content}
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestError(
            f"{path}.content: there is no text that could be continued", f"{path}.content"
        )
    return text


def tagged(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the tag at the end of its text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + TAG}
    *others, part = content
    return {**message, "content": [*others, part | {"text": part["text"] + TAG}]}


def up_to_tag(text: str, continued: str) -> str:
    """A conversation's text without what the template adds to the end of its last message."""
    at = text.rfind(TAG.strip())
    if at < 0 or continued.strip() not in text:
        raise RequestError(
            "continue_final_message: the model's chat template leaves out the last message or "
            "changes it",
            "continue_final_message",
        )
    return text[:at] if text[at:].startswith(TAG) else text[:at].rstrip()


def find_chat_template(
    folder: Path, config: Mapping[str, Any], variables: dict[str, str]
) -> ChatTemplate | None:
    """The files' templates if there are any, else tokenizer_config.json's."""
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
    """Of a text, or of templates by name, of which the default and the one for tools are used."""
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
            f"{path}: the chat template cannot be read ({e}); name a text file, or download the "
            "file again"
        ) from e
