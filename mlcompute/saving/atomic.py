"""Atomic replacement of files.

The new file is written beside the old one, flushed to the disk, renamed over it, and the folder is flushed too. Until
the rename the old file is untouched. A writer keeps its temporary file locked; one without a lock belongs to a
writer that died, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlcompute.errors import FileError

if TYPE_CHECKING:
    import fcntl
else:
    try:
        import fcntl
    except ImportError:  # Windows: an open file can be neither renamed nor removed, which does as well as a lock
        fcntl = None

_PREFIX, _SUFFIX = ".mlcompute-", ".tmp"
#: Seconds after which a temporary file that nobody has open belongs to a dead writer, where there are no locks.
_ABANDONED = 3600.0

#: What this process is writing. Some network file systems cannot tell its own locks apart.
_in_use: set[str] = set()


class Writer:
    """Bytes for a new file: in order, or at a place of their own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> None:
        """All of the bytes; a system call may take only some of them."""
        view = memoryview(data)
        while view.nbytes:
            count = os.write(self._descriptor, view)
            if count <= 0:
                raise OSError("nothing could be written")
            view = view[count:]

    def seek(self, position: int) -> None:
        """Go on writing there."""
        os.lseek(self._descriptor, position, os.SEEK_SET)


def replace_file(path: str, fill: Callable[[Writer], None], who: str) -> None:
    """Give `path` the bytes that `fill` writes. FileError, and the old bytes are still there, when that fails."""
    folder = os.path.dirname(path)
    try:
        # A link stays a link: the file it leads to is replaced.
        target = os.path.realpath(path)
        folder = os.path.dirname(target)
        old = _file_at(target)
        sweep(folder)
        # While it is written, nobody reads it who was not allowed to read the old file.
        with _temporary(folder, 0o666 if old is None else 0o600) as new:
            fill(Writer(new.descriptor))
            if old is not None:
                _take_over_permissions(new.descriptor, old)
            os.fsync(new.descriptor)
            if fcntl is None:
                new.close()
            os.replace(new.name, target)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise FileError(
            f"{who}: {path} could not be written: {getattr(error, 'strerror', None) or error}",
            folder=folder,
            fix="make the folder first"
            if not os.path.isdir(folder)
            else "what was there before is untouched; free space or choose another folder, then save again",
        ) from error
    try:
        _flush_folder(folder)
    except OSError as error:
        raise FileError(
            f"{who}: {path} is complete and in place, but its folder could not be flushed: {error.strerror or error}",
            folder=folder,
            fix="after a power failure the file from before may be back; save again",
        ) from error


def _file_at(target: str) -> os.stat_result | None:
    """What is there; None for nothing. Refuses what is no file: renaming would put a file in place of a device."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file")
    os.close(os.open(target, os.O_WRONLY))  # a rename does not ask for permission
    return found


def _take_over_permissions(descriptor: int, old: os.stat_result) -> None:
    """Whoever was allowed to read the old file may read the new one: owner and group where the system lets us."""
    refused = contextlib.suppress(OSError, AttributeError)  # not ours to give, or a system without owners
    with refused:
        os.fchown(descriptor, -1, old.st_gid)
    with refused:
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
    with refused:  # last: afterwards it may be somebody else's
        os.fchown(descriptor, old.st_uid, -1)


class _Temporary:
    """A file that is being written, and the only descriptor of it."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor, self.name = descriptor, name

    def close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


@contextlib.contextmanager
def _temporary(folder: str, mode: int) -> Iterator[_Temporary]:
    """A locked new file in the folder; removed at the end unless it was renamed."""
    new = _Temporary(*_create(folder, mode))
    try:
        yield new
    except BaseException:
        if fcntl is None:
            new.close()
        with contextlib.suppress(OSError):
            os.unlink(new.name)
        raise
    finally:
        _in_use.discard(new.name)
        new.close()


def _create(folder: str, mode: int) -> tuple[int, str]:
    while True:
        name = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        _in_use.add(name)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(name, flags, mode)
        except OSError:
            _in_use.discard(name)
            raise
        if fcntl is None:
            return descriptor, name
        with contextlib.suppress(OSError):  # a file system without locks: then nobody sweeps either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between creating and locking, another writer may have taken the file for a dead one's.
        if _is_still_there(name, descriptor):
            return descriptor, name
        _in_use.discard(name)
        os.close(descriptor)


def _is_still_there(name: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_text(path: Path, text: str, who: str) -> Path:
    """Replace a file by a new one; FileError, and the old one stays as it was, when that fails."""
    replace_file(str(path), lambda writer: writer.write(text.encode("utf-8", "replace")), who)
    return path


def sweep(folder: str) -> int:
    """Remove temporary files whose writers died; how many there were. Never fails: what cannot be removed stays."""
    removed = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                removed += _remove_if_dead(os.path.join(folder, name))
    return removed


def _remove_if_dead(name: str) -> bool:
    if name in _in_use:
        return False
    with contextlib.suppress(OSError):
        if fcntl is None:
            if time.time() - os.stat(name).st_mtime < _ABANDONED:
                return False  # its writer may be about to rename it
            os.unlink(name)  # refused while somebody has it open
            return True
        descriptor = os.open(name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name)
            return True
        finally:
            os.close(descriptor)
    return False


def _flush_folder(folder: str) -> None:
    if os.name == "nt":
        return  # folders cannot be flushed there; the rename itself is written through
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
