"""What the engine needs of CUDA: memory, streams, events, kernels, captured graphs; NVIDIA's driver, by cuda-bindings.

Every device has its primary context, which all libraries in a process share. The driver is looked for at the first
use: `import mlcompute` touches nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cuda import cublaslt, cudnn, nccl
from mlcompute.devices.cuda.jit import nvrtc
from mlcompute.devices.cuda.jit.cache import kernel_name, machine_code
from mlcompute.devices.cuda.kernels.launch import Extents
from mlcompute.devices.cuda.libraries import Gpu, imported
from mlcompute.devices.cuda.memory_account import MemoryAccount
from mlcompute.errors import DeviceError

#: After these the context is of no use any more, whatever is called.
_FATAL = {
    *("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "MISALIGNED_ADDRESS", "ASSERT", "HARDWARE_STACK_ERROR"),
    *("ILLEGAL_INSTRUCTION", "INVALID_PC", "INVALID_ADDRESS_SPACE", "LAUNCH_TIMEOUT", "ECC_UNCORRECTABLE"),
    *("NVLINK_UNCORRECTABLE", "CONTAINED", "CONTEXT_IS_DESTROYED"),
}
_is_forked = False


def _after_fork() -> None:
    global _is_forked
    _is_forked = _library.cache_info().currsize > 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _library() -> Any:
    """cuda.bindings.driver with a driver behind it; DeviceError when something is missing."""
    library = imported("cuda.bindings.driver", "cuda-bindings")
    try:
        (result,) = library.cuInit(0)
    except Exception as error:  # cuda-bindings looks for the library now, and says in its own way that it is not there
        raise DeviceError(
            "there is no NVIDIA driver on this machine",
            reason=str(error).strip().split("\n")[0],
            fix="install NVIDIA's driver for CUDA 13 or newer, or run on a machine with a GPU",
        ) from error
    if result != library.CUresult.CUDA_SUCCESS:
        raise DeviceError(
            "the NVIDIA driver cannot be used",
            reason=_reason(library, result),
            fix="look at what nvidia-smi says; in a container, start it with access to the GPU",
        )
    _, version = library.cuDriverGetVersion()
    needed = int(nvrtc.version().split(".")[0])
    if version // 1000 < needed:
        raise DeviceError(
            f"the NVIDIA driver is too old: it supports CUDA {_version(version)}",
            expected=f"CUDA {needed}.0 or newer, because NVRTC {nvrtc.version()} is installed",
            fix="update the driver",
        )
    return library


#: What every step calls, and what it is given.
_HOT = {"cuCtxSetCurrent": 1, "cuEventRecord": 2, "cuEventQuery": 1, "cuEventSynchronize": 1, "cuGraphLaunch": 2}


@functools.cache
def _direct_calls() -> Any:
    """The driver's library itself. A step makes a handful of calls, and cuda-bindings takes longer than they do."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    for name, count in _HOT.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * count, ctypes.c_int
    return library


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _reason(library: Any, result: Any) -> str:
    _, text = library.cuGetErrorString(result)
    return f"{result.name.removeprefix('CUDA_ERROR_')}, {text.decode() if text else 'unknown'}"


def device_count() -> int:
    """GPUs this process may use; DeviceError when there is no usable driver."""
    result, count = _library().cuDeviceGetCount()
    return int(count) if result == _library().CUresult.CUDA_SUCCESS else 0


def _context_of(driver: CudaDriver) -> Any:
    driver.activate()
    return driver.context


class CudaDriver:
    """One GPU. Handles and addresses are plain integers, so that nothing above depends on the types of the binding.

    Everything may be called from any thread.

    ordinal          which of the machine's devices it is
    device_name      as its maker calls it
    architecture     what kernels are compiled for: "sm_90"
    multiprocessors  how many thread blocks run side by side, at least
    total_memory     bytes
    compute_capability   its generation: (9, 0)
    account          what this process takes of its memory
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._library = library = _library()
        self._success = library.CUresult.CUDA_SUCCESS
        self._not_ready = int(library.CUresult.CUDA_ERROR_NOT_READY)
        self._is_lost = False
        device = self._check("cuDeviceGet", library.cuDeviceGet(ordinal))
        name: bytes = self._check("cuDeviceGetName", library.cuDeviceGetName(128, device))
        self.device_name = name.split(b"\0")[0].decode()
        self.total_memory = int(self._check("cuDeviceTotalMem", library.cuDeviceTotalMem(device)))

        def attribute(name: str) -> int:
            which = getattr(library.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self._check("cuDeviceGetAttribute", library.cuDeviceGetAttribute(which, device)))

        self.multiprocessors = attribute("MULTIPROCESSOR_COUNT")
        self.compute_capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
        self.architecture = self._best_architecture()
        self._device = device
        self.account = MemoryAccount(self.free_memory)
        self.context: Any = None
        self._context_handle = 0
        self._calls = _direct_calls()
        self._functions: dict[str, int] = {}
        self._shared: dict[int, int] = {}
        self._modules: list[Any] = []
        self._lock = threading.RLock()

    def _best_architecture(self) -> str:
        """What to compile for: code for an older device of the same generation runs, too."""
        major, minor = self.compute_capability
        for lower in range(minor, -1, -1):
            if nvrtc.supports(f"sm_{major}{lower}"):
                return f"sm_{major}{lower}"
        raise DeviceError(
            f"{self.device_name}: NVRTC {nvrtc.version()} cannot compile for compute capability {major}.{minor}",
            fix="install another version of nvidia-cuda-nvrtc",
        )

    def activate(self) -> Gpu | None:
        """Make the device the current one of this thread. What libraries have to know of it; None without them."""
        self._enter()
        return Gpu(self.ordinal, self.device_name, self.compute_capability, self.multiprocessors)

    def identity(self) -> str:
        """Tells it from all other devices, on this and other machines."""
        return bytes(self._check("cuDeviceGetUuid", self._library.cuDeviceGetUuid(self._device)).bytes).hex()

    def versions(self) -> dict[str, str]:
        """What it is made of here, for people to read."""
        version = self._check("cuDriverGetVersion", self._library.cuDriverGetVersion())
        libraries = []
        for require in (cublaslt.require, cudnn.require, nccl.library):
            try:
                libraries.append(require().name)
            except DeviceError as error:
                libraries.append(error.message)
        return {
            "driver": f"CUDA {_version(version)}",
            "loops": f"NVRTC {nvrtc.version()}",
            "libraries": ", ".join(libraries),
        }

    # Calls ------------------------------------------------------------------------------------------------------

    def _check_code(self, name: str, code: int) -> None:
        """DeviceError when a function that was called directly failed."""
        if code:
            self._fail(name, self._library.CUresult(code))

    def _check(self, name: str, answer: tuple[Any, ...]) -> Any:
        """What a function gave; DeviceError when it failed."""
        result = answer[0]
        if result != self._success:
            self._fail(name, result)
        return answer[1] if len(answer) > 1 else None

    def _out_of_memory(self, asked: str) -> DeviceError:
        return DeviceError(
            f"device 'cuda:{self.ordinal}' ({self.device_name}): out of memory",
            asked=asked,
            free=f"{self.free_memory()} of {self.total_memory} bytes",
            fix="use a smaller batch, or free other graphs",
        )

    def _fail(self, name: str, result: Any) -> None:
        if result.name == "CUDA_ERROR_OUT_OF_MEMORY" and name != "cuMemGetInfo" and self.context is not None:
            raise self._out_of_memory(f"by {name}")
        self._is_lost = self._is_lost or result.name.removeprefix("CUDA_ERROR_") in _FATAL
        raise DeviceError(
            f"device 'cuda:{self.ordinal}': {name} failed",
            reason=_reason(self._library, result),
            fix="restart the process: the device has lost what it was doing" if self._is_lost else "",
        )

    def _enter(self) -> Any:
        """The library, with this device's context current on the calling thread."""
        if _is_forked:
            raise DeviceError(
                f"device 'cuda:{self.ordinal}' was in use when the process was forked, and cannot be used in the child",
                fix="start the child with multiprocessing's method 'spawn'",
            )
        if self.context is None:
            # The device's memory and some of the host's are taken only now. Retaining it twice does no harm.
            answer = self._library.cuDevicePrimaryCtxRetain(self._device)
            self.context = self._check("cuDevicePrimaryCtxRetain", answer)
            self._context_handle = int(self.context)
        # Another library may have made another device the current one of this thread.
        self._calls.cuCtxSetCurrent(self._context_handle)
        return self._library

    # Memory -----------------------------------------------------------------------------------------------------

    def free_memory(self) -> int:
        """Bytes that are free on the device."""
        answer = self._enter().cuMemGetInfo()
        self._check("cuMemGetInfo", answer)
        return int(answer[1])

    def allocate(self, nbytes: int) -> int:
        """The address of device memory, aligned to 256 bytes; DeviceError when there is not enough."""
        result, address = self._enter().cuMemAlloc(nbytes)
        if result == self._library.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise self._out_of_memory(f"{nbytes} bytes")
        if result != self._success:
            self._fail("cuMemAlloc", result)
        self.account.allocated(int(address), nbytes)
        return int(address)

    def free(self, address: int) -> None:
        """Give device memory back, when what was started before has finished with it."""
        self._release("cuMemFree", address)
        self.account.freed(address)

    def allocate_pinned(self, nbytes: int) -> int:
        """The address of host memory that the device copies from and to by itself."""
        portable = 1  # for all contexts
        return int(self._check("cuMemHostAlloc", self._enter().cuMemHostAlloc(nbytes, portable)))

    def free_pinned(self, address: int) -> None:
        """Give pinned memory back."""
        self._release("cuMemFreeHost", address)

    def _release(self, name: str, handle: int) -> None:
        """Give something back. Called by destructors: there is nobody to tell about errors, and they come again."""
        if not _is_forked and not self._is_lost:
            with contextlib.suppress(DeviceError):
                self._check(name, getattr(self._enter(), name)(handle))

    # Work on streams ----------------------------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A queue of work; what is enqueued runs in order, beside other streams."""
        not_blocking = 1  # does not wait for the default stream, on which others may work
        return int(self._check("cuStreamCreate", self._enter().cuStreamCreate(not_blocking)))

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from pinned memory."""
        self._check("cuMemcpyHtoDAsync", self._enter().cuMemcpyHtoDAsync(target, source, nbytes, stream))

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy into pinned memory."""
        self._check("cuMemcpyDtoHAsync", self._enter().cuMemcpyDtoHAsync(target, source, nbytes, stream))

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy inside the device."""
        self._check("cuMemcpyDtoDAsync", self._enter().cuMemcpyDtoDAsync(target, source, nbytes, stream))

    def allow_access(self, other: CudaDriver) -> None:
        """Let it read another device's memory itself, where the machine can do that: copies are faster then."""
        if other.ordinal != self.ordinal:
            context, library = _context_of(other), self._enter()
            can = self._check("cuDeviceCanAccessPeer", library.cuDeviceCanAccessPeer(self._device, other.ordinal))
            (result,) = library.cuCtxEnablePeerAccess(context, 0) if can else (self._success,)
            if result.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                self._check("cuCtxEnablePeerAccess", (result,))

    def copy_from(self, other: CudaDriver, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from another device's memory, on a stream of this one."""
        source_context, library = _context_of(other), self._enter()
        answer = library.cuMemcpyPeerAsync(target, self.context, source, source_context, nbytes, stream)
        self._check("cuMemcpyPeerAsync", answer)

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Enqueue setting all bytes."""
        self._check("cuMemsetD8Async", self._enter().cuMemsetD8Async(target, byte, nbytes, stream))

    def launch(
        self, function: int, grid: Extents, block: Extents, shared_bytes: int, stream: int, parameters: int
    ) -> None:
        """Enqueue a kernel. `parameters` is the address of an array with the address of every argument."""
        answer = self._enter().cuLaunchKernel(function, *grid, *block, shared_bytes, stream, parameters, 0)
        self._check("cuLaunchKernel", answer)

    def synchronize(self, stream: int) -> None:
        """Return when everything enqueued on a stream is done."""
        self._check("cuStreamSynchronize", self._enter().cuStreamSynchronize(stream))

    # Events -------------------------------------------------------------------------------------------------------

    def create_event(self, timed: bool = False) -> int:
        """A mark in a stream. Before it is first recorded it counts as reached."""
        without_time = 2
        return int(self._check("cuEventCreate", self._enter().cuEventCreate(0 if timed else without_time)))

    def free_event(self, event: int) -> None:
        """Give an event back."""
        self._release("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        """Enqueue the mark."""
        self._enter()
        self._check_code("cuEventRecord", self._calls.cuEventRecord(event, stream))

    # An event knows its device, whichever is the current one. Only a thread that has none yet is turned away.

    def is_reached(self, event: int) -> bool:
        """Has the work before the mark finished? Never waits."""
        code = self._calls.cuEventQuery(event)
        if code not in (0, self._not_ready):
            self._enter()
            code = self._calls.cuEventQuery(event)
            if code != self._not_ready:
                self._check_code("cuEventQuery", code)
        return bool(code == 0)

    def wait(self, event: int) -> None:
        """Return when the work before the mark has finished."""
        if self._calls.cuEventSynchronize(event):
            self._enter()
            self._check_code("cuEventSynchronize", self._calls.cuEventSynchronize(event))

    def wait_on_stream(self, stream: int, event: int) -> None:
        """What is enqueued on a stream from now on waits for the mark, the host does not."""
        self._check("cuStreamWaitEvent", self._enter().cuStreamWaitEvent(stream, event, 0))

    def seconds_between(self, start: int, end: int) -> float:
        """Time between two timed marks that were reached."""
        return float(self._check("cuEventElapsedTime", self._enter().cuEventElapsedTime(start, end))) / 1e3

    # Kernels and graphs -------------------------------------------------------------------------------------------

    def functions(self, sources: Sequence[str]) -> list[int]:
        """Handles of kernels, each given as CUDA C++ in which the kernel is called `KERNEL`; compiled if need be."""
        with self._lock:
            missing = list(dict.fromkeys(source for source in sources if source not in self._functions))
            if missing:
                codes = machine_code(missing, self.architecture)
                with self.account.taking("kernels"):
                    for source, code in zip(missing, codes, strict=True):
                        self._functions[source] = self._loaded(source, code)
            return [self._functions[source] for source in sources]

    def _loaded(self, source: str, code: bytes) -> int:
        image, library = np.frombuffer(code, np.uint8), self._enter()
        module = self._check("cuModuleLoadData", library.cuModuleLoadData(image.ctypes.data))
        name = kernel_name(source).encode()
        function = self._check("cuModuleGetFunction", library.cuModuleGetFunction(module, name))
        self._modules.append(module)
        return int(function)

    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        """Let a kernel be launched with so much dynamic shared memory: more than 48 kB in all must be asked for."""
        # Programs share kernels: what one of them needs must not be taken from another.
        with self._lock:
            if nbytes > self._shared.get(function, 0):
                which = self._library.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._check("cuFuncSetAttribute", self._enter().cuFuncSetAttribute(function, which, nbytes))
                self._shared[function] = nbytes

    def begin_capture(self, stream: int) -> None:
        """From now on, what is enqueued on a stream is noted and not run."""
        # Relaxed: other threads, and destructors on this one, may allocate and free memory meanwhile.
        relaxed = self._library.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._check("cuStreamBeginCapture", self._enter().cuStreamBeginCapture(stream, relaxed))

    def end_capture(self, stream: int) -> int:
        """What was noted since, as a graph that can be launched."""
        library = self._enter()
        graph = self._check("cuStreamEndCapture", library.cuStreamEndCapture(stream))
        try:
            with self.account.taking("graphs"):
                return int(self._check("cuGraphInstantiate", library.cuGraphInstantiate(graph, 0)))
        finally:
            library.cuGraphDestroy(graph)

    def abort_capture(self, stream: int) -> None:
        """Forget what was noted since."""
        library = self._enter()
        result, graph = library.cuStreamEndCapture(stream)
        if result == self._success:
            library.cuGraphDestroy(graph)

    def launch_graph(self, graph: int, stream: int, mark: int | None) -> None:
        """Enqueue a graph and, where one is given, a mark behind it."""
        # A stream knows its device, too: one that is refused was not launched, and is tried again with all in order.
        calls = self._calls
        if _is_forked or calls.cuGraphLaunch(graph, stream):
            self._enter()
            self._check_code("cuGraphLaunch", calls.cuGraphLaunch(graph, stream))
        if mark is not None:
            self._check_code("cuEventRecord", calls.cuEventRecord(mark, stream))

    def upload_graph(self, graph: int, stream: int) -> None:
        """Enqueue what the first launch of a graph would do besides running it."""
        self._check("cuGraphUpload", self._enter().cuGraphUpload(graph, stream))

    def free_graph(self, graph: int) -> None:
        """Give a graph back; one that is running is given back when it has finished."""
        with self.account.taking("graphs"):
            self._release("cuGraphExecDestroy", graph)
