"""One HTTP request's generations: the engine fills them, its response drains them."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from specserve.errors import EngineDied, Overloaded, SpecserveError
from specserve.exchange.client import EngineClient
from specserve.exchange.sampling_params import Sampling
from specserve.exchange.step_output import StepOutput
from specserve.generation import Generation
from specserve.server.metrics import Metrics


class Said(NamedTuple):
    """What one step added to one choice."""

    choice: int
    text: str
    is_last: bool


class Answer:
    """Choices in order of their prompts, those of one prompt side by side. `release` it whatever
    happens: that frees their blocks.
    """

    def __init__(
        self, engine: EngineClient, live: "set[Answer]", metrics: Metrics, arrived: float
    ) -> None:
        self.engine, self.live, self.metrics, self.arrived = engine, live, metrics, arrived
        self.generations: list[Generation] = []
        self.firsts: list[Generation] = []  # of each prompt
        self.num_said = 0  # tokens
        self.said: deque[Said] = deque()
        self.error: SpecserveError | None = None
        self.has_left = False  # the client
        self.waiter: asyncio.Future[None] | None = None
        live.add(self)  # until it is released

    def ask(self, prompt: Sequence[int], samplings: Sequence[Sampling], tokenizer: Any) -> None:
        """One more prompt, and all its choices."""
        begin = len(self.generations)
        listeners = [Choice(self, begin + i) for i in range(len(samplings))]
        ids = self.engine.add(prompt, samplings, listeners)
        for id, sampling in zip(ids, samplings, strict=True):
            generation = Generation(id, prompt, sampling, tokenizer)
            generation.arrived = self.arrived
            self.generations.append(generation)
        self.firsts.append(self.generations[begin])

    @property
    def is_done(self) -> bool:
        return all(g.is_done for g in self.generations)

    @property
    def is_over(self) -> bool:
        """Nothing more will be said, whatever the reason."""
        return self.is_done or self.has_left or self.error is not None

    def end(self, error: SpecserveError) -> None:
        """Break off; a client that still listens is told why."""
        if not self.is_over:
            self.error = error
            self.wake()
            self.release()

    def leave(self) -> None:
        """The client has gone."""
        self.has_left = True
        self.wake()
        self.release()

    def release(self) -> None:
        """Nobody listens any more: what still runs is given up."""
        if self not in self.live:
            return
        self.live.discard(self)
        for generation in self.generations:
            self.engine.finish(generation.id)
            broken_off = "error" if self.error is not None else "abort"
            reason = generation.finish_reason or broken_off
            self.metrics.on_end(generation, reason, generation in self.firsts)

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self, seconds: float | None = None) -> list[Said]:
        """What has been said since the last call; nothing after so many silent seconds."""
        if not self.said and not self.is_over:
            self.waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait((self.waiter,), timeout=seconds)
        said = list(self.said)
        self.said.clear()
        return said


class Choice:
    """The engine's listener for one of an answer's generations."""

    def __init__(self, answer: Answer, index: int) -> None:
        self.answer, self.index = answer, index

    def push(self, output: StepOutput) -> None:
        answer = self.answer
        if output.failure:
            answer.end(Overloaded(output.failure))
            return
        generation = answer.generations[self.index]
        before = len(generation.token_ids), generation.last_token_at
        text = generation.push(output)
        answer.num_said += len(generation.token_ids) - before[0]
        answer.metrics.on_tokens(generation, *before)
        if generation.is_done:  # the engine may not know it yet
            answer.engine.finish(generation.id)
        answer.said.append(Said(self.index, text, generation.is_done))
        answer.wake()

    def fail(self, message: str) -> None:
        self.answer.end(EngineDied(message))
