from __future__ import annotations

from mlcompute.devices.cpu.entry import Maker

KERNELS: dict[str, Maker] = {}
