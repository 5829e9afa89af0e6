"""A file to read from that costs no disk."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_MEMORY = "/dev/shm"


def _folder() -> Path:
    """One per process, in memory where the system has such a place."""
    parent = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    return Path(parent) / f"mlcompute-fuzzing-{os.getpid()}"


def scratch_file(name: str) -> Path:
    """Where a target may write what it reads; removed at the end of the process."""
    folder = _folder()
    folder.mkdir(exist_ok=True)
    atexit.register(remove_scratch)
    return folder / name


def remove_scratch() -> None:
    """Also called by who ends a process without its usual end."""
    shutil.rmtree(_folder(), ignore_errors=True)
