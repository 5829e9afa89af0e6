"""The safetensors format: a length, a JSON header, and the bytes of the tensors without gaps.

8 bytes       n, the length of the header, unsigned little-endian
n bytes       {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}},
              spaces at the end; offsets count from the end of the header, metadata is text
the rest      the tensors' elements, row-major and little-endian; every byte belongs to exactly one tensor

The safetensors library reads and judges headers. Those of checkpoints are written here (`lay_out`, `header_bytes`),
because of what version 0.8 does when it writes (`tests/saving/test_interop.py` shows it):

- Metadata are written in the order of a hash table, another one in every call, so that one graph would give many files.
  A single text would have one order, but there have to be two: readers of the Hugging Face Hub want `format`, too.
- `serialize_file` fills a temporary file of its own and renames it over the one we hold locked. Whoever is killed
  meanwhile leaves it behind, as large as the checkpoint and with a name that tells nobody whose it is.
- It reads the arrays themselves, and hashes stand before the data: of a parameter that is written into meanwhile, the
  file would hold other numbers than were hashed. Here a piece is copied, hashed and written before the next one.

It would be neither faster nor smaller; `serialize` and `save`, without a file, take twice the size of the file in
memory (191 MB for 100).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from mlcompute.errors import FileError
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.saving.plain import JSON, from_text, shortened, to_text
from mlcompute.tensor_data import Array

#: Longer headers are refused before they are read, as other readers do.
LONGEST_HEADER = 100_000_000

#: The types NumPy itself has, by the format's name. BF16 is an extension type.
NUMPY = {
    name: np.dtype(code).newbyteorder("<")
    for name, code in {
        "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "i2", "U16": "u2", "I32": "i4", "U32": "u4", "I64": "i8",
        "U64": "u8", "F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8",
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in NUMPY.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type, its shape, and where in the data its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Header:
    """What stands before the data: entries by name, in the order of their bytes, and text by key."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def type_name(dtype: np.dtype[Any]) -> str | None:
    """The format's name for a NumPy type; None when it has none."""
    return "BF16" if is_bfloat16(dtype) else _NAMES.get(dtype.newbyteorder("<"))


def lay_out(arrays: Mapping[str, Array]) -> dict[str, Entry]:
    """Entries for arrays, one after the other: wide types first, so that all of them are aligned."""
    entries, start = {}, 0
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        kind = type_name(array.dtype)
        assert kind is not None
        entries[name] = Entry(kind, array.shape, start, start + array.nbytes)
        start += array.nbytes
    return entries


def header_bytes(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """The header with its length before it, padded so that the data begins at a multiple of 8."""
    listed: dict[str, JSON] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        listed[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.end]}
    text = to_text(listed).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_length(first_bytes: bytes, file_size: int, who: str) -> int:
    """The length of the header, from the first eight bytes of a file."""
    if len(first_bytes) < 8:
        raise FileError(f"{who}: the file has {file_size} bytes, not even a length", expected="a safetensors file")
    (length,) = struct.unpack("<Q", first_bytes)
    if length > LONGEST_HEADER or 8 + length > file_size:
        if first_bytes[:4] == b"PK\x03\x04":
            raise FileError(
                f"{who}: this is a zip archive, as torch.save, Keras and np.savez write them",
                expected="a safetensors file",
                fix="weights saved by PyTorch: mlc.from_state_dict(graph, torch.load(path)); arrays: np.load(path)",
            )
        if who.endswith(".onnx"):
            raise FileError(f"{who}: not a safetensors file", fix="an ONNX model is read by mlc.onnx.load(path)")
        raise FileError(
            f"{who}: the header would have {length} bytes, the file has {file_size}",
            expected="a safetensors file",
            fix="the file was cut off, or is of another kind",
        )
    return int(length)


def parse_header(file: BinaryIO, text: bytes, who: str) -> Header:
    """The header of an open file, whose text was read from it; FileError unless everything fits exactly."""
    from safetensors import SafetensorError, safe_open  # here: most programs never open a checkpoint

    path, backend = _name_of(file)
    try:
        with safe_open(path, framework="np", backend=backend):
            pass
        listed = from_text(text.decode())  # the library takes the last of two tensors with one name
    except SafetensorError as error:
        raise FileError(f"{who}: {_reason(error)}", expected="a safetensors file") from error
    except ValueError as error:
        raise FileError(f"{who}: the header is damaged: {shortened(error)}") from error
    metadata = listed.pop("__metadata__", None) or {}
    entries = {name: _entry(name, entry, who) for name, entry in listed.items()}
    return Header(dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))), metadata)


def _name_of(file: BinaryIO) -> tuple[str, str]:
    """How the library opens an open file once more, even if its name belongs to another one by now."""
    if os.path.exists(f"/dev/fd/{file.fileno()}"):
        return f"/dev/fd/{file.fileno()}", "pread"  # mapped memory is a fatal error once the file becomes shorter
    return file.name, "mmap"  # Windows, where nobody can replace or cut off an open file


def _reason(error: Exception) -> str:
    reason = shortened(error).removeprefix("Error while deserializing header: ")
    if "not fully covered" in reason:
        return "the file was cut off, or has bytes no tensor owns"
    return f"the header is damaged: {reason}"


def _entry(name: str, entry: JSON, who: str) -> Entry:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        what = "has no dtype, shape and data_offsets, or more than these"
        raise FileError(f"{who}: the header is damaged: '{name[:200]}' {what}")
    return Entry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])


def decoded(raw: Array, entry: Entry, who: str) -> Array:
    """The elements of a tensor from its bytes, in this machine's byte order."""
    if entry.dtype == "BF16":
        bits: Array = raw.view("<u2").astype(np.uint16, copy=False)
        return bits.view(bfloat16()).reshape(entry.shape)
    if entry.dtype not in NUMPY:
        raise FileError(f"{who} has the type {entry.dtype}, which has no NumPy counterpart")
    if entry.dtype == "BOOL" and raw.size and raw.max() > 1:
        raise FileError(f"{who} is BOOL, but has bytes other than 0 and 1")
    dtype = NUMPY[entry.dtype]
    elements: Array = raw.view(dtype).reshape(entry.shape)
    return elements.astype(dtype.newbyteorder("="), copy=False)
