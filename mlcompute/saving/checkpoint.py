"""Checkpoint: a saved file, opened and verified. Nothing in it is trusted before its hash was checked.

One safetensors file holds everything; which tensor is what shows in its name:

    fc.weights                      a tensor of the graph that keeps data
    optimizer/momentum/fc.weights   optimizer state
    constants/x                     an input that was folded in when the graph was compiled
    arrays/anything                 what the caller gave as `arrays`

The metadata are JSON texts: mlcompute.description (the graph), .state (time step, rates, random streams), .progress
(the caller's), .facts, .manifest (a SHA-256 per tensor), .version, and .header (the SHA-256 of the whole header, taken
with zeros in its place).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from mlcompute.errors import FileError, where_to_look
from mlcompute.saving.plain import JSON, from_text, restored, shortened
from mlcompute.saving.tensor_file import Entry, Header, decoded, header_length, parse_header
from mlcompute.tensor_data import Array

#: Files of a later version are refused; every earlier one can be read.
FORMAT_VERSION = 1

PREFIX = "mlcompute."
OPTIMIZER, CONSTANTS, ARRAYS = "optimizer/", "constants/", "arrays/"
NO_HASH = "0" * 64
_CHUNK = 1 << 20

#: The file with the weights in a folder of the Hugging Face Hub.
HUB_MODEL = "model.safetensors"


class Checkpoint:
    """A saved file, opened and verified: names, shapes, lengths, version and hashes. FileError when anything is wrong.

    Plain safetensors files of other programs can be opened too; they have no description and nothing to verify
    beyond their layout. `is_plain` tells. A folder of the Hugging Face Hub stands for the model.safetensors in it.

    >>> import mlcompute as mlc, os, tempfile
    >>> g, x = mlc.Graph(), mlc.Tensor(shape=(1, 4))
    >>> y = g.node(mlc.ActivationLayer.relu(), source=x)
    >>> path = os.path.join(tempfile.mkdtemp(), "relu.safetensors")
    >>> mlc.save(path, g, progress={"epoch": 3})
    >>> mlc.Checkpoint(path).progress
    {'epoch': 3}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fsdecode(path)
        if os.path.isfile(inside := os.path.join(self.path, HUB_MODEL)):
            self.path = inside
        who = self.who = f"mlcompute.Checkpoint: {self.path}"
        self._lock = threading.Lock()
        try:
            self._file: BinaryIO = _opened(self.path)  # kept open: the path may become another file's
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            found = where_to_look(self.path) if isinstance(error, FileNotFoundError) else {}
            if isinstance(error, IsADirectoryError):
                files = sorted(Path(self.path).glob("*.safetensors"))
                found = {"fix": f"name a file in it: {os.fspath(files[0])!r}"} if files else {}
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"{who}: cannot be opened: {reason}", **found) from error
        self._close = weakref.finalize(self, self._file.close)
        try:
            self._header = self._read_header()
            self._check_version()
            self._check_hashes()
            #: The graph as plain data; None for a plain file.
            self.description: JSON = self._json("description")
            #: Versions, engine, threads, data types and the hash of the graph.
            self.facts: dict[str, JSON] = self._json("facts", dict) or {}
            #: Time step, rates and random streams.
            self.state: dict[str, JSON] = self._json("state", dict) or {}
            #: What the caller gave as `progress`.
            self.progress: JSON = self._json("progress")
        except OSError as error:
            self.close()
            raise FileError(f"{who}: cannot be read: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    # Verifying ------------------------------------------------------------------------------------------------

    def _read_header(self) -> Header:
        self._opened_as = os.fstat(self._file.fileno())
        size = self._opened_as.st_size
        first = self._at(0, min(8, size)).tobytes()
        length = header_length(first, size, self.who)
        self._header_bytes = first + self._at(8, length).tobytes()
        self._data_start = 8 + length
        return parse_header(self._file, self._header_bytes[8:], self.who)

    @property
    def is_plain(self) -> bool:
        """Is it a file of another program?"""
        # One flipped bit can spoil one key, never all of them: what was ours is not taken for a plain file.
        return not any(key.startswith(PREFIX) for key in self._header.metadata)

    def _check_version(self) -> None:
        if self.is_plain:
            return
        version = self._text("version")
        if not version.isascii() or not version.isdigit() or not 1 <= int(version[:9]) <= FORMAT_VERSION:
            raise FileError(
                f"{self.who}: the file has format version {version[:40]!r}",
                expected=f"1 to {FORMAT_VERSION}",
                fix="it was written by a later version of mlcompute: install that one, or save again with this one",
            )

    def _check_hashes(self) -> None:
        if self.is_plain:
            return
        stated = self._text("header").encode()
        if self._header_bytes.count(stated) != 1:
            raise FileError(f"{self.who}: the header's hash is damaged")
        if hashlib.sha256(self._header_bytes.replace(stated, NO_HASH.encode())).hexdigest().encode() != stated:
            raise FileError(f"{self.who}: the header is damaged: its hash differs", fix="use an earlier file")
        manifest = self._json("manifest", dict)
        if manifest.keys() != self._header.entries.keys():
            raise FileError(f"{self.who}: the manifest does not list the tensors of the file")
        for name, entry in self._header.entries.items():
            if self._hash(entry) != manifest[name]:
                raise FileError(f"{self.who}: '{name}' is damaged: its hash differs", fix="use an earlier file")
        self._header_bytes = b""

    def _hash(self, entry: Entry) -> str:
        hashed = hashlib.sha256()
        for start in range(entry.start, entry.end, _CHUNK):
            hashed.update(self._at(self._data_start + start, min(_CHUNK, entry.end - start)).data)
        return hashed.hexdigest()

    def _text(self, key: str) -> str:
        text = self._header.metadata.get(PREFIX + key)
        if text is None:
            raise FileError(f"{self.who}: there is no {key} in the file")
        return text

    def _json(self, key: str, kind: type = object) -> JSON:
        if self.is_plain:
            return None
        try:
            value = from_text(self._text(key))
            # Descriptions keep their marks: they are read by whoever builds the graph.
            value = value if key == "description" else restored(value)
            if not isinstance(value, kind):
                raise ValueError(f"it is no {kind.__name__}")
            return value
        except (ValueError, RecursionError) as error:
            raise FileError(f"{self.who}: its {key} cannot be read: {shortened(error)}") from error

    def _at(self, position: int, count: int) -> Array:
        """Bytes of the file, in memory of their own."""
        raw = np.empty(count, np.uint8)
        done = 0
        with self._lock:
            self._file.seek(position)
            while done < count:
                found = self._file.readinto(raw.data[done:])  # type: ignore[attr-defined]
                if not found:
                    raise FileError(f"{self.who}: the file became shorter while it was read")
                done += found
        return raw

    def _expect_unchanged(self) -> None:
        """`save` never writes into a file that is there; others may, after its hashes were checked."""
        now, then = os.fstat(self._file.fileno()), self._opened_as
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise FileError(
                f"{self.who}: another program has written into the file since it was opened",
                fix="open it again when it is complete; replace files by renaming, as mlcompute.save does",
            )

    # Reading --------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The graph's tensors in the file, sorted; all tensors of a plain file."""
        listed = self._header.entries
        return sorted(listed if self.is_plain else (name for name in listed if "/" not in name))

    @property
    def entries(self) -> dict[str, Entry]:
        """Type, shape and place of every tensor in the file, optimizer state and arrays included."""
        return dict(self._header.entries)

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The `arrays` given to `save`; each is read on access."""
        return _Arrays(self, ARRAYS)

    def optimizer_state(self, name: str) -> dict[str, Array]:
        """The optimizer's state for a tensor, by the name of the state; empty when there is none."""
        states = self._header.entries if name in self._header.entries else {}
        found = (key.split("/", 2) for key in states if key.startswith(OPTIMIZER))
        return {part[1]: self["/".join(part)] for part in found if part[2:] == [name]}

    def __getitem__(self, name: str) -> Array:
        """One tensor, read now, into memory of its own."""
        if name not in self._header.entries:
            raise KeyError(name)
        if not self._close.alive:
            raise FileError(f"{self.who}: the file was closed")
        entry = self._header.entries[name]
        try:
            raw = self._at(self._data_start + entry.start, entry.nbytes)
            self._expect_unchanged()
        except OSError as error:
            raise FileError(f"{self.who}: cannot be read: {error.strerror or error}") from error
        return decoded(raw, entry, f"{self.who}: '{name}'")

    def __contains__(self, name: object) -> bool:
        return name in self._header.entries

    def close(self) -> None:
        """Close the file. What was read stays valid."""
        self._close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        count = len(self.names)
        return f"Checkpoint('{self.path}', {count} tensors{', plain' if self.is_plain else ''})"


def _opened(path: str) -> BinaryIO:
    """The file at a path. A pipe nobody writes into is refused at once: opening it would wait for ever."""
    at_once = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | at_once))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file")
    return file


class _Arrays(Mapping[str, Array]):
    """Tensors of a file whose names share a beginning."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix

    def __getitem__(self, name: str) -> Array:
        return self._checkpoint[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        names = self._checkpoint.entries
        return (name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
