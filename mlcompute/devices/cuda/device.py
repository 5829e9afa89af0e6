"""The CUDA engine: programs become kernels and library calls, captured into CUDA graphs."""

from __future__ import annotations

import threading

from mlcompute.compiler.program import Program
from mlcompute.devices.cuda.driver import Driver
from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.cuda.memory import CudaBuffer, Staging
from mlcompute.devices.device import Buffer, Engine, Executable, Traits
from mlcompute.enums import DeviceType
from mlcompute.interrupts import held
from mlcompute.ops.op import Array, Step


class Cuda(Engine):
    """One NVIDIA GPU. Work of all its programs and copies is in one stream, in the order in which it was started."""

    device_type = DeviceType.GPU
    traits = Traits(fuses_elementwise=True, channels_last=True)

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.name = f"cuda:{driver.ordinal}"
        self.stream = driver.create_stream()
        #: Graphs are captured on a stream of their own: nothing that others enqueue meanwhile gets into them.
        self.capture_stream = driver.create_stream()
        self.staging = Staging(driver, self.stream)
        #: Held while a run is enqueued.
        self.lock = threading.RLock()
        #: Marks that no run is using.
        self.events: list[int] = []

    def facts(self) -> dict[str, str]:
        driver = self.driver
        memory = f"{driver.total_memory / 2**30:.0f} GiB"
        return {"device": f"{driver.device_name} ({driver.architecture}), {memory}", **driver.versions()}

    def supports(self, step: Step) -> bool:
        row = KERNELS.get(step.op.name)
        return row is not None and row.supports(step)

    def workspace(self, step: Step) -> int:
        return KERNELS[step.op.name].workspace(step)

    def allocate(self, nbytes: int) -> Buffer:
        buffer = CudaBuffer(self.driver, self.staging, nbytes)
        if nbytes:
            self.driver.fill(buffer.address, 0, nbytes, self.stream)
        return buffer

    def wrap(self, array: Array) -> Buffer | None:
        return None

    def build(self, program: Program, arena: Buffer) -> Executable:
        assert isinstance(arena, CudaBuffer)
        with held:
            return CudaExecutable(self, program, arena)

    def synchronize(self) -> None:
        self.driver.synchronize(self.stream)
