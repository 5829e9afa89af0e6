"""Normalization by statistics of one sample alone: of groups of channels, or of its trailing axes."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import whole, whole_list
from mlcompute.layers.layer import Forward
from mlcompute.layers.normalization import ChannelNormalization, Normalization
from mlcompute.layers.read_only import Copied, ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor


class GroupNormalizationLayer(ChannelNormalization):
    """y = gamma (x - m) / sqrt(v + epsilon) + beta, m and v per sample and group.   x (n, c, *)   ->   y like x

    group_count  groups of c / group_count neighbouring channels; m and v (biased) are taken over a whole group
    beta, gamma  c elements each, one per channel; None means 0 and 1
    """

    default_label = "GroupNorm"

    group_count = ReadOnly[int]("Number of groups of neighbouring channels.")

    def __init__(
        self,
        feature_channel_count: int,
        group_count: int,
        beta: Tensor | None = None,
        gamma: Tensor | None = None,
        variance_epsilon: float = 1e-5,
    ) -> None:
        super().__init__(feature_channel_count, beta, gamma, variance_epsilon)
        self._group_count = whole(self.who, "group_count", group_count, least=1)
        self.expect(
            self._feature_channel_count % self._group_count == 0,
            f"{self._feature_channel_count} channels cannot be divided into {self._group_count} equal groups",
            fix="give a group_count that divides feature_channel_count",
        )

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        size = self._feature_channel_count // self._group_count
        y = ops.normalize_groups(x, range(2, x.rank), 1, size, self._variance_epsilon)
        return self.scale_and_shift(run, y, self.per_channel(x))


class LayerNormalizationLayer(Normalization):
    """y = gamma (x - m) / sqrt(v + epsilon) + beta over trailing axes.   x (*, *normalized_shape)   ->   y like x

    normalized_shape  the trailing extents m and v (biased) are taken over, e.g. (w), (h, w) or (c, h, w)
    beta, gamma       as many elements as normalized_shape has; None means 0 and 1
    """

    default_label = "LayerNorm"

    normalized_shape = Copied[list[int]]("The trailing extents that are normalized together.")

    def __init__(
        self,
        normalized_shape: Sequence[int],
        beta: Tensor | None = None,
        gamma: Tensor | None = None,
        variance_epsilon: float = 1e-5,
    ) -> None:
        who = type(self).__name__
        self._normalized_shape = whole_list(who, "normalized_shape", normalized_shape, least=1)
        count = 1
        for extent in self._normalized_shape:
            count *= extent
        super().__init__(beta, gamma, variance_epsilon, count, f"normalized_shape {self._normalized_shape}")
        rank = len(self._normalized_shape)
        most = TensorDescriptor.max_tensor_dimensions
        self.expect(1 <= rank <= most, f"normalized_shape has {rank} axes", expected=f"1 to {most} axes")

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self._check(x.shape)
        return [x]

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        self._check(x.shape)
        axes = range(x.rank - len(self._normalized_shape), x.rank)
        y, _, _ = ops.normalize(x, axes, self._variance_epsilon)
        return self.scale_and_shift(run, y, self._normalized_shape)

    def _check(self, shape: Shape) -> None:
        self.expect(
            shape[-len(self._normalized_shape) :] == self._normalized_shape,
            f"normalized_shape is {self._normalized_shape}, the source is {shape}",
            expected="a source that ends with normalized_shape",
        )


class RMSNormalizationLayer(LayerNormalizationLayer):
    """y = gamma x / sqrt(mean(x²) + epsilon) over trailing axes.   x (*, *normalized_shape)   ->   y like x

    normalized_shape  the trailing extents the mean is taken over
    gamma             as many elements as normalized_shape has; None means 1
    """

    default_label = "RMSNorm"

    def __init__(
        self, normalized_shape: Sequence[int], gamma: Tensor | None = None, variance_epsilon: float = 1e-5
    ) -> None:
        super().__init__(normalized_shape, None, gamma, variance_epsilon)

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        self._check(x.shape)
        axes = range(x.rank - len(self._normalized_shape), x.rank)
        y = x * ops.rsqrt(ops.mean(x * x, axes) + self._variance_epsilon)
        return self.scale_and_shift(run, y, self._normalized_shape)
