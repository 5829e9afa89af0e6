"""The CUDA engine: programs become kernels and library calls, captured into CUDA graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlcompute.compiler.program import Program
from mlcompute.devices import register
from mlcompute.devices.cuda import cuda_bindings, nccl, recurrent_choice
from mlcompute.devices.cuda.branches import STREAMS
from mlcompute.devices.cuda.compare_steps import is_wanted
from mlcompute.devices.cuda.completion import Progress
from mlcompute.devices.cuda.exchange import GpuArray, adopted, dlpack_capsule
from mlcompute.devices.cuda.executable import CudaExecutable
from mlcompute.devices.cuda.gpu_exchange import joined
from mlcompute.devices.cuda.input_blocks import SmallPart
from mlcompute.devices.cuda.kernels import cudnn_recurrent
from mlcompute.devices.cuda.kernels.table import KERNELS
from mlcompute.devices.cuda.libraries import building_for
from mlcompute.devices.cuda.memory import CudaBuffer, Staging
from mlcompute.devices.device import Buffer, DeviceMemory, Engine, Executable, GpuDevice, Traits
from mlcompute.devices.device_exchange import DeviceExchange
from mlcompute.devices.foreign_array import DeviceArray, is_on_gpu
from mlcompute.devices.interrupts import held
from mlcompute.enums import DeviceType
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array, Step, Value


class Cuda(Engine):
    """One NVIDIA GPU. Work of all its programs and copies is in one stream, in the order in which it was started."""

    device_type = DeviceType.GPU
    traits = Traits(
        fuses_elementwise=True,
        fuses_epilogues=True,
        fuses_normalization=True,
        attention_by_token=True,
        recurrent_reserve=True,
        merges_matmuls=1024,  # for fewer rows, copying the weights side by side takes longer than is won
        recomputes_factors=False,  # it has much memory, and writing them again takes time
        updates_last=True,
        channels_last=True,
        reuse_delay=16,
        matmul_reuse_delay=8,
        runs_ahead=True,
    )
    precisions = ("float32", "bf16")

    def __init__(self, driver: cuda_bindings.CudaDriver) -> None:
        self.driver = driver
        self.name = f"cuda:{driver.ordinal}"
        #: Held while a run is enqueued.
        self.lock = threading.RLock()
        #: Marks that no run is using.
        self.events: list[int] = []
        #: Pinned memory for small values on their way to the host that nobody is using.
        self.small_parts: list[SmallPart] = []
        self._opened: _Opened | None = None

    def _open(self) -> _Opened:
        """What a device in use has. One that is only listed takes no memory of it."""
        if self._opened is None:
            with self.lock:
                if self._opened is None:
                    self._opened = _Opened(self.driver)
        return self._opened

    @property
    def stream(self) -> int:
        """Where everything runs."""
        return self._open().stream

    @property
    def capture_stream(self) -> int:
        """Where graphs are captured: nothing that others enqueue meanwhile gets into them."""
        return self._open().capture_stream

    @property
    def branch_streams(self) -> Sequence[int]:
        """Where branches of graphs are captured."""
        return self._open().branch_streams

    @property
    def copy_stream(self) -> int:
        """Where large inputs are copied while kernels run."""
        return self._open().copy_stream

    @property
    def progress(self) -> Progress:
        """How many runs it was given, and has finished."""
        return self._open().progress

    def take_event(self) -> int:
        """A mark that nobody uses."""
        try:
            return self.events.pop()
        except IndexError:
            return self.driver.create_event()

    @property
    def staging(self) -> Staging:
        """Copies to and from the device."""
        return self._open().staging

    def facts(self) -> dict[str, str]:
        driver = self.driver
        memory = f"{driver.total_memory / 2**30:.0f} GiB"
        return {"device": f"{driver.device_name} ({driver.architecture}), {memory}", **driver.versions()}

    @property
    def gpu(self) -> GpuDevice:
        driver = self.driver
        return GpuDevice(self.name, driver.device_name, driver.total_memory, driver.compute_capability)

    def memory(self) -> DeviceMemory:
        return self.driver.account.state(self.driver.total_memory)

    def supports(self, step: Step) -> bool:
        row = KERNELS.get(step.op.name)
        if row is None:
            return False
        with building_for(self.driver.activate()):
            return is_wanted(self, step, row)

    def recurrent_reserve(self, step: Step, trains: bool) -> int | None:
        with building_for(self.driver.activate()):
            return recurrent_choice.reserve(self, step, trains)

    def needs_dense(self, steps: Sequence[Step], views: Mapping[Value, Value]) -> Mapping[Step, Sequence[Value]]:
        return cudnn_recurrent.strided_inputs(steps, views)

    def workspace(self, step: Step) -> int:
        with building_for(self.driver.activate()):
            return KERNELS[step.op.name].workspace(step)

    def allocate(self, nbytes: int) -> Buffer:
        buffer = CudaBuffer(self.driver, self.staging, nbytes)
        if nbytes:
            self.driver.fill(buffer.address, 0, nbytes, self.stream)
        return buffer

    def wrap(self, array: Array) -> Buffer | None:
        return None

    def adopt(self, data: object, who: str) -> GpuArray | None:
        return adopted(self, data, who) if is_on_gpu(data) else None

    def to_dlpack(self, values: Array | DeviceArray, stream: Any, *, shares: bool = False) -> Any:
        return dlpack_capsule(self, values, stream, shares=shares)

    def nccl(self) -> nccl.Nccl:
        """NCCL; DeviceError where it is missing."""
        return nccl.library()

    def join(
        self, engines: Sequence[Engine], rank: int, size: int, gather: Callable[[bytes], list[bytes]]
    ) -> DeviceExchange | None:
        return joined([engine for engine in engines if isinstance(engine, Cuda)], rank, size, gather)

    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        with held, building_for(self.driver.activate()), self.driver.account.taking("libraries"):
            executable = CudaExecutable(self, program)
        if arena is not None:
            executable.place(arena)
        return executable

    def synchronize(self) -> None:
        self.driver.synchronize(self.stream)


class _Opened:
    """Streams of a device, and copies in the first of them."""

    def __init__(self, driver: cuda_bindings.CudaDriver) -> None:
        self.stream, self.capture_stream = driver.create_stream(), driver.create_stream()
        self.branch_streams = [driver.create_stream() for _ in range(STREAMS - 1)]
        self.copy_stream = driver.create_stream()
        self.staging = Staging(driver, self.stream)
        self.progress = Progress(driver, self.staging)


@functools.cache
def _found() -> tuple[list[Cuda], DeviceError | None]:
    """An engine per GPU, or why there is none: looked for once."""
    try:
        count = cuda_bindings.device_count()
        return [Cuda(cuda_bindings.CudaDriver(ordinal)) for ordinal in range(count)], None
    except DeviceError as error:
        return [], error


def why_missing() -> DeviceError | None:
    """Why there is no GPU here, if there is none."""
    engines, error = _found()
    return None if engines else error or DeviceError("there is no NVIDIA GPU on this machine")


register("cuda", lambda: list(_found()[0]))
