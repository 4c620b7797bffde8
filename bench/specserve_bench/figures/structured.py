"""Structured output: the time of masks of 152 thousand ids, and TPOT with grammar drafts.

TPOT of `auto` and of `grammar` against no drafting: a text for
each of the 200 schemas, one at a time, at temperature 1. The schemas are of the kinds that
JSONSchemaBench has. On two cores a round takes a quarter of an hour with the pair at a 0.6B model's
cost.
"""

import argparse
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizerOfRust

from specserve import LLM, SamplingParams, StructuredOutputsParams
from specserve.api.outputs import Output
from specserve.config import load_config
from specserve.scheduling.grammar_state import GrammarState
from specserve.text.grammars.compiled import Compiled, vocabulary_of
from specserve.text.grammars.structured_outputs import grammar_of
from specserve.text.tokenizer import Tokenizer
from specserve_bench import suite
from specserve_bench.arguments import at_least_1, natural
from specserve_bench.figures.drafter_cells import KV_BYTES
from specserve_bench.pairs import PAIRS
from specserve_bench.report import markdown_table, ratio_words
from specserve_bench.results import ratio

# 40 of each kind: "kind/name" -> a schema. Texts and lists are bounded, so that a text that a model
# draws at random ends.
SCHEMAS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("schemas.json").read_bytes()
)
ROWS = 60  # of a schema, at most
SUBJECTS: dict[str, dict[str, Any]] = {
    "off": {"drafter.name": "none", "drafter.model": None},
    "grammar": {"drafter.options": {"sources": ["grammar"]}, "drafter.model": None},
    "auto": {},
}
SIZE = 151_936  # ids of Qwen's models
SCRIPTS = {  # first and last character -> the longest word, and how many of them
    ("\u4e00", "\u9fff"): (3, 25_000),
    ("\u0410", "\u044f"): (7, 12_000),
    ("\uac00", "\ud7a3"): (3, 8_000),
    ("\u3041", "\u30ff"): (4, 4_000),
    ("\u0621", "\u064a"): (6, 6_000),
}
END_ID = SIZE - 1


class SchemaText(NamedTuple):
    """A subject's response for a schema."""

    text: str
    tpot_ms: float | None  # None: of a text of one token


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--pair", choices=[*PAIRS], default="0.6b", help="default: 0.6b")
    p.add_argument("--rounds", type=natural, default=3, help="0: only masks; default: 3")
    p.add_argument("--every", type=at_least_1, default=1, metavar="N", help="only each Nth schema")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    chosen = dict([*SCHEMAS.items()][:: args.every])
    result: dict[str, Any] = {"schemas": len(chosen), "masks": mask_figures(chosen)}
    if args.rounds:
        result |= {"pair": args.pair} | speed_figures(PAIRS[args.pair](), chosen, args.rounds)
    return result


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
    pair: tuple[Path, Path], schemas: Mapping[str, Any], rounds: int, device: str = "cpu"
) -> dict[str, Any]:
    """TPOT of each subject, over interleaved rounds."""
    llms = load(pair, device)
    for llm in llms.values():
        said(llm, next(iter(schemas)), seed=0)  # the first one is slower
    tpot: dict[str, list[float]] = {name: [] for name in llms}
    texts = list[list[str]]()
    for number in range(rounds):
        each: dict[str, list[SchemaText]] = {name: [] for name in llms}
        for i, name in enumerate(schemas):
            first, names = (number + i) % len(llms), [*llms]
            for subject in names[first:] + names[:first]:
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


def load(pair: tuple[Path, Path], device: str) -> dict[str, LLM]:
    target, draft = map(str, pair)
    shared = {
        "model.path": target,
        "model.device": device,
        "drafter.model": draft,
        "memory.kv_bytes": KV_BYTES,
        "memory.prefix_cache": False,  # all rounds repeat the same prompts
    }
    loader = suite.Loader(progress=False)
    configs = {name: load_config(None, shared | settings) for name, settings in SUBJECTS.items()}
    return {name: loader.llm(config) for name, config in configs.items()}


def said(llm: LLM, name: str, seed: int) -> SchemaText:
    question = f"Give an example of {name.replace('/', ': ').replace('_', ' ')} as JSON."
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(json=SCHEMAS[name]),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=seed,
        max_tokens=200,
    )
    output: Output = llm.chat([{"role": "user", "content": question}], params)[0]
    return SchemaText(output.text, output.timing.tpot_ms)


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
    rows = (
        [name, f"{median(each):.2f}", ratio_words(result["over_off"].get(name))]
        for name, each in result["tpot_ms"].items()
    )
    lines += ["", markdown_table(["drafter", "TPOT, ms", "TPOT / off"], rows)]
    return "\n".join([*lines, *([] if result["is_same"] else ["", "OUTPUTS DIFFER"])])


@cache
def large_tokenizer() -> TokenizerOfRust:
    """Byte-level BPE without merges: what matters are the bytes of its tokens. Its last id ends a
    text.
    """
    vocabulary = {text: id for id, text in enumerate(tokens())}
    tokenizer = TokenizerOfRust(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def tokens() -> list[str]:
    """A vocabulary of bytes, frequent pieces of the standard library, words of other scripts, and
    beginnings of words. All are in the characters that byte-level BPE writes for bytes.
    """
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = dict.fromkeys(sorted(level.alphabet()))
    for piece in pieces():
        if len(found) == SIZE - 1:
            break
        found.setdefault("".join(part for part, _ in level.pre_tokenize_str(piece)))
    assert len(found) == SIZE - 1, f"only {len(found)} tokens were found"
    return [*found]


def pieces() -> Iterator[str]:
    counts = Counter[str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(errors="replace")
            counts.update(re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+|[0-9]", text))
    words = [piece for piece, _ in counts.most_common() if len(piece) < 32]
    yield from words
    chance = random.Random(0)
    for (first, last), (longest, number) in SCRIPTS.items():
        for _ in range(number):
            codes = chance.choices(range(ord(first), ord(last) + 1), k=chance.randint(1, longest))
            yield "".join(map(chr, codes))
    yield from (word[:end] for word in words for end in range(2, len(word)))
