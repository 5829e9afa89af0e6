"""Arrays of other libraries on this GPU: read where they are, or copied to the host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.cuda.memory import CudaBuffer
from mlcompute.devices.foreign_array import DEFAULT_STREAM, DeviceArray, ForeignArray, exported, foreign_array
from mlcompute.devices.loop_nest import dense_strides
from mlcompute.ops.op import Array, Value

if TYPE_CHECKING:
    from mlcompute.devices.cuda.device import Cuda

#: Kernels expect whatever is bound to begin at a multiple of so many bytes.
ALIGNMENT = 256


class GpuArray:
    """An array on a GPU that an engine can read. Called, it is itself: an input that is there when a run's turn comes.

    Its library goes on when runs that read it have finished: with the stream it told of. Work on other streams must not
    change the numbers before.
    """

    def __init__(self, engine: Cuda, foreign: ForeignArray) -> None:
        self._engine, self._foreign = engine, foreign
        self.shape, self.dtype = foreign.shape, foreign.dtype
        self._is_read = engine.take_event()
        self._ready = engine.take_event()
        if foreign.stream is not None:
            engine.driver.record(self._ready, foreign.stream)

    def __call__(self) -> GpuArray:
        return self

    def __del__(self) -> None:
        for event in (getattr(self, "_is_read", None), getattr(self, "_ready", None)):
            if event is not None:
                self._engine.events.append(event)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def fits(self, value: Value) -> bool:
        """Can a run read it as it is?"""
        return self.shape == value.shape and self.dtype == value.dtype and self._is_dense

    @property
    def _is_dense(self) -> bool:
        extents = zip(self.shape, self._foreign.strides, dense_strides(self.shape), strict=True)
        return all(stride == dense for extent, stride, dense in extents if extent > 1) or self.nbytes == 0

    @property
    def address(self) -> int:
        """Where it lies."""
        return self._foreign.address

    @property
    def is_aligned(self) -> bool:
        """Can kernels read it in place? They load many bytes at once."""
        return self.address % ALIGNMENT == 0 and self.nbytes > 0

    def begin_reading(self) -> None:
        """What is enqueued from now on reads it: behind what its library was doing."""
        if self._foreign.stream is not None:
            self._engine.driver.wait_on_stream(self._engine.stream, self._ready)

    def end_reading(self) -> None:
        """Everything that reads it has been enqueued: what its library does next waits for that."""
        if self._foreign.stream is not None:
            self._engine.driver.record(self._is_read, self._engine.stream)
            self._engine.driver.wait_on_stream(self._foreign.stream, self._is_read)

    def copy_to(self, address: int) -> None:
        """Enqueue a copy on the device."""
        assert self._is_dense
        if self.nbytes:
            self.begin_reading()
            self._engine.driver.copy_on_device(address, self.address, self.nbytes, self._engine.stream)
            self.end_reading()

    def buffer(self) -> CudaBuffer | None:
        """Its memory as a buffer that keeps it; None where kernels cannot use it in place."""
        if not self.is_aligned or not self._is_dense:
            return None
        self.begin_reading()
        return CudaBuffer.over(self._engine.staging, self.address, self.nbytes, self._foreign.owner)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        foreign, driver = self._foreign, self._engine.driver
        steps = zip(self.shape, foreign.strides, strict=True)
        last = sum((extent - 1) * stride for extent, stride in steps) if self.nbytes else -1
        flat = np.empty(last + 1, self.dtype)
        if foreign.stream is not None:
            driver.wait_on_stream(self._engine.stream, self._ready)
        self._engine.staging.fetch(flat, foreign.address)
        strides = tuple(stride * self.dtype.itemsize for stride in foreign.strides)
        array = np.array(np.lib.stride_tricks.as_strided(flat, self.shape, strides))
        return array if dtype is None else array.astype(dtype)


def adopted(engine: Cuda, data: object, who: str) -> GpuArray | None:
    """An array on this engine's GPU; None for one on another."""
    foreign = foreign_array(data, who)
    return GpuArray(engine, foreign) if foreign.ordinal == engine.driver.ordinal else None


def dlpack_capsule(engine: Cuda, values: Array | DeviceArray, stream: int | None, *, shares: bool) -> Any:
    """Values on this GPU as a DLPack capsule, ready for work on the receiver's stream: a copy, or the memory itself.

    stream   by DLPack's rules: None and 1 are the default stream, -1 means that nothing has to wait
    """
    shape, dtype = values.shape, values.dtype
    if isinstance(values, DeviceArray):
        buffer = values.buffer
        assert isinstance(buffer, CudaBuffer)
        if not shares:
            source, buffer = buffer, CudaBuffer(engine.driver, engine.staging, values.buffer.nbytes)
            if source.nbytes:
                engine.driver.copy_on_device(buffer.address, source.address, source.nbytes, engine.stream)
    else:
        uploaded = engine.upload(np.ascontiguousarray(values))
        assert isinstance(uploaded, CudaBuffer)
        buffer = uploaded
    if stream != -1 and buffer.nbytes:
        event = engine.take_event()
        engine.driver.record(event, engine.stream)
        engine.driver.wait_on_stream(stream or DEFAULT_STREAM, event)
        engine.events.append(event)
    return exported(ForeignArray(engine.driver.ordinal, buffer.address, shape, dense_strides(shape), dtype, buffer))
