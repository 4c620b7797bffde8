"""Structured output: what masks of 152 thousand ids take, and what the grammar's guesses bring."""

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from specserve import LLM, SamplingParams, StructuredOutputsParams
from specserve.api.outputs import Output
from specserve.config import load_config
from specserve.scheduling.grammar_state import GrammarState
from specserve.text.grammars.compiled import Compiled, vocabulary_of
from specserve.text.grammars.structured_outputs import grammar_of
from specserve.text.tokenizer import Tokenizer
from specserve_bench import outputs, suite
from specserve_bench.commands import at_least_1
from specserve_bench.pairs import PAIRS, Pair
from specserve_bench.report import ratio_words
from specserve_bench.results import Ratio, ratio
from specserve_bench.schemas import SCHEMAS
from specserve_bench.vocabulary import SIZE, large_tokenizer

FILE = Path("bench/results/structured-cpu.json")
ROUNDS = 3
ROWS = 60  # of a schema, at most
MAX_TOKENS = 200
SUBJECTS: dict[str, dict[str, Any]] = {
    "off": {"drafter.name": "none", "drafter.model": None},
    "grammar": {"drafter.options": {"sources": ["grammar"]}, "drafter.model": None},
    "auto": {},
}
KV_BYTES = 3 << 29  # of each subject: all of them are in memory at once
END_ID = SIZE - 1

DESCRIPTION = f"""
Measure masks with a vocabulary of {SIZE} ids, and the TPOT of `auto`, and of what the grammar
forces alone, beside that without guesses: a text for each of the {len(SCHEMAS)} schemas, one at a
time, at temperature 1. On two cores a round takes a quarter of an hour with the pair at a 0.6B
model's cost.
"""


class Said(NamedTuple):
    """What a subject made of a schema."""

    text: str
    tpot_ms: float | None  # None: of a text of one token


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    outputs.check_file("--out", args.out)
    chosen = dict([*SCHEMAS.items()][:: args.every])
    result: dict[str, Any] = {
        "machine": suite.machine("python -m specserve_bench.figures structured"),
        "schemas": len(chosen),
        "masks": mask_figures(chosen),
    }
    if args.rounds:
        result |= {"pair": args.pair} | speed_figures(PAIRS[args.pair](), chosen, args.rounds)
    outputs.write("--out", args.out, json.dumps(result).encode() + b"\n")
    print(table(result))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m specserve_bench.figures structured", description=DESCRIPTION
    )
    p.add_argument("--pair", choices=[*PAIRS], default="0.6b", help="default: 0.6b")
    p.add_argument("--rounds", type=int, default=ROUNDS, help=f"0: masks alone; default: {ROUNDS}")
    p.add_argument("--every", type=at_least_1, default=1, metavar="N", help="only each Nth schema")
    p.add_argument("--out", type=Path, default=FILE, metavar="JSON", help=f"default: {FILE}")
    return p


def mask_figures(schemas: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds to compile a schema, and for the mask of a row of random texts."""
    vocabulary = vocabulary_of(Tokenizer(large_tokenizer()), SIZE, (END_ID,))
    compiling, masks, chance = list[float](), list[float](), random.Random(0)
    for schema in schemas.values():
        grammar = grammar_of(StructuredOutputsParams(json=schema))
        start = perf_counter()
        compiled = Compiled(vocabulary, grammar)
        compiling.append(1e3 * (perf_counter() - start))
        masks += rows(GrammarState(compiled, (END_ID,), SIZE), chance)
    return {
        "compile_ms": round(median(compiling), 3),
        "compile_ms_most": round(max(compiling), 3),
        "rows": len(masks),
        "mask_ms": round(median(masks), 4),
        "mask_ms_p95": round(quantiles(masks, n=20)[-1], 4),
    }


def rows(state: GrammarState, chance: random.Random) -> Iterator[float]:
    """Milliseconds of each mask while random tokens that it allows are drawn."""
    for _ in range(ROWS):
        start = perf_counter()
        mask = state.mask(())
        yield 1e3 * (perf_counter() - start)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(ids[chance.randrange(len(ids))])
        if token == END_ID:
            return
        state.extend([token])


def speed_figures(
    pair: Pair, schemas: Mapping[str, Any], rounds: int, device: str = "cpu"
) -> dict[str, Any]:
    """TPOT of each subject, over interleaved rounds."""
    llms = load(pair, device)
    for llm in llms.values():
        said(llm, next(iter(schemas)), seed=0)  # the first one is slower
    tpot: dict[str, list[float]] = {name: [] for name in llms}
    texts = list[list[str]]()
    for number in range(rounds):
        each: dict[str, list[Said]] = {name: [] for name in llms}
        for i, name in enumerate(schemas):
            for subject in in_turn([*llms], number + i):
                each[subject].append(said(llms[subject], name, seed=i))
        for subject, every in each.items():
            tpot[subject].append(fmean(s.tpot_ms for s in every if s.tpot_ms is not None))
            texts.append([s.text for s in every])
    return {
        "tpot_ms": tpot,
        "over_off": {
            name: msgspec.to_builtins(ratio(tpot[name], tpot["off"]))
            for name in ("grammar", "auto")
        },
        "is_same": all(those == texts[0] for those in texts),
    }


def in_turn(names: Sequence[str], number: int) -> Sequence[str]:
    """All of them; another one is first each time."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def load(pair: Pair, device: str) -> dict[str, LLM]:
    target, draft = map(str, pair)
    shared = {
        "model.path": target,
        "model.device": device,
        "drafter.model": draft,
        "memory.kv_bytes": KV_BYTES,
        "memory.prefix_cache": False,  # all rounds repeat the same prompts
    }
    llms, weights = dict[str, LLM](), list[Any]()
    for name, settings in SUBJECTS.items():
        config = load_config(None, shared | settings)
        llms[name] = LLM(set=suite.settings_of(config), progress=False, weights=weights)
        weights += [model for model in llms[name].weights if model not in weights]
    return llms


def said(llm: LLM, name: str, seed: int) -> Said:
    question = f"Give an example of {name.replace('/', ': ').replace('_', ' ')} as JSON."
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=seed,
        max_tokens=MAX_TOKENS,
    )
    output: Output = llm.chat([{"role": "user", "content": question}], params)[0]
    return Said(output.text, output.timing.tpot_ms)


def table(result: Mapping[str, Any]) -> str:
    masks = result["masks"]
    lines = [
        f"a mask of {SIZE} ids: {masks['mask_ms']:.3f} ms, p95 {masks['mask_ms_p95']:.3f} ms, over "
        f"{masks['rows']} rows of {result['schemas']} schemas",
        f"a schema: {masks['compile_ms']:.1f} ms to compile, "
        f"{masks['compile_ms_most']:.1f} at most",
    ]
    if "tpot_ms" not in result:
        return "\n".join(lines)
    lines += ["", "| guesses | TPOT, ms | over off |", "| --- | --- | --- |"]
    for name, each in result["tpot_ms"].items():
        over = result["over_off"].get(name)
        words = "-" if over is None else ratio_words(msgspec.convert(over, Ratio))
        lines.append(f"| {name} | {median(each):.2f} | {words} |")
    return "\n".join([*lines, *([] if result["is_same"] else ["", "OUTPUTS DIFFER"])])
