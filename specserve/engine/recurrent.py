"""Features that do not support models with recurrent layers."""

from specserve.config import Config
from specserve.errors import ConfigError
from specserve.models.decoder import LoadedModel


def check_draft(config: Config, draft: LoadedModel) -> None:
    """Raise ConfigError for tiers, which do not store the states of draft models."""
    if not draft.state_layouts():
        return
    memory = config.memory
    settings = {
        "memory.host_bytes": memory.host_bytes > 0,
        "memory.disk_path": memory.disk_path is not None,
    }
    for name in (name for name, is_set in settings.items() if is_set):
        raise ConfigError(
            f"{name} does not support draft models with recurrent layers, such as "
            f"drafter.model = {config.draft!r}. Remove one of the two"
        )
