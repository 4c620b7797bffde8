"""What sampling takes of a step: with all parameters in use, and with none of them."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from specserve.engine import runner
from specserve.engine.engine import Engine
from specserve.engine.runner import Draws, draws_of, plain_draws
from specserve.exchange.sampling_params import Sampling
from specserve.models.decoder import LoadedModel
from specserve.models.loader import load_decoder
from specserve.scheduling.text_state import TextState
from specserve.speculation import verify
from specserve_bench.figures.host import PhaseClock, ms
from specserve_bench.figures.steps import BLOCK_SIZE, make_engine, plain_sampling
from specserve_bench.pairs import random_checkpoint
from specserve_bench.report import markdown_table
from specserve_bench.results import extremes, ratio
from specserve_drafters import Draft, base
from specserve_kernels import load

REQUESTS, PROMPT, NODES = 8, 500, 16
STEPS = 5  # of each subject in a round; their median counts
WARM_UP = 20
PARTS = ("host", "sample", "logprobs")


class Bush:
    """A binary tree of guesses that are hardly ever right."""

    class Options(base.Options, frozen=True):
        pass

    def __init__(self, options: Options) -> None:
        pass

    def propose(self, items: Sequence[base.DraftRequest]) -> list[Draft]:
        return [self.tree(item.token_ids[-item.limit :].tolist()) for item in items]

    def tree(self, tokens: list[int]) -> Draft:
        """Of tokens of the text, so that penalties count each of them once more."""
        tokens = list(dict.fromkeys(tokens))
        return Draft(tokens, [k // 2 for k in range(len(tokens))])

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        pass

    def forget(self, id: int) -> None:
        pass


class SamplingCase(NamedTuple):
    """Steps of an engine. Those of `without` go around what edits and masks have added."""

    guesses: int
    asked: str
    without: bool = False


SUBJECTS = [
    SamplingCase(guesses, *how)
    for guesses, how in product((0, NODES), (("none", False), ("none", True), ("all", False)))
]


def all_parameters(vocab_size: int) -> dict[str, Any]:
    ids = random.Random(0).sample(range(vocab_size), min(vocab_size, 400))
    return {
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {token: 1.0 for token in ids[:300]},
        "allowed_ids": tuple(range(vocab_size // 5, vocab_size)),
        "bad_words": tuple((ids[i],) * (i % 3) + (ids[50 + i],) for i in range(48)),
        "min_tokens": 1 << 20,
        "stop_ids": frozenset(ids[300:304]),
        "logprobs": 5,
    }


@torch.inference_mode()
def measure(folder: Path | None = None, rounds: int = 7) -> dict[str, Any]:
    """Each part of sampling and its share of a step, over interleaved rounds."""
    engines = load_engines(folder or random_checkpoint(), rounds)
    known: dict[SamplingCase, list[list[Counter[str]]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(WARM_UP):  # the number of threads is chosen meanwhile
        for engine in engines.values():
            engine.step()
    for i in range(rounds):
        ran: dict[SamplingCase, list[Counter[str]]] = {subject: [] for subject in SUBJECTS}
        for step in range(STEPS):
            # Of two subjects with one engine, either comes first in turn, as the first finds the
            # other engines' weights and KV in the caches.
            is_odd = (i + step) % 2 == 1
            for subject in sorted(SUBJECTS, key=lambda s: (*s[:2], s.without != is_odd)):
                ran[subject].append(one_step(engines[subject.guesses, subject.asked], subject))
        for subject, steps in ran.items():
            known[subject].append(steps)
    plain = [subject for subject in SUBJECTS if not subject.without]
    guesses = dict.fromkeys(subject.guesses for subject in SUBJECTS)
    return {
        "rounds": rounds,
        "requests": REQUESTS,
        "rows": [row(subject, [typical(steps) for steps in known[subject]]) for subject in plain],
        "none_over_without": [{"guesses": n} | over_without(known, n) for n in guesses],
    }


def load_engines(folder: Path, rounds: int) -> dict[tuple[int, str], Engine]:
    """An engine for each number of guesses and each `asked`, with all of its requests in midst."""
    # Hardly any guess is right, so there is room for a few that are.
    max_len = PROMPT + 2 * (WARM_UP + 2 * rounds * STEPS) + NODES + BLOCK_SIZE
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), max_len)
    kinds = dict.fromkeys((s.guesses, s.asked) for s in SUBJECTS)
    return {kind: started(decoder, str(folder), *kind, max_len) for kind in kinds}


def started(decoder: LoadedModel, name: str, guesses: int, asked: str, max_len: int) -> Engine:
    settings = {
        "memory.prefix_cache": False,
        "scheduler.max_running": REQUESTS,
        "drafter.name": f"{__name__}:Bush" if guesses else "none",
        "speculation.max_nodes": guesses,
        "speculation.max_step_nodes": REQUESTS * guesses,
    }
    engine = make_engine(decoder, name, max_len, REQUESTS * (max_len + BLOCK_SIZE), settings)
    vocab_size, chance = decoder.config.vocab_size, random.Random(1)
    for i in range(REQUESTS):
        prompt = [chance.randrange(vocab_size) for _ in range(PROMPT)]
        how = plain_sampling(1 << 20, temperature=0.8, seed=i)
        more = {} if asked == "none" else all_parameters(vocab_size)
        engine.add(prompt, msgspec.structs.replace(how, **more))
    while len(engine.step()) < REQUESTS:
        pass
    return engine


def one_step(engine: Engine, subject: SamplingCase) -> Counter[str]:
    """Nanoseconds by part."""
    clock = PhaseClock()
    with watched(engine, subject, clock):
        clock.take()
        outputs = engine.step()
        spent = clock.take()
    assert len(outputs) == REQUESTS and all(o.finish_reason is None for o in outputs)
    assert all(o.num_drafted == subject.guesses for o in outputs)
    return spent


def watched(engine: Engine, subject: SamplingCase, clock: PhaseClock) -> ExitStack:
    """Calls of the parts are timed until it is closed."""
    ops, made, params = engine.target.ops, draws_of, Draws.params
    if subject.without:
        made, params = without_states, Draws.plain_params
    stack = ExitStack()
    parts: list[tuple[Any, str, Any, str]] = [
        (runner, "draws_of", made, "host"),
        (Draws, "params", params, "host"),
        (TextState, "extend", TextState.extend, "host"),
        (ops, "sample", ops.sample, "sample"),
        (runner, "asked_logprobs", runner.asked_logprobs, "logprobs"),
        (verify, "report_drawn", verify.report_drawn, "logprobs"),
        (ops, "logprobs", ops.logprobs, "logprobs"),
    ]
    for owner, name, real, phase in parts:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, clock.timed(real, phase))
    return stack


def without_states(
    samplings: Sequence[Sampling],
    lengths: Sequence[int],
    drafts: Sequence[Draft],
    states: Sequence[TextState | None] = (),
) -> Draws:
    return plain_draws(samplings, lengths, drafts)


def typical(steps: Sequence[Counter[str]]) -> Counter[str]:
    """The median of each part, of their sum's share, and of the whole step."""
    each: Counter[str] = Counter({part: int(median(s[part] for s in steps)) for part in PARTS})
    each["step"] = int(median(s.total() for s in steps))
    return each


def row(subject: SamplingCase, rounds: Sequence[Counter[str]]) -> dict[str, Any]:
    """Medians over rounds, and the share with its spread."""
    return {
        "guesses": subject.guesses,
        "asked": subject.asked,
        "step_ms": extremes([r["step"] / 1e6 for r in rounds]),
        **{f"{part}_ms": ms(median(r[part] for r in rounds)) for part in PARTS},
        "share": extremes([sum(r[part] for part in PARTS) / r["step"] for r in rounds], 5),
    }


def over_without(
    known: Mapping[SamplingCase, Sequence[Sequence[Counter[str]]]], guesses: int
) -> dict[str, Any]:
    """A step with none in use over the one beside it that goes around edits and masks."""
    ours, theirs = (
        [step.total() for steps in known[SamplingCase(guesses, "none", without)] for step in steps]
        for without in (False, True)
    )
    found = ratio(ours, theirs)
    assert found is not None
    return msgspec.structs.asdict(found)


def table(result: Mapping[str, Any]) -> str:
    rows, over = [], []
    for each in result["rows"]:
        parts = [f"{each[f'{part}_ms']:.3f}" for part in PARTS]
        head = [each["asked"], str(each["guesses"]), f"{each['step_ms']['median']:.1f}"]
        share = "{median:.1%} ({low:.1%} to {high:.1%})".format(**each["share"])
        rows.append([*head, *parts, share])
    for each in result["none_over_without"]:
        low, high = each["interval"]
        over.append(
            f"none in use, {each['guesses']} guesses: {each['median']:.4f} times the step that "
            f"goes around edits and masks, with a confidence of 95 % in [{low:.4f}, {high:.4f}]"
        )
    head = ["parameters", "guesses a request", "step, ms", *(f"{p}, ms" for p in PARTS), "share"]
    return "\n".join([markdown_table(head, rows), *over])
