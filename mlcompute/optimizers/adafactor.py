"""Adafactor: second moments of a matrix as one number per row and one per column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mlcompute import ops
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.optimizers.counting import CountingOptimizer
from mlcompute.optimizers.descriptor import OptimizerDescriptor, OptimizerSettings, checked_number
from mlcompute.optimizers.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AdafactorOptimizer(CountingOptimizer):
    """u = g / √v, v from means of g² over rows and columns;  w -= min(lr, 1/√t) max(s, rms w) u / max(1, rms u / c).

    For parameters of two or more axes v = r c / mean(r), r and c running means over the last and the last but one
    axis: n + m numbers of state instead of n m. Others keep v itself. Running means forget t^beta2_decay per update.
    The rate is relative to the size of the parameter (at least s, minimum_scale); updates are clipped to root mean
    square c, clipping_threshold. The penalty acts on the parameter. As torch.optim.Adafactor (arXiv:1804.04235).

    >>> import mlcompute as mlc
    >>> mlc.AdafactorOptimizer(learning_rate=0.01).state_shapes((512, 256))
    {'row': (512, 1), 'column': (1, 256)}
    """

    largest_sensible_rate: ClassVar[float] = 10.0
    decouples_penalty: ClassVar[bool] = True

    beta2_decay = ReadOnly[float]("Running means forget t to this power per update.")
    epsilon = ReadOnly[float]("The root of v is at least this.")
    minimum_scale = ReadOnly[float]("The size of a parameter is taken to be at least this.")
    clipping_threshold = ReadOnly[float]("Root mean square of an update at most.")

    def __init__(
        self,
        descriptor: OptimizerDescriptor | None = None,
        *,
        beta2_decay: float = -0.8,
        epsilon: float = 2.0**-23,
        minimum_scale: float = 1e-3,
        clipping_threshold: float = 1.0,
        time_step: int = 1,
        groups: Sequence[ParameterGroup] = (),
        **shared: Unpack[OptimizerSettings],
    ) -> None:
        super().__init__(descriptor, groups, time_step=time_step, **shared)
        who = "AdafactorOptimizer"
        self._beta2_decay = -checked_number(who, "-beta2_decay", -beta2_decay, least=0.0)
        self._epsilon = checked_number(who, "epsilon", epsilon, above=0.0)
        self._minimum_scale = checked_number(who, "minimum_scale", minimum_scale, least=0.0)
        self._clipping_threshold = checked_number(who, "clipping_threshold", clipping_threshold, above=0.0)

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("row", "column", "variance")

    def state_shapes(self, shape: Shape) -> dict[str, Shape]:
        if len(shape) < 2:
            return {"variance": shape}
        return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1])}

    def rates(self, time_step: int) -> dict[str, float]:
        return {
            "learning_rate": self.learning_rate,
            "relative_rate": min(self.learning_rate, time_step**-0.5),
            "forgotten": float(time_step) ** self._beta2_decay,
        }

    def update(self, h: Mapping[str, Value], w: Value, g: Value, state: Sequence[Value]) -> tuple[Value, list[Value]]:
        squares, forgotten = g * g, h["forgotten"]
        if len(state) == 1:
            v = state[0] + (squares - state[0]) * forgotten
            kept = [v]
        else:
            means = [ops.mean(squares, (squares.rank - 1,)), ops.mean(squares, (squares.rank - 2,))]
            row, column = kept = [old + (new - old) * forgotten for old, new in zip(state, means, strict=True)]
            v = row * column / ops.maximum(ops.mean(row, (row.rank - 2,)), self._epsilon)
        step = g / ops.sqrt(ops.maximum(v, self._epsilon * self._epsilon))
        rate = h["relative_rate"] * ops.maximum(_root_mean_square(w), self._minimum_scale)
        step = rate * step / ops.maximum(_root_mean_square(step) / self._clipping_threshold, 1.0)
        if self.has_penalty:
            step = step + h["learning_rate"] * self.penalty(h, w)
        return w - step, kept


def _root_mean_square(x: Value) -> Value:
    return ops.sqrt(ops.mean(x * x, range(x.rank))) if x.rank else ops.sqrt(x * x)
