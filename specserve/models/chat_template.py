"""A model's chat template: a program in the model's folder that turns messages into text."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specserve.errors import ConfigError, RequestError
from specserve.models.special_tokens import NAMES

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
# Names that clients use; the first one present is taken.
REASONING = ("reasoning_content", "thinking", "reasoning")


# Arguments of every template; nobody else may give them.
OWN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
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
        text = self.run(chat, asked)
        return text if continued is None else up_to_tag(text, continued)

    def run(self, chat: list[dict[str, Any]], options: ChatOptions) -> str:
        try:
            given = self.read_kwargs(options.chat_template_kwargs)
            adds_prompt = options.add_generation_prompt
            if adds_prompt is None:
                adds_prompt = not options.continue_final_message
            return compiled(self.source).render(
                self.variables | given,
                messages=chat,
                tools=plain(options.tools or None),
                documents=None,
                add_generation_prompt=adds_prompt,
            )
        except RequestError:
            raise
        except MemoryError:  # its caller may have to end the process
            raise
        except Exception as e:  # a template is a program, and may raise anything
            reason = str(e) or type(e).__name__
            raise RequestError(f"the chat template refuses these messages: {reason:.200}") from e

    def read_kwargs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values as templates see them; RequestError for a name that is not the template's."""
        if not given:
            return {}
        names = sorted(names_read(self.source) - OWN - {*NAMES, *self.variables})
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
            return name in names_read(self.source) - OWN - {*NAMES, *self.variables}
        return False

    def prepare(self) -> None:
        """Compile ahead of the first rendering, which raises any error again."""
        with suppress(Exception):
            compiled(self.source)


def compiled(source: str) -> "Template":
    from specserve.models.template_sandbox import compile_template  # jinja2's import costs 30 ms

    return compile_template(source)


def names_read(source: str) -> frozenset[str]:
    from specserve.models.template_sandbox import names_read

    return names_read(source)


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


def read_message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: no null field, its reasoning under both usual names."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message is a mapping with role and content, not {message!r:.50}")
    fields = {key: plain(value) for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning} | fields | {"reasoning_content": reasoning}


def plain(value: Any) -> Any:
    """The value in JSON's types: the sandbox does not restrict methods of other types."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # also of a subclass, only the characters
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


def find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default template's source: the files' where there are any, else tokenizer_config.json's.

    A model may have several, by name; the others are not used.
    """
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (path := folder / "chat_template.jinja").exists():
        files.setdefault("default", path)
    if files:
        return read_template(files["default"]) if "default" in files else None
    written = config.get("chat_template")
    if isinstance(written, Sequence) and not isinstance(written, str):
        written = {entry["name"]: entry["template"] for entry in written}
    return written.get("default") if isinstance(written, Mapping) else written


def read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"{path}: cannot be read ({e}); download the file again") from e
