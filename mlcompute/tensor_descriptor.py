"""Tensor descriptors: shape, data type and layout of a tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from mlcompute.enums import DataType
from mlcompute.errors import DataError, ShapeError
from mlcompute.layers.read_only import ReadOnly


class TensorDescriptor:
    """Shape, data type and row-major layout of a tensor. Immutable.

    TensorDescriptor(shape)                                          any tensor, up to eight axes
    TensorDescriptor(width=, height=, feature_channel_count=, batch_size=)   an image batch (N, C, H, W)
    TensorDescriptor(shape, sequence_lengths=, sorted_sequences=)    sequences (batch, steps, features)

    >>> import mlcompute as mlc
    >>> mlc.TensorDescriptor((2, 3, 4, 5)).stride
    (240, 80, 20, 4)
    """

    # Slots keep the class constant below, and everything else, from being assigned on an instance.
    __slots__ = ("_data_type", "_sequence_lengths", "_shape", "_sorted_sequences")

    #: ML Compute has 4. Volumes over time and images cut into patches need more.
    max_tensor_dimensions: ClassVar[int] = 8

    def __init__(
        self,
        shape: Iterable[int] | None = None,
        *,
        data_type: DataType = DataType.FLOAT32,
        sequence_lengths: Sequence[int] | None = None,
        sorted_sequences: bool = False,
        width: int | None = None,
        height: int | None = None,
        feature_channel_count: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        image = (batch_size, feature_channel_count, height, width)
        if shape is None:
            if None in image:
                raise ShapeError(
                    "TensorDescriptor: no shape was given",
                    fix="give shape, or all of width, height, feature_channel_count and batch_size",
                )
            shape = [extent for extent in image if extent is not None]
        elif image != (None, None, None, None):
            raise ShapeError("TensorDescriptor: give either shape or the image sizes, not both")
        self._shape = _checked_shape(shape)
        try:
            self._data_type = DataType(data_type)
            self._data_type.numpy  # noqa: B018  (sentinels have none)
        except (ValueError, KeyError):
            fix = f"say mlc.DataType.{_name_of(data_type)}"
            raise DataError(f"TensorDescriptor: {data_type!r} is not a data type", fix=fix) from None
        self._sequence_lengths: tuple[int, ...] | None = None
        self._sorted_sequences = False
        if sequence_lengths is not None:
            self._set_sequences(sequence_lengths, sorted_sequences)
        elif sorted_sequences:
            raise ShapeError("TensorDescriptor: sorted_sequences without sequence_lengths", fix="give both or neither")

    def _set_sequences(self, lengths: Sequence[int], is_sorted: bool) -> None:
        lengths = _whole_numbers("sequence_lengths", lengths)
        if len(self._shape) != 3:
            raise ShapeError(
                f"TensorDescriptor: sequences need three axes (batch, steps, features), not shape {self._shape}"
            )
        if not lengths or min(lengths) < 1 or max(lengths) != self._shape[1]:
            raise ShapeError(
                f"TensorDescriptor: sequence_lengths {lengths} do not fit {self._shape[1]} steps",
                expected="positive lengths, the longest equal to the number of steps",
            )
        if is_sorted and list(lengths) != sorted(lengths, reverse=True):
            raise ShapeError(
                f"TensorDescriptor: sequence_lengths {lengths} are not in descending order",
                fix="sort them (and the samples), or pass sorted_sequences=False",
            )
        self._sequence_lengths = lengths
        self._sorted_sequences = bool(is_sorted)

    @classmethod
    def convolution_weights(
        cls,
        *,
        width: int = 1,
        height: int = 1,
        input_feature_channel_count: int,
        output_feature_channel_count: int,
        data_type: DataType = DataType.FLOAT32,
    ) -> TensorDescriptor:
        """Weights of a convolution or fully connected layer: (1, input * output, height, width), output-major."""
        _checked_shape((input_feature_channel_count, output_feature_channel_count))
        channels = input_feature_channel_count * output_feature_channel_count
        return cls((1, channels, height, width), data_type=data_type)

    @classmethod
    def convolution_biases(
        cls, *, feature_channel_count: int, data_type: DataType = DataType.FLOAT32
    ) -> TensorDescriptor:
        """Biases for `feature_channel_count` output channels: (1, count, 1, 1)."""
        return cls((1, feature_channel_count, 1, 1), data_type=data_type)

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost (batch) first."""
        return self._shape

    @property
    def dimension_count(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def stride(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        strides = [self._data_type.numpy.itemsize]
        for extent in reversed(self._shape[1:]):
            strides.append(strides[-1] * extent)
        return tuple(reversed(strides))

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def tensor_allocation_size_in_bytes(self) -> int:
        """Bytes the elements take."""
        return self.element_count * self._data_type.numpy.itemsize

    sequence_lengths = ReadOnly[tuple[int, ...] | None](
        "Length of each sequence; None for tensors that hold no sequences."
    )
    sorted_sequences = ReadOnly[bool]("Were the sequence lengths declared to be in descending order?")

    @property
    def batch_size_per_sequence_step(self) -> tuple[int, ...] | None:
        """How many sequences are longer than t, for every step t; None without sequences."""
        if self._sequence_lengths is None:
            return None
        steps = range(max(self._sequence_lengths))
        return tuple(sum(length > t for length in self._sequence_lengths) for t in steps)

    def _key(self) -> tuple[object, ...]:
        return self._shape, self._data_type, self._sequence_lengths, self._sorted_sequences

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorDescriptor) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{self._data_type.name.lower()}[{', '.join(map(str, self._shape))}]"


def _name_of(given: Any) -> str:
    """The data type that somebody means who gives a name, or a type of NumPy; the usual one if that cannot be told."""
    try:
        name = np.dtype(given).name if not isinstance(given, str) else given
    except TypeError:
        name = str(given).removeprefix("torch.")
    name = {"bool": "BOOLEAN", "float64": "FLOAT32", "float": "FLOAT32", "int": "INT64"}.get(name, name.upper())
    return name if name in DataType.__members__ and name not in ("INVALID", "COUNT") else "FLOAT32"


def _checked_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    return _checked_extents(_whole_numbers("shape", shape))


@functools.lru_cache(4096)  # so tensors that are alike share their shapes, too
def _checked_extents(extents: tuple[int, ...]) -> tuple[int, ...]:
    most = TensorDescriptor.max_tensor_dimensions
    if not 1 <= len(extents) <= most:
        raise ShapeError(f"TensorDescriptor: {len(extents)} axes in {extents}", expected=f"1 to {most} axes")
    if min(extents) < 1:
        raise ShapeError(f"TensorDescriptor: every extent must be at least 1, the shape is {extents}")
    if math.prod(extents) > 2**62:
        raise ShapeError(f"TensorDescriptor: {extents} has more elements than any memory")
    return extents


def _whole_numbers(name: str, numbers: Iterable[Any]) -> tuple[int, ...]:
    try:
        listed = tuple(numbers)
    except TypeError:
        raise ShapeError(f"TensorDescriptor: {name} is {numbers!r}", expected="a list of whole numbers") from None
    if set(map(type, listed)) == {int}:
        return listed
    if not all(isinstance(number, (int, np.integer)) and not isinstance(number, bool) for number in listed):
        raise ShapeError(f"TensorDescriptor: {name} must be whole numbers, not {listed}")
    return tuple(int(number) for number in listed)


def shared_descriptor(descriptor: TensorDescriptor) -> TensorDescriptor:
    """An equal descriptor, the same for many tensors: those of a large graph are alike."""
    return descriptor if descriptor.sequence_lengths is not None else _of_shape(descriptor.shape, descriptor.data_type)


@functools.lru_cache(4096)
def _of_shape(shape: tuple[int, ...], data_type: DataType) -> TensorDescriptor:
    return TensorDescriptor(shape, data_type=data_type)


def describe(
    shape: Iterable[int] | None,
    data_type: DataType,
    width: int | None,
    height: int | None,
    channels: int | None,
    batch: int | None,
    length: int | None,
    lengths: Sequence[int] | None,
    is_sorted: bool,
) -> TensorDescriptor:
    """The descriptor for whichever family of sizes was given; exactly one must be."""
    others = (width, height, channels, batch, length, lengths)
    if shape is not None and others == (None,) * len(others) and not is_sorted and isinstance(data_type, DataType):
        return _of_shape(_checked_shape(shape), data_type)
    families = {
        "shape": shape is not None,
        "image sizes": not (width is height is None) or (shape is not None and not (channels is batch is None)),
        "sequence_length": length is not None,
        "sequence_lengths": lengths is not None,
    }
    chosen = [name for name, given in families.items() if given]
    if len(chosen) != 1:
        raise ShapeError(
            f"Tensor: the shape comes from {' and '.join(chosen) or 'nowhere'}",
            expected="exactly one of descriptor, shape, image sizes, sequence_length, sequence_lengths",
        )
    if is_sorted and lengths is None and length is None:
        raise ShapeError("Tensor: sorted_sequences without sequence_lengths", fix="give both or neither")
    if shape is not None:
        return TensorDescriptor(shape, data_type=data_type)
    if chosen == ["image sizes"]:
        return TensorDescriptor(
            width=width, height=height, feature_channel_count=channels, batch_size=batch, data_type=data_type
        )
    if batch is None or channels is None:
        raise ShapeError("Tensor: sequences need batch_size and feature_channel_count too")
    steps = list(lengths) if lengths is not None else [length or 0] * batch
    if not steps:
        raise ShapeError("Tensor: sequence_lengths is empty")
    return TensorDescriptor(
        (batch, max(steps), channels),
        data_type=data_type,
        sequence_lengths=steps,
        sorted_sequences=is_sorted or length is not None,
    )
