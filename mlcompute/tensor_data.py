"""Memory handed in by the caller: `TensorData`, and how anything array-like becomes an array for a tensor."""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError

if TYPE_CHECKING:
    from mlcompute.tensor import TensorDescriptor

Array = np.ndarray[Any, np.dtype[Any]]
#: TensorData, NumPy arrays, anything with DLPack, the buffer protocol or `__array__`, numbers and lists of them.
ArrayLike = Any


class TensorData:
    """A view of the caller's memory used as tensor data. It neither copies nor frees.

    bytes_no_copy            anything with a writable buffer: a NumPy array, bytearray, memoryview
    immutable_bytes_no_copy  the same for memory that must not be written
    length                   bytes to use; the whole buffer if not given
    deallocator              called with (bytes, length) when this object and all tensors that use it are gone

    >>> import numpy as np, mlcompute as mlc
    >>> mlc.TensorData(np.zeros((2, 3), np.float32)).length
    24
    """

    def __init__(
        self,
        bytes_no_copy: Any = None,
        length: int | None = None,
        *,
        immutable_bytes_no_copy: Any = None,
        deallocator: Callable[[memoryview, int], None] | None = None,
    ) -> None:
        if (bytes_no_copy is None) == (immutable_bytes_no_copy is None):
            raise DataError("TensorData: give exactly one of bytes_no_copy and immutable_bytes_no_copy")
        exporter = immutable_bytes_no_copy if bytes_no_copy is None else bytes_no_copy
        try:
            view = memoryview(exporter)
        except TypeError:
            raise DataError(
                f"TensorData: {type(exporter).__name__} exports no memory",
                expected="a NumPy array, bytearray, memoryview or another object with the buffer protocol",
            ) from None
        if not view.c_contiguous:
            raise DataError(
                "TensorData: the memory is not contiguous", fix="wrap numpy.ascontiguousarray(array) instead"
            )
        whole = view.cast("B") if view.nbytes else memoryview(bytearray())
        if bytes_no_copy is not None and whole.readonly:
            raise DataError(
                "TensorData: bytes_no_copy is read-only memory",
                fix="pass it as immutable_bytes_no_copy, or pass a writable copy",
            )
        used = whole.nbytes if length is None else length
        if not 0 <= used <= whole.nbytes:
            raise DataError(f"TensorData: length is {used}, the buffer has {whole.nbytes} bytes")
        self._bytes = whole[:used].toreadonly() if bytes_no_copy is None else whole[:used]
        if deallocator is not None and used:
            # Arrays made from these bytes hold on to `holder`, so the memory outlives every tensor that reads it.
            holder = np.frombuffer(self._bytes, np.uint8)
            weakref.finalize(holder, deallocator, self._bytes, used)
            self._bytes = holder.data
        elif deallocator is not None:
            weakref.finalize(self, deallocator, self._bytes, used)

    @property
    def bytes(self) -> memoryview:
        """The memory itself; what is written through it is seen by the owner."""
        return self._bytes

    @property
    def length(self) -> int:
        """Size in bytes."""
        return self._bytes.nbytes

    @property
    def is_writable(self) -> bool:
        """False for immutable memory, which cannot receive results."""
        return not self._bytes.readonly

    def __repr__(self) -> str:
        return f"TensorData({self.length} bytes{'' if self.is_writable else ', immutable'})"


def read_array(data: ArrayLike, descriptor: TensorDescriptor, who: str, batch_size: int = 0) -> Array:
    """`data` as an array of the descriptor's dtype and shape, without a copy where layout and dtype allow.

    Raw memory (TensorData, bytes) and 1-D arrays are read in row-major order and may be longer than needed.
    Arrays with more axes must have the tensor's extents, apart from axes of extent 1 and surplus leading samples.
    """
    shape = descriptor.shape if batch_size == 0 else (batch_size, *descriptor.shape[1:])
    if type(data) is np.ndarray and data.shape == shape and data.dtype == descriptor.data_type.numpy:
        return data if data.flags.c_contiguous else np.ascontiguousarray(data)
    return _shaped(_typed(data, descriptor, who), shape, who)


def write_target(data: ArrayLike, descriptor: TensorDescriptor, who: str, batch_size: int = 0) -> Array:
    """The caller's own memory as an array results can be written to; never a copy."""
    array = read_array(data, descriptor, who, batch_size)
    if isinstance(data, TensorData):
        owner = np.frombuffer(data.bytes, np.uint8) if data.length else np.empty(0, np.uint8)
    else:
        owner = np.asarray(data)
    if not array.flags.writeable:
        raise DataError(f"{who}: the memory is read-only", fix="pass a writable buffer")
    if array.nbytes and not np.may_share_memory(array, owner):
        raise DataError(
            f"{who}: results cannot be written into this object without a copy",
            given=f"{owner.dtype} array of shape {owner.shape}",
            expected=f"a C-contiguous {descriptor.data_type.numpy} array",
        )
    return array


def expect_apart(named: Mapping[str, Array], who: str) -> None:
    """Refuse arrays that share memory: what is written into one would appear in the other."""
    for (name, array), (other, beside) in itertools.combinations(named.items(), 2):
        if np.may_share_memory(array, beside):
            raise DataError(f"{who}: {name} and {other} share memory", fix="give each its own buffer")


def _typed(data: ArrayLike, descriptor: TensorDescriptor, who: str) -> Array:
    dtype = descriptor.data_type.numpy
    if isinstance(data, TensorData):
        data = data.bytes
    if isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data):
        raise DataError(f"{who}: some of the data is masked", fix="fill the gaps first: array.filled(number)")
    try:
        if isinstance(data, (bytes, bytearray, memoryview, mmap.mmap)) and memoryview(data).format in ("B", "b", "c"):
            view = memoryview(data).cast("B")
            whole = view.nbytes // dtype.itemsize * dtype.itemsize
            return np.frombuffer(view[:whole], dtype)
        if not isinstance(data, np.ndarray) and hasattr(data, "__dlpack__") and not hasattr(data, "__array__"):
            data = np.from_dlpack(data)
        array = np.asarray(data)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DataError(f"{who}: {type(data).__name__} cannot be read as an array", reason=error) from None
    if array.dtype == dtype:
        return array
    if array.dtype.kind not in "biuf":
        raise DataError(f"{who}: data of type {array.dtype} cannot be used", expected=str(dtype))
    # Widening, narrowing within a kind, and integers into floats keep the meaning of the numbers; floats do not
    # become integers, and numbers do not become booleans, behind the caller's back.
    with np.errstate(all="ignore"):
        exact = isinstance(data, (int, float, list, tuple)) and np.array_equal(array.astype(dtype), array)
    if not exact and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise DataError(
            f"{who}: {array.dtype} data for a {dtype} tensor",
            fix=f"convert it yourself, e.g. array.astype({dtype.name!r})",
        )
    if not exact and array.dtype.kind in "iu" and dtype.kind in "iu" and array.size:
        info = np.iinfo(dtype.str)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise DataError(f"{who}: values {array.min()}..{array.max()} do not fit into {dtype}")
    with np.errstate(all="ignore"):  # what is too large becomes infinity, which is a number like others
        return array.astype(dtype)


def _shaped(array: Array, shape: tuple[int, ...], who: str) -> Array:
    needed = int(np.prod(shape))
    if array.ndim <= 1:
        flat = array.reshape(-1)
        if flat.size < needed:
            raise DataError(
                f"{who}: {flat.size} elements were given, {needed} are needed",
                given=f"{flat.nbytes} bytes",
                expected=f"at least {needed * array.itemsize} bytes for shape {shape}",
            )
        return np.ascontiguousarray(flat[:needed]).reshape(shape)
    given = tuple(extent for extent in array.shape[1:] if extent != 1)
    wanted = tuple(extent for extent in shape[1:] if extent != 1)
    if given == wanted and array.shape[0] >= shape[0]:
        return np.ascontiguousarray(array[: shape[0]]).reshape(shape)
    # A tensor whose first axis is 1 holds parameters: (1, C, 1, 1) and (C, 1) are the same numbers.
    if array.size == needed and tuple(e for e in array.shape if e != 1) == tuple(e for e in shape if e != 1):
        return np.ascontiguousarray(array).reshape(shape)
    kind = "elements" if array.size < needed else "shape"
    raise DataError(
        f"{who}: the {kind} of the data does not fit the tensor",
        given=f"{array.dtype} array of shape {array.shape}",
        expected=f"shape {shape}, or a flat array of at least {needed} elements",
    )
