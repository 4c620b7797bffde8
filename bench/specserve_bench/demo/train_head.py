"""Train an EAGLE-3 head for a target model from text, into the folder OUT/NAME-head.

Without --target and --text it trains a head of the demo target, from text that this model writes.
OUT also keeps unfinished work: the same command continues a training that was stopped.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specserve.config import DEMO_TARGET  # first: it configures the process

import msgspec  # isort: skip
import torch  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

from specserve.errors import ConfigError
from specserve.models.decoder_config import DecoderConfig
from specserve.models.folder import resolve
from specserve.models.preflight import check_model
from specserve_bench.demo.batches import Corpus, Ids, encode, load_corpus, save_corpus
from specserve_bench.demo.card import write_card
from specserve_bench.demo.head_card import HeadCard, Training, head_words
from specserve_bench.demo.head_figures import measure
from specserve_bench.demo.head_loss import Teacher, head_loss
from specserve_bench.demo.head_model import (
    Head,
    HeadShape,
    begin_head,
    export_head,
    round_weights,
    shape_like,
)
from specserve_bench.demo.head_text import (
    check_length,
    draft_vocabulary,
    encoded,
    held_out,
    read_files,
)
from specserve_bench.demo.held_out import questions, source_files
from specserve_bench.demo.learning import Stage, learn
from specserve_bench.demo.own_text import own_text
from specserve_bench.demo.train import device_named, hours, machine, read_corpus
from specserve_bench.demo.training_config import HeadConfig, check_config, read_config
from specserve_kernels.threads import allowed_threads

BEGINNING = 1000  # characters of an evaluation file


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m specserve_bench.demo.train_head")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.description = __doc__
    p.add_argument("out", type=Path, help="folder for the head and for unfinished work")
    p.add_argument("--target", help="a local folder or a hub id; default: the demo target")
    p.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help='plain text, or .jsonl with a line {"messages": [...]} for each conversation',
    )
    p.add_argument(
        "--aux-layers",
        metavar="LAYERS",
        help="layers whose input the head reads, for example 2,18,33; default: an early, a middle "
        "and a late layer",
    )
    p.add_argument("--config", type=Path, help="JSON file with fields of HeadConfig")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.set_defaults(action=run)


def run(args: argparse.Namespace) -> int:
    config, device = read_config(args.config, HeadConfig), device_named(args.device)
    folder = DEMO_TARGET if args.target is None else resolve(args.target)
    if not args.text and folder != DEMO_TARGET:
        raise ConfigError("--target: its text is not known: name files with --text")
    shape = checked_shape(folder, config)
    aux_layer_ids = (
        default_aux_layer_ids(shape.num_layers)
        if args.aux_layers is None
        else parse_aux_layer_ids(args.aux_layers, shape)
    )
    job = Job(str(folder), tuple(map(str, args.text)), aux_layer_ids, config)
    print(train_head(args.out, job, shape, device))
    return 0


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of a training, kept in its folder."""

    target: str
    texts: tuple[str, ...]  # none: the demo target's own
    aux_layer_ids: tuple[int, ...] = msgspec.field(name="taps")
    config: HeadConfig


class Lessons(NamedTuple):
    """The training corpus, and by kind the beginnings of held-out texts."""

    corpus: Corpus
    held_out: Mapping[str, Sequence[Ids]]


def checked_shape(folder: Path, config: HeadConfig) -> DecoderConfig:
    """ConfigError unless a head for it could be served."""
    if folder.is_file():
        raise ConfigError(f"{folder}: a file; take the folder that it was made of")
    shape = check_model(folder)
    if not isinstance(shape, DecoderConfig):
        raise ConfigError(
            f"{folder}: transformers computes it, and no layers can be read there; take a target "
            "of a family that is in docs/models.md"
        )
    if shape.quantization is not None:
        raise ConfigError(f"{folder}: quantized; take the model that it was made of")
    if config.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"--config: draft_vocab_size = {config.draft_vocab_size}, and the target's vocab_size "
            f"is {shape.vocab_size}; give at most that"
        )
    return shape


def default_aux_layer_ids(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's layers if the target model has at least 8 layers, else up to three layers."""
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))


def parse_aux_layer_ids(text: str, shape: DecoderConfig) -> tuple[int, ...]:
    parts = text.split(",")
    aux_layer_ids = tuple(int(part) for part in parts if part.isdecimal())
    if len(aux_layer_ids) != len(parts) or list(aux_layer_ids) != sorted(set(aux_layer_ids)):
        raise ConfigError(
            f"--aux-layers {text}: the layers must be ascending numbers. Example: 2,18,33"
        )
    if aux_layer_ids[-1] >= shape.num_layers:
        raise ConfigError(
            f"--aux-layers {text}: the target model has the layers 0 to {shape.num_layers - 1}. "
            "Choose some of these"
        )
    return aux_layer_ids


def train_head(out: Path, job: Job, shape: DecoderConfig, device: torch.device) -> Path:
    """The head's folder; what is there already is not made again."""
    config, source = job.config, Path(job.target)
    folder = out / f"{source.name}-head"
    lessons = prepare(out, job, read_tokenizer(source, shape))
    torch.set_num_threads(config.threads or allowed_threads())
    if folder.exists():
        return folder
    target = read_target(source, device)
    if not job.texts:
        own = own_text(out / "own.npy", config, lessons.corpus, target)
        lessons = lessons._replace(corpus=lessons.corpus._replace(source=own))
    vocabulary = draft_vocabulary(lessons.corpus, shape.vocab_size, config.draft_vocab_size)
    teacher = Teacher(target, job.aux_layer_ids, vocabulary.to(device))
    head = learnt(
        out / "head", job, shape_like(shape, job.aux_layer_ids, config), teacher, lessons.corpus
    )
    round_weights(head)
    figures = measure(head, teacher, lessons.held_out, max(3, config.draft_steps))
    half = folder.with_suffix(".part")
    export_head(half, head, vocabulary)
    card = HeadCard(figures, facts(out, job, lessons.corpus, device), config)
    write_card(half, card, head_words(card))
    half.replace(folder)
    return folder


def prepare(out: Path, job: Job, tokenizer: Any) -> Lessons:
    """The corpus of the texts, as they were at the start of the training."""
    config, file = job.config, out / "corpus.npz"
    if file.exists():
        corpus = load_corpus(file)
    elif job.texts:
        corpus = read_files([Path(text) for text in job.texts], tokenizer)
    else:
        corpus = encode(tokenizer, *read_corpus(config))
    lessons = (
        Lessons(*held_out(corpus, config.held_out))
        if job.texts
        else Lessons(corpus, evaluation(tokenizer, config))
    )
    check_length(lessons.corpus, config)
    check_config(out / "training.json", job)  # where none is, this begins OUT: all is checked
    if not file.exists():
        save_corpus(file, corpus)
    return lessons


def evaluation(tokenizer: Any, config: HeadConfig) -> dict[str, list[Ids]]:
    """The evaluation texts of the demo models."""
    texts = [text[:BEGINNING] for text in source_files().values()]
    asked = [[{"role": "user", "content": q.question}] for q in questions()[:: config.ask_every]]
    prompts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    kinds = {"files": texts, "questions": prompts}
    return {kind: [encoded(tokenizer, text) for text in each] for kind, each in kinds.items()}


def read_tokenizer(folder: Path, shape: DecoderConfig) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens, and config.json's vocab_size is "
            f"{shape.vocab_size}; copy the files of the model's own tokenizer into the folder"
        )
    return tokenizer


def read_target(folder: Path, device: torch.device) -> Any:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def learnt(folder: Path, job: Job, shape: HeadShape, teacher: Teacher, corpus: Corpus) -> Head:
    config, device = job.config, teacher.model.device
    torch.manual_seed(config.seed)
    head = Head(shape)
    begin_head(head, teacher.model, teacher.vocabulary)
    share = config.talk_share if len(corpus.source) else 1.0
    stage = Stage(
        folder,
        config.tokens,
        share if len(corpus.talk) else 0.0,
        config.peak_rate,
        config.weight_decay,
        is_rounded=device.type != "cpu",
        has_muon=False,
    )
    loss = head_loss(head.to(device), teacher, config.draft_steps, config.step_weight)
    learn(stage, head, config, corpus, loss)
    return head


def facts(out: Path, job: Job, corpus: Corpus, device: torch.device) -> Training:
    return Training(
        target=Path(job.target).name,
        texts=[Path(text).name for text in job.texts],
        aux_layer_ids=list(job.aux_layer_ids),
        hours=hours(out / "head"),
        machine=machine(device, torch.get_num_threads()),
        torch=str(torch.__version__),
        python=corpus.python,
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as e:
        sys.exit(f"error: {e}")
