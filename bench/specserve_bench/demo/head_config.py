"""What the training of an EAGLE-3 head is made of: sizes, tokens, draft steps, rates."""

from typing import Annotated

from msgspec import Meta

from specserve_bench.demo.training_config import Course, Positive, Rate, Share


class HeadConfig(Course, frozen=True, forbid_unknown_fields=True):
    """The defaults make the demo target's head on one core; a large model's takes more tokens."""

    own_tokens: Annotated[int, Meta(ge=512)] = 400_000  # of the demo target's own continuations
    step_tokens: Positive = 1024
    long_length: Positive = 512
    tokens: Positive = 540_000
    draft_vocab_size: Positive = 4096  # the tokens that are most frequent in the text
    mlp: Positive | None = None  # width of the head's MLP; the target's
    draft_steps: Annotated[int, Meta(ge=1, le=16)] = 3  # of the training-time test
    step_weight: Annotated[float, Meta(gt=0, le=1)] = 0.8  # of each draft step's loss to the last's
    talk_share: Share = 0.6
    peak_rate: Rate = 2e-3
    weight_decay: Share = 0.1
    held_out: Annotated[float, Meta(ge=0, le=0.5)] = 0.02  # share of --text, for the card's figures
    ask_every: Positive = 16  # of the demo's questions, likewise
    threads: Positive | None = None  # all; weights depend on them, as sums of gradients do
