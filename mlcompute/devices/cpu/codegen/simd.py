"""SIMD values: arithmetic on registers with Python's operators, so that formulas in kernels read as formulas.

A `SimdValue` is a register of `lanes` elements (a scalar for one lane). Each operator appends one instruction, so an
expression rounds the same whatever the number of lanes. Nothing is contracted: `fma` is written where it is meant.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.code import Code, float_literal, vector
from mlcompute.devices.cpu.runtime.machine import rounds_to_bfloat16

#: Types that the floating-point instructions take; all others are integers.
FLOATING = ("half", "float", "double")
#: The integer type as wide as a floating-point type, for looking at its bits.
_BITS = {"half": "i16", "float": "i32", "double": "i64"}
_FROM_BITS = {bits: element for element, bits in _BITS.items()}


@dataclass(frozen=True, eq=False)
class SimdValue:
    """A register: its name, the LLVM type of an element and the number of elements."""

    code: Code
    name: str
    element: str
    lanes: int

    @property
    def type(self) -> str:
        return vector(self.element, self.lanes)

    @property
    def is_floating(self) -> bool:
        return self.element in FLOATING

    def like(self, value: SimdValue | float) -> SimdValue:
        """The value itself, or a number in every lane of a register like this one."""
        if isinstance(value, SimdValue):
            return value
        return SimdValue(self.code, literal(value, self.element, self.lanes), self.element, self.lanes)

    def let(self, instruction: str, element: str | None = None) -> SimdValue:
        """What an instruction computes; of this register's element type unless told otherwise."""
        return SimdValue(self.code, self.code.let(instruction), element or self.element, self.lanes)

    def _binary(self, floating: str, integer: str, a: SimdValue | float, b: SimdValue | float) -> SimdValue:
        operation = floating if self.is_floating else integer
        return self.let(f"{operation} {self.type} {self.like(a).name}, {self.like(b).name}")

    def __add__(self, other: SimdValue | float) -> SimdValue:
        return self._binary("fadd", "add", self, other)

    def __radd__(self, other: float) -> SimdValue:
        return self._binary("fadd", "add", other, self)

    def __sub__(self, other: SimdValue | float) -> SimdValue:
        return self._binary("fsub", "sub", self, other)

    def __rsub__(self, other: float) -> SimdValue:
        return self._binary("fsub", "sub", other, self)

    def __mul__(self, other: SimdValue | float) -> SimdValue:
        return self._binary("fmul", "mul", self, other)

    def __rmul__(self, other: float) -> SimdValue:
        return self._binary("fmul", "mul", other, self)

    def __truediv__(self, other: SimdValue | float) -> SimdValue:
        return self.let(f"fdiv {self.type} {self.name}, {self.like(other).name}")

    def __rtruediv__(self, other: float) -> SimdValue:
        return self.like(other) / self

    def __neg__(self) -> SimdValue:
        return self.let(f"fneg {self.type} {self.name}") if self.is_floating else 0 - self

    # Bits: of integers and of masks

    def __and__(self, other: SimdValue | int) -> SimdValue:
        return self.let(f"and {self.type} {self.name}, {self.like(other).name}")

    def __or__(self, other: SimdValue | int) -> SimdValue:
        return self.let(f"or {self.type} {self.name}, {self.like(other).name}")

    def __xor__(self, other: SimdValue | int) -> SimdValue:
        return self.let(f"xor {self.type} {self.name}, {self.like(other).name}")

    def __lshift__(self, count: int) -> SimdValue:
        return self.let(f"shl {self.type} {self.name}, {self.like(count).name}")

    def __rshift__(self, count: int) -> SimdValue:
        """Shift right, keeping the sign."""
        return self.let(f"ashr {self.type} {self.name}, {self.like(count).name}")

    def __invert__(self) -> SimdValue:
        return self ^ -1

    def bits(self) -> SimdValue:
        """The bits of floating-point lanes as integers."""
        element = _BITS[self.element]
        return self.let(f"bitcast {self.type} {self.name} to {vector(element, self.lanes)}", element)

    def from_bits(self) -> SimdValue:
        """Integers as the floating-point numbers with those bits."""
        element = _FROM_BITS[self.element]
        return self.let(f"bitcast {self.type} {self.name} to {vector(element, self.lanes)}", element)

    # Comparisons give masks: lanes of i1. Beside a NaN all but `differs` are false.

    def compare(self, floating: str, integer: str, other: SimdValue | float) -> SimdValue:
        operation = f"fcmp {floating}" if self.is_floating else f"icmp {integer}"
        return self.let(f"{operation} {self.type} {self.name}, {self.like(other).name}", "i1")

    def __lt__(self, other: SimdValue | float) -> SimdValue:
        return self.compare("olt", "slt", other)

    def __le__(self, other: SimdValue | float) -> SimdValue:
        return self.compare("ole", "sle", other)

    def __gt__(self, other: SimdValue | float) -> SimdValue:
        return self.compare("ogt", "sgt", other)

    def __ge__(self, other: SimdValue | float) -> SimdValue:
        return self.compare("oge", "sge", other)

    def equals(self, other: SimdValue | float) -> SimdValue:
        return self.compare("oeq", "eq", other)

    def differs(self, other: SimdValue | float) -> SimdValue:
        return self.compare("une", "ne", other)

    def is_nan(self) -> SimdValue:
        return self.compare("uno", "ne", self)

    # Functions LLVM knows

    def intrinsic(self, name: str, *others: SimdValue | float) -> SimdValue:
        operands = [self.name, *(self.like(other).name for other in others)]
        return SimdValue(self.code, self.code.intrinsic(name, self.type, *operands), self.element, self.lanes)

    def abs(self) -> SimdValue:
        return self.intrinsic("fabs")

    def sqrt(self) -> SimdValue:
        return self.intrinsic("sqrt")

    def rounded(self) -> SimdValue:
        """The nearest integer, half to even."""
        return self.intrinsic("roundeven")

    def with_sign_of(self, other: SimdValue) -> SimdValue:
        return self.intrinsic("copysign", other)

    def at_least(self, bound: float) -> SimdValue:
        """max(self, bound); a NaN stays."""
        return select(self.like(bound) > self, bound, self)

    def at_most(self, bound: float) -> SimdValue:
        """min(self, bound); a NaN stays."""
        return select(self.like(bound) < self, bound, self)


def fma(a: SimdValue, b: SimdValue | float, c: SimdValue | float) -> SimdValue:
    """a b + c, rounded once."""
    return a.intrinsic("fma", b, c)


def select(mask: SimdValue, a: SimdValue | float, b: SimdValue | float) -> SimdValue:
    """a where the mask is set, else b; at most one of them a number."""
    like = a if isinstance(a, SimdValue) else b
    assert isinstance(like, SimdValue)
    a, b = like.like(a), like.like(b)
    return like.let(f"select {mask.type} {mask.name}, {a.type} {a.name}, {b.type} {b.name}")


def from_bfloat16(x: SimdValue) -> SimdValue:
    """The bits of bfloat16 as float."""
    wide = x.let(f"zext {x.type} {x.name} to {vector('i32', x.lanes)}", "i32")
    return (wide << 16).from_bits()


def to_bfloat16(x: SimdValue, flush: bool = True) -> SimdValue:
    """Float rounded to the bits of bfloat16, half to even; a NaN stays one.

    AVX512_BF16 has an instruction for it, which takes subnormal numbers as 0: for those who let it `flush` them.
    """
    if flush and rounds_to_bfloat16():
        rounded = x.let(f"fptrunc {x.type} {x.name} to {vector('bfloat', x.lanes)}", "bfloat")
        return rounded.let(f"bitcast {rounded.type} {rounded.name} to {vector('i16', x.lanes)}", "i16")
    bits = x.bits()
    odd = bits.let(f"lshr {bits.type} {bits.name}, {bits.like(16).name}") & 1
    kept = select(x.is_nan(), bits | 0x400000, bits + 0x7FFF + odd)
    high = kept.let(f"lshr {kept.type} {kept.name}, {kept.like(16).name}")
    return high.let(f"trunc {high.type} {high.name} to {vector('i16', high.lanes)}", "i16")


def polynomial(x: SimdValue, coefficients: Sequence[float]) -> SimdValue:
    """c0 + c1 x + c2 x² + ..., by Horner's rule."""
    *rest, last = coefficients
    result = x.like(last)
    for coefficient in reversed(rest):
        result = fma(result, x, coefficient)
    return result


def literal(value: float, element: str, lanes: int) -> str:
    """A number in every lane, as an operand."""
    if element == "float":
        text = float_literal(value)
    elif element == "double":
        text = "0x" + struct.pack(">d", value).hex().upper()
    elif element == "half":
        text = "0xH" + struct.pack(">e", value).hex().upper()
    else:
        text = str(int(value))
    return text if lanes == 1 else "<" + ", ".join([f"{element} {text}"] * lanes) + ">"
