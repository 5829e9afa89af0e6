"""Tensors as a user sees them: descriptor, host data, parameter and optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from mlcompute import tensor_operators as operators
from mlcompute.devices import engine_of
from mlcompute.devices.foreign_array import is_on_gpu
from mlcompute.enums import DataType, RandomInitializerType
from mlcompute.errors import DataError, ShapeError
from mlcompute.foreign_names import TENSOR_ATTRIBUTES, advice_for_attribute, refusing
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.runtime import quantization
from mlcompute.runtime.array_protocols import Exchanged
from mlcompute.runtime.random_values import random_values
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import TensorState, state_of
from mlcompute.tensor_data import (
    Array,
    ArrayLike,
    TensorData,
    element_of,
    expect_apart,
    is_boolean,
    owned,
    read_array,
    read_only,
    shape_of_data,
    shared_array,
    write_target,
)
from mlcompute.tensor_descriptor import TensorDescriptor, describe, shared_descriptor

if TYPE_CHECKING:
    from mlcompute.device import Device
    from mlcompute.devices.device import Engine
    from mlcompute.devices.foreign_array import DeviceArray
    from mlcompute.graph import Graph
    from mlcompute.initializers import Initializer

__all__ = ["Tensor", "TensorDescriptor", "TensorOptimizerDeviceData", "TensorParameter", "tensor_ids"]

tensor_ids = itertools.count()


#: What `==` and `!=` compare the numbers of a tensor with; beside anything else they ask whether both are the same.
_COMPARED: tuple[type[Any], ...] = (int, float, np.generic, np.ndarray)


class TensorOptimizerDeviceData:
    """Opaque handle of one optimizer state buffer on a device; made by the library, obtained from a tensor."""

    def __init__(self, _buffer: object = None) -> None:
        if _buffer is None:
            raise TypeError("TensorOptimizerDeviceData is made by the library: see Tensor.optimizer_device_data")
        self._buffer = _buffer

    def __copy__(self) -> TensorOptimizerDeviceData:
        return TensorOptimizerDeviceData(self._buffer)


class Tensor(Exchanged):
    """An n-dimensional value: a descriptor, and data where there is some.

    Weights and other parameters are given data (which is copied), shared_data (the caller's memory itself, which is
    then trained), fill_with_data or random_initializer_type; graph inputs and labels none of them. The shape comes from
    one of: a descriptor; `shape`; the image sizes; one `sequence_length`; several `sequence_lengths`; else that of the
    data. The type is FLOAT32 by default; boolean data needs `data_type`: a mask of 0.0 and 1.0 would mask nothing.

    >>> import mlcompute as mlc
    >>> mlc.Tensor(shape=(2, 3), fill_with_data=1.0).data.sum()
    np.float32(6.0)
    """

    #: The name in messages, summaries and files: "data" and a number unless a graph or its user gives another.
    label: str = ""

    def __init__(
        self,
        descriptor: TensorDescriptor | None = None,
        *,
        shape: Iterable[int] | None = None,
        data: ArrayLike = None,
        shared_data: ArrayLike = None,
        fill_with_data: float | None = None,
        random_initializer_type: RandomInitializerType | Initializer | None = None,
        data_type: DataType = DataType.FLOAT32,
        width: int | None = None,
        height: int | None = None,
        feature_channel_count: int | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        sequence_lengths: Sequence[int] | None = None,
        sorted_sequences: bool = False,
    ) -> None:
        sizes = (shape, width, height, feature_channel_count, batch_size, sequence_length, sequence_lengths)
        array = data if data is not None else shared_data
        sized = [size for size in sizes if size is not None]
        if descriptor is None and array is not None and not sized:
            shape = shape_of_data(array)
        if descriptor is None:
            if data_type == DataType.FLOAT32 and is_boolean(array):
                raise DataError(
                    "Tensor: boolean data for a FLOAT32 tensor",
                    fix="data_type=mlc.DataType.BOOLEAN keeps a mask; data.astype('float32') makes it 0 and 1",
                )
            descriptor = describe(
                shape, data_type, width, height, feature_channel_count, batch_size,
                sequence_length, sequence_lengths, sorted_sequences,
            )  # fmt: skip
        elif not isinstance(descriptor, TensorDescriptor):
            given = type(descriptor).__name__
            raise TypeError(
                f"Tensor: descriptor must be a TensorDescriptor, not {given}; numbers are Tensor(data=...), "
                "a shape is Tensor(shape=...)"
            )
        elif sorted_sequences or sized:
            raise ShapeError("Tensor: give either a descriptor or sizes, not both")
        elif data_type not in (DataType.FLOAT32, descriptor.data_type):
            raise DataError(
                f"Tensor: data_type is {data_type!r}, the descriptor says {descriptor.data_type.name}",
                fix="leave data_type out",
            )
        sources = (data, shared_data, fill_with_data, random_initializer_type)
        if len([source for source in sources if source is not None]) > 1:
            raise DataError("Tensor: give at most one of data, shared_data, fill_with_data and random_initializer_type")
        state = self._begin(descriptor)
        if data is not None:
            state.storage = Storage.owning(owned(read_array(data, descriptor, f"Tensor '{self.label}'"), data))
        elif shared_data is not None:
            shared = shared_array(shared_data, descriptor, f"Tensor '{self.label}': shared_data")
            state.storage = Storage(shared, is_callers=True)
        elif fill_with_data is not None:
            element = element_of(fill_with_data, descriptor.data_type, self.label)
            state.storage = Storage.owning(np.full(descriptor.shape, element))
        elif random_initializer_type is not None:
            array, state.unscaled = random_values(f"Tensor '{self.label}'", descriptor, random_initializer_type)
            state.storage = Storage.owning(array)

    def _begin(self, descriptor: TensorDescriptor) -> TensorState:
        self._descriptor = descriptor
        self._tensor_id = number = next(tensor_ids)
        self.label = f"data{number}"
        state = self._state = TensorState()
        if descriptor.sequence_lengths is not None:
            state.feature_axis = 2
        return state

    @staticmethod
    def _of_result(descriptor: TensorDescriptor) -> Tensor:
        """What a layer computes: `Tensor(descriptor)`, without a look at arguments that are not given."""
        tensor = object.__new__(Tensor)
        tensor._begin(shared_descriptor(descriptor))
        return tensor

    # Arithmetic: layers of the graph the tensor belongs to (mlcompute/tensor_operators.py) -------------------------

    #: An array on the left leaves the operation to the tensor, which NumPy would otherwise take for a number.
    __array_priority__ = 1000
    __hash__ = object.__hash__
    #: A loop over a tensor would add a layer for every step; `split` and `chunk` say it in one.
    __iter__ = None

    __add__, __radd__ = operators.add, operators.add_to
    __sub__, __rsub__ = operators.subtract, operators.subtract_from
    __mul__, __rmul__ = operators.multiply, operators.multiply_with
    __truediv__, __rtruediv__ = operators.divide, operators.divide_into
    __floordiv__, __rfloordiv__ = operators.floor_divide, operators.floor_divide_into
    __mod__, __rmod__ = operators.remainder, operators.remainder_of
    __pow__, __rpow__ = operators.power, operators.power_of
    __matmul__, __rmatmul__ = operators.matmul, operators.matmul_from
    __neg__, __abs__ = operators.negate, operators.absolute
    __lt__, __le__ = operators.less, operators.less_or_equal
    __gt__, __ge__ = operators.greater, operators.greater_or_equal
    __and__, __or__, __xor__ = operators.logical_and, operators.logical_or, operators.logical_xor
    __invert__, __bool__ = operators.logical_not, operators.truth
    __getitem__ = operators.index
    equal, not_equal = operators.equal, operators.not_equal
    abs, exp, log, sqrt = operators.absolute, operators.exp, operators.log, operators.sqrt
    sigmoid, tanh, relu, clip = operators.sigmoid, operators.tanh, operators.relu, operators.clip
    softmax, log_softmax, detach = operators.softmax, operators.log_softmax, operators.detach
    mean, sum, max, min = operators.mean, operators.sum, operators.max, operators.min
    var, argmax = operators.var, operators.argmax
    reshape, flatten, transpose = operators.reshape, operators.flatten, operators.transpose
    split, chunk, gather = operators.split, operators.chunk, operators.gather

    @overload
    def __eq__(self, other: float | Array) -> Tensor: ...  # type: ignore[overload-overlap]
    @overload
    def __eq__(self, other: object) -> bool: ...
    def __eq__(self, other: object) -> Any:
        """x == 1, x == array: a BOOLEAN tensor. x == y: are both the same tensor? Tensors are keys of dictionaries."""
        return operators.equal(self, other) if isinstance(other, _COMPARED) else NotImplemented

    @overload
    def __ne__(self, other: float | Array) -> Tensor: ...  # type: ignore[overload-overlap]
    @overload
    def __ne__(self, other: object) -> bool: ...
    def __ne__(self, other: object) -> Any:
        """x != 1, x != array: a BOOLEAN tensor. x != y: are they two tensors?"""
        return operators.not_equal(self, other) if isinstance(other, _COMPARED) else NotImplemented

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there
        __setattr__ = refusing(
            dict.fromkeys(("requires_grad", "trainable"), "layer.updates = False, or graph.freeze('layer.weights')")
        )

        def __getattr__(self, name: str) -> Any:
            advice = advice_for_attribute(name, TENSOR_ATTRIBUTES, type(self))
            raise AttributeError(f"'Tensor' has no attribute {name!r}{advice}")

    @property
    def graph(self) -> Graph | None:
        """The graph the tensor belongs to: that of the layer that computes it, or that it is an input of; or None."""
        return operators.graph(self)

    @property
    def T(self) -> Tensor:  # noqa: N802  (everybody's name for it)
        """A matrix with rows and columns exchanged."""
        return operators.transposed(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost (batch) first."""
        return self._descriptor.shape

    @property
    def tensor_id(self) -> int:
        """A number that is unique in the process."""
        return self._tensor_id

    @property
    def descriptor(self) -> TensorDescriptor:
        """Shape, data type, strides."""
        return self._descriptor

    @property
    def device(self) -> Device | None:
        """The device the tensor was bound or compiled to; None before."""
        return self._state.device

    @property
    def data(self) -> Array | Any:
        """The present values, in a read-only array that later runs do not change; None if there are none (yet).

        Waits for queued work that changes them. Results of a graph are the last run's, with as many leading samples
        as that run had; one that the last run computed and did not keep is None, and a warning says that `add_outputs`
        keeps it. Set it to write the values of a tensor that has some: they are copied into the memory it has.

        >>> import mlcompute as mlc
        >>> w = mlc.Tensor(shape=(2,), fill_with_data=1.0)
        >>> before = w.data
        >>> w.data = 3 * before
        >>> before, w.data
        (array([1., 1.], dtype=float32), array([3., 3.], dtype=float32))
        """
        state = self._state
        found = state.values(self)
        if found is not None and (state.storage is not None or found is state.bound_data):
            found = found.copy()
        return None if found is None else read_only(found)

    @data.setter
    def data(self, values: ArrayLike) -> None:
        who, state = f"Tensor '{self.label}'.data", self._state
        if state.storage is None:
            raise DataError(
                f"{who} cannot be set: the tensor keeps no data of its own",
                fix="create it with data; data of inputs is passed to execute or attached with bind_and_write_data",
            )
        fresh = read_array(values, self._descriptor, who)
        state.wait_for_runs()
        state.storage.write(fresh)
        state.unscaled = state.bound_data = state.bound_on_gpu = None

    @property
    def keeps_data(self) -> bool:
        """Does the tensor keep values of its own between runs, as parameters do? Inputs and results do not."""
        return self._state.keeps_data

    @property
    def varies(self) -> tuple[int, ...]:
        """Axes of an input whose extents may differ from run to run (`graph.input(..., varies=[1])`); else ()."""
        return self._state.varies

    def _how_to_have_data(self) -> str:
        return self._state.how_to_keep(self) or super()._how_to_have_data()

    def _device_array_on(self, engine: Engine) -> tuple[DeviceArray | None, bool]:
        return self._state.device_array_on(self, engine)

    @property
    def has_valid_numerics(self) -> bool:
        """True when there is no NaN and no infinity in the data; also without data."""
        data = self._state.values(self)
        return data is None or not is_floating(data.dtype) or bool(np.isfinite(data).all())

    @property
    def optimizer_data(self) -> list[TensorData]:
        """The optimizer's state for this tensor (momentum and the like), in layout order; empty without one.

        Bound buffers are the caller's memory itself. Others are read-only copies of the present state.
        """
        self._state.wait_for_runs()
        arrays = [storage.array() for storage in self._state.optimizer_storages]
        if self._state.has_callers_optimizer_data:
            return [TensorData(array) for array in arrays]
        return [TensorData(immutable_bytes_no_copy=array.copy()) for array in arrays]

    @property
    def optimizer_device_data(self) -> list[TensorOptimizerDeviceData]:
        """Handles of the same state on the device."""
        return [TensorOptimizerDeviceData(storage) for storage in self._state.optimizer_storages]

    def synchronize_data(self) -> bool:
        """Bring `data`, and memory that was bound, up to date with the device, waiting for queued work.

        True on success.
        """
        self._state.wait_for_runs()
        if self._state.storage is not None:
            self._state.storage.array()
        return True

    def synchronize_optimizer_data(self) -> bool:
        """Bring `optimizer_data` up to date with the device, waiting for queued work. True on success."""
        self._state.wait_for_runs()
        for storage in self._state.optimizer_storages:
            storage.array()
        return True

    def copy_data_from_device_memory(
        self, to_bytes: Any, length: int | None = None, *, synchronize_with_device: bool = False
    ) -> bool:
        """Copy the first `length` bytes (all by default) of the values into a writable buffer."""
        who = f"Tensor '{self.label}'.copy_data_from_device_memory"
        data = self._state.values(self)
        if data is None:
            fix = self._state.how_to_keep(self) or "run a graph that computes it first"
            raise DataError(f"{who}: the tensor has no data", fix=fix)
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        count = raw.size if length is None else length
        if not 0 <= count <= raw.size:
            raise DataError(f"{who}: length is {count}, the tensor has {raw.size} bytes")
        target = TensorData(to_bytes) if not isinstance(to_bytes, TensorData) else to_bytes
        if target.length < count:
            raise DataError(f"{who}: the buffer has {target.length} bytes, {count} are needed")
        if not target.is_writable:
            raise DataError(f"{who}: the buffer is read-only")
        np.frombuffer(target.bytes, np.uint8)[:count] = raw[:count]
        return True

    def bind_and_write_data(self, data: ArrayLike, *, to: Device) -> bool:
        """Attach new values, without a copy where layout and dtype allow; meant for parameters.

        What is trained is then the caller's memory, on the host or on the GPU `to`; `data = ...` copies values instead.
        Host memory of what a GPU trains has the new values after `synchronize_data`, or when `data` was read.
        """
        from mlcompute.device import expect_device

        who = f"Tensor '{self.label}'.bind_and_write_data"
        expect_device(who, "to", to)
        host = read_array(data, self._descriptor, who)
        state = self._state
        state.rebind(self, host)
        state.device = to
        there = engine_of(to).adopt(data, who) if is_on_gpu(data) else None
        if there is not None and (there.shape, there.dtype) == (host.shape, host.dtype) and state.storage is not None:
            buffer = there.buffer()
            if buffer is not None:
                state.storage.place(engine_of(to), buffer, is_callers=True)
        return True

    def bind_optimizer_data(
        self, data: Sequence[ArrayLike], *, device_data: Sequence[TensorOptimizerDeviceData] | None = None
    ) -> bool:
        """Attach optimizer state: one buffer per state, in layout order. The memory stays the caller's."""
        who, own = f"Tensor '{self.label}'.bind_optimizer_data", self._state
        expected = [TensorDescriptor(self._descriptor.shape)] * len(data)  # FLOAT32, whatever the tensor's type
        if len(own.optimizer_storages) == len(data):  # some optimizers keep state of other shapes
            expected = [TensorDescriptor(storage.shape) for storage in own.optimizer_storages]
        states = [
            write_target(state, descriptor, f"{who}[{index}]")
            for index, (state, descriptor) in enumerate(zip(data, expected, strict=True))
        ]
        memory = {f"state {index}": state for index, state in enumerate(states)}
        if own.storage is not None:
            memory["the parameter"] = own.storage.array()
        expect_apart(memory, who)
        residents = own.wait_for_runs()
        before = own.optimizer_storages, own.has_callers_optimizer_data
        bound = [Storage(state, is_callers=True) for state in states]
        own.optimizer_storages, own.has_callers_optimizer_data = bound, True
        try:
            for resident in residents:
                resident.rebound(self)
        except DataError:
            own.optimizer_storages, own.has_callers_optimizer_data = before
            raise
        return True

    quantized = quantization.quantized
    dequantized = quantization.dequantized

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A tensor of its own with the same values; what a graph computed stays with the graph."""
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._tensor_id, copied._state = next(tensor_ids), self._state.copied()
        return copied

    def __copy__(self) -> Tensor:
        copied = Tensor(self._descriptor)
        data, own, state = self._state.values(self), self._state, copied._state
        state.storage = None if data is None else Storage.owning(data.copy())
        state.unscaled = own.unscaled
        state.optimizer_storages = [storage.copy() for storage in own.optimizer_storages]
        state.has_callers_optimizer_data = own.has_callers_optimizer_data
        return copied

    def __reduce__(self) -> Any:
        """For pickle: shape, label and values. What layers compute travels with the graph that has them."""
        is_computed = self._state.producer is not None
        values = self._state.values(self) if self.keeps_data or is_computed else None
        if is_computed and values is None:
            raise TypeError(f"{self!r} has no values to pickle: pickle the graph, which has its tensors")
        return _unpickled, (self._descriptor, self.label, self.varies, values)

    def __repr__(self) -> str:
        return f"Tensor('{self.label}' {self._descriptor})"


#: The tensor of a layer's result.
result_tensor = Tensor._of_result  # noqa: SLF001


def _unpickled(descriptor: TensorDescriptor, label: str, varies: tuple[int, ...], values: Array | None) -> Tensor:
    if values is not None and values.shape != descriptor.shape:  # the result of a smaller batch
        descriptor = TensorDescriptor(values.shape, data_type=descriptor.data_type)
    tensor = Tensor(descriptor, data=values)
    tensor.label, state_of(tensor).varies = label, varies
    return tensor


class TensorParameter:
    """A tensor the optimizer updates; `is_updatable` switches that off and on.

    optimizer_data: initial state buffers, in layout order.
    """

    __slots__ = ("__weakref__", "_is_updatable", "_tensor")

    def __repr__(self) -> str:
        return f"TensorParameter({self.tensor!r}{'' if self.is_updatable else ', not updatable'})"

    def __init__(self, tensor: Tensor, *, optimizer_data: Sequence[ArrayLike] | None = None) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"TensorParameter: needs a Tensor, not {type(tensor).__name__}")
        self._tensor = tensor
        self._is_updatable = True
        if optimizer_data is not None:
            tensor.bind_optimizer_data(optimizer_data)

    @property
    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tensor

    @property
    def is_updatable(self) -> bool:
        """May the optimizer change the tensor? Takes effect at the next run."""
        return self._is_updatable

    @is_updatable.setter
    def is_updatable(self, value: bool) -> None:
        if bool(value) != self._is_updatable:
            self._is_updatable = bool(value)
            state_of(self._tensor).outdated()
