"""Random initial values of a tensor, with the layer's true fans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.enums import DataType, RandomInitializerType
from mlcompute.errors import DataError
from mlcompute.ops.bfloat16 import is_numeric
from mlcompute.ops.op import Array
from mlcompute.platform import stream
from mlcompute.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from mlcompute.initializers import Initializer

#: Significant bits.
_DIGITS = {DataType.FLOAT32: 24, DataType.FLOAT16: 11, DataType.BFLOAT16: 8}


def random_values(
    who: str, d: TensorDescriptor, kind: RandomInitializerType | Initializer
) -> tuple[Array, Rescaled | Redrawn | None]:
    """Values for fans that are guessed from the shape, and how to make those for others; None: they do not matter."""
    if not d.data_type.is_floating:
        raise DataError(f"{who}: random values need a floating type, not {d.data_type.name}")
    fan_in, fan_out = _guess_fans(d.shape)
    if callable(kind) and not isinstance(kind, int):
        # A key of its own: drawn again with the true fans, the numbers do not depend on what was drawn meanwhile.
        redrawn = Redrawn(kind, d, stream.key())
        return redrawn.values(None, fan_in, fan_out), redrawn
    if not isinstance(kind, int):
        raise DataError(
            f"{who}: a {type(kind).__name__} is not an initializer",
            expected="a RandomInitializerType, an object of mlc.initializers, or a function of (shape, fans, random)",
            fix="values themselves are data=..., or weights=mlc.Tensor(data=...) of a layer",
        )
    if kind == RandomInitializerType.UNIFORM:
        # Rounding to the nearest number of few digits could give 1; cutting digits off cannot.
        steps = 2.0 ** _DIGITS[d.data_type]
        values, scale = np.floor(stream.uniform(d.element_count) * steps) / steps, 1.0
    elif kind == RandomInitializerType.GLOROT_UNIFORM:
        values, scale = 2.0 * stream.uniform(d.element_count) - 1.0, math.sqrt(6.0 / (fan_in + fan_out))
    elif kind == RandomInitializerType.XAVIER:
        values, scale = stream.normal(d.element_count), math.sqrt(2.0 / (fan_in + fan_out))
    else:
        raise DataError(f"{who}: {kind!r} is not a random initializer")
    array: Array = (values * scale).reshape(d.shape).astype(d.data_type.numpy)
    return array, None if kind == RandomInitializerType.UNIFORM else Rescaled(fan_in + fan_out)


@dataclass(frozen=True)
class Rescaled:
    """Values that are proportional to 1 / sqrt(fan_in + fan_out), made with a guess of that sum."""

    guessed: float

    def values(self, now: Array | None, fan_in: float, fan_out: float) -> Array:
        assert now is not None
        if self.guessed == fan_in + fan_out:
            return now
        scaled: Array = now * now.dtype.type(math.sqrt(self.guessed / (fan_in + fan_out)))
        return scaled


@dataclass(frozen=True)
class Redrawn:
    """Values of an initializer, which may depend on the fans in any way: it is asked again."""

    initializer: Initializer
    descriptor: TensorDescriptor
    key: int

    def values(self, now: Array | None, fan_in: float, fan_out: float) -> Array:
        shape, dtype = self.descriptor.shape, self.descriptor.data_type.numpy
        made = self.initializer(shape, (fan_in, fan_out), np.random.default_rng(self.key))
        found = np.asarray(made)
        if found.shape != shape or not is_numeric(found.dtype) or found.dtype == np.bool_:
            raise DataError(
                f"Tensor: the initializer {_name_of(self.initializer)} gives {found.dtype} of shape {found.shape}",
                expected=f"numbers of shape {shape}",
            )
        return np.array(found, dtype)


def _name_of(function: object) -> str:
    return getattr(function, "__name__", None) or repr(function)


def _guess_fans(shape: tuple[int, ...]) -> tuple[float, float]:
    """(fan_in, fan_out) of (out, in), (out, in, h, w), or (1, in*out, h, w), whose split only the layer knows."""
    if len(shape) == 1:
        return shape[0], shape[0]
    area = math.prod(shape[2:])
    if shape[0] == 1 and len(shape) == 4:
        side = math.sqrt(shape[1]) * area
        return side, side
    return shape[1] * area, shape[0] * area
