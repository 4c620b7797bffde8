"""A model's chat template: a program in the model's folder that turns messages into text."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specserve.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
# Names that clients use; the first one present is taken.
REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate(msgspec.Struct, frozen=True):
    """A template as plain data, so that another process can render it."""

    source: str
    variables: dict[str, str]  # special tokens by their names: "bos_token" -> "<s>"

    def render(self, messages: Iterable[Message]) -> str:
        """The conversation as text, up to where the answer begins; RequestError if it is refused.

        Neither time nor memory is bounded here.
        """
        chat = [read_message(message) for message in messages]
        if not chat:
            raise RequestError("messages: give at least one")
        try:
            return compiled(self.source).render(
                self.variables,
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except MemoryError:  # its caller may have to end the process
            raise
        except Exception as e:  # a template is a program, and may raise anything
            reason = str(e) or type(e).__name__
            raise RequestError(f"the chat template refuses these messages: {reason:.200}") from e

    def prepare(self) -> None:
        """Compile ahead of the first rendering, which raises any error again."""
        with suppress(Exception):
            compiled(self.source)


def compiled(source: str) -> "Template":
    from specserve.models.template_sandbox import compile_template  # jinja2's import costs 30 ms

    return compile_template(source)


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
