"""Columns: one array of samples for one tensor of the graph, checked once, then cut into rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import numpy as np

from mlcompute.devices.foreign_array import host_array
from mlcompute.errors import DataError
from mlcompute.ops.bfloat16 import is_numeric
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import TensorData, can_convert, rearrangement
from mlcompute.trainer.metrics import Array


def as_array(data: Any, who: str) -> Array:
    """Anything array-like as an array, without a copy where possible: NumPy, `__array__`, DLPack, lists."""
    if isinstance(data, TensorData):
        raise DataError(f"{who}: TensorData has no shape", fix="pass an array of shape (samples, ...)")
    try:
        array = host_array(data)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        fix = "data must be in the CPU's memory, detached from any gradient, and of a tensor's type, e.g. float32"
        if isinstance(data, (list, tuple)):
            fix = "give all samples one shape: cut or pad those that differ; or graph.input(shape, varies=[1])"
        raise DataError(f"{who}: {type(data).__name__} cannot be read as an array", reason=error, fix=fix) from None
    if isinstance(data, np.ma.MaskedArray) and np.ma.is_masked(data):
        raise DataError(
            f"{who}: {int(np.ma.getmaskarray(data).sum())} elements are masked",
            fix="fill them: array.filled(value), or leave their samples out",
        )
    if not is_numeric(array.dtype):
        raise DataError(
            f"{who}: data of type {array.dtype} cannot be used", expected="numbers", fix=_readable(data, array)
        )
    if array.ndim == 0:
        raise DataError(f"{who}: a single number was given", expected="an array with samples on axis 0")
    return array


@dataclass(frozen=True)
class Column:
    """Samples for one tensor.

    scale    rows of the tensor per sample (more than 1 where the tensor's first extent is a multiple of the batch)
    class_axis  labels are integer class labels and become one-hot along this axis; 0: they are used as they are
    shared   the same data for every batch: the tensor's first axis does not count samples
    varied   extents of a sample, where they differ from the tensor's own
    """

    name: str
    tensor: Tensor
    array: Array
    scale: int = 1
    class_axis: int = 0
    shared: bool = False
    varied: tuple[int, ...] | None = None

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of a sample."""
        return self.tensor.descriptor.shape[1:] if self.varied is None else self.varied

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(self.array) // self.scale

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample as the tensor holds it."""
        return math.prod(self.extents) * self.tensor.descriptor.data_type.numpy.itemsize * self.scale

    def part(self, rows: slice) -> Column:
        """The column of some samples in a row."""
        if self.shared:
            return self
        return replace(self, array=self.array[rows.start * self.scale : rows.stop * self.scale])

    def rows(self, picked: Array | slice) -> Array:
        """Some samples, in the tensor's type and shape."""
        d = self.tensor.descriptor
        if self.shared:
            return self.array
        array = self.array
        if self.scale > 1:
            array = array.reshape(self.count, self.scale, *array.shape[1:])
        taken = array[picked] if isinstance(picked, slice) else np.take(array, picked, axis=0)
        if self.class_axis:
            return one_hot(taken, self.extents, d.data_type.numpy, self.class_axis - 1)
        with np.errstate(all="ignore"):
            rows: Array = np.ascontiguousarray(taken, d.data_type.numpy).reshape(-1, *self.extents)
        rows.flags.writeable = False  # perhaps the caller's memory: callbacks may look at a batch, not write
        return rows


def one_hot(numbers: Array, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int = 0) -> Array:
    """Integer class labels (n, ...) -> samples of a shape with the classes on one axis: 1 at the class, 0 elsewhere."""
    n, before, after = len(numbers), int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    labels = np.zeros((n, before, shape[axis], after), dtype)
    where = numbers.reshape(n, before, after)
    labels[np.arange(n)[:, None, None], np.arange(before)[:, None], where, np.arange(after)] = 1
    return labels.reshape(n, *shape)


def are_class_labels(array: Array, tensor: Tensor, follows: bool) -> bool:
    """Are these integer class labels for a tensor of such? `follows`: all its extents may vary."""
    d = tensor.descriptor
    if follows and array.dtype.kind in "iu" and array.ndim == len(d.shape):
        return True
    extents = [[extent for extent in shape[1:] if extent != 1] for shape in (array.shape, d.shape)]
    return array.dtype.kind in "iu" and extents[0] == extents[1]


def column(
    name: str,
    tensor: Tensor,
    data: Any,
    who: str,
    *,
    batch: int,
    class_axis: int = 0,
    is_over_classes: bool = False,
    is_weight: bool = False,
    follows: bool = False,
    classes: tuple[int, int | None] | None = None,
) -> Column:
    """A checked column.

    batch       the number of samples the graph was built for; 0: the tensor holds nothing per sample
    class_axis  of labels: where the classes are
    is_over_classes  of labels: are they one class of several, and not numbers to be predicted or yes-or-no answers?
    is_weight   it weighs labels
    follows     labels or weights whose extents follow those of inputs that vary
    classes     of integer class labels: how many classes there are, and the label that is ignored
    """
    is_label = class_axis > 0
    if isinstance(data, (list, tuple)) and not len(data):
        raise DataError(f"{who}: there are no samples")
    who = f"{who}: '{name}'"
    array = as_array(data, who)
    d = tensor.descriptor
    if not batch and d.shape == array.shape:
        return Column(name, tensor, np.ascontiguousarray(_castable(array, tensor, who), d.data_type.numpy), shared=True)
    if not batch:
        raise DataError(f"{who}: axis 0 of the tensor counts no samples", given=array.shape, expected=str(d.shape))
    scale = d.shape[0] // batch
    if len(array) % scale:
        raise DataError(f"{who}: {len(array)} rows cannot be dealt out {scale} to a sample")
    if classes is not None and not d.data_type.is_floating and are_class_labels(array, tensor, follows):
        _expect_classes(who, array, *classes)
        shape = _varied(tensor, array.shape, 0, follows)
        return Column(name, tensor, array, scale, varied=shape[1:] if shape != d.shape else None)
    shape = _varied(tensor, array.shape, class_axis, follows)
    varied = shape[1:] if shape != d.shape else None
    if is_over_classes and is_label and _are_class_numbers(array, shape, class_axis):
        _expect_classes(who, array, d.shape[class_axis], None)
        return Column(name, tensor, array, scale, class_axis=class_axis, varied=varied)
    given, wanted = (tuple(e for e in extents[1:] if e != 1) for extents in (array.shape, shape))
    if given != wanted:
        fix = rearrangement(array.shape, (len(array), *d.shape[1:]))
        if tuple(e for e in array.shape if e != 1) == wanted and wanted and not is_label:
            fix = "this is one sample: give it an axis for samples, array[None]"
        if is_label and not is_over_classes and _has_one_entry_for(array, d.shape, class_axis):
            fix = _one_per_output(len(array), d.shape, class_axis)
        elif is_label and array.dtype.kind not in "iu" and _has_one_entry_for(array, d.shape, class_axis):
            fix = "integer class labels must be whole numbers: labels.astype(int)"
            broken = array[array != np.round(array)] if array.dtype.kind == "f" else array[:0]
            if broken.size:  # NaN, or what would be cut off
                fix = f"integer class labels must be whole numbers, and one is {broken.flat[0]:g}"
        elif is_label and array.dtype.kind in "iu" and array.shape[1:] in (d.shape[1:-1], d.shape[2:]):
            fix = f"classes lie on axis {class_axis}: give the loss another class_axis=, or give one-hot labels"
        elif not wanted and not fix:
            fix = f"give one number per sample: an array of shape ({len(array)},)"
            if is_weight:
                fix += "; weights of single labels are declared with TrainingGraph.add_inputs(loss_label_weights=...)"
        elif not fix and array.dtype.kind in "iu" and _has_one_entry_for(array, d.shape, len(d.shape) - 1):
            fix = "one-hot labels, np.eye(classes)[labels], have an element for every class"
        elif not fix and is_label and len(given) == len(wanted):
            fix = f"give labels of this shape, or the last layer as many outputs: {array.shape[-1]}"
        elif not fix and not is_label and not is_weight:
            fix = f"give samples of this shape, or build the graph's input with shape {(batch, *array.shape[1:])}"
            if array.ndim == len(d.shape) == 2 and len(array) == d.shape[1]:
                fix = f"samples lie on axis 0: array.T; or {fix.partition(', or ')[2]}"
        raise DataError(
            f"{who}: samples of shape {array.shape[1:]} for a tensor of shape {d.shape}",
            given=f"{array.dtype} array of shape {array.shape}",
            expected=f"shape ({', '.join(map(str, (len(array), *d.shape[1:])))}{',' if len(d.shape) == 1 else ''})",
            fix=fix,
        )
    return Column(name, tensor, _castable(array, tensor, who), scale, varied=varied)


def _one_per_output(samples: int, shape: tuple[int, ...], class_axis: int) -> str:
    """What to do with one label per sample where the loss compares every output with a label of its own."""
    dense = "np.eye({0})[labels]" if class_axis == len(shape) - 1 else "np.moveaxis(np.eye({0})[labels], -1, {1})"
    return (
        "this loss needs a label for every output. Classes: the loss 'softmax_cross_entropy', or one-hot labels, "
        f"{dense.format(shape[class_axis], class_axis)}. Numbers: labels of shape {(samples, *shape[1:])}, or a last "
        "layer with 1 output"
    )


def _readable(data: Any, array: Array) -> str:
    """How data that is no numbers becomes some."""
    if hasattr(data, "toarray"):
        return "a sparse matrix: data.toarray()"
    if array.ndim == 0:
        return f"a file is read by mlc.data.load({str(data)!r}, ...)" if isinstance(data, str) else ""
    if array.dtype.kind == "c":
        return "complex numbers: np.stack([data.real, data.imag], axis=-1), or their absolute values"
    # What an array of objects has besides numbers.
    odd = next((one for one in array.flat if not isinstance(one, (Number, np.bool_))), None)
    if array.dtype.kind == "O" and all(isinstance(one, (Number, np.bool_)) for one in array.flat):
        return "it has only numbers: array.astype('float32')"
    if odd is None or type(odd).__name__ in ("NAType", "NaTType"):
        return f"{odd} stands where a number is missing: fill it, or leave its sample out"
    if not isinstance(odd, (str, bytes)):
        return f"there is a {type(odd).__name__} in it: tables are read by mlc.data.table(columns, target=...)"
    try:
        np.asarray(array, np.float64)
    except (TypeError, ValueError):
        pass
    else:
        return "numbers as text: array.astype('float32')"
    if array.ndim == 1:
        return (
            "text labels: mlc.data.arrays(x, labels) gives each class a number, and remembers its name; "
            "np.unique(labels, return_inverse=True) gives names and numbers"
        )
    return (
        f"text such as {str(odd)!r} in tables: mlc.data.table(columns, target=...), mlc.data.read_csv(path, target=...)"
    )


def _varied(tensor: Tensor, given: tuple[int, ...], class_axis: int, follows: bool) -> tuple[int, ...]:
    """The tensor's shape, with the given extents where they may vary."""
    shape = tensor.descriptor.shape
    axes = set(tensor.varies or (range(1, len(shape)) if follows else ())) - {class_axis}
    if class_axis and len(given) == len(shape) - 1:  # integer class labels
        given = (*given[:class_axis], shape[class_axis], *given[class_axis:])
    if not axes or len(given) != len(shape):
        return shape
    return (shape[0], *(given[axis] if axis in axes else shape[axis] for axis in range(1, len(shape))))


def _expect_classes(who: str, array: Array, classes: int, ignored: int | None) -> None:
    """Refuse labels that are the number of no class before anything is trained with them."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if ignored is not None and (low < 0 or high >= classes):
        counted = array[array != ignored]
        low, high = (int(counted.min()), int(counted.max())) if counted.size else (0, 0)
    if low < 0 or high >= classes:
        fix = "labels to be left out: LossLayer.softmax_cross_entropy(ReductionType.MEAN, ignore_index=-100), say"
        if low > 0 and high - low < classes:
            fix = f"count from 0: labels - {low}"
        elif low == 0:
            fix = f"give the last layer {high + 1} outputs, one for every class; {fix}"
        raise DataError(
            f"{who}: integer class labels go from {low} to {high}, the graph has {classes} classes",
            expected=f"0 to {classes - 1}" + ("" if ignored is None else f", or {ignored}, which is ignored"),
            fix=fix if ignored is None else "",
        )


def _are_class_numbers(array: Array, shape: tuple[int, ...], class_axis: int) -> bool:
    """Whole numbers with one entry where the labels have one per class."""
    return array.dtype.kind in "iu" and _has_one_entry_for(array, shape, class_axis)


def _has_one_entry_for(array: Array, shape: tuple[int, ...], class_axis: int) -> bool:
    if len(shape) < 2 or shape[class_axis] == 1:
        return False
    places = tuple(extent for extent in (*shape[1:class_axis], *shape[class_axis + 1 :]) if extent != 1)
    return tuple(extent for extent in array.shape[1:] if extent != 1) == places


def _castable(array: Array, tensor: Tensor, who: str) -> Array:
    dtype = tensor.descriptor.data_type.numpy
    if not can_convert(array.dtype, dtype):
        raise DataError(
            f"{who}: {array.dtype} data for a {dtype} tensor",
            fix=f"convert it yourself, e.g. array.astype({dtype.name!r})",
        )
    if dtype.kind in "iu" and array.size and array.dtype.itemsize >= dtype.itemsize and array.dtype != dtype:
        low, high, limits = int(array.min()), int(array.max()), np.iinfo(dtype.name)
        if low < limits.min or high > limits.max:
            raise DataError(f"{who}: numbers from {low} to {high} do not fit into a {dtype} tensor")
    return array
