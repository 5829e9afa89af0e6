"""The arguments of a kernel: an array of 64-bit words, numbered while the kernel's code is written."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Array

#: One argument: the address of an operand, of another kernel or of an array that its entry keeps, or an integer.
Argument = Operand | int | Code | Array


class KernelArguments:
    """Collects the arguments that a kernel's code reads, in order: `values` is what the kernel must be called with."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.values: list[Argument] = []

    def pointer(self, operand: Argument) -> str:
        """A register with an address, which may be given as an integer."""
        self.values.append(operand)
        return self.code.argument(len(self.values) - 1, "ptr")

    def number(self, number: int) -> str:
        """A register with an integer."""
        self.values.append(number)
        return self.code.argument(len(self.values) - 1)

    def numbers(self, numbers: Sequence[int]) -> list[str]:
        return [self.number(number) for number in numbers]


def call_kernel(code: Code, function: str, integers: Sequence[str | int], pointers: Sequence[str]) -> None:
    """Call another kernel from a kernel, as its only thread; it reads the integers first, then the pointers."""
    words = code.variable(f"[{len(integers) + len(pointers)} x i64]", "undef")
    typed = [("i64", str(word)) for word in integers] + [("ptr", word) for word in pointers]
    for index, (type_, word) in enumerate(typed):
        code.do(f"store {type_} {word}, ptr {code.at(words, index, 'i64')}")
    code.do(f"call void {function}(i64 0, i64 1, ptr {words})")
