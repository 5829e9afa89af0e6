"""Operators on bits: of constants only, since devices have no bitwise arithmetic."""

# ruff: noqa: D103  (a row is the ONNX operator it names: the standard is its docstring)

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mlcompute.onnx.rows import Call, operator
from mlcompute.onnx.types import numpy_type
from mlcompute.ops.op import Array


def _constant(name: str, function: Callable[..., Array], count: int) -> None:
    def describe(call: Call) -> Array:
        return np.asarray(function(*(call.array(k) for k in range(count))))

    operator(name, trains=False, needs=range(count), note="of constants only")(describe)


_constant("BitwiseAnd", np.bitwise_and, 2)
_constant("BitwiseOr", np.bitwise_or, 2)
_constant("BitwiseXor", np.bitwise_xor, 2)
_constant("BitwiseNot", np.invert, 1)


@operator("BitShift", trains=False, needs=(0, 1), note="of constants only")
def bit_shift(call: Call) -> Array:
    shift = np.left_shift if call.attribute("direction") == "LEFT" else np.right_shift
    return np.asarray(shift(call.array(0), call.array(1)))


@operator("BitCast", trains=False, needs=(0,), note="of constants only")
def bit_cast(call: Call) -> Array:
    x = call.array(0)
    found: Array = np.ascontiguousarray(x).view(numpy_type(call.attribute("to"))).reshape(x.shape)
    return found
