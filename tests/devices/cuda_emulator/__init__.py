"""CUDA without a GPU: generated kernels compiled for the host, behind the engine's own driver interface.

`register()` makes the engine `cuda-emulated` known. Kernels run as they would on a device, thread by thread; library
calls are replaced by their steps' NumPy meanings.
"""

from __future__ import annotations

from mlcompute import devices
from tests.devices.cuda_emulator.engine import EmulatedCuda

__all__ = ["EmulatedCuda", "register"]


def register() -> None:
    devices.register("cuda-emulated", lambda: [EmulatedCuda()])
