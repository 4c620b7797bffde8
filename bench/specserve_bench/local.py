"""Requests to an engine in this process."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specserve import LLM, SamplingParams, StructuredOutputsParams
from specserve.api.base import Resolved
from specserve.api.outputs import Generation
from specserve.engine.engine import Engine
from specserve_bench.results import (
    Load,
    MeasuredRequest,
    Round,
    Speculation,
    gaps,
    output_hash,
    spread,
)
from specserve_bench.workloads import Ask, Workload


class Going(NamedTuple):
    """A running request, and the times of its tokens."""

    number: int
    due_at: float
    generation: Generation
    events: list[float]


class Local:
    """Steps an LLM; tests replace `clock` and `wait`.

    is_warm     a round begins with what sources have learnt in the rounds before, and with the
                costs that these have shown
    is_lasting  a round begins as the one before ended, with a full prefix cache, too
    """

    def __init__(
        self,
        llm: LLM,
        clock: Callable[[], float] = time.perf_counter,
        wait: Callable[[float], None] = time.sleep,
        is_warm: bool = False,
        is_lasting: bool = False,
    ) -> None:
        self.llm, self.clock, self.wait = llm, clock, wait
        self.is_warm, self.is_lasting = is_warm or is_lasting, is_lasting

    def run(self, workload: Workload, load: Load) -> Round:
        """Every request once; one that is due starts between two steps.

        Usually the prefix cache is emptied first, and what was learnt is forgotten, so that no
        round gains from the one before.
        """
        if not self.is_lasting:
            self.llm.reset_cache()
        if not self.is_warm:
            reset_learned(self.llm.engine)
        prompts = [self.check(ask) for ask in workload.asks]
        due, most = load.due_times(len(prompts)), load.concurrency or len(prompts)
        stats = self.llm.engine.stats
        before = stats.draft_seconds, stats.verify_seconds, stats.step_seconds
        started_at = self.clock()
        running: list[Going] = []
        done: list[Going] = []
        started = 0
        while started < len(prompts) or running:
            now = self.clock() - started_at
            while started < len(prompts) and len(running) < most and due[started] <= now:
                # A request is due when there is room for it, if the concurrency is fixed.
                at = now if load.rate is None else due[started]
                [generation] = self.llm.start(*prompts[started])
                running.append(Going(started, at, generation, []))
                started += 1
            if not running:
                self.wait(due[started] - now)
                continue
            self.step(running, started_at)
            ended = [g for g in running if g.generation.is_done]
            self.llm.end([g.generation for g in ended])
            running = [g for g in running if not g.generation.is_done]
            done += ended
        after = stats.draft_seconds, stats.verify_seconds, stats.step_seconds
        drafting, verifying, stepping = (b - a for a, b in zip(before, after, strict=True))
        return finished(sorted(done), drafting, verifying, stepping)

    def check(self, ask: Ask) -> tuple[list[int], Resolved]:
        params = SamplingParams(
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            top_p=1.0,
            prediction=ask.prediction,
            speculation=ask.speculation,
            structured_outputs=None
            if ask.schema is None
            else StructuredOutputsParams(json=ask.schema),
        )
        prompt: Any = ask.prompt
        if not isinstance(prompt, str):
            prompt = self.llm.input_processor.render(prompt)
        return self.llm.check(prompt, params)

    def record(self, asks: Sequence[Ask]) -> list[str]:
        """The responses of the target model."""
        checked = [self.check(ask) for ask in asks]
        prompts, params = [ids for ids, _ in checked], [asked.params for _, asked in checked]
        outputs = self.llm.generate(prompts, params)
        return [output.text for output in outputs]

    def step(self, running: Sequence[Going], started_at: float) -> None:
        counts = [len(g.generation.token_ids) for g in running]
        self.llm.step()
        now = self.clock() - started_at
        for going, count in zip(running, counts, strict=True):
            if len(going.generation.token_ids) > count:
                going.events.append(now)


def finished(done: Sequence[Going], drafting: float, verifying: float, stepping: float) -> Round:
    return Round(
        seconds=max(g.events[-1] for g in done) - min(g.due_at for g in done),
        requests=[measured(g) for g in done],
        itl_ms=spread([gap for g in done for gap in gaps(g.events)]),
        output_hash=output_hash([(g.generation.text, g.generation.finish_reason) for g in done]),
        speculation=speculation([g.generation for g in done]),
        draft_seconds=drafting,
        verify_seconds=verifying,
        step_seconds=stepping,
    )


def measured(going: Going) -> MeasuredRequest:
    events = going.events
    return MeasuredRequest(
        number=going.number,
        arrived_at=going.due_at,
        first_at=events[0],
        last_at=events[-1],
        num_events=len(events),
        longest_stall_ms=max(gaps(events), default=None),
        prompt_tokens=len(going.generation.prompt),
        completion_tokens=len(going.generation.token_ids),
    )


def speculation(generations: Sequence[Generation]) -> Speculation:
    histogram = Counter(accepted for g in generations for _, accepted in g.steps)
    return Speculation(
        steps=sum(len(g.steps) for g in generations),
        tokens=sum(g.num_step_tokens for g in generations),
        drafted=sum(g.num_drafted for g in generations),
        accepted=[histogram[n] for n in range(max(histogram, default=-1) + 1)],
    )


def reset_learned(engine: Engine) -> None:
    """Drop what steps have shown of costs and of draft tokens; running requests continue."""
    engine.scheduler.costs.reset()
    engine.plain_steps.reset()
    for model in engine.draft_models:
        model.costs.reset()
        model.first_costs.reset()
    if engine.speculator is not None:
        engine.speculator.reset()
