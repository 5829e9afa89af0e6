"""Files made by hand: headers with anything in them, and checkpoints whose texts were changed and signed again."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlcompute as mlc
from tests.saving.networks import small


def raw_file(header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """A length, a header, data: all as given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape: tuple[int, ...] | None = None, dtype: str = "F32") -> dict[str, Any]:
    """What a header says of one tensor; float32 with one axis unless told."""
    listed = [(end - start) // 4] if shape is None else list(shape)
    return {"dtype": dtype, "shape": listed, "data_offsets": [start, end]}


def checkpoint_bytes(folder: Path) -> bytes:
    """A small checkpoint with something of every kind in it."""
    path = folder / "whole.safetensors"
    mlc.save(path, small(1.0, 3), progress={"epoch": 2, "history": [0.5, 0.25]}, arrays={"average": [1.0, 2.0]})
    return path.read_bytes()


def parts(whole: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a file."""
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def signed(header: dict[str, Any], data: bytes) -> bytes:
    """A file with these parts and a header hash that fits, whatever the parts say."""
    header = {**header, "__metadata__": {**header["__metadata__"], "mlcompute.header": "0" * 64}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode()) + data


def with_text(whole: bytes, key: str, value: Any) -> bytes:
    """The file with another text in its metadata (JSON, unless it is text already), signed again."""
    header, data = parts(whole)
    text = value if isinstance(value, str) else json.dumps(value)
    header["__metadata__"][f"mlcompute.{key}"] = text
    return signed(header, data)
