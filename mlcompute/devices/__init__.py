"""Engines: devices that run programs. `device.py` is the interface, the other files implement it.

An engine registers itself with its name and how to find its devices on this machine: `register("cuda", find)`. The
modules of the engines that come with the library are imported when one of their devices is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlcompute.errors import DeviceError

if TYPE_CHECKING:
    from mlcompute.device import Device
    from mlcompute.devices.device import Engine
    from mlcompute.runtime.queue import WorkQueue

#: Nanoseconds since 1970: files of engines that were written later may say something else than what was imported.
IMPORTED = time.time_ns()
#: Finds the devices of one kind: an engine each, the best first; none where there is no such device.
Find = Callable[[], Sequence["Engine"]]

_kinds: dict[str, Find] = {}
#: Where the engines of the library register themselves.
_MODULES = {
    "cpu": "mlcompute.devices.cpu.device",
    "cuda": "mlcompute.devices.cuda.device",
    "reference": "mlcompute.devices.reference",
    "remote": "mlcompute.devices.remote",
}


def engine_of(device: Device) -> Engine:
    """What runs programs on a device; of several GPUs the first."""
    return engines_of(device)[0]


def engines_of(device: Device) -> list[Engine]:
    """All that a training graph is run on."""
    return device._engines  # noqa: SLF001  for the package: users are told about none of it


def queue_of(device: Device) -> WorkQueue:
    """Where runs wait for their turn: all devices with the same first engine share it."""
    return device._queue  # noqa: SLF001


def register(name: str, find: Find) -> None:
    """Make a kind of engine known. `find` is called whenever somebody asks for its devices."""
    _kinds[name] = find


def names() -> list[str]:
    """The kinds of engines there are."""
    return list(dict.fromkeys([*_MODULES, *_kinds]))


def devices(name: str) -> list[Engine]:
    """The devices of a kind on this machine; DeviceError for a kind that nobody registered."""
    if name not in _kinds and name in _MODULES:
        importlib.import_module(_MODULES[name])
    if name not in _kinds:
        raise DeviceError(f"there is no engine '{name}'", expected=", ".join(names()))
    return list(_kinds[name]())
