"""NVIDIA's Python packages, which are imported at the first use of a GPU and need not be there before."""

from __future__ import annotations

import importlib
from typing import Any

from mlcompute.errors import DeviceError


def imported(module: str, package: str) -> Any:
    """A module; DeviceError that names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DeviceError(
            f"GPUs need the package {package}, which cannot be imported",
            reason=error,
            fix="pip install mlcompute[cuda]",
        ) from error
