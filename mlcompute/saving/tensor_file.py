"""The safetensors format, read strictly: a length, a JSON header, and the bytes of the tensors without gaps.

8 bytes       n, the length of the header, unsigned little-endian
n bytes       {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}},
              spaces at the end; offsets count from the end of the header, metadata is text
the rest      the tensors' elements, row-major and little-endian; every byte belongs to exactly one tensor
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.errors import FileError
from mlcompute.saving.plain import JSON, from_text, to_text
from mlcompute.tensor_data import Array

#: Longer headers are refused before they are read, as other readers do.
LONGEST_HEADER = 100_000_000

#: Bits per element by the format's name of the type.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

#: The types NumPy has, by the format's name.
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

    @property
    def data_size(self) -> int:
        """Bytes of all tensors."""
        return max((entry.end for entry in self.entries.values()), default=0)


def type_name(dtype: np.dtype[Any]) -> str | None:
    """The format's name for a NumPy type; None when it has none."""
    return _NAMES.get(dtype.newbyteorder("<"))


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
        raise FileError(
            f"{who}: the header would have {length} bytes, the file has {file_size}",
            expected="a safetensors file",
            fix="the file was cut off, or is of another kind",
        )
    return int(length)


def parse_header(text: bytes, data_size: int, who: str) -> Header:
    """The header of a file with so many bytes of data after it; FileError unless everything fits exactly."""
    if not text.startswith(b"{"):
        raise FileError(f"{who}: the header is not JSON", expected="a safetensors file")
    try:
        listed = from_text(text.decode("utf-8"))
        if not isinstance(listed, dict):
            raise ValueError("it is no dictionary")
        metadata = _metadata(listed.pop("__metadata__", {}))
        entries = {name: _entry(name, entry) for name, entry in listed.items()}
    except ValueError as error:
        raise FileError(f"{who}: the header is damaged: {error}") from error
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = 0
    for name, entry in ordered.items():
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise FileError(f"{who}: '{name[:200]}' {what}", starts=entry.start, expected=end)
        end = entry.end
    if end != data_size:
        what = "was cut off" if end > data_size else "has bytes no tensor owns"
        raise FileError(f"{who}: the file {what}", expected=f"{end} bytes of data", found=f"{data_size} bytes")
    return Header(ordered, metadata)


def _metadata(metadata: JSON) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must be text by name")
    return metadata


def _entry(name: str, entry: JSON) -> Entry:
    shown = name[:200]
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"'{shown}' has no dtype, shape and data_offsets, or more than these")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"'{shown}' has the dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"'{shown}' has a shape or offsets that are no sizes")
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise ValueError(f"'{shown}' is {dtype}{shape}, its bytes go from {offsets[0]} to {offsets[1]}")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(sizes: JSON) -> bool:
    # Few axes and 63 bits each: products stay cheap to compute whatever a header claims.
    return (
        isinstance(sizes, list) and len(sizes) <= 64 and all(type(size) is int and 0 <= size < 2**63 for size in sizes)
    )


def decoded(raw: Array, entry: Entry, who: str) -> Array:
    """The elements of a tensor from its bytes, in this machine's byte order. BF16 becomes float32, exactly."""
    if entry.dtype == "BF16":
        wide: Array = raw.view("<u2").astype(np.uint32) << 16
        widened: Array = wide.view(np.float32).reshape(entry.shape)
        return widened
    if entry.dtype not in NUMPY:
        raise FileError(f"{who} has the type {entry.dtype}, which has no NumPy counterpart")
    if entry.dtype == "BOOL" and raw.size and raw.max() > 1:
        raise FileError(f"{who} is BOOL, but has bytes other than 0 and 1")
    dtype = NUMPY[entry.dtype]
    elements: Array = raw.view(dtype).reshape(entry.shape)
    return elements.astype(dtype.newbyteorder("="), copy=False)
