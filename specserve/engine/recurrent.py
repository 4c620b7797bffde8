"""Features that do not support models with recurrent layers."""

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder import LoadedModel
from specserve.models.draft_head import DraftHead


def check_recurrent(
    config: Config, target: LoadedModel, draft: LoadedModel | None, head: DraftHead | None
) -> None:
    """Raise ConfigError for features that do not support the models' recurrent layers."""
    if draft is not None:
        check_draft(config, draft)
    if not target.state_layouts():
        return
    if head is not None:
        raise ConfigError(
            "drafter.head does not support models with recurrent layers, such as this "
            f"{target.config.architecture}. Remove it"
        )


def check_draft(config: Config, draft: LoadedModel) -> None:
    """Raise ConfigError for a draft model with recurrent layers."""
    if draft.state_layouts():
        raise ConfigError(
            f"drafter.model = {config.draft!r} has recurrent layers, which only target models may "
            "have. Use another draft model"
        )
