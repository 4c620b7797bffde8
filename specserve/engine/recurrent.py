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
    memory = config.memory
    unsupported = {
        "memory.host_bytes": memory.host_bytes > 0,
        "memory.disk_path": memory.disk_path is not None,
        "lora.max_loras": config.lora.num_slots > 0,
        "drafter.head": head is not None,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{name} does not support models with recurrent layers, such as this "
                f"{target.config.architecture}. Remove it"
            )


def check_draft(config: Config, draft: LoadedModel) -> None:
    """Raise ConfigError for a draft model with recurrent layers."""
    if draft.state_layouts():
        raise ConfigError(
            f"drafter.model = {config.draft!r} has recurrent layers, which only target models may "
            "have. Use another draft model"
        )
