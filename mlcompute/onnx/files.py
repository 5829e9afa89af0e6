"""Reading model files: nothing outside the model's folder, nothing larger than what is there."""

from __future__ import annotations

import errno
import math
import mmap
import os
import stat
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, where_to_look
from mlcompute.onnx.types import nbytes
from mlcompute.onnx.wire import without_large_data
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto


@dataclass(eq=False)
class ModelFile:
    """A model, and the numbers of its large initializers where they have not been read yet.

    proto     the model as onnx parsed it, without those numbers
    folder    where its external data may lie; None when the model did not come from a file
    places    initializer number -> (start, size) of its raw data in the model's bytes
    """

    proto: ModelProto
    folder: Path | None = None
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    path: Path | None = None
    data: bytes = b""

    def raw(self, number: int) -> Any:
        """The raw data of an initializer in memory of its own; None when it is inside `proto`."""
        if number not in self.places:
            return None
        start, size = self.places[number]
        array = np.empty(size, np.uint8)
        if self.path is None:
            array[:] = np.frombuffer(self.data, np.uint8, size, start)
            return array
        with _opened(self.path) as file:
            file.seek(start)
            if file.readinto(array.data) != size:
                raise DataError(f"onnx.load: '{self.path}' changed while it was read")
        return array


def read_model(model: Any) -> ModelFile:
    """A model from a path, or from bytes or a message, which have no folder."""
    import onnx

    if isinstance(model, onnx.ModelProto):
        return ModelFile(model)
    if isinstance(model, (bytes, bytearray, memoryview)):
        data = bytes(model)
        small, places = without_large_data(data)
        return ModelFile(_parsed(small, "the given bytes"), None, places, None, data if places else b"")
    try:
        path = Path(model)
    except TypeError:
        raise TypeError(f"onnx.load: needs a path, bytes or a ModelProto, not {type(model).__name__}") from None
    with _opened(path) as file:
        small, places = _without_large_data(file)
    return ModelFile(_parsed(small, f"'{path}'"), path.resolve().parent, places, path)


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        found = where_to_look(path) if isinstance(error, FileNotFoundError) else {}
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"onnx.load: '{path}' cannot be read", reason=reason, **found) from None


def _without_large_data(file: BufferedReader) -> tuple[bytes, dict[int, tuple[int, int]]]:
    try:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # not a plain file, or an empty one
        return file.read(), {}
    with mapped:
        return without_large_data(mapped)


def _parsed(data: bytes, who: str) -> ModelProto:
    import onnx

    try:
        model: ModelProto = onnx.ModelProto.FromString(data)
    except Exception as error:  # the parser's own errors differ between its versions
        fix = "a checkpoint is read by mlc.load(path)" if who.endswith(".safetensors'") else ""
        raise DataError(
            f"onnx.load: {who} is not an ONNX model", reason=str(error).split("\n")[0][:200], fix=fix
        ) from None
    if not model.HasField("graph"):
        raise DataError(f"onnx.load: {who} holds no graph")
    return model


#: Element types of raw data by number of bits; everything else takes whole bytes.
_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}


def tensor_array(tensor: TensorProto, folder: Path | None, limit: int | None = None, raw: Any = None) -> Array:
    """A stored tensor as an array; its size is checked before anything is allocated.

    raw   its raw data, where that is not in the message
    """
    from onnx import TensorProto, helper, numpy_helper

    who = f"tensor '{tensor.name}'"
    if tensor.data_type == TensorProto.STRING:
        raise DataError(f"{who}: strings cannot be computed with")
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        kind = TensorProto.DataType.Name(tensor.data_type)
    except (KeyError, ValueError):
        raise DataError(f"{who}: {tensor.data_type} is not an element type") from None
    if dtype.kind == "c":
        raise DataError(f"{who}: complex numbers cannot be computed with")
    shape = tuple(int(extent) for extent in tensor.dims)
    if len(shape) > 32:
        raise DataError(f"{who}: has {len(shape)} axes")
    bits = _BITS.get(kind, dtype.itemsize * 8)
    size = nbytes(shape, bits, who)
    if limit is not None and size > limit:
        raise DataError(f"{who}: takes {size} bytes, {limit} are allowed", fix="raise memory_limit")
    if tensor.HasField("segment"):
        raise DataError(f"{who}: is stored in segments, which ONNX no longer allows")
    if tensor.data_location == TensorProto.EXTERNAL:
        raw = external_bytes(tensor, folder, size, who)
    elif raw is not None or tensor.HasField("raw_data"):
        raw = tensor.raw_data if raw is None else raw
        if len(raw) != size:
            raise DataError(f"{who}: has {len(raw)} bytes of data, {size} are needed for {kind}{list(shape)}")
    else:
        _check_fields(tensor, shape, kind, who)
        try:
            return np.asarray(numpy_helper.to_array(tensor)).reshape(shape)
        except Exception as error:
            raise DataError(f"{who}: its data does not fit {kind}{list(shape)}", reason=str(error)[:200]) from None
    if bits < 8:
        whole = TensorProto(dims=shape, data_type=tensor.data_type, raw_data=bytes(raw))
        return np.asarray(numpy_helper.to_array(whole))
    array = np.frombuffer(raw, dtype.newbyteorder("<") if dtype.kind in "iuf" else dtype)
    return array.astype(dtype, copy=False).reshape(shape)


def _check_fields(tensor: TensorProto, shape: tuple[int, ...], kind: str, who: str) -> None:
    """As many numbers as the shape says, in whichever of the typed lists they are."""
    lists = (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
    given = sum(map(len, lists))
    per_byte = 8 // _BITS.get(kind, 8)
    needed = -(-math.prod(shape) // per_byte)
    if given != needed:
        raise DataError(f"{who}: has {given} numbers of data, {needed} are needed for {kind}{list(shape)}")


def external_bytes(tensor: TensorProto, folder: Path | None, size: int, who: str) -> Any:
    """The bytes of a tensor kept beside the model: a plain file in the model's folder, and nothing else.

    No absolute path, no way up, no symbolic link on the way, no hard link to a file that may belong elsewhere.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise DataError(f"{who}: its data is in '{location}', but the model was not read from a file")
    parts = Path(location).parts
    absolute = Path(location).is_absolute() or location.startswith(("/", "\\")) or ":" in location
    if not parts or absolute or ".." in parts or "\\" in location or "\0" in location:
        raise DataError(f"{who}: external data '{location}' is not inside the model's folder")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
    except ValueError:
        raise DataError(f"{who}: offset and length of its external data must be whole numbers") from None
    if offset < 0 or length != size:
        raise DataError(f"{who}: external data of {length} bytes at {offset}, {size} bytes are needed")
    try:
        handle = _open_inside(folder, parts)
    except OSError as error:
        raise DataError(
            f"{who}: external data '{location}' cannot be read",
            reason="links are not followed" if error.errno in _LINK_ERRORS else error.strerror,
        ) from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        os.close(handle)
        raise DataError(f"{who}: external data '{location}' is not a plain file with one name")
    with os.fdopen(handle, "rb") as file:
        if offset + size > facts.st_size:
            raise DataError(f"{who}: needs bytes {offset} to {offset + size} of '{location}', which ends earlier")
        file.seek(offset)
        array = np.empty(size, np.uint8)
        if file.readinto(array.data) != size:
            raise DataError(f"{who}: external data '{location}' ended while it was read")
        return array.data


_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)  # the second for a link where a folder is expected


def _open_inside(folder: Path, parts: tuple[str, ...]) -> int:
    """Open a file below a folder, one step at a time, never following a link."""
    no_follow = getattr(os, "O_NOFOLLOW", 0)
    if not no_follow or os.open not in os.supports_dir_fd:  # a system without these: look before opening
        path = folder
        for part in parts:
            path = path / part
            if path.is_symlink():
                raise OSError(errno.ELOOP, "links are not followed")
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | no_follow, dir_fd=here)
            os.close(here)
            here = below
        return os.open(parts[-1], os.O_RDONLY | no_follow | os.O_NONBLOCK, dir_fd=here)
    finally:
        os.close(here)
