"""Progress bars of loading and long runs, and a table of start-up times, on stderr."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from specserve.api.outputs import Generation


class LoadProgress:
    """A bar for each model, in bytes of weights loaded."""

    def __init__(self, enabled: bool) -> None:
        self.bar = progress_bar(enabled)
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.bar.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(f"loading {name}", total=total)
        self.bar.update(self.tasks[name], completed=done, total=total)


def show_phases(phases: Mapping[str, str]) -> None:
    table = Table(title="start-up", show_header=False, title_justify="left")
    for name, text in phases.items():
        table.add_row(name, text)
    Console(stderr=True).print(table)


def track(generations: Sequence[Generation], enabled: bool) -> Iterator[None]:
    """Yield until all generations are done, and show how many are."""
    with progress_bar(enabled) as bar:
        task = bar.add_task("prompts", total=len(generations))
        while (done := sum(each.is_done for each in generations)) < len(generations):
            bar.update(task, completed=done)
            yield
        bar.update(task, completed=done)


def progress_bar(enabled: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not enabled)
