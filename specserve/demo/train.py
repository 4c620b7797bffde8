"""`python -m specserve.demo.train OUT`: from the standard library to a target, its draft, a card.

Every few minutes a stage leaves its state behind: run it again to go on from there.
"""

import argparse
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated, Any, NamedTuple

from specserve import LLM, SamplingParams  # first: it settles the process before torch comes

import msgspec  # isort: skip
import numpy as np  # isort: skip
import torch  # isort: skip
from rich.console import Console  # isort: skip
from rich.progress import Progress, TextColumn, TimeRemainingColumn, BarColumn  # isort: skip
from msgspec import Meta  # isort: skip
from numpy.typing import NDArray  # isort: skip
from safetensors import safe_open  # isort: skip
from safetensors.torch import save_file  # isort: skip
from torch import Tensor, nn  # isort: skip
from torch.nn import functional as F  # isort: skip
from transformers import Qwen3Config, Qwen3ForCausalLM  # isort: skip

from specserve.config import DEMO_DRAFT, DEMO_TARGET
from specserve.demo.batches import IGNORED, Batch, Corpus, batch, encode
from specserve.demo.card import Card, write_card
from specserve.demo.corpus import library, read_source, source_files, symbols, turns
from specserve.demo.evaluate import evaluate
from specserve.demo.tokenizer import END_OF_TEXT, END_TURN, load_or_train
from specserve.errors import ConfigError
from specserve.machine import cpu_name

BEGINNING, OWN_LENGTH = 160, 128  # tokens of source at most, and of the target after them
PART = 512  # rows of logits at a time
SAVE_SECONDS = 300.0  # of work that a kill may cost


Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(gt=0, le=1)]


class Size(msgspec.Struct, frozen=True):
    """Of a Qwen3-shaped model with as many KV heads as heads of 64."""

    layers: Positive
    hidden: Positive
    heads: Positive
    mlp: Positive


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    vocab_size: Annotated[int, Meta(ge=300, lt=2**16)] = 8192
    target: Size = Size(4, 384, 6, 1024)
    draft: Size = Size(1, 128, 2, 768)
    target_tokens: Positive = 13_000_000
    own_tokens: Annotated[int, Meta(ge=4 * OWN_LENGTH)] = 1_200_000
    draft_tokens: Positive = 15_000_000
    step_tokens: Positive = 6144
    length: Positive = 256  # attention is what grows with it, and most conversations are shorter
    long_length: Positive = 1024  # of every eighth step, for those that are not
    talk_share: Share = 0.7
    draft_talk_share: Share = 0.6
    peak_rate: Rate = 3e-3
    draft_peak_rate: Rate = 6e-3
    ask_every: Positive = 1  # in the evaluation: of the questions, every so many
    max_files: Positive | None = None  # for tests
    max_symbols: Positive | None = None

    def __post_init__(self) -> None:
        longest = max(self.length, self.long_length)
        if longest > self.step_tokens:
            raise ValueError(
                f"step_tokens = {self.step_tokens} has no room for {longest} at a time"
            )

    def length_of(self, step: int) -> int:
        return self.long_length if step % 8 == 7 else self.length


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m specserve.demo.train", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder of the pair, and of what is half done")
    parser.add_argument("--plan", type=Path, help="JSON with fields of Plan that differ")
    args = parser.parse_args(argv)
    plan = read_plan(args.plan)
    train(args.out, plan)
    figures = evaluate(args.out / DEMO_TARGET.name, args.out / DEMO_DRAFT.name, plan.ask_every)
    training = facts(args.out, plan)
    write_card(args.out, Card(figures=figures, training=training, plan=msgspec.to_builtins(plan)))
    return 0


def read_plan(file: Path | None) -> Plan:
    try:
        return msgspec.json.decode(file.read_bytes() if file else b"{}", type=Plan)
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"--plan {file}: {e}") from e


def train(out: Path, plan: Plan) -> None:
    """Both models, in OUT; what is half done, in OUT/target and OUT/draft."""
    check_plan(out / "plan.json", plan)
    torch.manual_seed(plan.seed)
    sources, talk = read_corpus(plan)
    texts = [*sources, *(text for turn in talk for text in turn)]
    tokenizer = load_or_train(out / "tokenizer", texts, plan.vocab_size)
    corpus = encode(tokenizer, sources, talk)
    print(f"{corpus.num_tokens:,} tokens, {len(corpus.source):,} of them source", file=sys.stderr)
    target = build(plan.target, plan, tokenizer)
    stage = Stage(out / "target", plan.target_tokens, plan.talk_share, plan.peak_rate)
    learn(stage, target, plan, corpus, next_token_loss(target))
    export(out / DEMO_TARGET.name, target, tokenizer)
    own = corpus._replace(source=own_text(out, plan, corpus))
    draft = build(plan.draft, plan, tokenizer)
    begin_as(draft, target)
    loss = distillation_loss(draft, target.eval().requires_grad_(False))
    stage = Stage(out / "draft", plan.draft_tokens, plan.draft_talk_share, plan.draft_peak_rate)
    learn(stage, draft, plan, own, loss)
    export(out / DEMO_DRAFT.name, draft, tokenizer)


def check_plan(file: Path, plan: Plan) -> None:
    """What was begun by one plan is not ended by another."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_bytes(msgspec.json.encode(plan))
        begun = msgspec.json.decode(file.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as e:
        raise ConfigError(f"{file}: {e}; give another folder") from e
    if begun != plan:
        raise ConfigError(f"{file}: begun by another plan; give that one, or another folder")


def read_corpus(plan: Plan) -> tuple[list[str], list[Any]]:
    folder = library()
    names = source_files(folder)[: plan.max_files]
    sources = [text for name in names if (text := read_source(folder / name)) is not None]
    known = symbols(folder)[: plan.max_symbols]
    return sources, [turn for symbol in known for turn in turns(symbol)]


def own_text(out: Path, plan: Plan, corpus: Corpus) -> NDArray[np.uint16]:
    """Beginnings of source, each gone on with by the target: what its draft will have to guess.

    Half greedily, half at temperature 1. A draft that has only seen what others wrote does not
    know the target's own ways, loops among them (on-policy distillation, Agarwal et al. 2023).
    """
    file = out / "own.npy"
    if not file.exists():
        random = np.random.default_rng(plan.seed)
        prompts, params = [], []
        for number in range(plan.own_tokens // OWN_LENGTH):
            start = int(random.integers(len(corpus.source) - BEGINNING))
            length = int(random.integers(1, BEGINNING))
            prompts.append(corpus.source[start : start + length].tolist())
            temperature = float(number % 2)
            params.append(
                SamplingParams(
                    max_tokens=OWN_LENGTH, temperature=temperature, seed=number, ignore_eos=True
                )
            )
        with LLM(out / DEMO_TARGET.name, drafter="none") as llm:
            outputs = llm.generate(prompts, params)
        ids = [token for o in outputs for token in o.prompt_token_ids + o.token_ids]
        half = file.with_suffix(".part")
        with half.open("wb") as opened:
            np.save(opened, np.array(ids, dtype=np.uint16))
        half.replace(file)
    own: NDArray[np.uint16] = np.load(file)
    return own


def build(size: Size, plan: Plan, tokenizer: Any) -> Any:
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (END_TURN, END_OF_TEXT)]
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=plan.vocab_size,
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
    """The draft's embedding is the target's along its first principal directions (Eckart and Young
    1936), so that from the first step on words lie beside those that the target takes for alike.
    """
    embedding = draft.get_input_embeddings().weight
    u, s, _ = torch.linalg.svd(target.get_input_embeddings().weight.detach(), full_matrices=False)
    width = min(embedding.shape[1], len(s))
    embedding.data[:, :width] = (u * s)[:, :width]


Loss = Callable[[Batch], float]  # in nats a label; adds its gradients


def next_token_loss(model: Any) -> Loss:
    def loss(b: Batch) -> float:
        labels = b.labels[b.labels != IGNORED]
        labels = F.pad(labels, (0, -len(labels) % PART), value=IGNORED)

        def entropy(logits: Tensor, part: slice) -> Tensor:
            return F.cross_entropy(logits, labels[part], reduction="sum", ignore_index=IGNORED)

        return by_parts(model, b, entropy)

    return loss


def distillation_loss(draft: Any, target: Any) -> Loss:
    """KL(target || draft) over the positions that have a label (Hinton et al. 2015, T = 1)."""

    def loss(b: Batch) -> float:
        with torch.no_grad():
            wanted = hidden_of_labels(target, b)

        def divergence(logits: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                want = target.lm_head(wanted[part]).float().log_softmax(-1)
            return F.kl_div(logits.log_softmax(-1), want, reduction="sum", log_target=True)

        return by_parts(draft, b, divergence)

    return loss


def by_parts(model: Any, b: Batch, sum_of: Callable[[Tensor, slice], Tensor]) -> float:
    """The mean over the labels of a loss that is a sum over [PART, V] float32 logits, and backward
    through it.

    All logits at once would take gigabytes. Rows of zeros fill the last part: libraries keep
    something for every shape they meet, and the heap would come to be full of holes.
    """
    hidden = hidden_of_labels(model, b)
    leaf, total = hidden.detach().requires_grad_(), 0.0
    num_labels = int((b.labels != IGNORED).sum())
    for start in range(0, len(leaf), PART):
        part = slice(start, start + PART)
        value = sum_of(model.lm_head(leaf[part]).float(), part) / num_labels
        torch.autograd.backward(value)
        total += value.item()
    torch.autograd.backward(hidden, leaf.grad)
    return total


def hidden_of_labels(model: Any, b: Batch) -> Tensor:
    """[n, hidden], for the positions that have a label; zeros up to a multiple of PART.

    Zeros make uniform logits, of any model: there is nothing in them for a loss.
    """
    hidden: Tensor = model.model(b.token_ids).last_hidden_state[b.labels != IGNORED]
    return F.pad(hidden, (0, 0, 0, -len(hidden) % PART))


class Stage(NamedTuple):
    folder: Path
    num_tokens: int
    talk_share: float
    peak_rate: float


def learn(stage: Stage, model: nn.Module, plan: Plan, corpus: Corpus, loss: Loss) -> None:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW (Loshchilov and Hutter 2019) for
    the rest, in bf16 autocast; picks up where it was stopped.
    """
    folder, num_steps = stage.folder, max(1, stage.num_tokens // plan.step_tokens)
    optimizers = build_optimizers(model, stage.peak_rate)
    first = load_state(folder, model, optimizers)
    saved_at = monotonic()
    for step in progress(folder.name, first, num_steps):
        started_at = monotonic()
        length = plan.length_of(step)
        num_rows = plan.step_tokens // length
        drawn = batch(corpus, plan.seed, step, num_rows, length, stage.talk_share)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(drawn)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = stage.peak_rate * rate(step, num_steps)
            optimizer.step()
        log(folder, Step(step, round(value, 4), round(monotonic() - started_at, 3)))
        if step + 1 == num_steps or monotonic() - saved_at > SAVE_SECONDS:
            save_state(folder, model, optimizers, step + 1)
            saved_at = monotonic()


def build_optimizers(model: nn.Module, peak_rate: float) -> list[torch.optim.Optimizer]:
    """Muon's steps are scaled so that AdamW's rate and decay suit both (Liu et al. 2025)."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
    others = [p for name, p in named if not (".layers." in name and p.ndim == 2)]
    muon = torch.optim.Muon(
        matrices, lr=peak_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=peak_rate, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    return [muon, adamw]


def rate(step: int, num_steps: int) -> float:
    """A linear start, a plateau, and a cosine down to a hundredth over the last two fifths."""
    warmup, decay = max(1, num_steps // 50), max(1, 2 * num_steps // 5)
    fall = (step - (num_steps - decay)) / decay
    down = 0.505 + 0.495 * math.cos(math.pi * max(0.0, fall))
    return min((step + 1) / warmup, down)


def progress(name: str, first: int, last: int) -> Iterator[int]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=last, completed=first)
        for step in range(first, last):
            yield step
            bar.update(task, completed=step + 1)


class Step(msgspec.Struct, frozen=True):
    """A line of a stage's log."""

    step: int
    loss: float
    seconds: float | None = None


def log(folder: Path, step: Step) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(step) + b"\n")


def facts(out: Path, plan: Plan) -> dict[str, Any]:
    """For the card. Hours go by the median step, which a busy neighbour moves little."""
    hours = {}
    for stage in ("target", "draft"):
        lines = (out / stage / "log.jsonl").read_bytes().splitlines()
        steps = [msgspec.json.decode(line, type=Step) for line in lines]
        seconds = [step.seconds for step in steps if step.seconds is not None]
        hours[stage] = round(median(seconds) * (1 + steps[-1].step) / 3600, 2)
    return {
        "hours": hours,
        "tokens": {"target": plan.target_tokens, "draft": plan.draft_tokens},
        "machine": f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


Optimizers = list[torch.optim.Optimizer]


def save_state(folder: Path, model: nn.Module, optimizers: Optimizers, step: int) -> None:
    """As one file, put in place in one move: a kill leaves the last one whole."""
    state = {f"model.{k}": v.detach() for k, v in model.named_parameters()}
    for n, optimizer in enumerate(optimizers):
        for i, slots in optimizer.state_dict()["state"].items():
            state |= {f"{n}.{i}.{k}": v for k, v in slots.items()}
    half = folder / "state.part"
    save_file(state, half, {"step": str(step)})
    half.replace(folder / "state.safetensors")


def load_state(folder: Path, model: nn.Module, optimizers: Optimizers) -> int:
    """The number of steps that have been done."""
    file = folder / "state.safetensors"
    if not file.exists():
        return 0
    with safe_open(file, "pt") as state:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(state.get_tensor(f"model.{name}"))
        keys = [key.split(".") for key in state.keys() if not key.startswith("model.")]  # noqa: SIM118
        for n, optimizer in enumerate(optimizers):
            slots: dict[int, dict[str, Tensor]] = {}
            for number, i, name in keys:
                if int(number) == n:
                    slots.setdefault(int(i), {})[name] = state.get_tensor(f"{n}.{i}.{name}")
            optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
        return int(state.metadata()["step"])


def export(folder: Path, model: Any, tokenizer: Any) -> None:
    """As any model's folder: bf16 weights in shards, config, tokenizer."""
    copy = deepcopy(model).to(torch.bfloat16)
    copy.save_pretrained(folder, max_shard_size="14MB")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as e:
        sys.exit(f"error: {e}")
