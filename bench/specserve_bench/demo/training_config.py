"""Configs of trainings of the demo models and of heads: sizes, tokens, rates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from specserve.errors import ConfigError
from specserve.models.folder import not_written

OWN_LENGTH = 128  # tokens that the target continues a beginning with

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(gt=0, le=1)]


class Size(msgspec.Struct, frozen=True):
    """Size of a Qwen3-shaped model with as many KV heads as heads of 64."""

    layers: Positive
    hidden: Positive
    heads: Positive
    mlp: Positive


class Course(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Common fields of all trainings: the text and its division into steps."""

    seed: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    own_tokens: Annotated[int, Meta(ge=4 * OWN_LENGTH)] = 1_200_000
    step_tokens: Positive = 6144
    length: Positive = 256  # of a row; longer ones cost more attention
    long_length: Positive = 1024  # in every eighth step, for long conversations
    max_files: Positive | None = None  # for tests
    max_symbols: Positive | None = None

    def __post_init__(self) -> None:
        longest = max(self.length, self.long_length)
        if longest > self.step_tokens:
            raise ValueError(
                f"step_tokens = {self.step_tokens} has no room for {longest} at a time"
            )

    def length_of(self, step: int) -> int:
        return self.long_length if step % 8 == 7 else self.length


class TrainingConfig(Course, frozen=True, forbid_unknown_fields=True):
    """Both stages: first the target's, then the draft's.

    The defaults make a pair on a few cores; the demo pair's own are in its card.
    """

    vocab_size: Annotated[int, Meta(ge=300, lt=2**16)] = 8192
    target: Size = Size(4, 384, 6, 1024)
    draft: Size = Size(1, 128, 2, 768)
    target_tokens: Positive = 13_000_000
    draft_tokens: Positive = 15_000_000
    talk_share: Share = 0.7
    draft_talk_share: Share = 0.6
    peak_rate: Rate = 3e-3
    draft_peak_rate: Rate = 6e-3
    weight_decay: Share = 0.1
    draft_weight_decay: Share = 0.1
    ask_every: Positive = 1  # the evaluation asks every so many questions


C = TypeVar("C", bound=msgspec.Struct)


def read_config(file: Path | None, kind: type[C]) -> C:
    try:
        return msgspec.json.decode(file.read_bytes() if file else b"{}", type=kind)
    except (OSError, msgspec.MsgspecError) as e:
        is_unknown = "unknown field" in str(e)
        known = f"; the fields are {', '.join(kind.__struct_fields__)}" if is_unknown else ""
        raise ConfigError(f"--config {file}: {e}{known}") from e


def check_config(file: Path, config: msgspec.Struct) -> None:
    """Keep the config of a training in its folder; ConfigError where another one is there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_bytes(msgspec.json.encode(config))
        started = msgspec.json.decode(file.read_bytes(), type=type(config))
    except OSError as e:
        raise not_written(file, e) from e
    except msgspec.MsgspecError as e:
        raise ConfigError(f"{file}: {e}; give another folder") from e
    if started != config:
        now = dict(values(config))
        other = (f"{key} = {x!r}" for key, x in values(started) if now[key] != x)
        raise ConfigError(
            f"{file}: begun by another config, with {', '.join(other)}; give that one, or another "
            "folder"
        )


def values(config: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """All fields, also those of nested configs."""
    for key, value in msgspec.structs.asdict(config).items():
        yield from values(value) if isinstance(value, msgspec.Struct) else [(key, value)]


class HeadConfig(Course, frozen=True, forbid_unknown_fields=True):
    """The defaults make the demo target's head on one core; a large model's takes more tokens."""

    own_tokens: Annotated[int, Meta(ge=512)] = 400_000  # of the demo target's own continuations
    step_tokens: Positive = 1024
    long_length: Positive = 512
    tokens: Positive = 540_000
    draft_vocab_size: Positive = 4096  # the tokens that are most frequent in the text
    mlp: Positive | None = None  # width of the head's MLP; the target's
    draft_steps: Annotated[int, Meta(ge=1, le=16)] = 3  # of the training-time test
    step_weight: Annotated[float, Meta(gt=0, le=1)] = 0.8  # of each draft step's loss to the last's
    talk_share: Share = 0.6
    peak_rate: Rate = 2e-3
    weight_decay: Share = 0.1
    held_out: Annotated[float, Meta(ge=0, le=0.5)] = 0.02  # share of --text, for the card's figures
    ask_every: Positive = 16  # of the demo's questions, likewise
    threads: Positive | None = None  # all; weights depend on them, as sums of gradients do
