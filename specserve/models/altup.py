"""Several residual streams, of which a layer computes the first one, as in Gemma 3n.

AltUp (Baykal et al. 2301.13310) predicts all streams before a layer, and corrects them with the
layer's output. LAuReL (Menghani et al. 2411.07501) adds a low-rank map of a layer's input. The
streams stand next to each other in a row: N streams of width K are [R, N K].
"""

from typing import Any, NamedTuple

from torch import Tensor

from specserve_kernels import Ops

HALF = 2.0**-0.5  # factor of a layer's input after attention and LAuReL


class StreamMaps(NamedTuple):
    """A model's maps between one stream and N.

    spread  packed [(N - 1) K, K]
    merge   N - 1 times packed [K, K]
    """

    spread: Any
    merge: tuple[Any, ...]

    def spread_out(self, ops: Ops, x: Tensor) -> Tensor:
        """The streams of an embedding [R, K]."""
        return ops.spread_streams(ops.linear(x, self.spread), x)

    def merged(self, ops: Ops, streams: Tensor, width: int) -> Tensor:
        """The mean of all streams, which are mapped and scaled to the size of the first one."""
        first = ops.take_columns(streams, 0, width)
        total = ops.copy(first)
        for i, packed in enumerate(self.merge, 1):
            x = ops.linear(ops.take_columns(streams, i * width, (i + 1) * width), packed)
            total = ops.add_matched(x, first, total)
        return ops.scale(total, 1 / (1 + len(self.merge)))


class AltUp(NamedTuple):
    """A layer's weights of AltUp and LAuReL. Maps are packed, norms are float32.

    router_norm   [K]        divided by K
    router        [N, K]
    predict       [N N, N]
    correct       [N, N]
    output_scale  [K]        float32, of the stream that gates the layer's inputs; None: no factor
    left, right   [rank, K], [K, rank]  LAuReL
    laurel_norm   [K]
    """

    router_norm: Tensor
    router: Any
    predict: Any
    correct: Any
    output_scale: Tensor | None
    left: Any
    right: Any
    laurel_norm: Tensor

    def modalities(self, ops: Ops, x: Tensor, eps: float) -> Tensor:
        routed = ops.linear(ops.rms_norm(x, self.router_norm, eps), self.router)
        return ops.soft_cap(routed, 1.0)  # tanh

    def predicted(self, ops: Ops, streams: Tensor, width: int, eps: float) -> Tensor:
        modalities = self.modalities(ops, ops.take_columns(streams, 0, width), eps)
        return ops.mix_streams(streams, ops.linear(modalities, self.predict))

    def corrected(self, ops: Ops, streams: Tensor, x: Tensor, eps: float) -> Tensor:
        modalities = self.modalities(ops, x, eps)
        return ops.correct_streams(streams, x, ops.linear(modalities, self.correct))

    def laurel(self, ops: Ops, x: Tensor) -> Tensor:
        """The low-rank map of a layer's normalized input, before its norm."""
        return ops.linear(ops.linear(x, self.left), self.right)

    def scaled(self, ops: Ops, streams: Tensor, width: int) -> Tensor:
        if self.output_scale is None:
            return ops.take_columns(streams, 0, width)
        return ops.weigh_columns(streams, 0, self.output_scale)
