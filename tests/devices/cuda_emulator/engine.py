"""The engine over the emulated driver. Steps that call a library run by their NumPy meaning."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import numpy as np

from mlcompute.compiler.program import Program
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.cuda.executable import CudaExecutable, Work
from mlcompute.devices.cuda.kernels.launch import LibraryCall
from mlcompute.devices.cuda.libraries import building_for
from mlcompute.devices.cuda.nccl import Nccl
from mlcompute.devices.device import Buffer, Executable
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array, Step, Value, run_meaning
from tests.devices.cuda_emulator.driver import EmulatedDriver

#: Where values lay when a step was enqueued.
Places = dict[Value, int | None]


class EmulatedCuda(Cuda):
    driver: EmulatedDriver

    def __init__(self, ordinal: int = 0, nccl: Nccl | None = None) -> None:
        super().__init__(EmulatedDriver(ordinal))
        self.name = "cuda-emulated" + (f":{ordinal}" if ordinal else "")
        self._nccl = nccl

    def nccl(self) -> Nccl:
        if self._nccl is None:
            raise DeviceError("NCCL cannot be used without a GPU")
        return self._nccl

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        with building_for(self.driver.activate()):
            executable = EmulatedExecutable(self, program)
        if arena is not None:
            executable.place(arena)
        return executable


class EmulatedExecutable(CudaExecutable):
    """Replaces every step that calls a library, and all its launches, by what the step means."""

    engine: EmulatedCuda

    def _enqueue_one(self, work: Work, stream: int) -> None:
        calls = [each for each in self._work if each.step is work.step and isinstance(each, LibraryCall)]
        if not calls:
            super()._enqueue_one(work, stream)
        elif work is calls[0]:
            mean, step = weakref.WeakMethod(self._mean), work.step  # captured, it must not keep the program alive
            places = {value: self._address(self._operands[value]) for value in (*step.inputs, *step.results)}
            self.engine.driver.enqueue(lambda: _called(mean, step, places), stream)

    def _mean(self, step: Step, places: Places) -> None:
        with np.errstate(all="ignore"):
            results = run_meaning(step, [self._array(value, places[value]) for value in step.inputs])
        for value, array in zip(step.results, results, strict=True):
            if places[value] is not None:
                np.copyto(self._array(value, places[value]), array)

    def _array(self, value: Value, address: int | None) -> Array:
        """A value where it lies."""
        operand = self._operands[value]
        assert address is not None, value
        last = sum((extent - 1) * stride for extent, stride in zip(operand.shape, operand.strides, strict=True))
        count = last + 1 if operand.size else 0
        memory = (ctypes.c_uint8 * (count * operand.dtype.itemsize)).from_address(address)
        flat = np.frombuffer(memory, operand.dtype)
        strides = tuple(stride * operand.dtype.itemsize for stride in operand.strides)
        return np.lib.stride_tricks.as_strided(flat, operand.shape, strides)


def _called(method: weakref.WeakMethod[Callable[[Step, Places], None]], step: Step, places: Places) -> None:
    found = method()
    assert found is not None
    found(step, places)
