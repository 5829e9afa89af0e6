"""Compiled kernels on disk: found again by a digest of all that determines them, never trusted blindly."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

#: Size limit of the folder of compiled kernels; the oldest files are deleted first.
CACHE_BYTES = 256 << 20
#: Seconds after which a temporary file has been abandoned.
_ABANDONED = 3600.0


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None when MLCOMPUTE_CACHE is set to nothing, or there is no home."""
    configured = os.environ.get("MLCOMPUTE_CACHE")
    if configured is not None:
        return Path(configured) if configured else None
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")
        if home == "~":  # a user without a home folder, as in many containers
            return None
        base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
        base = base or os.path.join(home, ".cache")
    return Path(base) / "mlcompute"


def read(digest: str) -> bytes | None:
    """Machine code kept under a digest; None when there is none, or it is damaged or another's."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        data = (folder / f"{digest}.o").read_bytes()
    except OSError:
        return None
    checksum, code = data[:32], data[32:]
    return code if _checksum(digest, code) == checksum else None


def _checksum(digest: str, code: bytes) -> bytes:
    """Of the code and of what it is kept under: the code of another kernel, whole as it is, would crash."""
    return hashlib.sha256(digest.encode() + code).digest()


def write(digest: str, code: bytes) -> None:
    """Keep machine code. Readers see a full file or none; a folder that cannot be written is not an error.

    One file in 256, by its digest, is the occasion to sweep the folder: looking at every file after every write would
    take longer than compiling, once there are thousands of them.
    """
    folder = cache_folder()
    if folder is None:
        return
    import tempfile  # slow to import, and not needed where every kernel is there already

    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_checksum(digest, code) + code)
            os.replace(name, folder / f"{digest}.o")
        except OSError:
            os.unlink(name)
            raise
        if digest.startswith("00"):
            _sweep(folder)


def _sweep(folder: Path) -> None:
    """Delete what a killed process left, and the oldest files while the folder is larger than its limit."""
    kept: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
                status = entry.stat()
                if entry.name.endswith(".o"):
                    kept.append((status.st_mtime, status.st_size, entry.path))
                elif entry.name.endswith(".tmp") and time.time() - status.st_mtime > _ABANDONED:
                    os.unlink(entry.path)
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= CACHE_BYTES:
            break
        total -= size
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
