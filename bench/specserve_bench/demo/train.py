"""`python -m specserve_bench.demo.train OUT`: from the standard library to a pair and its card.

The corpus and each finished model stay in OUT, and the state of an unfinished stage is saved every
few minutes. The same command continues a training that was stopped, on any machine that has a copy
of OUT. On the same machine with the same torch, the final weights are those of an undisturbed run.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from specserve.config import DEMO_DRAFT, DEMO_TARGET  # first: it configures the process

import msgspec  # isort: skip
import torch  # isort: skip

from specserve.errors import ConfigError
from specserve_bench.demo.batches import Corpus, encode, load_corpus, save_corpus
from specserve_bench.demo.card import Card, words, write_card
from specserve_bench.demo.corpus import library, read_source, source_files, symbols, turns
from specserve_bench.demo.evaluate import evaluate
from specserve_bench.demo.learning import Stage, Step, learn
from specserve_bench.demo.losses import distillation_loss, next_token_loss
from specserve_bench.demo.models import begin_as, build, export, read
from specserve_bench.demo.own_text import own_text
from specserve_bench.demo.tokenizer import load, train_tokenizer
from specserve_bench.demo.training_config import Course, TrainingConfig, check_config, read_config
from specserve_bench.machine import cpu_name
from specserve_kernels.threads import allowed_threads


def main(argv: list[str]) -> int:
    prog = "python -m specserve_bench.demo.train"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the pair, and of what is half done")
    parser.add_argument("--config", type=Path, help="JSON: fields of TrainingConfig that differ")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--no-card",
        action="store_true",
        help="leave evaluation and card to the same command without it, maybe on another machine",
    )
    args = parser.parse_args(argv)
    config = read_config(args.config, TrainingConfig)
    training = train(args.out, config, device_named(args.device))
    if args.no_card:
        return 0
    figures = evaluate(args.out / DEMO_TARGET.name, args.out / DEMO_DRAFT.name, config.ask_every)
    fields = msgspec.to_builtins(config)
    card = Card(figures=figures, training=training, config=fields)
    write_card(args.out, card, words(card))
    return 0


def device_named(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU; take cpu")
    return torch.device(name)


def train(out: Path, config: TrainingConfig, device: torch.device) -> dict[str, Any]:
    """Train into OUT what is not there yet; the facts are those of the training of the draft."""
    check_config(out / "training.json", config)
    torch.set_num_threads(allowed_threads())  # sums of gradients depend on their number
    tokenizer, corpus = prepare(out, config)
    print(f"{corpus.num_tokens:,} tokens, {len(corpus.source):,} of them source", file=sys.stderr)
    if not (out / DEMO_TARGET.name).exists():
        train_target(out, config, corpus, tokenizer, device)
    if not (out / DEMO_DRAFT.name).exists():
        train_draft(out, config, corpus, tokenizer, device)
    told: dict[str, Any] = msgspec.json.decode((out / "facts.json").read_bytes())
    return told


def train_target(
    out: Path, config: TrainingConfig, corpus: Corpus, tokenizer: Any, device: torch.device
) -> None:
    target = build(config.target, config, tokenizer).to(device)
    stage = Stage(
        out / "target",
        config.target_tokens,
        config.talk_share,
        config.peak_rate,
        config.weight_decay,
    )
    learn(stage, target, config, corpus, next_token_loss(target))
    export(out / DEMO_TARGET.name, target, tokenizer)


def train_draft(
    out: Path, config: TrainingConfig, corpus: Corpus, tokenizer: Any, device: torch.device
) -> None:
    """Distil the target as it was exported, rounded to bf16."""
    target, draft = read(out / DEMO_TARGET.name), build(config.draft, config, tokenizer)
    begin_as(draft, target)
    target, draft = target.to(device), draft.to(device)
    own = corpus._replace(source=own_text(out / "own.npy", config, corpus, target))
    stage = Stage(
        out / "draft",
        config.draft_tokens,
        config.draft_talk_share,
        config.draft_peak_rate,
        config.draft_weight_decay,
    )
    learn(stage, draft, config, own, distillation_loss(draft, target))
    told = facts(out, config, corpus, device)
    (out / "facts.json").write_bytes(msgspec.json.encode(told))
    export(out / DEMO_DRAFT.name, draft, tokenizer)


def prepare(out: Path, config: TrainingConfig) -> tuple[Any, Corpus]:
    """The tokenizer and the corpus; of this Python's library if OUT has none."""
    if not (out / "corpus.npz").exists():
        sources, talk = read_corpus(config)
        texts = [*sources, *(text for turn in talk for text in turn)]
        train_tokenizer(texts, config.vocab_size).save_pretrained(out / "tokenizer")
        save_corpus(out / "corpus.npz", encode(load(out / "tokenizer"), sources, talk))
    return load(out / "tokenizer"), load_corpus(out / "corpus.npz")


def read_corpus(config: Course) -> tuple[list[str], list[Any]]:
    folder = library()
    names = source_files(folder)[: config.max_files]
    sources = [text for name in names if (text := read_source(folder / name)) is not None]
    known = symbols(folder)[: config.max_symbols]
    return sources, [turn for symbol in known for turn in turns(symbol)]


def facts(
    out: Path, config: TrainingConfig, corpus: Corpus, device: torch.device
) -> dict[str, Any]:
    """Facts for the card."""
    return {
        "hours": {stage: hours(out / stage) for stage in ("target", "draft")},
        "tokens": {"target": config.target_tokens, "draft": config.draft_tokens},
        "machine": machine(device, allowed_threads()),
        "python": corpus.python,
        "torch": str(torch.__version__),
    }


def hours(stage: Path) -> float:
    """Steps times the median step: other load changes that little."""
    lines = (stage / "log.jsonl").read_bytes().splitlines()
    steps = [msgspec.json.decode(line, type=Step) for line in lines]
    seconds = [step.seconds for step in steps if step.seconds is not None]
    return round(median(seconds) * (1 + steps[-1].step) / 3600, 3)


def machine(device: torch.device, cores: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cores} core{'s' * (cores > 1)} of {cpu_name()}"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as e:
        sys.exit(f"error: {e}")
