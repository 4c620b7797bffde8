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

from specserve.config import load_config
from specserve.engine import runner
from specserve.engine.build import assemble
from specserve.engine.engine import Engine
from specserve.engine.loading import Model, ModelKey
from specserve.engine.pool_plan import Models
from specserve.engine.runner import Draws, draws_of, plain_draws
from specserve.engine.tuning import tune
from specserve.exchange.sampling_params import Sampling
from specserve.models.decoder import LoadedModel
from specserve.models.loader import load_decoder
from specserve.scheduling.text_state import TextState
from specserve.speculation import verify
from specserve_bench.host import PhaseClock, ms
from specserve_bench.results import ratio
from specserve_bench.steps import BLOCK_SIZE, kv_token_bytes, spread
from specserve_drafters import Draft, base
from specserve_kernels import load

REQUESTS, PROMPT, NODES = 8, 500, 16
ROUNDS = 7
STEPS = 5  # of each subject in a round; their median counts
WARM_UP = 20
PARTS = ("host", "sample", "logprobs")
BUSH = "specserve_bench.sampling:Bush"


class Bush:
    """A binary tree of guesses that are hardly ever right."""

    class Options(base.Options, frozen=True):
        pass

    def __init__(self, options: Options) -> None:
        pass

    def propose(self, items: Sequence[base.DraftItem]) -> list[Draft]:
        return [self.tree(item.token_ids[-item.limit :].tolist()) for item in items]

    def tree(self, tokens: list[int]) -> Draft:
        """Of tokens of the text, so that penalties count each of them once more."""
        tokens = list(dict.fromkeys(tokens))
        return Draft(tokens, [k // 2 for k in range(len(tokens))])

    def observe(self, id: int, draft: Draft, accepted: Sequence[int]) -> None:
        pass

    def forget(self, id: int) -> None:
        pass


class Subject(NamedTuple):
    """Steps of an engine. Those of `without` go around what edits and masks have added."""

    guesses: int
    asked: str
    without: bool = False


SUBJECTS = [
    Subject(guesses, *how)
    for guesses, how in product((0, NODES), (("none", False), ("none", True), ("all", False)))
]


def sampling_of(asked: str, vocab_size: int, seed: int) -> Sampling:
    how = Sampling(max_tokens=1 << 20, temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    return how if asked == "none" else msgspec.structs.replace(how, **all_parameters(vocab_size))


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
def sampling_figures(folder: Path, rounds: int = ROUNDS) -> dict[str, Any]:
    """Each part of sampling and its share of a step, over interleaved rounds."""
    engines = load_engines(folder, rounds)
    known: dict[Subject, list[list[Counter[str]]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(WARM_UP):  # the number of threads is chosen meanwhile
        for engine in engines.values():
            engine.step()
    for i in range(rounds):
        ran: dict[Subject, list[Counter[str]]] = {subject: [] for subject in SUBJECTS}
        for step in range(STEPS):
            for subject in in_turn((i + step) % 2 == 1):
                ran[subject].append(one_step(engines[subject.guesses, subject.asked], subject))
        for subject, steps in ran.items():
            known[subject].append(steps)
    result = {
        "rounds": rounds,
        "requests": REQUESTS,
        "rows": [
            row(subject, [typical(steps) for steps in known[subject]])
            for subject in SUBJECTS
            if not subject.without
        ],
        "none_over_without": [
            {"guesses": n} | over_without(known, n) for n in dict.fromkeys(s[0] for s in SUBJECTS)
        ],
    }
    print(table(result))
    return result


def in_turn(is_odd: bool) -> list[Subject]:
    """All subjects. Of two beside each other that have one engine, either comes first in turn, as
    the first finds the other engines' weights and KV in the caches.
    """
    return sorted(SUBJECTS, key=lambda s: (s.guesses, s.asked, s.without != is_odd))


def load_engines(folder: Path, rounds: int) -> dict[tuple[int, str], Engine]:
    """An engine for each number of guesses and each `asked`, with all of its requests in midst."""
    max_len = longest(rounds)
    decoder = load_decoder(folder, "bf16", load(torch.device("cpu")), max_len)
    model = Model(decoder, ModelKey(str(folder), "cpu", "auto", "bf16", max_len))
    kinds = dict.fromkeys((s.guesses, s.asked) for s in SUBJECTS)
    return {kind: started(model, *kind, max_len) for kind in kinds}


def started(model: Model, guesses: int, asked: str, max_len: int) -> Engine:
    decoder = model.decoder
    config = load_config(None, settings(decoder, guesses, max_len))
    engine = assemble(config, Models(decoder), max_len)
    tune(model, engine.target, engine.pool, config, max_len)
    vocab_size = decoder.config.vocab_size
    chance = random.Random(1)
    for i in range(REQUESTS):
        prompt = [chance.randrange(vocab_size) for _ in range(PROMPT)]
        engine.add(prompt, sampling_of(asked, vocab_size, seed=i))
    while len(engine.step()) < REQUESTS:
        pass
    return engine


def longest(rounds: int) -> int:
    """Slots of a request; as hardly any guess is right, there is room for a few that are."""
    return PROMPT + 2 * (WARM_UP + 2 * rounds * STEPS) + NODES + BLOCK_SIZE


def settings(decoder: LoadedModel, guesses: int, max_len: int) -> dict[str, Any]:
    return {
        "memory.kv_bytes": REQUESTS * (max_len + BLOCK_SIZE) * kv_token_bytes(decoder.config),
        "memory.block_size": BLOCK_SIZE,
        "memory.prefix_cache": False,
        "scheduler.max_running": REQUESTS,
        "drafter.name": BUSH if guesses else "none",
        "speculation.max_nodes": guesses,
        "speculation.max_step_nodes": REQUESTS * guesses,
    }


def one_step(engine: Engine, subject: Subject) -> Counter[str]:
    """Nanoseconds by part."""
    clock = PhaseClock()
    with watched(engine, subject, clock):
        clock.take()
        outputs = engine.step()
        spent = clock.take()
    assert len(outputs) == REQUESTS and all(o.finish_reason is None for o in outputs)
    assert all(o.num_drafted == subject.guesses for o in outputs)
    return spent


def watched(engine: Engine, subject: Subject, clock: PhaseClock) -> ExitStack:
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
        (verify, "tell_drawn", verify.tell_drawn, "logprobs"),
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


def row(subject: Subject, rounds: Sequence[Counter[str]]) -> dict[str, Any]:
    """Medians over rounds, and the share with its spread."""
    return {
        "guesses": subject.guesses,
        "asked": subject.asked,
        "step_ms": spread([r["step"] / 1e6 for r in rounds]),
        **{f"{part}_ms": ms(median(r[part] for r in rounds)) for part in PARTS},
        "share": share_spread([sum(r[part] for part in PARTS) / r["step"] for r in rounds]),
    }


def share_spread(shares: Sequence[float]) -> dict[str, float]:
    each = {"median": median(shares), "low": min(shares), "high": max(shares)}
    return {name: round(value, 5) for name, value in each.items()}


def over_without(
    known: Mapping[Subject, Sequence[Sequence[Counter[str]]]], guesses: int
) -> dict[str, Any]:
    """A step with none in use over the one beside it that goes around edits and masks."""
    ours, theirs = (
        [step.total() for steps in known[Subject(guesses, "none", without)] for step in steps]
        for without in (False, True)
    )
    found = ratio(ours, theirs)
    assert found is not None
    return msgspec.structs.asdict(found)


def table(result: Mapping[str, Any]) -> str:
    """In Markdown, as in docs/bench.md."""
    lines = [
        ["parameters", "guesses a request", "step, ms", *(f"{p}, ms" for p in PARTS), "share"],
        ["---"] * (4 + len(PARTS)),
    ]
    for each in result["rows"]:
        parts = [f"{each[f'{part}_ms']:.3f}" for part in PARTS]
        head = [each["asked"], str(each["guesses"]), f"{each['step_ms']['median']:.1f}"]
        lines.append([*head, *parts, share_words(each["share"])])
    said = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*said, *map(over_words, result["none_over_without"])])


def share_words(share: Mapping[str, float]) -> str:
    return f"{share['median']:.1%} ({share['low']:.1%} to {share['high']:.1%})"


def over_words(over: Mapping[str, Any]) -> str:
    low, high = over["interval"]
    return (
        f"none in use, {over['guesses']} guesses: {over['median']:.4f} times the step that goes "
        f"around edits and masks, with a confidence of 95 % in [{low:.4f}, {high:.4f}]"
    )
