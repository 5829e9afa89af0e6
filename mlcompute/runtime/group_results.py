"""What can be read after a run of a graph in a group: of the whole batch, wherever its slices ran.

Losses of a whole step come with the exchange. Everything else is put together when somebody reads it, which is
collective: every process must read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.device import Completion, Executable
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.group.exchange import Kind
from mlcompute.group.slices import Node, cut, tree_sum
from mlcompute.ops.bfloat16 import computed_type
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.last_run import LastRun
from mlcompute.runtime.run_result import ResultState
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.runtime.tensor_state import storage_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.group_training import GroupTraining

#: Values of own slices, by slice.
_Own = dict[int, Array]
#: Values, or how to get them from a device that is still at work.
_Later = Array | Callable[[], Array]


class GroupResults:
    """The values of one batch.

    losses   of the whole batch
    """

    def __init__(self, training: GroupTraining) -> None:
        self._training = training
        self.losses: dict[Tensor, _Later] = {}
        #: Was the last run one of the group, and not one by itself, as inference is?
        self.is_shared = False
        self._style, self._batch = "", 0
        #: Own slices' parts of losses and statistics.
        self._parts: defaultdict[Tensor, _Own] = defaultdict(dict)
        self._rows: defaultdict[Tensor, dict[int, _Later]] = defaultdict(dict)
        self._sums: _Own = {}
        self._gathered: dict[tuple[str, Tensor], Array] = {}
        self._gradients: dict[Tensor, Array] | None = None

    def begin(self, style: str, batch: int) -> None:
        """A forward pass begins: what the one before it left is gone."""
        self._style, self._batch = style, batch
        own: dict[Any, Any]
        for own in (self.losses, self._parts, self._rows, self._gathered):
            own.clear()
        self._gradients = None

    @property
    def are_of_passes(self) -> bool:
        """Are passes run one by one, whose losses and statistics are exchanged by themselves?"""
        return self._style == "phases"

    def add_part(self, number: int, tensor: Tensor, value: Array) -> None:
        """Add a slice's part of a loss or a statistic."""
        self._parts[tensor][number] = value.copy()

    def add_rows(self, number: int, program: Program, keep: Callable[[Value], _Later]) -> None:
        """Outputs of a slice, before the next one overwrites them."""
        for tensor, value in self.outputs_of(program):
            self._rows[tensor][number] = keep(value)

    def outputs_of(self, program: Program) -> list[tuple[Tensor, Value]]:
        """What the program of a slice computes that has rows for samples, and no loss."""
        losses = {*self._training.losses, self._training.request.total}
        kept = [tensor for tensor in self._training.request.kept if tensor not in losses]
        return [(one, program.values[one]) for one in kept if program.values.get(one) in program.kept]

    def add_sum(self, number: int, value: Array) -> None:
        """Add a slice's part of a sum over all slices that the pass waits for."""
        self._sums[number] = value.copy()

    def take_sum(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """That sum; collective."""
        own, self._sums = self._sums, {}
        return self._sum(Kind.STATISTICS, own, shape, dtype)

    def exchange_statistics(self) -> None:
        """After forward passes by themselves: everybody goes on with the statistics of the whole batch."""
        for tensor in self._training.statistics:
            d = tensor.descriptor
            storage_of(tensor).write(self._sum(Kind.STATISTICS, self._parts[tensor], d.shape, d.data_type.numpy))

    # Reading --------------------------------------------------------------------------------------------------------

    def knows(self, tensor: Tensor) -> bool:
        """Did the last run compute a tensor?"""
        return tensor in self._training.program.values

    def value(self, tensor: Tensor) -> Array | None:
        """A loss, or a result with rows for all samples."""
        training = self._training
        if tensor in self.losses:
            found = self.losses[tensor] = _now(self.losses[tensor])
            return found
        if tensor is training.request.total:
            return self._total()
        value = training.program.values.get(tensor)
        if value is None:
            return None
        key = ("value", tensor)
        if key not in self._gathered:
            if tensor in training.losses and self._style == "phases":
                self._gathered[key] = self._sum(Kind.RESULTS, self._parts[tensor], value.shape, value.dtype)
            elif self._style == "phases":
                own = {n: one.executable.read(one.program.values[tensor]) for n, one in training.slices.passes.items()}
                self._gathered[key] = self._join(Kind.RESULTS, tensor, own)
            elif tensor in training.request.kept:
                rows = {number: _now(one) for number, one in self._rows[tensor].items()}
                self._gathered[key] = self._join(Kind.RESULTS, tensor, rows)
            else:
                return None
        return self._gathered[key]

    def later(self, tensor: Tensor) -> _Later | None:
        """The same, or a function that returns it when the devices have computed it."""
        return self.losses[tensor] if tensor in self.losses else self.value(tensor)

    def _total(self) -> Array | None:
        """The sum of all losses of the whole batch."""
        terms = [self.value(tensor) for tensor in self._training.request.minimised]
        numbers = [term.sum(dtype=computed_type(term.dtype)) for term in terms if term is not None]
        return np.array([sum(numbers)], np.float32) if len(numbers) == len(terms) else None

    @property
    def has_gradients(self) -> bool:
        """Was it a gradient pass by itself, or an update after one?"""
        return self._style == "phases" and "gradient" in self._training.pass_phases

    def gradients_changed(self) -> None:
        """A gradient pass has run."""
        self._gradients = None
        self._gathered = {key: value for key, value in self._gathered.items() if key[0] != "gradient"}

    def gradient(self, tensor: Tensor) -> Array | None:
        """The gradient of a tensor over the whole batch, as of a gradient pass that was run by itself."""
        training = self._training
        if not self.has_gradients or tensor not in training.program.gradients:
            return None
        if tensor in training.program.exchanged:
            if self._gradients is None:
                self._gradients = training.whole_gradients()
            return np.array(self._gradients[tensor])
        key = ("gradient", tensor)
        if key not in self._gathered:
            own = {n: one.executable.read(one.program.gradients[tensor]) for n, one in training.slices.passes.items()}
            self._gathered[key] = self._join(Kind.RESULTS, tensor, own, adds=True)
        return np.array(self._gathered[key])

    # Where others may have to be replaced ---------------------------------------------------------------------------

    def gather_rows(self) -> None:
        """Outputs of the whole batch, now: whoever reads them later need not ask others that may be gone."""
        for tensor, _ in self.outputs_of(self._training.program):
            self.value(tensor)

    def outcome(self) -> Any:
        """Results of the last step, for whoever has not finished it."""
        kept = self._training.request.kept
        rows = {number: self._gathered.get(("value", tensor)) for number, tensor in enumerate(kept)}
        return [self.losses.get(tensor) for tensor in self._training.losses], rows

    def take_outcome(self, outcome: Any) -> None:
        """Results of a step that others have finished."""
        losses, rows = outcome
        self.losses = dict(zip(self._training.losses, losses, strict=True))
        kept = self._training.request.kept
        self._gathered = {("value", kept[n]): values for n, values in rows.items() if values is not None}
        self.is_shared = True

    # Over the group -------------------------------------------------------------------------------------------------

    def _slices(self) -> list[tuple[int, int]]:
        """(number, samples) of the slices that have any."""
        parts = cut(self._batch, self._training.group.slices)
        return [(number, last - first) for number, (first, last) in enumerate(parts) if last > first]

    def _sum(self, kind: Kind, own: _Own, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """The sum of the parts of all slices, added in the order of the tree."""
        message = b"".join(np.ascontiguousarray(own[number], dtype).tobytes() for number in sorted(own))
        joined = b"".join(self._training.exchange.gather_bytes(kind, message))
        values = np.frombuffer(joined, dtype).reshape(-1, *shape).copy()
        root: Node = (0, self._training.group.slices)
        sums: dict[Node, Array] = {(n, n + 1): np.zeros(shape, dtype) for n in range(root[1])}
        for (number, _), value in zip(self._slices(), values, strict=True):
            sums[number, number + 1] = value
        return tree_sum(sums, root)

    def _join(self, kind: Kind, tensor: Tensor, own: _Own, *, adds: bool = False) -> Array:
        """Rows of all slices one behind the other; of something without rows for samples the sum, or any one."""
        descriptor, full = tensor.descriptor, self._training.request.batch_size
        message = b"".join(np.ascontiguousarray(own[number]).tobytes() for number in sorted(own))
        joined = b"".join(self._training.exchange.gather_bytes(kind, message))
        values = np.frombuffer(joined, descriptor.data_type.numpy)
        rows, inner = descriptor.shape[0], next(iter(own.values())).shape[1:] if own else descriptor.shape[1:]
        per_sample = rows // full if rows % full == 0 else 0
        if per_sample and values.size == per_sample * self._batch * int(np.prod(inner, dtype=np.int64)):
            return np.array(values.reshape(-1, *inner))
        if adds:
            return self._sum(kind, own, descriptor.shape, descriptor.data_type.numpy)
        return np.array(values.reshape(-1, *descriptor.shape)[0])


def _now(values: _Later) -> Array:
    return values() if callable(values) else values


class GroupRun(LastRun):
    """The last run of a graph in a group."""

    def __init__(self, results: GroupResults) -> None:
        super().__init__()
        self._results = results

    def finished(
        self, executable: Executable, specification: RunSpecification, completion: Completion | None
    ) -> ResultState | None:
        self._results.is_shared = specification.program.name in ("slice", "phases")
        return super().finished(executable, specification, None if self._results.is_shared else completion)

    def computed(self, tensor: Tensor) -> bool:
        return self._results.knows(tensor) if self._results.is_shared else super().computed(tensor)

    def device_array(self, tensor: Tensor) -> DeviceArray | None:
        return None if self._results.is_shared else super().device_array(tensor)

    def value(self, tensor: Tensor) -> Array | None:
        return self._results.value(tensor) if self._results.is_shared else super().value(tensor)

    @property
    def has_gradients(self) -> bool:
        return self._results.has_gradients if self._results.is_shared else super().has_gradients

    def gradient(self, tensor: Tensor) -> Array | None:
        return self._results.gradient(tensor) if self._results.is_shared else super().gradient(tensor)

    def kept_gradient(self, tensor: Tensor) -> Array | None:
        return self.gradient(tensor) if self._results.is_shared else super().kept_gradient(tensor)
