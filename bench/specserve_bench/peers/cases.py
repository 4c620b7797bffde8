"""The requests of all engines, as token ids, and the figures of their times."""

import random
from collections.abc import Callable, Sequence
from itertools import islice, pairwise, takewhile
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from specserve.errors import ConfigError
from specserve.models.source import open_source
from specserve_bench.bound import StepSize
from specserve_bench.demo import held_out
from specserve_bench.peers.protocol import Timed

NUM_PROMPT, NUM_LONG, NUM_LONGEST = 300, 1000, 8000  # tokens
EDITED = 16  # every 16th token of a quoted response is another one


class PeerCase(NamedTuple):
    """Prompts of one length, and how many tokens to go on with."""

    name: str
    prompts: list[list[int]]
    num_tokens: int
    is_batch: bool = False

    def short(self, num_prompts: int) -> "PeerCase":
        """For sweeps."""
        return self._replace(prompts=self.prompts[:num_prompts], num_tokens=32)

    def warm_up(self) -> "PeerCase":
        """A longer prompt would only take more time."""
        return self._replace(prompts=[prompt[:NUM_LONG] for prompt in self.prompts])

    def quoting(self, responses: Sequence[Sequence[int]]) -> "PeerCase":
        """Prompts that have almost the same response in their middle, as in a request to edit text.

        A prompt is the end of one of this case, its response, and the same end again.
        """
        pairs = zip(self.prompts, responses, strict=True)
        return self._replace(prompts=[quoting(prompt, response) for prompt, response in pairs])


class PeerFigure(NamedTuple):
    name: str
    case: str
    compute: Callable[[Sequence[Timed]], float]
    is_rate: bool = False  # more is better


def make_cases(
    folder: Path, sizes: "PeerSizes", must_survive_text: bool = False
) -> dict[str, PeerCase]:
    """By name. No two prompts of a case begin alike, so that no engine finds a prefix again.

    If `must_survive_text`, a prompt's text has exactly these token ids, for engines that take text.
    """
    tokenizer = open_source(folder).tokenizer()
    text = [t for file in held_out.source_files().values() for t in tokenizer.encode(file)]

    def is_usable(ids: list[int]) -> bool:
        known = tokenizer.decode(ids, skip_special_tokens=False)
        return not must_survive_text or tokenizer.encode(known, add_special_tokens=False) == ids

    short = cut(text, NUM_PROMPT, sizes.batch, is_usable)
    cases = {
        "plain": PeerCase("plain", short[: sizes.prompts], sizes.tokens),
        "prompt": PeerCase("prompt", cut(text, NUM_LONG, sizes.long, is_usable), 2),
        "batch": PeerCase("batch", short, sizes.tokens, is_batch=True),
        "drafting": PeerCase("drafting", short[: sizes.prompts], sizes.tokens),
    }
    if sizes.longest:
        cases["longest"] = PeerCase("longest", cut(text, NUM_LONGEST, 1, is_usable), 2)
    return cases


class PeerSizes(NamedTuple):
    """How many prompts of 300 tokens, of 1,000, at once, and tokens after each; `longest` is the
    number of rounds with a prompt of 8,000.
    """

    prompts: int = 6
    long: int = 3
    batch: int = 32
    tokens: int = 64
    longest: int = 0


def quoting(prompt: list[int], response: Sequence[int]) -> list[int]:
    """As long as the prompt, if the response leaves room for that."""
    end = prompt[-max(32, (len(prompt) - len(response)) // 2) :]
    edited = [prompt[0] if (i + 1) % EDITED == 0 else t for i, t in enumerate(response)]
    return [*end, *edited, *end]


def cut(
    text: Sequence[int], length: int, number: int, is_usable: Callable[[list[int]], bool]
) -> list[list[int]]:
    """Usable pieces that begin at different places; ConfigError if the text has too few."""
    source, places = random.Random(f"{length} {number}"), range(len(text) - length)
    starts = dict.fromkeys(source.sample(places, number))
    starts |= dict.fromkeys(source.sample(places, min(len(places), 100 * number)))
    pieces = (list(text[start : start + length]) for start in starts)
    found = list(islice(filter(is_usable, pieces), number))
    if len(found) < number:
        raise ConfigError(
            f"The tokenizer reads too few texts of {length} tokens as these tokens again. Use "
            "another model."
        )
    return found


def tpot_ms(requests: Sequence[Timed]) -> float:
    """(last - first token) / (tokens - 1), median over requests."""
    return median(1e3 * (r.times[-1] - r.times[0]) / (sum(r.counts) - 1) for r in requests)


def ttft_ms(requests: Sequence[Timed]) -> float:
    return median(1e3 * r.times[0] for r in requests)


def tokens_per_s(requests: Sequence[Timed]) -> float:
    """All tokens, over the time from the first request to the last token."""
    return sum(sum(r.counts) for r in requests) / max(r.times[-1] for r in requests)


def step_ms(requests: Sequence[Timed]) -> float:
    """The median step in which every request gets a token; ValueError if there is none.

    The error occurs if the first request ends before the last prompt is computed.
    """
    begin = max(r.times[0] for r in requests)
    end = min(r.times[-1] for r in requests)
    together = [t for t in requests[0].times if begin <= t <= end]
    if len(together) < 2:
        raise ValueError("no step has all requests")
    return median(1e3 * (b - a) for a, b in pairwise(together))


def tokens_per_step(requests: Sequence[Timed]) -> float:
    """Mean tokens of all steps after a request's first."""
    steps = sum(len(r.counts) - 1 for r in requests)
    return sum(sum(r.counts[1:]) for r in requests) / steps


def bound_size(figure: str, sizes: PeerSizes) -> StepSize | None:
    """The step that a figure is the time of, halfway through the output; None if it is of none."""
    context = NUM_PROMPT + sizes.tokens // 2
    contexts = {"TPOT ms": (context,), "batch step ms": (context,) * sizes.batch}.get(figure)
    return None if contexts is None else StepSize(figure, contexts, 1)


FIGURES = (
    PeerFigure("TPOT ms", "plain", tpot_ms),
    PeerFigure("TTFT 300 ms", "plain", ttft_ms),
    PeerFigure("TTFT 1000 ms", "prompt", ttft_ms),
    PeerFigure("TTFT 8000 ms", "longest", ttft_ms),
    PeerFigure("batch step ms", "batch", step_ms),
    PeerFigure("batch tokens/s", "batch", tokens_per_s, is_rate=True),
    PeerFigure("TPOT with drafting ms", "drafting", tpot_ms),
    PeerFigure("tokens per step", "drafting", tokens_per_step, is_rate=True),
)


def agreement(requests: Sequence[Timed], others: Sequence[Timed]) -> float | None:
    """Share of the tokens before two engines' texts part; near-ties do part them.

    Requests without token ids do not count; None if there are no others.
    """
    each = []
    for a, b in zip(requests, others, strict=True):
        if not a.token_ids or not b.token_ids:
            continue
        pairs = zip(a.token_ids, b.token_ids, strict=True)
        same = takewhile(lambda pair: pair[0] == pair[1], pairs)
        each.append(len(list(same)) / len(a.token_ids))
    return fmean(each) if each else None
