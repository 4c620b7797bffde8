"""lm-eval, which evaluates a model of its own.

A request is {"task", "numbers", "settings"}: a task's name, which of its items, or null for all,
and attributes that the model is to have. The answer is {"seconds", "scores", "answers"}: the time
of the model's calls, the task's metrics, and each item's number and result. Needs only lm-eval and
the standard library.
"""

from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter
from typing import Any

from specserve_bench.peers.protocol import answer_requests


class Evaluate:
    """A model of lm-eval with its arguments, and the folder of the tasks."""

    def __init__(self, model: str, args: dict[str, Any], folder: str) -> None:
        from lm_eval import evaluator
        from lm_eval.api.registry import get_model
        from lm_eval.tasks import TaskManager

        self.evaluator = evaluator
        self.tasks = TaskManager(include_path=folder, include_defaults=False)
        self.model = get_model(model)(**args)
        self.seconds = 0.0
        for name in ("loglikelihood", "generate_until"):
            setattr(self.model, name, self.timed(getattr(self.model, name)))

    def timed(self, call: Any) -> Any:
        def with_time(requests: Any, **options: Any) -> Any:
            start = perf_counter()
            try:
                return call(requests, **options)
            finally:
                self.seconds += perf_counter() - start

        return with_time

    def __call__(
        self, task: str, numbers: list[int] | None, settings: dict[str, Any]
    ) -> dict[str, Any]:
        for name, value in settings.items():
            if not hasattr(self.model, name):
                raise AttributeError(f"lm-eval's model has no {name}")
            setattr(self.model, name, value)
        self.seconds = 0.0
        told = self.evaluator.simple_evaluate(
            model=self.model,
            tasks=[task],
            task_manager=self.tasks,
            samples=None if numbers is None else {task: numbers},
            bootstrap_iters=0,
        )
        answers = {each["doc_id"]: each["filtered_resps"] for each in told["samples"][task]}
        return {
            "seconds": self.seconds,
            "scores": {k: v for k, v in told["results"][task].items() if isinstance(v, float)},
            "answers": sorted(answers.items()),
        }


def start(given: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], Any]]:
    evaluate = Evaluate(**given)
    return version("lm_eval"), lambda asked: evaluate(**asked)


if __name__ == "__main__":
    answer_requests(start)
