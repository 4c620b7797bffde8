"""Steps before their draft tokens are chosen, and measured steps without drafting."""

from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

from specserve.exchange.messages import PlainStep
from specserve.speculation.constants import LATEST
from specserve_kernels.cpu import drafting


class Step(msgspec.Struct):
    """A step before its draft tokens are chosen, and its allowed time."""

    rows: int  # roots and prompt rows
    context: int  # tokens whose KV is read
    requests: int
    num_roots: int
    prompt_rows: int = 0
    attended: int = 0  # tokens of context, summed over rows
    # Tokens of context of all roots: each row of a draft attends to its root's context
    root_context: int = 0
    spent: float = 0.0  # seconds of drafting, expected until it is done
    allowed: float = float("inf")  # seconds until the tightest target is missed
    kept: float = 1.0  # share of the expected draft tokens that are accepted

    @property
    def native(self) -> drafting.StepFields:
        """Return it for code in C++."""
        rows = self.rows, self.num_roots, self.prompt_rows
        context = self.context, self.requests, self.attended, self.root_context
        return drafting.StepFields(*rows, *context, self.spent, self.allowed, self.kept)

    @property
    def root_tokens(self) -> float:
        """Return the tokens of the roots, in expected draft tokens: plans compare both."""
        return self.num_roots / self.kept

    def attended_with(self, drafts: int) -> float:
        """Return `attended` with so many draft tokens added."""
        return self.attended + drafts * self.root_context / max(self.num_roots, 1)

    def with_prompt(self, rows: int, context: int) -> "Step":
        """Add rows of another prompt; each of them attends to `context` tokens."""
        return msgspec.structs.replace(
            self,
            rows=self.rows + rows,
            context=self.context + context,
            requests=self.requests + 1,
            prompt_rows=self.prompt_rows + rows,
            attended=self.attended + rows * context,
        )

    @property
    def without_prompts(self) -> "Step":
        """Return the step with its roots only."""
        if not self.prompt_rows:
            return self
        rows, context = self.rows - self.prompt_rows, self.root_context
        return msgspec.structs.replace(
            self, rows=rows, context=context, requests=rows, prompt_rows=0, attended=context
        )

    def allowed_with_draft(self, roots: float) -> float:
        """Return the allowed time with draft tokens, if the roots take `roots` seconds. A target
        that the roots miss does not limit drafts, because only drafts can meet it.
        """
        return self.allowed if roots <= self.allowed else float("inf")


def prefill_value(prompts: float, tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the value of prompt rows in tokens: as many as the streams would get in the same time.

    Otherwise time would seem cheap in a step with long prompts. Draft tokens would lengthen it, for
    tokens that the next steps produce faster.
    """
    rates = (t / (s - prompts) for t, s in zip(tokens, seconds, strict=True) if s > prompts)
    return prompts * max(rates, default=0.0)


class PlainSteps:
    """Measured whole steps without drafting, grouped by context up to the next power of two."""

    def __init__(self) -> None:
        self.steps: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, step: Step, rows: int, seconds: float) -> None:
        """Count a step of `rows` rows, draft tokens included, if its only row is a request's
        root.
        """
        if rows != 1 or step.num_roots != 1:
            return
        latest = self.steps.setdefault(step.context.bit_length(), deque(maxlen=LATEST))
        latest.append((step.context, seconds))

    def reset(self) -> None:
        self.steps = {}

    @property
    def state(self) -> list[PlainStep]:
        """Return the medians by rising context."""
        each = [[*zip(*self.steps[size], strict=True)] for size in sorted(self.steps)]
        return [PlainStep(int(median(c)), median(s), len(s)) for c, s in each]
