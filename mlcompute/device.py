"""The device a user names when compiling a graph."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlcompute import devices
from mlcompute.enums import DeviceType
from mlcompute.errors import DeviceError
from mlcompute.execution import WorkQueue

if TYPE_CHECKING:
    from mlcompute.devices.device import Engine

#: One queue per device, which its engine's name tells: graphs that share weights on it also share the order of runs.
_queues: dict[str, WorkQueue] = {}


def why_not_native() -> str | None:
    """Why the CPU runs operations by their NumPy definitions here; None where it has its native engine."""
    wanted = os.environ.get("MLCOMPUTE_ENGINE")
    if wanted == "reference":
        return "MLCOMPUTE_ENGINE=reference asks for it"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    if sys.platform != "linux" and wanted != "cpu":
        return "the native engine is made for Linux (MLCOMPUTE_ENGINE=cpu tries it here)"
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
        return devices.devices("cpu")[0]
    from mlcompute.devices.reference import Reference

    return Reference(reason=reason)


class Device:
    """Where a graph runs.

    Device()  is the best device there is; Device.cpu() never fails; Device.gpu() and Device.ane() are None
    where there is none.

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
    ) -> None:
        try:
            self._type = DeviceType(type)
        except ValueError:
            raise DeviceError(f"Device: {type!r} is not a device type", expected="DeviceType.CPU or ANY") from None
        self.selects_multiple_compute_devices = bool(selects_multiple_compute_devices)
        if gpu_devices is not None or self._type in (DeviceType.GPU, DeviceType.ANE, DeviceType.COUNT):
            wanted = "GPU" if gpu_devices is not None else self._type.name
            raise DeviceError(
                f"Device: there is no {wanted} device here",
                expected="CPU or ANY",
                fix="use Device.cpu(), or Device() for the best device there is",
            )
        self.engine = engine or cpu_engine()
        self.queue = _queues.setdefault(self.engine.name, WorkQueue())

    @classmethod
    def cpu(cls) -> Device:
        """The CPU; never fails."""
        return cls(DeviceType.CPU)

    @classmethod
    def gpu(cls) -> Device | None:
        """A GPU; None if there is none."""
        try:
            return cls(DeviceType.GPU)
        except DeviceError:
            return None

    @classmethod
    def ane(cls) -> Device | None:
        """A Neural Engine; None, as there is none outside its maker's machines."""
        return None

    @property
    def type(self) -> DeviceType:
        """The type asked for; ANY stays ANY."""
        return self._type

    @property
    def actual_device_type(self) -> DeviceType:
        """The type that was chosen."""
        return self.engine.device_type

    @property
    def gpu_devices(self) -> list[Any]:
        """Identifiers of the GPUs in use; empty on the CPU."""
        return []

    def __copy__(self) -> Device:
        copied = Device.__new__(Device)
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self.__copy__()  # there is one engine and one queue

    def __repr__(self) -> str:
        return f"Device({self._type.name}, engine '{self.engine.name}')"


def expect_device(who: str, name: str, given: object) -> Device:
    """`given`, unless it is no device: what Device.gpu() gives where there is no GPU, say."""
    if isinstance(given, Device):
        return given
    if given is None:
        raise DeviceError(
            f"{who}: {name} is None, which is what Device.gpu() and Device.ane() give where there is no such device",
            fix="use Device.cpu(), or Device() for the best device there is",
        )
    raise TypeError(f"{who}: {name} must be a Device, not {type(given).__name__}")
