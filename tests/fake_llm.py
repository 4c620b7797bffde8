"""A stand-in for `LLM` and its outputs, for tests of the command line and the documents."""

import msgspec

from specserve.exchange.messages import SpeculationState


class FakeParams(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    return_speculation_details: bool = False


class Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 2


class Timing(msgspec.Struct, frozen=True):
    ttft_ms: float = 40.0
    total_ms: float = 100.0


class Speculation(msgspec.Struct, frozen=True):
    drafter: str
    mean_acceptance_length: float | None
    drafted: int = 1


class FakeOutput(msgspec.Struct, frozen=True):
    text: str
    speculation: Speculation
    usage: Usage = Usage()
    timing: Timing = Timing()
    finish_reason: str = "stop"


class FakeLLM:
    """Generates every prompt backwards, a letter a step; the last instance is `FakeLLM.last`."""

    folders = ()

    def __init__(
        self,
        model,
        draft_model=None,
        drafter=None,
        config=None,
        set=None,
        progress=True,
        quantize=None,
        draft_quantize=None,
        draft_head=None,
    ):
        self.model, self.draft_model, self.drafter = model, draft_model, drafter
        self.draft_head = draft_head
        self.quantize, self.draft_quantize = quantize, draft_quantize
        self.config, self.set, self.progress = config, set, progress
        self.params, self.is_closed = None, False
        FakeLLM.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def stream(self, prompt, params):
        self.params = params
        for letter in reversed(prompt):
            yield letter, [ord(letter)]
        return self.output(prompt)

    def watch(self, prompt, params):
        self.params = params
        for letter in reversed(prompt):
            yield letter, [ord(letter)], []
        return self.output(prompt)

    def speculation(self):
        return SpeculationState(sources=("ngram",))

    def generate(self, prompts, params):
        self.params = params
        return [self.output(p) for p in prompts]

    def output(self, prompt):
        name = self.drafter or "ngram"
        return FakeOutput(prompt[::-1], Speculation(name, None if name == "none" else 1.5))
