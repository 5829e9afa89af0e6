"""Where the data of a run comes from: the call, the tensors, the run before, or a linked graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DataError
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.run_specification import InputSlot, RunSpecification
from mlcompute.runtime.tensor_state import moments, state_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import ArrayLike, read_array

if TYPE_CHECKING:
    from mlcompute.devices.device import Engine
    from mlcompute.execution import Execution
    from mlcompute.runtime.compiled_graph import CompiledGraph
    from mlcompute.runtime.session import Session

_ndarray = np.ndarray
#: Data by the names given to add_inputs or add_outputs.
Named = Mapping[str, ArrayLike]
#: An array, or a function that returns it when the run begins: it may be the result of a run that is still queued.
InputData = dict[Value, "Array | Callable[[], Array | None]"]
#: Returns the function that gets a tensor's value from a linked graph; None where no linked graph computes it.
Linked = Callable[[Tensor], "Callable[[], Array | None] | None"]


class Inputs:
    """The data of one graph's runs: given with the call, attached to the tensor, fed before, or from a linked graph."""

    def __init__(self) -> None:
        #: The data of earlier runs with its time, which SKIP_WRITING_INPUT_DATA_TO_DEVICE uses again. The data of the
        #: last run is in `_latest`, and is merged into it only when a run with other inputs comes, or when it is read.
        self._before: dict[Tensor, tuple[int, Array]] = {}
        self._latest: tuple[int, Sequence[InputSlot], InputData] = (0, (), {})

    def collect(
        self,
        slots: Iterable[InputSlot],
        data: Mapping[Tensor, Any],
        who: Callable[[Tensor], str],
        linked: Linked,
        *,
        skips: bool,
        copies: bool | AbstractSet[Value],
        engine: Engine | None = None,
    ) -> InputData:
        """Something for every input: `skips` what was fed before; `copies` all, or what is read after the call's end.

        engine   of the device that will run, which reads what lies there already without a copy on the host
        """
        inputs: InputData = {}
        for tensor, value, descriptor, rows, per_sample in slots:
            if tensor in data and not skips:
                given = data[tensor]
                if engine is not None and type(given) is not np.ndarray:
                    there = engine.adopt(given, who(tensor))
                    if there is not None and there.fits(value):
                        inputs[value] = there
                        self._before.pop(tensor, None)
                        continue
                array = read_array(given, descriptor, who(tensor), rows, rows_per_sample=per_sample)
            else:
                standing = self._standing(tensor, skips, linked)
                state = state_of(tensor)
                if engine is not None and state.bound_on_gpu is not None and standing is state.bound_data:
                    there = engine.adopt(state.bound_on_gpu, who(tensor))
                    if there is not None and there.fits(value):
                        inputs[value] = there
                        continue
                if not isinstance(standing, np.ndarray):
                    inputs[value] = self._later(tensor, value, per_sample, standing, who, skips)
                    continue
                if tensor.varies and standing.shape[1:] != value.shape[1:]:
                    raise DataError(
                        f"{who(tensor)}: what it was fed before has shape {standing.shape}, {value.shape} is needed",
                        fix="give data of this size with the call",
                    )
                array = _fitting(standing, value, who(tensor), per_sample)
            is_copied = copies if isinstance(copies, bool) else value in copies
            inputs[value] = array.copy() if is_copied else array
        return inputs

    def remember(self, slots: Sequence[InputSlot], inputs: InputData) -> None:
        """The run was accepted: later ones may use its data again."""
        if slots is not self._latest[1]:
            self._look_through()
        self._latest = (next(moments), slots, inputs)

    def _look_through(self) -> None:
        moment, slots, inputs = self._latest
        for tensor, value, *_ in slots:
            array = inputs.get(value)
            if isinstance(array, np.ndarray):
                self._before[tensor] = (moment, array)

    def has(self, tensor: Tensor, data: Mapping[Tensor, Any], skips: bool, linked: Linked) -> bool:
        """Would a run have data for a tensor? A call that brings data speaks for all inputs, attached ones included."""
        if data and not skips:
            return tensor in data
        return isinstance(self._standing(tensor, skips, linked), np.ndarray)

    def _standing(self, tensor: Tensor, skips: bool, linked: Linked) -> Array | Callable[[], Array | None] | None:
        """What a run that brings no data finds: the latest of what was attached and fed, a linked value, own data."""
        state = state_of(tensor)
        array = state.bound_data
        self._look_through()
        when, before = self._before.get(tensor, (0, None))
        if skips and before is not None and when > state.bound_at:
            array = before
        if array is None:
            return linked(tensor) or (state.storage.array() if state.storage is not None else None)
        return array

    def _later(
        self,
        tensor: Tensor,
        value: Value,
        per_sample: int,
        find: Callable[[], Array | None] | None,
        who: Callable[[Tensor], str],
        skips: bool,
    ) -> Callable[[], Array]:
        if find is None:
            fix = "pass its data by name, or attach it with bind_and_write_data first"
            if state_of(tensor).node is not None:
                fix += "; a layer of another graph computes it: first.link([second]) and LINK_GRAPHS hand it on"
            skipped = "SKIP_WRITING_INPUT_DATA_TO_DEVICE takes what was written before, and nothing was"
            raise DataError(
                f"{who(tensor)} was not given",
                reason=skipped if skips else "",
                expected=repr(tensor.descriptor),
                fix="leave that option out of the first run" if skips else fix,
            )

        def get() -> Array:
            array = find()
            if array is None:
                raise DataError(
                    f"{who(tensor)} comes from a linked graph, which has not computed it",
                    fix="run the forward passes of linked graphs in order, their gradient passes in reverse order",
                )
            return _fitting(array, value, who(tensor), per_sample)

        return get


class PreparedRun(Protocol):
    """What calls of one kind run: a `Run`, or a step of a group."""

    specification: RunSpecification

    def is_current(self, compiled: CompiledGraph) -> bool:
        """Does the graph still have what it was prepared with?"""

    def submit(self, session: Session, compiled: CompiledGraph, inputs: InputData) -> Execution:
        """Run it on one call's data."""


class CallCache:
    """A call whose data all came by name. When the next one gives the same names, nothing needs to be looked up.

    run    what such a call runs, if nobody is told of its end and it has no outputs
    named  of inputs, labels and label weights: names, and the values they are the data of
    """

    __slots__ = ("_batch_size", "_copies", "_named", "_options", "run")

    def __init__(
        self,
        run: PreparedRun,
        options: ExecutionOptions,
        batch_size: int,
        named: Sequence[Sequence[tuple[str, Value]]],
    ) -> None:
        self.run = run
        self._options, self._batch_size = options, batch_size
        self._copies = run.specification.copies
        self._named = [[(name, value, value.shape, value.dtype) for name, value in some] for some in named]

    @staticmethod
    def after(
        run: PreparedRun,
        options: ExecutionOptions,
        batch_size: int,
        given: Sequence[Named | None],
        declared: Sequence[Mapping[str, Tensor]],
    ) -> CallCache | None:
        """What to cache of a call; None unless every name stood for one input, and every input had a name."""
        values = {tensor: value for tensor, value, *_ in run.specification.inputs}
        named: list[list[tuple[str, Value]]] = []
        for data, tensors in zip(given, declared, strict=True):
            named.append([])
            for name in data or ():
                value = values.pop(tensors[name], None) if name in tensors else None
                if value is None:
                    return None
                named[-1].append((name, value))
        return (
            CallCache(run, options, batch_size, named)
            if any(named) and not values and not run.specification.skips
            else None
        )

    def data(self, options: ExecutionOptions, batch_size: int, given: Sequence[Named | None]) -> InputData | None:
        """The data of a call that asks for the same; None when it does not, or when its data must be converted."""
        if options is not self._options or batch_size != self._batch_size:
            return None
        inputs: dict[Value, Array] = {}
        for data, named in zip(given, self._named):  # noqa: B905  both have three, and a small step pays for the check
            if not named:
                if data:
                    return None
                continue
            if type(data) is not dict or len(data) != len(named):
                return None
            for name, value, shape, dtype in named:
                array = data.get(name)
                if (
                    type(array) is not _ndarray
                    or array.shape != shape
                    or (array.dtype is not dtype and array.dtype != dtype)  # nearly always the same object
                    or not array.flags.c_contiguous
                ):
                    return None
                inputs[value] = array
        if self._copies:
            return {value: array.copy() for value, array in inputs.items()}
        return inputs  # type: ignore[return-value]  # nobody puts anything else into it


def resolved(inputs: InputData) -> dict[Value, Array]:
    """The arrays themselves, now that the run's turn has come."""
    arrays: dict[Value, Array] = {}
    for value, array in inputs.items():
        found = array if isinstance(array, np.ndarray) else array()
        assert found is not None
        arrays[value] = found
    return arrays


def _fitting(array: Array, value: Value, who: str, rows_per_sample: int) -> Array:
    """The leading part of what is there that the run needs."""
    if len(array.shape) != len(value.shape) or any(a < b for a, b in zip(array.shape, value.shape, strict=True)):
        is_short = rows_per_sample and array.shape[1:] == value.shape[1:] and not array.shape[0] % rows_per_sample
        raise DataError(
            f"{who}: the attached data has shape {array.shape}, {value.shape} is needed",
            fix=f"pass batch_size={array.shape[0] // rows_per_sample}" if is_short else "",
        )
    leading = array[tuple(slice(extent) for extent in value.shape)]
    return np.ascontiguousarray(leading, dtype=value.dtype)
