"""Normalization by statistics that may be kept from run to run: of a batch, or of an instance."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from mlcompute import ops
from mlcompute.errors import DataError
from mlcompute.layers.arguments import between, whole
from mlcompute.layers.layer import FLOATS, Forward, Layer, parameter_of
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter


class Normalization(Layer):
    """What all four normalizations share: y = gamma (x - m) / sqrt(v + epsilon) + beta.

    beta, gamma       None means 0 and 1; any shape with the right number of elements is accepted
    variance_epsilon  keeps the root away from 0
    """

    source_types = FLOATS

    beta = ReadOnly[Tensor | None]("The shift; None when there is none.")
    gamma = ReadOnly[Tensor | None]("The scale; None when there is none.")
    beta_parameter = ReadOnly[TensorParameter | None]("The shift as the optimizer sees it; None when there is none.")
    gamma_parameter = ReadOnly[TensorParameter | None]("The scale as the optimizer sees it; None when there is none.")
    variance_epsilon = ReadOnly[float]("What is added to the variance before its root is taken.")

    def __init__(
        self, beta: Tensor | None, gamma: Tensor | None, variance_epsilon: float, count: int, meaning: str
    ) -> None:
        super().__init__()
        self._variance_epsilon = between(self.who, "variance_epsilon", variance_epsilon, least=0.0)
        self._beta = self._floats(beta, "beta", count, meaning)
        self._gamma = self._floats(gamma, "gamma", count, meaning)
        self._beta_parameter = parameter_of(beta)
        self._gamma_parameter = parameter_of(gamma)

    def _floats(self, tensor: Tensor | None, slot: str, count: int, meaning: str) -> Tensor | None:
        if tensor is None:
            return None
        kind = self.sized(tensor, slot, count, meaning).descriptor.data_type
        expected = "FLOAT32, FLOAT16 or BFLOAT16"
        self.expect(kind.is_floating, f"{slot} is {kind.name}", expected=expected, error=DataError)
        return tensor

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        slots = {"beta": self._beta_parameter, "gamma": self._gamma_parameter}
        return {name: slot for name, slot in slots.items() if slot is not None}

    def scale_and_shift(self, run: Forward, y: Value, shape: Shape) -> Value:
        """gamma y + beta, the two seen with a shape that broadcasts against y."""
        if self._gamma is not None:
            y = y * run.read(self._gamma, shape)
        if self._beta is not None:
            y = y + run.read(self._beta, shape)
        return y


class ChannelNormalization(Normalization):
    """A normalization with one scale and one shift per channel, channels on axis 1."""

    #: Ranks a source may have.
    ranks: ClassVar[range] = range(2, TensorDescriptor.max_tensor_dimensions + 1)

    feature_channel_count = ReadOnly[int]("Extent of axis 1 of the source.")

    def __init__(
        self, feature_channel_count: int, beta: Tensor | None, gamma: Tensor | None, variance_epsilon: float
    ) -> None:
        who = type(self).__name__
        self._feature_channel_count = whole(who, "feature_channel_count", feature_channel_count, least=1)
        super().__init__(beta, gamma, variance_epsilon, self._feature_channel_count, "one per channel")

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        self.expect(
            x.dimension_count in self.ranks,
            f"the source has {x.dimension_count} axes",
            source=x.shape,
            expected=f"{self.ranks[0]} to {self.ranks[-1]} axes, channels on axis 1",
        )
        self.expect(
            x.shape[1] == self._feature_channel_count,
            f"feature_channel_count is {self._feature_channel_count}, the source has {x.shape[1]} channels",
            source=x.shape,
            fix=f"set feature_channel_count={x.shape[1]} or reshape the source",
        )
        return [x]

    def per_channel(self, x: Value) -> Shape:
        """The shape of one number per channel that broadcasts against x: (1, channels, 1, ...)."""
        return (1, self._feature_channel_count, *(1,) * (x.rank - 2))


class RunningNormalization(ChannelNormalization):
    """A channel normalization that may keep running statistics: updated in training, used in inference."""

    momentum = ReadOnly[float](
        "Weight of the old value when a running statistic is updated: new = momentum old + (1 - momentum) batch."
    )

    def __init__(
        self,
        feature_channel_count: int,
        mean: Tensor | None,
        variance: Tensor | None,
        beta: Tensor | None,
        gamma: Tensor | None,
        variance_epsilon: float,
        momentum: float,
    ) -> None:
        super().__init__(feature_channel_count, beta, gamma, variance_epsilon)
        self._mean = self._floats(mean, "mean", self._feature_channel_count, "one per channel")
        self._variance = self._floats(variance, "variance", self._feature_channel_count, "one per channel")
        self._momentum = between(self.who, "momentum", momentum, least=0.0, most=1.0)

    @property
    def statistics(self) -> dict[str, Tensor]:
        slots = {"mean": self._mean, "variance": self._variance}
        return {name: tensor for name, tensor in slots.items() if tensor is not None}

    @abstractmethod
    def statistic_axes(self, x: Value) -> Shape:
        """The axes one mean and one variance are taken over."""

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        shape = self.per_channel(x)
        moves = run.training and run.updates
        if self._mean is None or self._variance is None or moves:
            y, m, v = self.normalized(run, x)
            if moves:
                self._update(run, m, v, shape)
        else:
            variance = run.read(self._variance, shape)
            y = (x - run.read(self._mean, shape)) * ops.rsqrt(variance + self._variance_epsilon)
        return self.scale_and_shift(run, y, shape)

    def normalized(self, run: Forward, x: Value) -> tuple[Value, Value, Value]:
        """(x - m) / sqrt(v + epsilon), m and v."""
        return ops.normalize(x, self.statistic_axes(x), self._variance_epsilon)

    def _update(self, run: Forward, m: Value, v: Value, shape: Shape) -> None:
        """Move the running statistics towards this batch's; biased variance, statistics of instances averaged."""
        for running, batch in ((self._mean, m), (self._variance, v)):
            if running is not None:
                new = batch if batch.shape == shape else ops.mean(batch, (0,))
                old = run.read(running, shape)
                run.write(running, old * self._momentum + new * (1.0 - self._momentum))


class BatchNormalizationLayer(RunningNormalization):
    """y = gamma (x - m) / sqrt(v + epsilon) + beta per channel.   x (n, c, *)   ->   y like x

    Training takes m and v (biased) from the batch and moves `mean` and `variance` towards them; inference takes m
    and v from `mean` and `variance`, and so does training where the layer is not trained (`updates` is False).

    mean, variance   running statistics, c elements each
    beta, gamma      c elements each; None means 0 and 1
    momentum         weight of the old running value, as in Keras; PyTorch's momentum is 1 minus this one
    across_group     in a group of processes: m and v are those of the whole batch, not of each slice of it
    """

    default_label = "BatchNorm"

    across_group = ReadOnly[bool]("Are statistics those of the whole batch where a group of processes shares it?")

    mean = ReadOnly[Tensor]("Running mean, one element per channel.", "_running", 0)
    variance = ReadOnly[Tensor]("Running variance, one element per channel.", "_running", 1)

    def __init__(
        self,
        feature_channel_count: int,
        mean: Tensor,
        variance: Tensor,
        beta: Tensor | None = None,
        gamma: Tensor | None = None,
        variance_epsilon: float = 1e-5,
        momentum: float = 0.99,
        across_group: bool = False,
    ) -> None:
        if not isinstance(across_group, bool):
            raise TypeError(
                f"BatchNormalizationLayer: across_group must be True or False, not {type(across_group).__name__}"
            )
        self._across_group = across_group
        for slot, tensor in (("mean", mean), ("variance", variance)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"BatchNormalizationLayer: {slot} must be a Tensor, not {type(tensor).__name__}")
        self._running = mean, variance
        super().__init__(feature_channel_count, mean, variance, beta, gamma, variance_epsilon, momentum)

    def statistic_axes(self, x: Value) -> Shape:
        return (0, *range(2, x.rank))

    def normalized(self, run: Forward, x: Value) -> tuple[Value, Value, Value]:
        if not (self._across_group and run.is_slice):
            return super().normalized(run, x)
        axes, share = self.statistic_axes(x), ops.convert(run.slice_share(), x.dtype)
        m = run.sum_over_slices(ops.mean(x, axes) * share)
        away = x - m
        v = run.sum_over_slices(ops.mean(away * away, axes) * share)
        return away * ops.rsqrt(v + self._variance_epsilon), m, v


class InstanceNormalizationLayer(RunningNormalization):
    """y = gamma (x - m) / sqrt(v + epsilon) + beta per instance.   x (n, c, l, *)   ->   y like x

    An instance is one channel of one sample; m and v (biased) are its own, or, in inference with running
    statistics, those.

    mean, variance   running statistics, c elements each, or None for both; moved in training towards the
                     average over the batch
    beta, gamma      c elements each; None means 0 and 1
    momentum         weight of the old running value
    """

    default_label = "InstanceNorm"
    ranks = range(3, TensorDescriptor.max_tensor_dimensions + 1)

    mean = ReadOnly[Tensor | None]("Running mean, one element per channel; None when none is kept.")
    variance = ReadOnly[Tensor | None]("Running variance, one element per channel; None when none is kept.")

    def __init__(
        self,
        feature_channel_count: int,
        mean: Tensor | None = None,
        variance: Tensor | None = None,
        beta: Tensor | None = None,
        gamma: Tensor | None = None,
        variance_epsilon: float = 1e-5,
        momentum: float = 0.99,
    ) -> None:
        super().__init__(feature_channel_count, mean, variance, beta, gamma, variance_epsilon, momentum)
        self.expect(
            (mean is None) == (variance is None),
            f"{'variance' if mean is None else 'mean'} is given alone",
            expected="mean and variance, or neither",
            error=DataError,
        )

    def statistic_axes(self, x: Value) -> Shape:
        return tuple(range(2, x.rank))
