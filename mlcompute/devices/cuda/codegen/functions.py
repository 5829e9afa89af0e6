"""Elementwise ops as expressions in CUDA C++: one op of `mlcompute.ops.elementwise` on registers, as NumPy computes it.

float16 and bfloat16 are computed in float and rounded after every op, as NumPy does. Functions of integers are computed
in double.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cuda.codegen.types import BOOL, DOUBLE, HALF, DType, is_element, is_floating, register_type
from mlcompute.ops.bfloat16 import is_bfloat16

_COMPARISONS = {
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_or_equal": "<=",
    "greater": ">",
    "greater_or_equal": ">=",
}
_LOGIC = {"logical_and": "&&", "logical_or": "||", "logical_xor": "!="}
_INFIX = {"add": "+", "subtract": "-", "multiply": "*"}
#: The same for floating-point numbers. Unlike + and *, these never become one fused multiply-add, which rounds once
#: instead of twice: then numbers would depend on which ops share a kernel, and so on what must be readable.
_ROUNDED = {"add": "add_rn", "subtract": "sub_rn", "multiply": "mul_rn"}
#: What the arithmetic of NumPy makes of booleans.
_BOOLEAN = {"add": "||", "multiply": "&&", "minimum": "&&", "maximum": "||"}
#: Functions of the language's own mathematical library: their names for double; for float, f is added.
_LIBRARY = {
    **{name: name for name in ("floor", "ceil", "sqrt", "exp", "exp2", "expm1", "log", "log2", "log1p", "erf")},
    **{name: name for name in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")},
    **{name: name for name in ("asinh", "acosh", "atanh")},
    "round": "rint",
    "abs": "fabs",
}
_ROUNDINGS = ("floor", "ceil", "round")
#: Ops that are functions of the prelude, and ops with formulas of their own below.
_FORMULAS = ("sigmoid", "softplus", "gelu", "gelu_gradient")
_OTHERS = ("divide", "negate", "minimum", "maximum", "sign", "abs", "relu", "rsqrt", "pow", *_FORMULAS)


def supports_function(op_name: str, operand_types: Sequence[DType], result_type: DType) -> bool:
    """Whether `function` has this op for these types."""
    if not all(map(is_element, (*operand_types, result_type))):
        return False
    if op_name in (*_COMPARISONS, *_LOGIC, "logical_not", "select", "convert", "copy", "stop_gradient"):
        return True
    if result_type == BOOL:
        return op_name in _BOOLEAN
    return op_name in _INFIX or op_name in _LIBRARY or op_name in _OTHERS


def function(op_name: str, operands: Sequence[str], operand_types: Sequence[DType], result_type: DType) -> str:
    """An expression for one op; operands are names of registers."""
    if op_name in ("copy", "stop_gradient"):
        return operands[0]
    if op_name == "convert":
        return converted(operands[0], operand_types[0], result_type)
    if op_name in _LOGIC or op_name == "logical_not":
        truths = [_truth(name, dtype) for name, dtype in zip(operands, operand_types, strict=True)]
        return f"!{truths[0]}" if op_name == "logical_not" else f"{truths[0]} {_LOGIC[op_name]} {truths[1]}"
    if op_name == "select":
        return f"{_truth(operands[0], operand_types[0])} ? {operands[1]} : {operands[2]}"
    if op_name in _COMPARISONS:
        return f"{operands[0]} {_COMPARISONS[op_name]} {operands[1]}"
    if result_type == BOOL:
        return f"{operands[0]} {_BOOLEAN[op_name]} {operands[1]}"
    expression = _arithmetic(op_name, list(operands), operand_types[0])
    return rounded(expression, result_type)


def rounded(expression: str, dtype: DType) -> str:
    """A float as a number of a 16-bit type, where that is the type."""
    if is_bfloat16(dtype):
        return f"round_bfloat16({expression})"
    return f"round_half({expression})" if dtype == HALF else expression


def _arithmetic(op_name: str, names: list[str], dtype: DType) -> str:
    """An op on numbers of one type."""
    is_float, type_ = is_floating(dtype), register_type(dtype)
    if op_name in _INFIX and is_float:
        return f"__{'f' if type_ == 'float' else 'd'}{_ROUNDED[op_name]}({names[0]}, {names[1]})"
    if op_name in _INFIX:
        return f"({type_})({names[0]} {_INFIX[op_name]} {names[1]})"
    if op_name == "negate":
        return f"({type_})(-{names[0]})"
    if op_name in ("minimum", "maximum"):
        return f"{op_name}<{type_}>({names[0]}, {names[1]})"
    if op_name == "sign":
        return f"sign_of<{type_}>({names[0]})"
    if op_name == "relu":
        return f"maximum<{type_}>({names[0]}, ({type_})0)"
    if is_float:
        return _floating(op_name, names, "f" if type_ == "float" else "")
    if op_name in _ROUNDINGS:
        return names[0]
    if op_name == "abs":
        return f"({type_})({names[0]} < ({type_})0 ? -{names[0]} : {names[0]})"
    if op_name == "pow":
        return f"integer_power<{type_}>({names[0]}, {names[1]})"
    return f"to_integer<{type_}>({_floating(op_name, [f'(double){name}' for name in names], '')})"


def _floating(op_name: str, names: list[str], suffix: str) -> str:
    """An op on float (suffix f) or double."""
    if op_name == "divide":
        return f"{names[0]} / {names[1]}"
    if op_name == "rsqrt":  # as NumPy computes it; the device's own is less accurate
        return f"1.0{suffix} / sqrt{suffix}({names[0]})"
    if op_name == "pow":
        return f"pow{suffix}({names[0]}, {names[1]})"
    if op_name in _FORMULAS:
        return f"{op_name}({', '.join(names)})"
    return f"{_LIBRARY[op_name]}{suffix}({names[0]})"


def _truth(name: str, dtype: DType) -> str:
    """x != 0; NaN counts as true."""
    return name if dtype == BOOL else f"({name} != ({register_type(dtype)})0)"


def converted(name: str, source: DType, target: DType) -> str:
    """x.astype(target), for values in the target's range."""
    if source == target:
        return name
    if target == BOOL:
        return _truth(name, source)
    if target == HALF:
        if source == DOUBLE or (source.kind in "iu" and source.itemsize > 2):
            return f"to_float(to_half((double){name}))"  # rounded once
        return f"round_half((float){name})"
    if is_bfloat16(target):
        return f"round_bfloat16((float){name})"
    if is_floating(source) and not is_floating(target):
        return f"to_integer<{register_type(target)}>({name})"
    return f"({register_type(target)}){name}"
