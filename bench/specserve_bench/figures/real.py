"""`auto` against no drafting on SmolLM2, with real prompts; exact ties; perplexity.

TPOT of SmolLM2-135M-Instruct (Q4_1), one request at a time, in interleaved rounds. The settings are
short chats, short chats in a process that has answered long prompts, and prompts of 7,000 tokens.
Exact ties are those of the two most probable tokens in greedy responses to 20 questions. Perplexity
is that of SmolLM2 and of the demo models. It needs the weights that `make real-models` fetches.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

from specserve import LLM, SamplingParams
from specserve.api.outputs import Output
from specserve.config import DEMO_DRAFT, DEMO_TARGET, load_config
from specserve.errors import ConfigError
from specserve_bench import suite
from specserve_bench.arguments import at_least_1
from specserve_bench.demo.held_out import source_files
from specserve_bench.perplexity import perplexity
from specserve_bench.real_models import FOLDER, REMEDY, RealModels, real_models
from specserve_bench.real_prompts import problems
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import ratio

NEW_TOKENS = 128
SUBJECTS = "none", "auto"
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
    "Name three planets and describe each in a sentence.",
    "What is 17 times 3?",
    "Translate 'good morning' into Spanish and German.",
    "Who wrote Romeo and Juliet?",
    "Explain recursion to a child.",
    "Give me a recipe for pancakes.",
    "What does the HTTP status 404 mean?",
    "Summarize the water cycle in two sentences.",
    "List five animals that live in the desert.",
    "Write a Python function that reverses a string.",
    "What is the difference between a list and a tuple?",
    "Suggest a name for a bakery and explain it.",
    "How far away is the moon?",
    "Write a short letter to a friend who moved away.",
    "What causes tides?",
    "Which is heavier, a kilogram of iron or of feathers?",
)


class RealSetting(NamedTuple):
    """Requests of a round; `before` are prompt lengths that run first and are not measured."""

    name: str
    temperature: float
    wanted: float  # maximum TPOT of auto over none
    before: tuple[int, ...] = ()
    long_prompt: int | None = None  # measure this long prompt of 7,000 tokens, not short chats


LONG = 7000
SETTINGS = (
    RealSetting("chat", 0.0, 1.05),
    RealSetting("chat", 0.8, 1.05),
    RealSetting("chat after long prompts", 0.8, 1.05, before=(5000, 5750, 6500)),
    *(
        RealSetting(f"{LONG} tokens, prompt {i + 1}", temperature, 1.1, long_prompt=i)
        for i in range(3)
        for temperature in (0.0, 0.8)
    ),
)
CHATS = 6  # short chats of a round


class RealRun(NamedTuple):
    """A subject's measured requests of a round."""

    tpot_ms: float
    tokens: int  # of steps
    nodes: int  # draft tokens that were verified
    steps: int
    prompt_tokens: list[int]
    token_ids: list[list[int]]


class Ties(NamedTuple):
    """Positions of greedy responses where the two most probable tokens have equal logprobs."""

    positions: int
    ties: int
    responses: int
    responses_with_ties: int


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--rounds", type=at_least_1, default=20, help="default: 20")
    p.add_argument(
        "--settings",
        nargs="+",
        choices=sorted({s.name for s in SETTINGS}),
        metavar="SETTING",
        help="names of settings as in the table; default: all",
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    models = real_models()
    if models is None:
        raise ConfigError(f"no real weights in {FOLDER}: {REMEDY}")
    chosen = [s for s in SETTINGS if args.settings is None or s.name in args.settings]
    texts = [problem["prompt"] + problem["canonical_solution"] for problem in problems()]
    with LLM(models.smollm2, drafter="none", progress=False) as llm:
        ties = ties_of(llm, QUESTIONS)
    return {
        "model": models.smollm2.name,
        "rows": [measured(setting, models, texts, args.rounds) for setting in chosen],
        "ties": ties._asdict(),
        "perplexity": perplexities(models, texts),
    }


def measured(
    setting: RealSetting, models: RealModels, texts: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Interleaved rounds; each begins with another subject, and the first one is not counted."""
    print(f"{setting.name}, T = {setting.temperature:g}", file=sys.stderr)
    llms = load(models)
    runs: dict[str, list[RealRun]] = {name: [] for name in SUBJECTS}
    for number in range(1 + rounds):
        for name in SUBJECTS if number % 2 else reversed(SUBJECTS):
            runs[name].append(one_run(llms[name], setting, texts, number))
    for llm in llms.values():
        llm.close()
    return row(setting, {name: each[1:] for name, each in runs.items()})


def load(models: RealModels) -> dict[str, LLM]:
    """An LLM of each subject, with nothing learnt and room for 11,000 tokens."""
    settings = {"model.path": str(models.smollm2), "memory.kv_bytes": 1 << 28}
    loader = suite.Loader(progress=False)
    configs = {name: load_config(None, settings | {"drafter.name": name}) for name in SUBJECTS}
    return {name: loader.llm(config) for name, config in configs.items()}


def one_run(llm: LLM, setting: RealSetting, texts: Sequence[str], number: int) -> RealRun:
    for length in setting.before:
        answered(llm, long_prompt(llm, texts, length, number), setting, number)
    if setting.long_prompt is None:
        prompts = chats(texts, number)
    else:
        prompts = [long_prompt(llm, texts, LONG, setting.long_prompt)]
    return run_of([answered(llm, prompt, setting, number) for prompt in prompts])


def chats(texts: Sequence[str], number: int) -> list[str]:
    """Short questions, and the beginning of a program; other ones in each round."""
    questions = islice(cycle(QUESTIONS), number * (CHATS - 1), (number + 1) * (CHATS - 1))
    return [*questions, f"Complete this program:\n\n{texts[number % len(texts)]}"]


def long_prompt(llm: LLM, texts: Sequence[str], length: int, number: int) -> str:
    """A question about so many tokens of programs; other programs for each number."""
    first = 40 * number % len(texts)
    programs = "\n".join([*texts[first:], *texts[:first]])
    ids = llm.tokenizer.encode(programs, add_special_tokens=False)[: length - 64]
    return f"{llm.tokenizer.decode(ids)}\n\nWhich of these functions is the longest, and why?"


def answered(llm: LLM, prompt: str, setting: RealSetting, seed: int) -> Output:
    """The prefix cache is emptied first, as rounds repeat prompts."""
    llm.reset_cache()
    is_long = bool(setting.before) or setting.long_prompt is not None
    params = SamplingParams(
        temperature=setting.temperature,
        seed=seed,
        max_tokens=NEW_TOKENS,
        ignore_eos=is_long and len(prompt) > 1000,
    )
    return llm.chat([{"role": "user", "content": prompt}], params)[0]


def run_of(answers: Sequence[Output]) -> RealRun:
    speculation = [answer.speculation for answer in answers]
    milliseconds = sum(a.timing.total_ms - a.timing.ttft_ms for a in answers)
    return RealRun(
        tpot_ms=milliseconds / sum(len(a.token_ids) - 1 for a in answers),
        tokens=sum(round(s.steps * (s.mean_acceptance_length or 1)) for s in speculation),
        nodes=sum(s.drafted for s in speculation),
        steps=sum(s.steps for s in speculation),
        prompt_tokens=[len(a.prompt_token_ids) for a in answers],
        token_ids=[a.token_ids for a in answers],
    )


def row(setting: RealSetting, runs: dict[str, list[RealRun]]) -> dict[str, Any]:
    """A setting's figures; lists have a value for each round, and rounds are paired."""
    tpot = {name: [run.tpot_ms for run in each] for name, each in runs.items()}
    auto = runs["auto"]
    steps = sum(run.steps for run in auto)
    lengths = [n for run in auto for n in run.prompt_tokens]
    return {
        "setting": setting.name,
        "temperature": setting.temperature,
        "prompt_tokens": [min(lengths), max(lengths)],
        "tpot_ms": tpot,
        "over_none": ratio(tpot["auto"], tpot["none"]),
        "tokens_per_step": sum(run.tokens for run in auto) / steps,
        "nodes_per_step": sum(run.nodes for run in auto) / steps,
        "wanted": setting.wanted,
        "is_same": [r.token_ids for r in auto] == [r.token_ids for r in runs["none"]],
    }


def ties_of(llm: LLM, questions: Iterable[str]) -> Ties:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2)
    chats: list[Any] = [[{"role": "user", "content": each}] for each in questions]
    counts = []
    for output in llm.chat(chats, params, use_tqdm=False):
        assert output.logprobs is not None
        top = [sorted((x.logprob for x in each.values()), reverse=True) for each in output.logprobs]
        counts.append((len(top), sum(first == second for first, second, *_ in top)))
    return Ties(
        positions=sum(n for n, _ in counts),
        ties=sum(ties for _, ties in counts),
        responses=len(counts),
        responses_with_ties=sum(ties > 0 for _, ties in counts),
    )


def perplexities(models: RealModels, texts: Sequence[str]) -> dict[str, float]:
    """SmolLM2's of HumanEval's programs, and the demo models' of the demo's held-out files."""
    demo = list(source_files().values())
    asked = {
        "SmolLM2-135M-Instruct Q4_1": (models.smollm2, texts[:40]),
        DEMO_TARGET.name: (DEMO_TARGET, demo),
        DEMO_DRAFT.name: (DEMO_DRAFT, demo),
    }
    found = {}
    for name, (model, of) in asked.items():
        with LLM(model, drafter="none", progress=False) as llm:
            found[name] = perplexity(llm, of)
    return found


def table(kept: Mapping[str, Any]) -> str:
    head = ["setting", "T", "prompt tokens", "TPOT off, ms", "TPOT auto, ms", "auto / off"]
    head += ["tokens per step", "draft tokens per step", "goal"]
    ties = Ties(**kept["ties"])
    scores = [f"{name} {value:.4f}" for name, value in kept["perplexity"].items()]
    return "\n".join(
        [
            markdown_table(head, map(cells, kept["rows"])),
            "",
            f"Exact ties of the two most probable tokens: {ties.ties} of {ties.positions} positions"
            f" ({ties.responses_with_ties} of {ties.responses} responses).",
            f"Perplexity: {', '.join(scores)}.",
        ]
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["prompt_tokens"]
    return [
        row["setting"] + ("" if row["is_same"] else " (OUTPUTS DIFFER)"),
        f"{row['temperature']:g}",
        f"{low}" if low == high else f"{low} to {high}",
        *(f"{median(row['tpot_ms'][name]):.2f}" for name in SUBJECTS),
        ratio_words(row["over_none"]),
        f"{row['tokens_per_step']:.2f}",
        f"{row['nodes_per_step']:.2f}",
        f"at most {row['wanted']:g}",
    ]
