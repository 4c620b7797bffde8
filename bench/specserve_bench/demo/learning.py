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

from specserve_bench.demo.batches import Batch, Corpus, batch
from specserve_bench.demo.losses import Loss
from specserve_bench.demo.training_config import Course

SAVE_SECONDS = 120.0  # between saved states: the work that a killed process loses
LOG_STEPS = 20  # of a line of the log: reading a loss waits for the device


Optimizers = list[torch.optim.Optimizer]


class Stage(NamedTuple):
    folder: Path
    num_tokens: int
    talk_share: float
    peak_rate: float
    weight_decay: float
    is_rounded: bool = True  # products in bf16, sums and weights in float32
    has_muon: bool = True  # it multiplies in bf16, whatever the weights are


def learn(stage: Stage, model: nn.Module, config: Course, corpus: Corpus, loss: Loss) -> None:
    """Train from the step after the saved state's last."""
    folder, num_steps = stage.folder, max(1, stage.num_tokens // config.step_tokens)
    optimizers = build_optimizers(model, stage)
    first = load_state(folder, model, optimizers)
    values: list[Tensor] = []
    saved_at = started_at = monotonic()
    for step in progress(folder.name, first, num_steps):
        set_rate(optimizers, stage.peak_rate * rate(step, num_steps))
        length = config.length_of(step)
        num_rows = config.step_tokens // length
        drawn = batch(corpus, config.seed, step, num_rows, length, stage.talk_share)
        values.append(take_step(stage, model, optimizers, loss, drawn))
        is_saved = step + 1 == num_steps or monotonic() - saved_at > SAVE_SECONDS
        if is_saved or len(values) == LOG_STEPS:
            log(folder, summary(step, values, started_at))
            values, started_at = [], monotonic()
        if is_saved:
            save_state(folder, model, optimizers, step + 1)
            saved_at = started_at = monotonic()


def take_step(
    stage: Stage, model: nn.Module, optimizers: Optimizers, loss: Loss, drawn: Batch
) -> Tensor:
    model.zero_grad()
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=stage.is_rounded):
        value = loss(drawn)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return value


def set_rate(optimizers: Optimizers, value: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = value


def build_optimizers(model: nn.Module, stage: Stage) -> Optimizers:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW (Loshchilov and Hutter 2019) for
    the rest. Muon's steps are scaled so that AdamW's rate and decay suit both (Liu et al. 2025).
    """
    rate, decay = stage.peak_rate, stage.weight_decay
    named = list(model.named_parameters())
    matrices = [p for name, p in named if stage.has_muon and ".layers." in name and p.ndim == 2]
    others = [p for name, p in named if not any(p is matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr=rate, weight_decay=decay, betas=(0.9, 0.95), fused=True)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
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
    """A line of a stage's log: the last of a few steps, their mean loss and seconds of each."""

    step: int
    loss: float
    seconds: float | None = None


def summary(step: int, values: list[Tensor], started_at: float) -> Step:
    loss = float(torch.stack(values).mean())  # waits until the steps have been taken
    return Step(step, round(loss, 4), round((monotonic() - started_at) / len(values), 4))


def log(folder: Path, step: Step) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(step) + b"\n")


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
