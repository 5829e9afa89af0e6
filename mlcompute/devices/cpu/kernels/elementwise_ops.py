"""Elementwise ops on registers: one op of `mlcompute.ops.elementwise` on `lanes` elements, with NumPy's results.

Booleans are bits (i1) in registers and bytes in memory. float16 and bfloat16 compute in float32 and round after every
op, as NumPy does. What is not served here (`supports_elementwise`) has no kernel: integer powers, transcendental
functions of float64.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlcompute.devices.cpu.codegen import math
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector
from mlcompute.devices.cpu.codegen.simd import SimdValue, from_bfloat16, select, to_bfloat16
from mlcompute.devices.cpu.runtime.machine import features
from mlcompute.ops.bfloat16 import computed_type, is_bfloat16
from mlcompute.ops.elementwise import FUNCTIONS

DType = np.dtype[Any]
_BOOL, _HALF, _FLOAT = np.dtype(np.bool_), np.dtype(np.float16), np.dtype(np.float32)


def register_type(dtype: DType) -> str:
    """The LLVM type of an element in a register."""
    return "i1" if dtype == _BOOL else _loaded_type(dtype)


def _loaded_type(dtype: DType) -> str:
    """The LLVM type that an element is loaded and stored as: bfloat16 as its bits."""
    return "i16" if is_bfloat16(dtype) else MEMORY_TYPES[dtype]


def load_element(code: Code, pointer: str, dtype: DType, lanes: int) -> str:
    """The elements at an address, as a register."""
    memory = vector(_loaded_type(dtype), lanes)
    value = code.load(pointer, memory)
    return SimdValue(code, value, "i8", lanes).differs(0).name if dtype == _BOOL else value


def store_element(code: Code, pointer: str, dtype: DType, value: str, lanes: int) -> None:
    """Put a register's elements at an address."""
    memory = vector(_loaded_type(dtype), lanes)
    if dtype == _BOOL:
        value = code.let(f"zext {vector('i1', lanes)} {value} to {memory}")
    code.store(pointer, memory, value)


def supports_elementwise(op_name: str, operand_types: Sequence[DType], result_type: DType) -> bool:
    """Whether `emit_elementwise` has this op for these types."""
    types = [*operand_types, result_type]
    known = all(dtype in MEMORY_TYPES or is_bfloat16(dtype) for dtype in types)
    if not known or (_HALF in types and not has_half()):
        return False
    if op_name == "convert":
        return len(operand_types) == 1
    if op_name in _COMPARISONS:
        return result_type == _BOOL and len(operand_types) == 2 and operand_types[0] == operand_types[1]
    if op_name in _LOGIC:
        return result_type == _BOOL and len(operand_types) == (1 if op_name == "logical_not" else 2)
    if op_name == "select":
        return len(operand_types) == 3 and operand_types[1] == operand_types[2] == result_type
    if any(dtype != result_type for dtype in operand_types):
        return False
    if op_name in ("copy", "stop_gradient"):
        return True
    if op_name in _ARITHMETIC or op_name == "divide":
        return result_type != _BOOL or op_name in _OF_BOOLEANS
    if op_name in _FLOATING:
        return result_type.kind == "f" or is_bfloat16(result_type)
    return op_name in FUNCTIONS and computed_type(result_type) in (_FLOAT, _HALF)


def emit_elementwise(
    code: Code,
    op_name: str,
    attributes: dict[str, Any],
    operands: list[str],
    operand_types: list[DType],
    result_type: DType,
    lanes: int,
) -> str:
    """The register holding one op of `operands`. What most attributes say, the types say too."""
    assert supports_elementwise(op_name, operand_types, result_type), (op_name, operand_types, result_type)
    values = [
        SimdValue(code, operand, register_type(dtype), lanes)
        for operand, dtype in zip(operands, operand_types, strict=True)
    ]
    if op_name == "convert":
        return _convert(values[0], operand_types[0], result_type, flush=attributes.get("flush", False)).name
    return _emit(op_name, values, operand_types, result_type).name


def _emit(op_name: str, values: list[SimdValue], types: list[DType], result_type: DType) -> SimdValue:
    if op_name in ("copy", "stop_gradient"):
        return values[0]
    if op_name in _LOGIC or op_name == "select":
        if is_bfloat16(types[0]):
            values = [from_bfloat16(values[0]), *values[1:]]
        if op_name == "select":
            return select(_truth(values[0]), values[1], values[2])
        return _LOGIC[op_name](*map(_truth, values))
    if types[0] == _HALF or is_bfloat16(types[0]):
        wide = [_convert(value, types[0], _FLOAT) for value in values]
        result = _emit(op_name, wide, [_FLOAT] * len(wide), _BOOL if result_type == _BOOL else _FLOAT)
        return result if result_type == _BOOL else _convert(result, _FLOAT, types[0])
    if op_name in _COMPARISONS:
        return _compare(_COMPARISONS[op_name], types[0], *values)
    if types[0] == _BOOL:
        return _LOGIC[_OF_BOOLEANS[op_name]](*values)
    if op_name in _ARITHMETIC:
        return _ARITHMETIC[op_name](types[0], *values)
    if op_name == "divide" and types[0].kind != "f":  # as NumPy: in float64, then cut
        wide = [_convert(value, types[0], np.dtype(np.float64)) for value in values]
        return _to_integer(wide[0] / wide[1], result_type)
    if op_name in _FLOATING:
        return _FLOATING[op_name](*values)
    code, lanes = values[0].code, values[0].lanes
    # One of `FUNCTIONS`.
    name = getattr(math, op_name)(code, *[value.name for value in values], lanes)
    return SimdValue(code, name, "float", lanes)


# Arithmetic -----------------------------------------------------------------------------------------------------


def _unsigned(dtype: DType) -> bool:
    return dtype.kind in "ub"


def _compare(predicate: str, dtype: DType, a: SimdValue, b: SimdValue | float) -> SimdValue:
    """a < b and the like; `predicate` is lt, le, gt, ge, eq or ne."""
    floating = "une" if predicate == "ne" else f"o{predicate}"
    integer = predicate if predicate in ("eq", "ne") else f"{'u' if _unsigned(dtype) else 's'}{predicate}"
    return a.compare(floating, integer, b)


def _extreme(predicate: str) -> Callable[[DType, SimdValue, SimdValue], SimdValue]:
    def emit(dtype: DType, a: SimdValue, b: SimdValue) -> SimdValue:
        # Beside a NaN the comparison is false and b is taken; left to see to is a NaN in a.
        result = select(_compare(predicate, dtype, a, b), a, b)
        return select(a.is_nan(), a, result) if a.is_floating else result

    return emit


def _abs(dtype: DType, x: SimdValue) -> SimdValue:
    if x.is_floating:
        return x.abs()
    return x if _unsigned(dtype) else select(x < 0, -x, x)


def _sign(dtype: DType, x: SimdValue) -> SimdValue:
    if x.is_floating:
        # x + 0: NaN stays NaN, and -0 becomes 0.
        return select(x > 0.0, 1.0, select(x < 0.0, -1.0, x + 0.0))
    positive = select(_compare("gt", dtype, x, 0), 1, x.like(0))
    return positive if _unsigned(dtype) else select(x < 0, -1, positive)


def _relu(dtype: DType, x: SimdValue) -> SimdValue:
    if x.is_floating:
        return x.at_least(0.0)
    return x if _unsigned(dtype) else select(x < 0, 0, x)


#: Ops of every type but bool: (dtype, operands) -> result.
_ARITHMETIC: dict[str, Callable[..., SimdValue]] = {
    "add": lambda dtype, a, b: a + b,
    "subtract": lambda dtype, a, b: a - b,
    "multiply": lambda dtype, a, b: a * b,
    "negate": lambda dtype, x: -x,
    "minimum": _extreme("lt"),
    "maximum": _extreme("gt"),
    "abs": _abs,
    "sign": _sign,
    "relu": _relu,
}

#: Ops of floating-point types, each one instruction or two.
_FLOATING: dict[str, Callable[..., SimdValue]] = {
    "divide": lambda a, b: a / b,
    "floor": lambda x: x.intrinsic("floor"),
    "ceil": lambda x: x.intrinsic("ceil"),
    "round": SimdValue.rounded,
    "sqrt": SimdValue.sqrt,
    "rsqrt": lambda x: 1.0 / x.sqrt(),
}

_COMPARISONS = {
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_or_equal": "le",
    "greater": "gt",
    "greater_or_equal": "ge",
}

_LOGIC: dict[str, Callable[..., SimdValue]] = {
    "logical_and": lambda a, b: a & b,
    "logical_or": lambda a, b: a | b,
    "logical_xor": lambda a, b: a ^ b,
    "logical_not": lambda a: ~a,
}

#: What arithmetic means for booleans.
_OF_BOOLEANS = {"add": "logical_or", "maximum": "logical_or", "multiply": "logical_and", "minimum": "logical_and"}


# Conversion -----------------------------------------------------------------------------------------------------


def _truth(x: SimdValue) -> SimdValue:
    """x != 0, as a mask; NaN counts as true."""
    return x if x.element == "i1" else x.differs(0)


def _cast(instruction: str, x: SimdValue, element: str) -> SimdValue:
    return x.let(f"{instruction} {x.type} {x.name} to {vector(element, x.lanes)}", element)


def _convert(x: SimdValue, source: DType, target: DType, flush: bool = False) -> SimdValue:
    """x.astype(target), for values in the target's range; `flush`: see `to_bfloat16`."""
    element = register_type(target)
    if source == target:
        return x
    if is_bfloat16(source):  # every bfloat16 is a float32
        return _convert(from_bfloat16(x), _FLOAT, target)
    if is_bfloat16(target):
        return to_bfloat16(_convert(x, source, _FLOAT), flush)
    if target == _BOOL:
        return _truth(x)
    if source == _HALF:  # every float16 is a float32
        return _convert(_cast("fpext", x, "float"), _FLOAT, target)
    if target == _HALF:
        if source == np.float64:
            return _cast("fptrunc", _to_odd_float(x), element)
        return _cast("fptrunc", _convert(x, source, _FLOAT), element)
    if source.kind == "f":
        if target.kind == "f":
            return _cast("fpext" if target.itemsize > source.itemsize else "fptrunc", x, element)
        return _to_integer(x, target)
    if target.kind == "f":
        return _cast("uitofp" if _unsigned(source) else "sitofp", x, element)
    width = 1 if source == _BOOL else 8 * source.itemsize
    if width == 8 * target.itemsize:
        return x  # signed and unsigned share their registers
    widened = "zext" if _unsigned(source) else "sext"
    return _cast(widened if width < 8 * target.itemsize else "trunc", x, element)


def _to_integer(x: SimdValue, target: DType) -> SimdValue:
    """Toward zero. Outside the range of the wider type computed in: its nearest end, and 0 for NaN."""
    wide = "i64" if target == np.uint32 or target.itemsize == 8 else "i32"
    result = vector(wide, x.lanes)
    lanes = "" if x.lanes == 1 else f"v{x.lanes}"
    name = f"llvm.fptosi.sat.{lanes}{wide}.{lanes}{'f32' if x.element == 'float' else 'f64'}"
    x.code.declare(f"{result} @{name}({x.type})")
    integer = x.let(f"call {result} @{name}({x.type} {x.name})", wide)
    element = register_type(target)
    return integer if wide == element else _cast("trunc", integer, element)


def _to_odd_float(x: SimdValue) -> SimdValue:
    """float64 as float32, inexact numbers with their last bit set: rounding the result again cannot err."""
    near = _cast("fptrunc", x, "float")
    back = _cast("fpext", near, "double")
    below = select(back.abs() > x.abs(), near.bits() - 1, near.bits())
    return select(back.compare("one", "ne", x), below | 1, near.bits()).from_bits()


@functools.cache
def has_half() -> bool:
    """Whether this machine converts float16 itself: others would call a runtime library that need not be there."""
    return "f16c" in features() or platform.machine() not in ("x86_64", "AMD64", "i686")
