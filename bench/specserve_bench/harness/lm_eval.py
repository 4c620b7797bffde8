"""lm-eval in a process of its own, and the tasks that it is given: nothing is downloaded."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple, Self

import specserve_bench
from specserve.errors import ConfigError
from specserve_bench.peers.peer import environment

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LOGLIKELIHOOD = {
    "output_type": "loglikelihood",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}


class Evaluation(NamedTuple):
    """What lm-eval says of a task.

    seconds   of the calls of the model
    answers   by the number of the item: (loglikelihood, whether it is greedy) of each of its
              requests, or a generated text
    """

    seconds: float
    scores: Mapping[str, float]
    answers: Mapping[int, Any]


class LmEval:
    """A model of lm-eval, loaded; ended when the block ends."""

    def __init__(self, python: str, model: str, args: Mapping[str, Any], folder: Path) -> None:
        self.log = TemporaryFile()  # noqa: SIM115, closed with the process
        # A folder with nothing but this package, so that lm-eval finds its own packages alone.
        self.folder = TemporaryDirectory(prefix="specserve-lm-eval-")
        package = Path(specserve_bench.__file__).parent
        Path(self.folder.name, package.name).symlink_to(package)
        given = json.dumps({"model": model, "args": args, "folder": str(folder.resolve())})
        self.process = subprocess.Popen(
            [python, "-m", "specserve_bench.harness.evaluate", given],
            cwd=self.folder.name,
            env=environment() | OFFLINE | {"HF_HOME": os.path.join(self.folder.name, "cache")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def __enter__(self) -> Self:
        try:
            self.version: str = self.answer()["version"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()
        self.folder.cleanup()

    def run(
        self, task: str, numbers: Sequence[int] | None = None, **settings: object
    ) -> Evaluation:
        """`settings` are attributes of lm-eval's model."""
        assert self.process.stdin is not None
        asked = {"task": task, "numbers": numbers and list(numbers), "settings": settings}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        told = self.answer()
        return Evaluation(told["seconds"], told["scores"], dict(told["answers"]))

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise ConfigError(f"lm-eval ended: {self.log.read().decode(errors='replace')[-2000:]}")
        told = json.loads(line)
        if "error" in told:
            self.log.seek(0)
            log = self.log.read().decode(errors="replace")[-2000:]
            raise ConfigError(f"lm-eval failed: {told['error']}\n{log}")
        return told["ok"]


def write_task(
    folder: Path, name: str, docs: Sequence[Mapping[str, Any]], **config: object
) -> None:
    """A task of lm-eval: its items have a `context` and a `target`, which follows it directly."""
    items = folder / f"{name}.jsonl"
    items.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    told = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items.resolve())}},
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "metadata": {"version": 1},
    }
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(told | config))
