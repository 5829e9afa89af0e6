"""Memory handed in by the caller: `TensorData`, and how anything array-like becomes an array for a tensor."""

from __future__ import annotations

import itertools
import math
import mmap
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.devices.foreign_array import host_array, is_on_gpu
from mlcompute.enums import DataType
from mlcompute.errors import DataError
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.bfloat16 import is_bfloat16, is_floating, is_numeric

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
            view = memoryview(_with_buffer(exporter))
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

    length = ReadOnly[int]("Size in bytes.", "_bytes.nbytes")

    @property
    def is_writable(self) -> bool:
        """False for immutable memory, which cannot receive results."""
        return not self._bytes.readonly

    def __repr__(self) -> str:
        return f"TensorData({self.length} bytes{'' if self.is_writable else ', immutable'})"


def _with_buffer(exporter: Any) -> Any:
    """The same memory as an object with the buffer protocol, which has no code for bfloat16."""
    is_extension = isinstance(exporter, np.ndarray) and is_bfloat16(exporter.dtype)
    return exporter.view(np.uint16) if is_extension else exporter


def read_array(
    data: ArrayLike, descriptor: TensorDescriptor, who: str, batch_size: int = 0, *, rows_per_sample: int = 0
) -> Array:
    """`data` as an array of the descriptor's dtype and shape, without a copy where layout and dtype allow.

    batch_size       rows that are read; 0: all the tensor has. Data for all of them may be given nevertheless
    rows_per_sample  of tensors that are fed, whose first axis counts the samples of a batch, for advice; else 0

    Arrays must have the tensor's extents, apart from axes of extent 1, or be flat with as many elements. Only a
    TensorData, which has no shape, may be longer than needed.
    """
    whole = descriptor.shape
    shape = whole if batch_size == 0 else (batch_size, *whole[1:])
    if type(data) is np.ndarray and data.shape == shape and data.dtype == descriptor.data_type.numpy:
        return data if data.flags.c_contiguous else np.ascontiguousarray(data)
    array = _typed(data, descriptor, who)
    needed = math.prod(shape)
    if isinstance(data, TensorData) and array.size >= needed:
        return array[:needed].reshape(shape)
    for wanted in (shape, whole) if shape[0] <= whole[0] else (shape,):
        if array.size == math.prod(wanted) and (array.ndim <= 1 or _long(array.shape) == _long(wanted)):
            return np.ascontiguousarray(np.ascontiguousarray(array).reshape(wanted)[: shape[0]])
    kind = "" if isinstance(data, TensorData) or is_on_gpu(data) else host_array(data).dtype.kind
    raise _misfit(array, kind, shape, whole, who, rows_per_sample)


def write_target(data: ArrayLike, descriptor: TensorDescriptor, who: str, batch_size: int = 0) -> Array:
    """The caller's own memory as an array results can be written to; never a copy."""
    array = read_array(data, descriptor, who, batch_size)
    if not array.flags.writeable:
        raise DataError(f"{who}: the memory is read-only", fix="pass a writable buffer")
    return _callers_own(array, data, f"{who}: results cannot be written into this object without a copy")


def shared_array(data: ArrayLike, descriptor: TensorDescriptor, who: str) -> Array:
    """The caller's own memory as an array that is read and, unless it is read-only, written in place; never a copy."""
    message, fix = f"{who}: this object cannot be shared, only copied", "pass it as data=, which copies, or convert it"
    return _callers_own(read_array(data, descriptor, who), data, message, fix)


def _callers_own(array: Array, data: ArrayLike, message: str, fix: str = "") -> Array:
    """An array, which must lie where the caller's data lies."""
    memory = _memory(data)
    if array.nbytes and not np.may_share_memory(array, memory):
        expected = f"a C-contiguous {array.dtype} array"
        raise DataError(message, given=f"{memory.dtype} array of shape {memory.shape}", expected=expected, fix=fix)
    return array


def owned(array: Array, data: ArrayLike) -> Array:
    """The array `read_array` made of some data, in memory that nobody else has."""
    is_new = isinstance(data, (int, float, list, tuple)) or not np.may_share_memory(array, _memory(data))
    return array if is_new else array.copy()


def read_only(array: Array) -> Array:
    """The same array, which cannot be written to any more."""
    array.setflags(write=False)
    return array


def _memory(data: ArrayLike) -> Array:
    """What the caller handed in, as an array of whatever type and shape over the caller's memory."""
    if isinstance(data, TensorData):
        return np.frombuffer(data.bytes, np.uint8) if data.length else np.empty(0, np.uint8)
    if isinstance(data, (bytes, bytearray, mmap.mmap)):
        return np.frombuffer(data, np.uint8)
    if is_on_gpu(data):
        return np.empty(0, np.uint8)  # none of the host's memory is the caller's
    return host_array(data)


def expect_apart(named: Mapping[str, Array], who: str) -> None:
    """Refuse arrays that share memory: what is written into one would appear in the other."""
    for (name, array), (other, beside) in itertools.combinations(named.items(), 2):
        if np.may_share_memory(array, beside):
            raise DataError(f"{who}: {name} and {other} share memory", fix="give each its own buffer")


def from_gpu(data: Any, who: str) -> Array:
    """An array of another library in the memory of a GPU, copied to the host."""
    from mlcompute.device import gpu_engines, why_no_gpu

    for engine in gpu_engines():
        found = engine.adopt(data, who)
        if found is not None:
            return np.asarray(found)
    raise DataError(
        f"{who}: the data lies on a GPU that cannot be used", reason=why_no_gpu(), fix="pass a copy on the host"
    )


def _typed(data: ArrayLike, descriptor: TensorDescriptor, who: str) -> Array:
    dtype = descriptor.data_type.numpy
    if isinstance(data, TensorData):
        data = data.bytes
    if isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data):
        raise DataError(f"{who}: some of the data is masked", fix="fill the gaps first: array.filled(number)")
    if is_on_gpu(data):
        data = from_gpu(data, who)
    try:
        if isinstance(data, (bytes, bytearray, memoryview, mmap.mmap)) and memoryview(data).format in ("B", "b", "c"):
            view = memoryview(data).cast("B")
            whole = view.nbytes // dtype.itemsize * dtype.itemsize
            return np.frombuffer(view[:whole], dtype)
        array = host_array(data)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DataError(f"{who}: {type(data).__name__} cannot be read as an array", reason=error) from None
    if array.dtype == dtype:
        return array
    if not is_numeric(array.dtype):
        raise DataError(f"{who}: data of type {array.dtype} cannot be used", expected=str(dtype))
    # Widening, narrowing within a kind, and integers into floats keep the meaning of the numbers; floats do not
    # become integers, and numbers do not become booleans, behind the caller's back.
    with np.errstate(all="ignore"):
        exact = isinstance(data, (int, float, list, tuple)) and np.array_equal(array.astype(dtype), array)
    if not exact and not can_convert(array.dtype, dtype):
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


def expect_no_booleans(data: ArrayLike, who: str) -> None:
    """Refuse truth values where numbers are added: as 0 and 1 they would be taken for something else than is meant."""
    if str(data.dtype if hasattr(data, "dtype") else np.asarray(data).dtype).endswith("bool"):  # PyTorch's, too
        raise DataError(
            f"{who}: boolean data for a mask of numbers, which are added to the scores",
            fix="build the input with data_type=mlc.DataType.BOOLEAN, where True forbids; or give 0 and -inf",
        )


def can_convert(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Do numbers keep their meaning, apart from digits? NumPy converts bfloat16 to wider types only."""
    return np.can_cast(source, target, "same_kind") or (is_bfloat16(source) and is_floating(target))


def _long(shape: Sequence[int]) -> list[int]:
    """A shape without its axes of extent 1: (1, C, 1, 1) and (C, 1) are the same numbers in the same order."""
    return [extent for extent in shape if extent != 1]


def _misfit(
    array: Array, kind: str, shape: tuple[int, ...], whole: tuple[int, ...], who: str, rows_per_sample: int
) -> DataError:
    """What is wrong with an array that does not fit, and what to do. `kind` is the type it had when it was given."""
    needed = math.prod(shape)
    given, expected = f"{array.dtype} array of shape {array.shape}", f"shape {shape}"
    if array.ndim and rows_per_sample and _long(array.shape[1:]) == _long(shape[1:]):
        rows, batch = array.shape[0], shape[0] // rows_per_sample
        wanted = f"batch_size is {batch}" if shape != whole else f"this graph was built for a batch of {batch}"
        several = f" with {rows_per_sample} rows a sample" if rows_per_sample > 1 else ""
        fix = _row_advice(rows, shape[0], whole[0], rows_per_sample)
        return DataError(f"{who}: {rows} rows were given, {wanted}{several}", given=given, expected=expected, fix=fix)
    if kind in ("i", "u") and is_floating(array.dtype) and rows_per_sample and array.ndim:
        one_hot = _one_hot_advice(array.shape, shape, whole[0])
        if one_hot:
            return DataError(
                f"{who}: whole numbers of shape {array.shape} for a tensor of shape {shape}",
                expected=expected,
                fix=f"make them one-hot: {one_hot}; or give integer class labels a tensor of an integer type",
            )
    if array.ndim <= 1:
        return DataError(
            f"{who}: {array.size} elements were given, {needed} are needed",
            given=f"{array.nbytes} bytes",
            expected=f"{needed * array.itemsize} bytes for shape {shape}",
            fix="give as many as are needed; only a TensorData may be longer" if array.size > needed else "",
        )
    in_rows = (array.shape[0], *shape[1:]) if rows_per_sample else shape
    return DataError(
        f"{who}: the shape of the data does not fit the tensor",
        given=given,
        expected=f"{expected}, or a flat array of {needed} elements",
        fix=rearrangement(array.shape, shape) or rearrangement(array.shape, in_rows),
    )


def _row_advice(rows: int, needed: int, most: int, rows_per_sample: int) -> str:
    """What to do with another number of rows than `needed`, of the `most` the tensor has."""
    samples = rows // rows_per_sample
    if not samples or rows % rows_per_sample:
        return "give whole samples, at least one"
    if rows > most:
        return f"slice the array: array[:{needed}]; or pass batch_size={samples}; or use Trainer"
    if rows > needed:
        return f"slice the array: array[:{needed}]; or pass batch_size={samples}"
    return f"pass batch_size={samples}"


def _one_hot_advice(given: tuple[int, ...], wanted: tuple[int, ...], most: int) -> str:
    """How integer class labels become labels with an axis of classes; empty when there is no such axis."""
    labels = f"labels[:{wanted[0]}]" if given[0] > most else "labels"
    if len(wanted) > 1 and _long(given[1:]) == _long(wanted[1:-1]):
        return f"np.eye({wanted[-1]}, dtype=np.float32)[{labels}]"
    if len(wanted) > 2 and _long(given[1:]) == _long(wanted[2:]):
        return f"np.moveaxis(np.eye({wanted[1]}, dtype=np.float32)[{labels}], -1, 1)"
    return ""


def rearrangement(given: Sequence[int], wanted: Sequence[int]) -> str:
    """How to bring an array of one shape into another that has the same numbers; empty when no way is obvious.

    The same extents in another order are axes to transpose: to reshape them would scramble the numbers. Axes are
    split or joined by reshaping.
    """
    if sorted(given) == sorted(wanted) and len(_long(given)) > 1:
        left = list(range(len(given)))
        order = []
        for extent in wanted:
            axis = next(axis for axis in left if given[axis] == extent)
            order.append(axis)
            left.remove(axis)
        return f"transpose its axes: array.transpose({', '.join(map(str, order))})"
    if math.prod(given) != math.prod(wanted) or 0 in given:
        return ""
    cuts = [set(itertools.accumulate(shape, operator.mul)) - {1} for shape in (given, wanted)]
    if not (cuts[0] <= cuts[1] or cuts[1] <= cuts[0]):
        return ""
    return f"reshape it: array.reshape({', '.join(map(str, wanted))})"


def shape_of_data(data: ArrayLike) -> tuple[int, ...]:
    """The shape of data."""
    try:
        array = host_array(data)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise DataError("Tensor: data has no shape to be taken over", reason=error, fix="give shape=...") from None
    if isinstance(data, (TensorData, bytes)) or array.dtype == object or not array.ndim:
        raise DataError(
            f"Tensor: {type(data).__name__} has no shape to be taken over", fix="give shape=..., (1,) for one number"
        )
    return tuple(array.shape)


def is_boolean(data: ArrayLike) -> bool:
    """Is it data of a boolean type, of whatever library, or a list of True and False?"""
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return isinstance(data, bool) or str(getattr(data, "dtype", "")).rpartition(".")[2] == "bool"


def element_of(number: float, data_type: DataType, label: str) -> Any:
    """`number` as an element of that type; DataError when the type cannot hold it."""
    if type(number) is float and data_type is DataType.FLOAT32 and abs(number) <= 1e38:
        return np.float32(number)  # as most are: biases of zeros
    if isinstance(number, (str, bytes)) or np.ndim(number) != 0:
        raise TypeError(f"Tensor '{label}': fill_with_data must be a number, not {number!r}")
    given = np.asarray(number)
    if not is_numeric(given.dtype):
        raise TypeError(f"Tensor '{label}': fill_with_data must be a number, not {number!r}")
    with np.errstate(all="ignore"):
        element = given.astype(data_type.numpy)[()]
    fits = np.isfinite(element) or not np.isfinite(given) if data_type.is_floating else element == given
    if not fits:
        raise DataError(
            f"Tensor '{label}': fill_with_data is {number}, which no {data_type.name} element can hold",
            fix="choose another data_type or another number",
        )
    return element
