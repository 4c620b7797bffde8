"""`python -m specserve_bench.demo.train OUT`: from the standard library to a pair and its card.

The state of a stage is saved every few minutes. A training that was stopped is continued by the
same command, and ends with the weights that it would have had (on the same CPUs and torch).
"""

import argparse
import os
import platform
import sys
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams  # first: it configures the process before torch loads

import msgspec  # isort: skip
import numpy as np  # isort: skip
import torch  # isort: skip
from numpy.typing import NDArray  # isort: skip
from transformers import Qwen3Config, Qwen3ForCausalLM  # isort: skip

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.errors import ConfigError
from specserve.machine import cpu_name
from specserve_bench.demo.batches import Corpus, encode
from specserve_bench.demo.card import Card, write_card
from specserve_bench.demo.corpus import library, read_source, source_files, symbols, turns
from specserve_bench.demo.evaluate import evaluate
from specserve_bench.demo.learning import Stage, Step, learn
from specserve_bench.demo.losses import distillation_loss, next_token_loss
from specserve_bench.demo.tokenizer import END_OF_TEXT, END_TURN, load_or_train
from specserve_bench.demo.training_config import (
    OWN_LENGTH,
    Size,
    TrainingConfig,
    check_config,
    read_config,
)
from specserve_kernels.threads import allowed_threads

BEGINNING = 160  # tokens of source that the target continues, at most


def main(argv: list[str]) -> int:
    prog = "python -m specserve_bench.demo.train"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the pair, and of what is half done")
    parser.add_argument("--config", type=Path, help="JSON: fields of TrainingConfig that differ")
    args = parser.parse_args(argv)
    config = read_config(args.config)
    train(args.out, config)
    figures = evaluate(args.out / DEMO_TARGET.name, args.out / DEMO_DRAFT.name, config.ask_every)
    training, fields = facts(args.out, config), msgspec.to_builtins(config)
    write_card(args.out, Card(figures=figures, training=training, config=fields))
    return 0


def train(out: Path, config: TrainingConfig) -> None:
    """Train both models into OUT; unfinished stages are kept in OUT/target and OUT/draft."""
    check_config(out / "training.json", config)
    torch.manual_seed(config.seed)
    torch.set_num_threads(allowed_threads())  # sums of gradients depend on their number
    sources, talk = read_corpus(config)
    texts = [*sources, *(text for turn in talk for text in turn)]
    tokenizer = load_or_train(out / "tokenizer", texts, config.vocab_size)
    corpus = encode(tokenizer, sources, talk)
    print(f"{corpus.num_tokens:,} tokens, {len(corpus.source):,} of them source", file=sys.stderr)
    target = build(config.target, config, tokenizer)
    stage = Stage(out / "target", config.target_tokens, config.talk_share, config.peak_rate)
    learn(stage, target, config, corpus, next_token_loss(target))
    export(out / DEMO_TARGET.name, target, tokenizer)
    own = corpus._replace(source=own_text(out, config, corpus))
    draft = build(config.draft, config, tokenizer)
    begin_as(draft, target)
    loss = distillation_loss(draft, target.eval().requires_grad_(False))
    stage = Stage(
        out / "draft", config.draft_tokens, config.draft_talk_share, config.draft_peak_rate
    )
    learn(stage, draft, config, own, loss)
    export(out / DEMO_DRAFT.name, draft, tokenizer)


def read_corpus(config: TrainingConfig) -> tuple[list[str], list[Any]]:
    folder = library()
    names = source_files(folder)[: config.max_files]
    sources = [text for name in names if (text := read_source(folder / name)) is not None]
    known = symbols(folder)[: config.max_symbols]
    return sources, [turn for symbol in known for turn in turns(symbol)]


def own_text(out: Path, config: TrainingConfig, corpus: Corpus) -> NDArray[np.uint16]:
    """Beginnings of source, each continued by the target: text as the draft will have to guess it.

    Only such text has the target's own patterns, such as loops (on-policy distillation, Agarwal et
    al. 2023).
    """
    file = out / "own.npy"
    if not file.exists():
        ids = continue_source(out / DEMO_TARGET.name, config, corpus)
        half = file.with_suffix(".part")
        with half.open("wb") as opened:
            np.save(opened, np.array(ids, dtype=np.uint16))
        half.replace(file)
    own: NDArray[np.uint16] = np.load(file)
    return own


def continue_source(target: Path, config: TrainingConfig, corpus: Corpus) -> list[int]:
    """Beginnings and continuations in turn; half of them greedy, half at temperature 1.

    The number of torch's threads stays as it was: the engine chooses its own by timing.
    """
    random = np.random.default_rng(config.seed)
    prompts, params = [], []
    for number in range(config.own_tokens // OWN_LENGTH):
        start = int(random.integers(len(corpus.source) - BEGINNING))
        length = int(random.integers(1, BEGINNING))
        prompts.append(corpus.source[start : start + length].tolist())
        params.append(
            SamplingParams(
                max_tokens=OWN_LENGTH, temperature=float(number % 2), seed=number, ignore_eos=True
            )
        )
    threads = torch.get_num_threads()
    with LLM(target, drafter="none") as llm:
        outputs = llm.generate(prompts, params)
    torch.set_num_threads(threads)
    return [token for o in outputs for token in o.prompt_token_ids + o.token_ids]


def build(size: Size, config: TrainingConfig, tokenizer: Any) -> Any:
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (END_TURN, END_OF_TEXT)]
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            num_hidden_layers=size.layers,
            hidden_size=size.hidden,
            intermediate_size=size.mlp,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ids,
            pad_token_id=tokenizer.pad_token_id,
            use_cache=False,
        )
    )


def begin_as(draft: Any, target: Any) -> None:
    """Set the draft's embedding to the target's, projected on its first principal directions
    (Eckart and Young 1936): tokens whose embeddings are close in one are close in the other.
    """
    embedding = draft.get_input_embeddings().weight
    u, s, _ = torch.linalg.svd(target.get_input_embeddings().weight.detach(), full_matrices=False)
    width = min(embedding.shape[1], len(s))
    embedding.data[:, :width] = (u * s)[:, :width]


def facts(out: Path, config: TrainingConfig) -> dict[str, Any]:
    """Facts for the card. Hours are steps times the median step: other load changes that little."""
    hours = {}
    for stage in ("target", "draft"):
        lines = (out / stage / "log.jsonl").read_bytes().splitlines()
        steps = [msgspec.json.decode(line, type=Step) for line in lines]
        seconds = [step.seconds for step in steps if step.seconds is not None]
        hours[stage] = round(median(seconds) * (1 + steps[-1].step) / 3600, 2)
    return {
        "hours": hours,
        "tokens": {"target": config.target_tokens, "draft": config.draft_tokens},
        "machine": f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def export(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face folder: bf16 weights in shards, config, tokenizer."""
    copy = deepcopy(model).to(torch.bfloat16)
    copy.save_pretrained(folder, max_shard_size="14MB")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as e:
        sys.exit(f"error: {e}")
