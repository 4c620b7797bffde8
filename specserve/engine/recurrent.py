"""Features that do not support models with recurrent layers."""

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder import LoadedModel


def check_recurrent(config: Config, target: LoadedModel, draft: LoadedModel | None) -> None:
    """Raise ConfigError for features that do not support the models' recurrent layers."""
    if draft is not None:
        check_draft(config, draft)
    if not target.state_layouts():
        return
    settings = tiers(config) | {"lora.max_loras": config.lora.num_slots > 0}
    for name in (name for name, is_set in settings.items() if is_set):
        raise ConfigError(
            f"{name} does not support models with recurrent layers, such as this "
            f"{target.config.architecture}. Remove it"
        )


def check_draft(config: Config, draft: LoadedModel) -> None:
    """Do the same for a draft model."""
    if not draft.state_layouts():
        return
    for name in (name for name, is_set in tiers(config).items() if is_set):
        raise ConfigError(
            f"{name} does not support draft models with recurrent layers, such as "
            f"drafter.model = {config.draft!r}. Remove one of the two"
        )


def tiers(config: Config) -> dict[str, bool]:
    """The settings of tiers, which do not store states, and whether they are set."""
    memory = config.memory
    return {
        "memory.host_bytes": memory.host_bytes > 0,
        "memory.disk_path": memory.disk_path is not None,
    }
