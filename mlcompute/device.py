"""The device a user names when compiling a graph."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from mlcompute import devices
from mlcompute.enums import DeviceType
from mlcompute.errors import DeviceError
from mlcompute.layers.read_only import ReadOnly
from mlcompute.runtime.queue import WorkQueue

if TYPE_CHECKING:
    from mlcompute.devices.device import DeviceMemory, Engine, GpuDevice

#: (sys.platform, machine) on which the tests of the library are run.
TESTED = {("linux", "x86_64")}
#: What activations may be stored in.
PRECISIONS = ("float32", "bf16")
#: One queue per device, which its engine's name tells: graphs that share weights on it also share the order of runs.
_queues: dict[str, WorkQueue] = {}


def why_not_native() -> str | None:
    """Why the CPU runs operations by their NumPy definitions here; None where it has its native engine."""
    if os.environ.get("MLCOMPUTE_ENGINE") == "reference":
        return "MLCOMPUTE_ENGINE=reference asks for it"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    return None


@functools.cache
def cpu_engine() -> Engine:
    """The engine behind the CPU: native where it can be, else NumPy; or whichever MLCOMPUTE_ENGINE names."""
    wanted = os.environ.get("MLCOMPUTE_ENGINE", "")
    if wanted not in ("", "cpu", "reference"):
        found = devices.devices(wanted)
        if not found:
            raise DeviceError(f"MLCOMPUTE_ENGINE={wanted}: there is no such device on this machine")
        return found[0]
    reason = why_not_native()
    if reason is None:
        _expect_native_code_to_work(wanted)
        return devices.devices("cpu")[0]
    from mlcompute.devices.reference import Reference

    return Reference(reason=reason)


def _expect_native_code_to_work(wanted: str) -> None:
    """On a system that nobody has tested, native code proves itself first; MLCOMPUTE_ENGINE=cpu insists on it."""
    if wanted != "cpu" and (sys.platform, platform.machine()) not in TESTED:
        from mlcompute.debug import self_test

        self_test.require()


def gpu_engines() -> list[Engine]:
    """An engine per GPU of this machine, none without the packages that drive them (`pip install mlcompute[cuda]`)."""
    return devices.devices("cuda") if why_no_gpu_packages() is None else []


def why_no_gpu_packages() -> str | None:
    """Which package is missing without which no GPU can be looked for; None when there is none."""
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:  # not even the package `cuda`
        found = None
    return None if found is not None else "the package cuda-bindings is not installed (pip install mlcompute[cuda])"


def why_no_gpu() -> str:
    """Why no GPU can be used here, for people to read."""
    reason = why_no_gpu_packages()
    if reason is None:
        from mlcompute.devices.cuda.device import why_missing

        error = why_missing()
        reason = "" if error is None else error.message
    return reason


#: What a device computes in.
Precision = Literal["float32", "bf16"]


class Device:
    """Where a graph runs.

    Device()  is the best device there is: a GPU, else the CPU. Device.cpu() is always there; Device.gpu() and
    Device.ane() are None where there is none.

    selects_multiple_compute_devices   train on all GPUs of the machine: each step's batch is split over them
    gpu_devices   some of the machine's GPUs, by number, by identifier ("cuda:1"), or as another device's `gpu_devices`
                  lists them. Of several, the first runs what is not training
    precision     "float32"; or "bf16": activations and products in bfloat16, with half the memory and the bytes to
                  move, while weights, sums, losses and the optimizer stay float32. A DeviceError where the device
                  has no kernels for it

    >>> import mlcompute as mlc
    >>> mlc.Device.cpu().type
    <DeviceType.CPU: 0>
    """

    def __init__(
        self,
        type: DeviceType = DeviceType.ANY,
        *,
        selects_multiple_compute_devices: bool = False,
        gpu_devices: Sequence[Any] | None = None,
        engine: Engine | None = None,
        precision: Precision = "float32",
    ) -> None:
        try:
            self._type = DeviceType(type)
        except ValueError:
            raise DeviceError(f"Device: {type!r} is not a device type", expected="DeviceType.CPU, GPU or ANY") from None
        self.selects_multiple_compute_devices = bool(selects_multiple_compute_devices)
        if self._type in (DeviceType.ANE, DeviceType.COUNT):
            raise DeviceError(
                f"Device: there is no {self._type.name} device here",
                expected="CPU, GPU or ANY",
                fix="use Device.cpu(), or Device() for the best device there is",
            )
        # All that a training graph is run on; other graphs are run on the first of them.
        self._engines = [engine] if engine is not None else self._chosen(gpu_devices)
        self.precision = _supported(precision, self._engines[0])
        self._queue = _queues.setdefault(self._engines[0].name, WorkQueue())

    def _chosen(self, gpu_devices: Sequence[Any] | None) -> list[Engine]:
        if gpu_devices is not None:
            return _listed(gpu_devices)
        several = self.selects_multiple_compute_devices
        if self._type is DeviceType.GPU:
            first = _gpu("0")
            return gpu_engines() if several else [first]
        # Whoever names an engine means it; else ANY is a GPU where there is one, or all of them.
        if self._type is DeviceType.ANY and not os.environ.get("MLCOMPUTE_ENGINE"):
            gpus = gpu_engines()
            return (gpus if several else gpus[:1]) or [cpu_engine()]
        return [cpu_engine()]

    @classmethod
    def cpu(cls, *, precision: Precision = "float32") -> Device:
        """The CPU. A DeviceError only where the system is untested and native code fails its self-test there.

        precision   "float32" or "bf16": see `Device`
        """
        return cls(DeviceType.CPU, precision=precision)

    @classmethod
    def gpu(cls, *, precision: Precision = "float32") -> Device | None:
        """A GPU; None if there is none.

        precision   "float32" or "bf16": see `Device`
        """
        try:
            engine = _gpu("0")
        except DeviceError:
            _expect_precision(precision)
            return None
        return cls(DeviceType.GPU, engine=engine, precision=precision)

    @classmethod
    def ane(cls) -> Device | None:
        """A Neural Engine; None, as there is none outside its maker's machines."""
        return None

    type = ReadOnly[DeviceType]("The type asked for; ANY stays ANY.")

    @property
    def actual_device_type(self) -> DeviceType:
        """The type that was chosen."""
        return self._engines[0].device_type

    @property
    def gpu_devices(self) -> list[GpuDevice]:
        """The GPUs in use (identifier, name, memory, compute capability); empty on the CPU."""
        return [engine.gpu for engine in self._engines if engine.gpu is not None]

    @property
    def memory_use(self) -> list[DeviceMemory]:
        """How much memory of each GPU is used, and for what: one entry for each of `gpu_devices`; empty on the CPU."""
        return [found for engine in self._engines if (found := engine.memory()) is not None]

    def __copy__(self) -> Device:
        copied = Device.__new__(Device)
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self.__copy__()  # there is one engine and one queue

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Device cannot be pickled, it belongs to its process: make it again where it is needed, with "
            f"mlc.Device{'.cpu()' if self.actual_device_type is DeviceType.CPU else '.gpu()'}"
        )

    def __repr__(self) -> str:
        precision = "" if self.precision == "float32" else f", precision '{self.precision}'"
        names = ", ".join(f"'{engine.name}'" for engine in self._engines)
        return f"Device({self._type.name}, engine{'s' * (len(self._engines) > 1)} {names}{precision})"


def _expect_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise DeviceError(f"Device: {precision!r} is not a precision", expected=" or ".join(map(repr, PRECISIONS)))


def _supported(precision: str, engine: Engine) -> str:
    """`precision`, unless the engine lacks it, or the package it needs is not there."""
    _expect_precision(precision)
    if precision not in engine.precisions:
        raise DeviceError(
            f"Device: '{engine.name}' has no kernels for precision={precision!r}",
            expected=", ".join(map(repr, engine.precisions)),
            fix="leave precision out, or use another device",
        )
    if precision == "bf16" and importlib.util.find_spec("ml_dtypes") is None:
        raise DeviceError(
            "Device: precision='bf16' needs the package ml_dtypes, which is not installed", fix="pip install ml_dtypes"
        )
    return precision


def _listed(gpu_devices: Sequence[Any]) -> list[Engine]:
    """The engines of the GPUs that are listed."""
    wanted = [gpu.identifier if hasattr(gpu, "identifier") else str(gpu) for gpu in gpu_devices]
    if not wanted:
        _gpu("0")  # where there is none, that is what to say
        raise DeviceError("Device: no GPU is listed", fix="leave gpu_devices out for the first GPU, or list some")
    engines = [_gpu(one) for one in wanted]
    if len(set(engines)) < len(engines):
        raise DeviceError(f"Device: a GPU is listed twice in {', '.join(wanted)}", fix="list every GPU once")
    return engines


def _gpu(wanted: str) -> Engine:
    """A GPU by its number or its identifier."""
    engines = gpu_engines()
    for number, engine in enumerate(engines):
        if wanted in (str(number), engine.name):
            return engine
    raise DeviceError(
        f"Device: there is no GPU device '{wanted}' here" if engines else "Device: there is no GPU device here",
        reason="" if engines else why_no_gpu(),
        expected=", ".join(engine.name for engine in engines),
        fix="use Device.cpu(), or Device() for the best device there is",
    )


def expect_device(who: str, name: str, given: object) -> Device:
    """`given`, unless it is no device: what Device.gpu() gives where there is no GPU, say."""
    if isinstance(given, Device):
        return given
    if given is None:
        raise DeviceError(
            f"{who}: {name} is None, which is what Device.gpu() and Device.ane() give where there is no such device",
            fix="use Device.cpu(), or Device() for the best device there is",
        )
    shown = repr(given) if isinstance(given, str) else type(given).__name__
    raise TypeError(
        f"{who}: {name} must be a Device, not {shown}: use mlc.Device.cpu(), mlc.Device.gpu(), or mlc.Device()"
    )
