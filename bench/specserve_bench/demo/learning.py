"""Training steps of one model, their log, and the saved state that they continue from."""

import math
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specserve_bench.demo.batches import Corpus, batch
from specserve_bench.demo.losses import Loss
from specserve_bench.demo.training_config import TrainingConfig

SAVE_SECONDS = 300.0  # between saved states: the work that a killed process loses


class Stage(NamedTuple):
    folder: Path
    num_tokens: int
    talk_share: float
    peak_rate: float


def learn(
    stage: Stage, model: nn.Module, config: TrainingConfig, corpus: Corpus, loss: Loss
) -> None:
    """Train from the step after the saved state's last, in bf16 autocast: Muon (Jordan et al. 2024)
    for the layers' matrices, AdamW (Loshchilov and Hutter 2019) for the rest.
    """
    folder, num_steps = stage.folder, max(1, stage.num_tokens // config.step_tokens)
    optimizers = build_optimizers(model, stage.peak_rate)
    first = load_state(folder, model, optimizers)
    saved_at = monotonic()
    for step in progress(folder.name, first, num_steps):
        started_at = monotonic()
        length = config.length_of(step)
        num_rows = config.step_tokens // length
        drawn = batch(corpus, config.seed, step, num_rows, length, stage.talk_share)
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
    """Share of the peak rate: linear warm-up, plateau, cosine to 1 % over the last two fifths."""
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


Optimizers = list[torch.optim.Optimizer]


def save_state(folder: Path, model: nn.Module, optimizers: Optimizers, step: int) -> None:
    """Save as one file, replaced atomically: a killed process leaves the previous one."""
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
