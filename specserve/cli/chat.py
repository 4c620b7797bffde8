"""A chat in a terminal, with a local model or with a server.

Does not import torch, because a chat with a server does not need it.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from specserve.api.watch import Colored, harmless
from specserve.errors import ConfigError, PromptTooLong, RequestError, SpecserveError
from specserve.models.folder import name_of
from specserve.text.template_messages import Message

if TYPE_CHECKING:
    from specserve.api.llm import LLM
    from specserve.api.outputs import Output
    from specserve.exchange.sampling_params import SamplingParams

HELP = (
    "/help prints this, /reset starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops a "
    "response. /system TEXT sets the system message, /set NAME VALUE a parameter, /model NAME the "
    "model; /save FILE and /load FILE keep a conversation"
)
COMMAND = re.compile(r"/[a-z]+")
WITH_ARGUMENT = re.compile(r"(/(?:system|save|load|set|model))(|\s.*)", re.DOTALL)
SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop"),
)


class AnswerStatistics(NamedTuple):
    """Measurements of a response; None if there is none, or if the server did not send it."""

    finish_reason: str
    num_tokens: int | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    acceptance_length: float | None = None
    drafter: str | None = None

    def footer(self) -> str:
        parts: list[str] = []
        if self.num_tokens is not None:
            parts.append(f"{self.num_tokens} tokens")
        if self.ttft_ms is not None:
            parts.append(f"TTFT {self.ttft_ms:.0f} ms")
        if self.num_tokens is not None and self.total_ms:
            parts.append(f"{1000 * self.num_tokens / self.total_ms:.1f} tokens/s")
        if self.acceptance_length is not None:
            parts.append(f"acceptance length {self.acceptance_length:.2f}")
        if self.drafter is not None:
            parts.append(f"drafter {self.drafter}")
        return f"[{' | '.join([*parts, f'ended by {self.finish_reason}'])}]"


def measured(output: "Output") -> AnswerStatistics:
    return AnswerStatistics(
        output.finish_reason or "abort",
        output.usage.completion_tokens,
        output.timing.ttft_ms,
        output.timing.total_ms,
        output.speculation.mean_acceptance_length if output.speculation.drafted else None,
        output.speculation.drafter,
    )


class Answerer(Protocol):
    name: str  # of the model
    colored: Colored | None  # None: tokens are not colored by draft source

    def set(self, name: str, value: Any) -> None:
        """Set a parameter of later responses. RequestError for an invalid one."""
        ...

    def choose(self, model: str) -> None:
        """Use another model. SpecserveError if that is not possible."""
        ...

    def stream_answer(self, messages: Sequence[Message]) -> Generator[str, None, AnswerStatistics]:
        """Yield the response's text piece by piece; closing the generator aborts the response."""
        ...


class ChatSession:
    """The messages of a chat. An aborted response is kept up to its last token."""

    def __init__(
        self, answerer: Answerer, system: str | None = None, file: Path | None = None
    ) -> None:
        """`file` keeps the messages, and has those of an earlier chat if it exists. ConfigError for
        an invalid file.
        """
        self.answerer, self.file = answerer, file
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = earlier_messages(file, system) or [*self.opening]

    def reset(self) -> None:
        self.messages = [*self.opening]
        self.keep()

    def keep(self) -> None:
        """Replace the file. A failure is printed, and the chat goes on."""
        if self.file is None:
            return
        try:
            write_messages(self.file, self.messages)
        except OSError as e:
            print(f"error: --session {self.file} cannot be written ({e})", file=sys.stderr)

    def instruct(self, text: str) -> None:
        """Replace the system message; an empty text removes it."""
        before = len(self.opening)
        self.opening = [{"role": "system", "content": text}] if text else []
        has_system = bool(self.messages) and self.messages[0].get("role") == "system"
        self.messages = [*self.opening, *self.messages[max(before, has_system) :]]
        self.keep()

    def save(self, name: str) -> None:
        try:
            write_messages(Path(name), self.messages)
        except OSError as e:
            raise ConfigError(f"/save {name}: cannot be written ({e})") from e

    def load(self, name: str) -> None:
        if not (messages := read_messages(Path(name), "/load")):
            raise ConfigError(f"/load {name}: there is no conversation. Name a file of /save")
        self.messages = messages
        self.keep()

    def set(self, words: str) -> None:
        """Set a parameter, e.g. `temperature 0.5`. The value is JSON, or else a text."""
        name, _, text = words.partition(" ")
        if name not in SETTABLE or not text.strip():
            raise ConfigError(f"/set {name}: write /set NAME VALUE, for {', '.join(SETTABLE)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text.strip()
        self.answerer.set(name, value)

    def run(self, command: str, rest: str) -> None:
        """Run a command with an argument, and print an error."""
        commands: dict[str, Callable[[str], None]] = {
            "/system": self.instruct,
            "/save": self.save,
            "/load": self.load,
            "/set": self.set,
            "/model": self.choose,
        }
        try:
            commands[command](rest.strip())
        except SpecserveError as e:
            print(self.complaint(e), file=sys.stderr)

    def choose(self, model: str) -> None:
        if model:
            self.answerer.choose(model)
        print(harmless(self.answerer.name))

    @property
    def introduction(self) -> str:
        return f"Chat with {harmless(self.answerer.name)}. {HELP}"

    def ask(self, text: str) -> None:
        """Print the response, and a footer or an error on stderr.

        A message whose response fails before its first text is dropped, because many chat templates
        refuse two consecutive user messages.
        """
        asked, parts = [*self.messages, {"role": "user", "content": text}], list[str]()
        is_kept = True
        try:
            if self.answerer.colored is not None:
                self.answerer.colored = Colored()  # a new one for each response
            ending = self.show(self.answerer.stream_answer(asked), parts).footer()
        except KeyboardInterrupt:
            ending, is_kept = "[stopped]", bool(parts)
        except SpecserveError as e:
            ending, is_kept = self.complaint(e), bool(parts)
        if parts:
            print(flush=True)
        print(harmless(ending), file=sys.stderr, flush=True)
        if is_kept:
            self.messages = [*asked, {"role": "assistant", "content": "".join(parts)}]
            self.keep()

    def show(
        self, pieces: Generator[str, None, AnswerStatistics], parts: list[str]
    ) -> AnswerStatistics:
        """Print the pieces, and append them to `parts`."""
        colored = self.answerer.colored
        with closing(pieces):  # Ctrl-C may come while the generator is suspended
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    statistics: AnswerStatistics = end.value
                    print("" if colored is None else colored.rest(), end="", flush=True)
                    return statistics
                shown = harmless(piece) if sys.stdout.isatty() else piece
                shown = shown if colored is None else colored.shown(shown)
                if piece:
                    parts.append(piece)
                if shown:
                    print(shown, end="", flush=True)

    def complaint(self, error: SpecserveError) -> str:
        """The error on one line, with a hint if /reset helps."""
        is_too_long = isinstance(error, RequestError) and error.code == PromptTooLong.code
        has_past = len(self.messages) > len(self.opening)
        hint = " (/reset removes the earlier messages)" if is_too_long and has_past else ""
        return f"error: {' '.join(str(error).split())}{hint}"


def earlier_messages(file: Path | None, system: str | None) -> list[Message]:
    """The messages of an earlier chat; none if there is no file. ConfigError for an invalid file,
    or one without this system message.
    """
    earlier = [] if file is None else read_messages(file)
    if earlier and system is not None and earlier[0] != {"role": "system", "content": system}:
        raise ConfigError(
            f"--system has no effect: {file} has a conversation without this system message. "
            "Remove --system, or name a new file with --session"
        )
    return earlier


def read_messages(file: Path, option: str = "--session") -> list[Message]:
    """The messages of an earlier chat; none if the file does not exist. Errors name `option`."""
    try:
        messages = json.loads(file.read_bytes())
        msgspec.convert(messages, list[dict[str, str]])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.ValidationError) as e:
        raise ConfigError(f"{option} {file} is not a conversation ({e}). Name a new file") from e
    return list[Message](messages)


def write_messages(file: Path, messages: Sequence[Message]) -> None:
    """Replace the file atomically. Only this user can read it."""
    temporary = file.with_name(f"{file.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        json.dump(messages, out)  # with escapes, also of surrogates, for undecodable input
    os.replace(temporary, file)


def converse(chat: ChatSession) -> None:
    """Respond to lines until the input ends, /exit, or Ctrl-C while no response is streaming."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    lines: Iterable[str] = typed(chat.introduction) if is_terminal else sys.stdin
    try:
        for line in lines:
            match line.strip():
                case "":
                    pass
                case "/exit" | "/quit":
                    return
                case "/reset":
                    chat.reset()
                case "/help":
                    print(HELP)
                case command if (found := WITH_ARGUMENT.fullmatch(command)) is not None:
                    chat.run(found[1], found[2])
                case command if COMMAND.fullmatch(command):
                    print(f"{command} is not a command. {HELP}", file=sys.stderr)
                case message:
                    chat.ask(message)
    except KeyboardInterrupt:
        pass


def typed(introduction: str) -> Iterator[str]:
    """Yield lines from a terminal. Ctrl-C clears the line, or ends the input if it is empty."""
    print(introduction)
    try:  # importing readline adds line editing and a history to `input`
        line_buffer: Callable[[], str] = import_module("readline").get_line_buffer
    except ImportError:
        line_buffer = str
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if not line_buffer():
                return
            continue
        yield line


class LocalModel:
    """A model in this process."""

    def __init__(
        self, llm: "LLM", params: "SamplingParams", colored: Colored | None = None
    ) -> None:
        """`colored` needs `params` with return_speculation_details."""
        own = llm.input_processor.defaults.for_chats.items()
        unset = {name: value for name, value in own if getattr(params, name) is None}
        self.llm, self.params, self.colored = llm, params.clone(**unset), colored
        self.name = name_of(llm.config.target)
        # Raise errors that every message would cause, e.g. a missing template, at the start.
        llm.check(llm.input_processor.render([{"role": "user", "content": "Hello"}]), self.params)

    def set(self, name: str, value: Any) -> None:
        changed = self.params.clone(**{name: value})
        self.llm.check(self.llm.input_processor.render([{"role": "user", "content": "a"}]), changed)
        self.params = changed

    def choose(self, model: str) -> None:
        raise ConfigError(
            f"/model {model}: this chat runs one model. Start again with --model, or use --url"
        )

    def stream_answer(self, messages: Sequence[Message]) -> Generator[str, None, AnswerStatistics]:
        ids = self.llm.input_processor.render(messages)
        with closing(self.llm.watch(ids, self.params)) as steps:
            while True:
                try:
                    text, _, details = next(steps)
                except StopIteration as end:
                    return measured(end.value)
                if self.colored is not None:
                    self.colored.add_steps(details)
                yield text
