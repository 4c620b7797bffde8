"""What is known of any model before its weights are read, whatever code computes it."""

from typing import ClassVar

import msgspec

from specserve.models.quantized.config import Quantization


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that callers of a model need; of a kind of model for each implementation."""

    implementation: ClassVar[str]  # native | transformers
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    quantization: Quantization | None

    @property
    def num_layer_weights(self) -> int:
        """Weights in the linear maps of all layers: a row is multiplied by each of them. Of a model
        that transformers computes, about so many.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)
