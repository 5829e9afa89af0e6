"""L-BFGS: steps along an approximate Newton direction, over forward and gradient passes of a training graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError, GraphError, warn
from mlcompute.foreign_names import instead_of_graph
from mlcompute.ops.op import Array
from mlcompute.optimizers.descriptor import checked_count, checked_number
from mlcompute.optimizers.line_search import Point, strong_wolfe
from mlcompute.runtime.apply_gradients import trained_parameters
from mlcompute.runtime.calls import execute_forward_and_gradient
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.run import Call
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

_WHO = "LBFGS"


class LBFGS:
    """d = -H g, H from the last changes of weights and gradients;  w += t d, t by a strong Wolfe line search.

    training        a compiled training graph with a loss; its optimizer, if it has one, is not used
    learning_rate   the first t of every search
    iterations      directions per `step`
    evaluations     passes per `step`; by default 5/4 of the iterations
    history_size    how many changes are remembered
    gradient_tolerance, change_tolerance   it ends when no gradient, or no change, is larger

    For full batches and few parameters (style transfer, physics, fitting a curve): every evaluation is a forward and a
    gradient pass, all vectors are kept on the host in float64. The settings are torch.optim.LBFGS's with
    line_search_fn="strong_wolfe". Random layers (dropout) make the loss another function in every pass: leave them out.

    >>> import numpy as np, mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> x, t = graph.input((4, 1), "x"), mlc.Tensor(shape=(4, 1))
    >>> y = graph.dense(x, 1)
    >>> training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN))
    >>> training.add_inputs({"x": x}, {"t": t}), training.compile(device=mlc.Device.cpu())
    (True, True)
    >>> points = np.arange(4.0)[:, None]
    >>> search = mlc.LBFGS(training)
    >>> _ = search.step({"x": points}, {"t": 3 * points + 1})
    >>> bool(search.step({"x": points}, {"t": 3 * points + 1}) < 1e-6)
    True
    """

    def __init__(
        self,
        training: TrainingGraph,
        *,
        learning_rate: float = 1.0,
        iterations: int = 20,
        evaluations: int | None = None,
        history_size: int = 100,
        gradient_tolerance: float = 1e-7,
        change_tolerance: float = 1e-9,
    ) -> None:
        if not isinstance(training, TrainingGraph):
            raise TypeError(f"{_WHO}: training must be a TrainingGraph, not {instead_of_graph(training)}")
        self.training = training
        self.learning_rate = checked_number(_WHO, "learning_rate", learning_rate, above=0.0)
        self.iterations = checked_count(_WHO, "iterations", iterations, least=1)
        most = self.iterations * 5 // 4 if evaluations is None else evaluations
        self.evaluations = checked_count(_WHO, "evaluations", most, least=1)
        self.history_size = checked_count(_WHO, "history_size", history_size, least=1)
        self.gradient_tolerance = checked_number(_WHO, "gradient_tolerance", gradient_tolerance, least=0.0)
        self.change_tolerance = checked_number(_WHO, "change_tolerance", change_tolerance, least=0.0)
        if not session_of(training).compile_if_needed().minimised:
            raise GraphError(f"{_WHO}: the training graph has no loss", fix="give it one")
        #: Changes of weights, and of the gradient, of the last iterations.
        self._changes: list[tuple[Array, Array]] = []
        self._scale = 1.0
        #: The change of the last iteration, and the gradient before it; None before the first.
        self._last: tuple[Array, Array] | None = None
        self._has_warned = False

    def step(self, inputs: Named, labels: Named | None = None, label_weights: Named | None = None) -> float:
        """Some iterations on one batch. The loss before them, as in PyTorch; the weights are where they ended."""
        self._data = (inputs, labels, label_weights)
        tensors = list(trained_parameters(session_of(self.training)).values())
        here = _joined([np.asarray(tensor) for tensor in tensors])
        loss, gradient = self._evaluate(tensors, here)
        passes = session_of(self.training).passes
        if passes is not None and passes.program.random_keys and not self._has_warned:
            self._has_warned = True
            warn(
                f"{_WHO}: the graph draws random numbers (dropout), so the loss is another function in every pass of a "
                "line search: leave such layers out, or use another optimizer"
            )
        first, count = loss, 1
        try:
            for iteration in range(1, self.iterations + 1):
                if not np.isfinite(loss):
                    raise DataError(f"{_WHO}: the loss is {loss}", fix="look at the data, and where it starts from")
                if float(np.abs(gradient).max(initial=0.0)) <= self.gradient_tolerance:
                    break
                is_first = self._last is None
                direction = self._direction(gradient)
                slope = float(gradient @ direction)
                if slope > -self.change_tolerance:
                    break
                step = self.learning_rate
                if is_first:
                    step *= min(1.0, 1.0 / float(np.abs(gradient).sum()))
                point, looked = self._search(tensors, here, direction, Point(0.0, loss, gradient, slope), step, count)
                before, here = loss, here + point.step * direction
                self._last = (point.step * direction, gradient)
                loss, gradient, count = point.loss, point.gradient, count + looked
                longest = float(np.abs(point.step * direction).max())
                if count >= self.evaluations or longest <= self.change_tolerance:
                    break
                if abs(loss - before) < self.change_tolerance or iteration == self.iterations:
                    break
        finally:
            _write(tensors, here)
        return first

    def _search(
        self, tensors: list[Tensor], here: Array, direction: Array, start: Point, step: float, count: int
    ) -> tuple[Point, int]:
        def evaluate(distance: float) -> Point:
            loss, gradient = self._evaluate(tensors, here + distance * direction)
            return Point(distance, loss, gradient, float(gradient @ direction))

        tolerance = self.change_tolerance / max(float(np.abs(direction).max()), 1e-300)
        return strong_wolfe(evaluate, start, step, tolerance, max(self.evaluations - count, 0))

    def _direction(self, gradient: Array) -> Array:
        """-H g by the two-loop recursion (Nocedal and Wright, algorithm 7.4)."""
        if self._last is not None:
            change, before = self._last
            difference = gradient - before
            curvature = float(difference @ change)
            if curvature > 1e-10:
                self._changes = [*self._changes, (change, difference)][-self.history_size :]
                self._scale = curvature / float(difference @ difference)
        direction, shares = -gradient, []
        for change, difference in reversed(self._changes):
            share = float(change @ direction) / float(difference @ change)
            direction = direction - share * difference
            shares.append(share)
        direction = direction * self._scale
        for (change, difference), share in zip(self._changes, reversed(shares), strict=True):
            direction = direction + (share - float(difference @ direction) / float(difference @ change)) * change
        return direction

    def _evaluate(self, tensors: list[Tensor], weights: Array) -> tuple[float, Array]:
        """Loss and gradient at some weights."""
        _write(tensors, weights)
        session = session_of(self.training)
        call = Call("execute", ExecutionOptions.SYNCHRONOUS)
        run = execute_forward_and_gradient(session, call, 0, self._data)
        result = run.result
        assert result is not None
        loss = float(np.sum(result.data, dtype=np.float64))
        found = [session.last.gradient(tensor) for tensor in tensors]
        return loss, _joined([array for array in found if array is not None])

    # Saving ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Array]:
        """The state as arrays, for `mlcompute.save(..., arrays=...)` and `restore`."""
        pairs = [*self._changes, *([self._last] if self._last is not None else [])]
        size = len(pairs[0][0]) if pairs else 0
        stacked = np.array(pairs, np.float64).reshape(len(pairs), 2, size)
        return {"lbfgs": stacked, "lbfgs scale": np.array([self._scale, float(self._last is not None)])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        pairs = [(np.array(a, np.float64), np.array(b, np.float64)) for a, b in np.asarray(state["lbfgs"])]
        self._scale, has_last = (float(number) for number in np.asarray(state["lbfgs scale"]))
        self._last = pairs.pop() if has_last else None
        self._changes = pairs


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate([array.ravel().astype(np.float64) for array in arrays])


def _write(tensors: list[Tensor], weights: Array) -> None:
    begin = 0
    for tensor in tensors:
        shape, count = tensor.descriptor.shape, tensor.descriptor.element_count
        tensor.data = weights[begin : begin + count].reshape(shape).astype(tensor.descriptor.data_type.numpy)
        begin += count
