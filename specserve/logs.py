"""Logging of the server's processes on stderr, as text or as one JSON object per line."""

import io
import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from time import localtime, strftime
from types import TracebackType
from typing import IO, Any, TextIO

ACCESS = "specserve.access"  # name of the logger for completed requests

# Id of the HTTP request that the current task serves; "" outside of a request.
request_id: ContextVar[str] = ContextVar("request_id", default="")
printed, uncaught = logging.getLogger("stderr"), logging.getLogger("specserve")


def configure(log_format: str) -> None:
    """Write log records to stderr. The format "json" also turns lines printed to `sys.stderr`,
    warnings and uncaught exceptions into records.

    Call it again after `sys.stderr` has been replaced.
    """
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for each in [*logging.root.handlers]:
        if isinstance(each, StderrHandler):
            logging.root.removeHandler(each)
    logging.root.addHandler(handler)
    uncaught.setLevel(logging.INFO)
    if log_format == "json":
        take_over()


def current() -> str:
    """The log format of this process: "text" or "json"."""
    return "json" if isinstance(sys.stderr, PrintedLines) else "text"


def take_over() -> None:
    """Route all writes to stderr through the handler of the root logger."""
    if not isinstance(sys.stderr, PrintedLines):
        sys.stderr = PrintedLines(sys.stderr)
    printed.setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = log_exception
    threading.excepthook = lambda args: log_exception(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.handlers:  # set by a library
            logger.handlers, logger.propagate = [], True


def relay(lines: IO[bytes]) -> None:
    """Log the stderr of a child process: JSON objects unchanged, other lines (of native code) as
    records of this process.
    """

    def relay_all() -> None:
        with lines:
            for line in lines:
                text = line.decode(errors="backslashreplace").rstrip()
                if text.startswith('{"time": "'):  # the beginning of lines from JsonFormatter
                    printed.info("", extra={"raw": text})
                elif text:
                    printed.info("%s", text)

    threading.Thread(target=relay_all, name="relay", daemon=True).start()


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes records to the current `sys.stderr`, and adds the request id to each record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def handle(self, record: logging.LogRecord) -> bool:
        # A record without an id gets the id of the current task.
        record.request_id = getattr(record, "request_id", "") or request_id.get()
        return super().handle(record)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr.stream if isinstance(sys.stderr, PrintedLines) else sys.stderr


class Seldom(logging.Filter):
    """Passes at most one record per `seconds`, and appends the number of dropped records to it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.next_at, self.num_left_out = seconds, 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self.next_at:
            self.num_left_out += 1
            return False
        if self.num_left_out:
            record.msg = f"{record.msg} ({self.num_left_out} more since the last such line)"
        self.next_at, self.num_left_out = record.created + self.seconds, 0
        return True


class PrintedLines(io.TextIOBase):
    """A text file whose lines become log records."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.begun = stream, ""

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split("\n")
        for line in filter(str.strip, lines):
            is_error = line.startswith("error: ")  # prefix of errors of the commands
            printed.log(logging.ERROR if is_error else logging.INFO, "%s", line)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


class TextFormatter(logging.Formatter):
    """Formats time and message, and a completed request's prompt and output if they are logged."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields, words = fields_of(record), [record.message.rstrip()]
        words += [f"{name} {quoted(fields[name])}" for name in ("prompt", "text") if name in fields]
        line = f"{strftime('%F %T', localtime(record.created))} {', '.join(words)}"
        id = getattr(record, "request_id", "")
        return f"{line} [{id}]" if id else line


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        if raw := getattr(record, "raw", ""):
            return str(raw)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage().rstrip(),
        }
        if id := getattr(record, "request_id", ""):
            fields["request_id"] = id
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields | fields_of(record))


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def quoted(text: str) -> str:
    """The text in quotation marks, with unprintable characters escaped."""
    return escaped(json.dumps(text, ensure_ascii=False))


def escaped(text: str) -> str:
    """The text with unprintable characters, including line breaks, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def log_exception(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    uncaught.critical("uncaught exception", exc_info=(kind, error, traceback))
