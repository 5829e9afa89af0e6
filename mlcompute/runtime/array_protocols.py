"""Tensors among other libraries' arrays: DLPack, `__array__` and the buffer protocol."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.foreign_array import CUDA_DEVICE, exported_from_host
from mlcompute.errors import DataError
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from mlcompute.devices.device import Engine
    from mlcompute.devices.foreign_array import DeviceArray


class Exchanged:
    """Something with `data` that other libraries read: np.asarray(t), torch.from_dlpack(t), memoryview(t).

    Who asks for a GPU gets a copy there, made there if the values lie there: torch.from_dlpack(t, device="cuda").

    They get the values as they are now. NumPy and the buffer protocol know read-only memory; what DLPack hands out is
    a copy of the receiver's own, because not all libraries do. Memory that several sides read and write is memory of
    the caller's: `Tensor(shared_data=array)`; or on a GPU that of a parameter, for who asks for it with copy=False.
    """

    label: str

    @property
    @abstractmethod
    def data(self) -> Array | None:
        """The values, or None."""

    def _how_to_have_data(self) -> str:
        return "run a graph that computes it, or give it data"

    def _values(self, otherwise: str = "") -> Array:
        data = self.data
        if data is None:
            fix = f"{self._how_to_have_data()}{otherwise}"
            raise DataError(f"Tensor '{self.label}' has no data", fix=fix)
        return data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self._values(
            "; in an expression, x.exp() and mlc.concatenate([x, y], axis) instead of NumPy's functions"
        )
        if copy is False:
            raise ValueError(
                f"Tensor '{self.label}': its memory cannot be had without a copy; share an array of your own instead: "
                "Tensor(shared_data=array)"
            )
        wanted = array.dtype if dtype is None else np.dtype(dtype)
        return array.astype(wanted) if copy or wanted != array.dtype else array

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], arguments: Any, keywords: Any
    ) -> Any:
        """NumPy's functions read the values: np.mean(t) would call t.mean(), which is an expression, otherwise."""
        if not all(issubclass(one, (Exchanged, np.ndarray)) for one in types):
            return NotImplemented
        if function is np.shape:  # is known without values
            return arguments[0].shape
        return function(*_as_arrays(arguments), **_as_arrays(keywords))

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
        **options: Any,
    ) -> Any:
        if dl_device is not None and int(dl_device[0]) == CUDA_DEVICE:
            return self._on_gpu(int(dl_device[1]), stream, shares=copy is False)
        if copy is False:
            raise BufferError(
                f"Tensor '{self.label}': its memory cannot be had without a copy; share an array of your own instead: "
                "Tensor(shared_data=array)"
            )
        if dl_device is not None:
            options["dl_device"] = dl_device  # NumPy knows it from 2.1 on
        copied = self._values().copy()
        return exported_from_host(copied) if is_bfloat16(copied.dtype) else copied.__dlpack__(stream=stream, **options)

    def _on_gpu(self, ordinal: int, stream: Any, *, shares: bool) -> Any:
        from mlcompute.device import gpu_engines, why_no_gpu

        engines = gpu_engines()
        if ordinal >= len(engines):
            raise BufferError(f"Tensor '{self.label}': there is no GPU {ordinal} to copy it to {why_no_gpu()}".strip())
        there, lasts = self._device_array_on(engines[ordinal])
        if shares and (there is None or not lasts):
            raise BufferError(
                f"Tensor '{self.label}' has no memory on GPU {ordinal} that could be shared: only parameters of graphs "
                "that run there do; leave copy=False out for a copy"
            )
        return engines[ordinal].to_dlpack(self._values() if there is None else there, stream, shares=shares)

    @abstractmethod
    def _device_array_on(self, engine: Engine) -> tuple[DeviceArray | None, bool]:
        """The newest values where a device has them, else None; and whether they lie there after the next run."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # host memory

    def __buffer__(self, flags: int) -> memoryview:  # asked from Python 3.12 on; before, use memoryview(tensor.data)
        values = self._values()
        if is_bfloat16(values.dtype):
            raise BufferError(
                f"Tensor '{self.label}' is BFLOAT16, which the buffer protocol has no code for: "
                "memoryview(np.asarray(tensor).view(np.uint16)) has its bits"
            )
        return values.data


def _as_arrays(given: Any) -> Any:
    """Tensors as arrays, also within lists, tuples and dictionaries."""
    if isinstance(given, Exchanged):
        return np.asarray(given)
    if isinstance(given, dict):
        return {name: _as_arrays(one) for name, one in given.items()}
    return type(given)(map(_as_arrays, given)) if type(given) in (list, tuple) else given
