"""A model that guesses level by level, and what its levels took in a step."""

from specserve.speculation.executor import ModelExecutor
from specserve_drafters.model_source import ModelSource


class Grower:
    """The draft model or the target's head, as a source of planned guesses."""

    def __init__(self, source: ModelSource, model: ModelExecutor) -> None:
        self.source, self.model = source, model
        self.begin()

    @property
    def name(self) -> str:
        return self.source.name

    def begin(self) -> None:
        """Begin a step."""
        self.seconds = 0.0  # of its levels
        self.catching_up = 0.0  # seconds that are not charged to the step
        self.is_trial_alone = False  # its levels were run for no other request than a trial's
