"""200 JSON schemas of the kinds that JSONSchemaBench has, which texts are made to obey."""

from specserve_bench.schemas.configs import CONFIGS
from specserve_bench.schemas.content import CONTENT
from specserve_bench.schemas.events import EVENTS
from specserve_bench.schemas.functions import FUNCTIONS
from specserve_bench.schemas.kubernetes import KUBERNETES
from specserve_bench.schemas.parts import Schema

KINDS = {
    "function": FUNCTIONS,
    "config": CONFIGS,
    "kubernetes": KUBERNETES,
    "event": EVENTS,
    "content": CONTENT,
}
SCHEMAS: dict[str, Schema] = {
    f"{kind}/{name}": schema for kind, those in KINDS.items() for name, schema in those.items()
}
FEW = [*SCHEMAS][::10]  # 20, of every kind
