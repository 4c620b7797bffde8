"""The supported model families by architecture, with their defaults of config fields."""

from specserve.models.dense_families import DENSE
from specserve.models.expert_families import WITH_EXPERTS
from specserve.models.gemma_families import GEMMAS
from specserve.models.recurrent_families import RECURRENT

FAMILIES = DENSE | GEMMAS | WITH_EXPERTS | RECURRENT

UNSUPPORTED = {  # the reason, by architecture
    "Phi3SmallForCausalLM": "its attention is block-sparse. Use Phi-3 mini or Phi-3 medium",
}
