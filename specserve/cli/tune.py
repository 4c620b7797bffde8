"""`specserve tune MODEL TEXT...`: learns the acceptance of draft tokens from an operator's texts.

Later starts of the same models begin with it. Nothing else that is learnt from texts reaches the
disk.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specserve.errors import ConfigError, RequestError

LINES = ".jsonl"


class TuningPrompt(msgspec.Struct, forbid_unknown_fields=False):
    """A line of a .jsonl file: a conversation, or a text to continue."""

    messages: list[dict[str, Any]] = []
    prompt: str = ""

    def __post_init__(self) -> None:
        while self.messages and self.messages[-1].get("role") == "assistant":
            self.messages.pop()  # the model writes its own response
        if bool(self.messages) == bool(self.prompt):
            raise ValueError("set either messages or prompt")


def read_prompts(files: Sequence[Path]) -> list[TuningPrompt]:
    """Return all prompts. ConfigError for a file that cannot be read, and without any prompt."""
    found = [prompt for file in files for prompt in prompts_of(file)]
    if not found:
        raise ConfigError("the files have no prompts. Name files with text")
    return found


def prompts_of(file: Path) -> Iterator[TuningPrompt]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} cannot be read ({e}). Name a text file, or a .jsonl file") from e
    if file.suffix.lower() != LINES:
        yield from [TuningPrompt(prompt=text)] if text.strip() else []
        return
    for number, line in enumerate(text.split("\n"), 1):
        try:
            yield from [msgspec.json.decode(line, type=TuningPrompt)] if line.strip() else []
        except (ValueError, RecursionError) as e:
            raise ConfigError(
                f"{file}, line {number}: {e}. Write an object with messages or prompt per line"
            ) from e


def tune(
    prompts: Sequence[TuningPrompt],
    max_tokens: int,
    config: Sequence[Path] | None,
    settings: Mapping[str, Any],
) -> str:
    """Generate responses to all prompts, keep what is learnt, and return a report."""
    from specserve import LLM, SamplingParams
    from specserve.engine.build import Prior, acceptance_file
    from specserve.speculation.adaptive_speculator import AdaptiveSpeculator
    from specserve_drafters.base import DEFAULT_SCOPE
    from specserve_kernels.cpu.kept import keep, read_kept

    with LLM(config=config, **settings) as llm:
        engine = llm.engine
        speculator = engine.speculator
        if not isinstance(speculator, AdaptiveSpeculator):
            raise ConfigError("speculation is off for this model, so there is nothing to learn")
        file = acceptance_file(llm.config, engine.target.decoder)
        if file is None:
            raise ConfigError("no folder can be written. Set XDG_CACHE_HOME to one that can")
        speculator.learn_anew()

        def responses(generate: Callable[..., list[Any]], asked: Sequence[Any]) -> list[Any]:
            """Sample as the model's defaults say, with a seed for each prompt."""
            params = [SamplingParams(max_tokens=max_tokens, seed=i) for i in range(len(asked))]
            return generate(asked, params) if asked else []

        try:
            outputs = [*responses(llm.generate, [p.prompt for p in prompts if p.prompt])]
            outputs += responses(llm.chat, [p.messages for p in prompts if p.messages])
        except (RequestError, RecursionError) as e:
            raise ConfigError(f"a prompt is refused: {e}") from e
        learnt = speculator.acceptance.find(DEFAULT_SCOPE)
        counts = {} if learnt is None else learnt.counts()
        keep(file, prior := Prior(counts))
        if read_kept(file, Prior) != prior:  # an older file may be there
            raise ConfigError(f"{file} cannot be written. Check the disk, or set XDG_CACHE_HOME")
        num_tokens = sum(len(output.token_ids) for output in outputs)
        lines = [f"{len(outputs)} prompts, {num_tokens} tokens"]
        lines += [
            f"{name}: {each.accepted} of {each.verified} verified draft tokens were accepted"
            for name, each in engine.stats.sources.items()
            if each.verified
        ]
    return "\n".join([*lines, f"kept for later starts in {file}; delete this file to forget it"])
