"""Elementwise kernels: single ops, fused groups of them, assigns, optimizer updates, copies of views.

A step becomes a `LoopNest`; a thread computes a pack of neighbouring elements of the innermost loop. Loads and stores
of packs are 16 bytes wide where memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.devices.cuda.codegen.functions import function, supports_function
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for, divisor, is_wide
from mlcompute.devices.cuda.codegen.types import is_element, loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Argument, Launch, Row
from mlcompute.devices.cuda.kernels.transposed_copy import is_transposed, transposed_copy
from mlcompute.devices.loop_nest import (
    Access,
    LoopNest,
    NestOperand,
    Operands,
    copy_nest,
    elementwise_nest,
)
from mlcompute.ops.op import TABLE, Step, Value, inner_steps

#: Bytes a thread loads or stores at once.
WIDEST = 16


def elementwise_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One elementwise op, an assign, or a fused group of them."""
    steps = inner_steps(step) if isinstance(step.op, FusedElementwise) else (step,)
    return nest_launches(step, elementwise_nest(step, steps, operands))


def copy_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """A view that needs memory of its own."""
    nest = copy_nest(step, operands)
    if len(nest.extents) == 2:
        source, target = (
            each.operand._replace(shape=nest.extents, strides=each.strides) for each in (nest.loads[0], nest.stores[0])
        )
        if is_transposed(source, target):
            return [transposed_copy(step, source, target)]
    return nest_launches(step, nest)


def supports_elementwise(step: Step) -> bool:
    """Is there a kernel for an elementwise step, an assign, a view or a fused group?"""
    if isinstance(step.op, FusedElementwise):
        # Shared steps stand for others of the same types.
        return all(map(supports_elementwise, step.attributes["steps"]))
    types = [value.dtype for value in step.inputs]
    if step.op.name == "assign":
        return types[0] == types[1] and is_element(types[0])
    if step.op.is_view:
        return is_element(types[0])
    return supports_function(step.op.name, types, step.results[0].dtype)


def nest_launches(step: Step, nest: LoopNest) -> Sequence[Launch]:
    """A loop nest as a kernel; none for an empty one."""
    if not nest.iterations:
        return []
    form = _Form.of(nest, not step.op.is_pure)
    key = (nest.structure(), form)
    source = _written.get(key)
    if source is None:
        source = _written[key] = _Writer(nest, form).text()
    packs = -(-nest.iterations // form.pack)
    index = np.int64 if form.wide else np.int32
    arguments: list[Argument] = [each.operand for each in nest.operands]
    arguments.append(index(nest.iterations if len(nest.extents) == 1 else packs))
    extents = (*nest.extents[1:-1], nest.extents[-1] // form.pack) if len(nest.extents) > 1 else ()
    arguments += [np.int64(extent) if form.wide else divisor(extent) for extent in extents]
    for each, moves in zip(nest.operands, form.moves, strict=True):
        arguments += [index(stride) for stride, is_moved in zip(each.strides, moves, strict=True) if is_moved]
    stores = range(len(nest.loads), len(nest.operands))
    return [
        Launch(step, nest.kernel_name, source, arguments, stores, blocks_for(packs), (BLOCK, 1, 1), 0, form.guarded)
    ]


#: Kernels written before, by everything they depend on: large networks repeat few different loops.
_written: dict[object, str] = {}


@dataclass(frozen=True)
class _Form:
    """What a kernel depends on besides the nest's structure.

    pack     neighbouring elements per thread
    wide     indices need 64 bits
    guarded  nothing is stored when the run has failed
    moves    per operand and loop: is its stride an argument? It is not where it is known: 0, or 1 along the innermost
    """

    pack: int
    wide: bool
    guarded: bool
    moves: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, nest: LoopNest, guarded: bool) -> _Form:
        wide = is_wide(nest.extents, [each.strides for each in nest.operands])
        moves = tuple(
            (*(stride != 0 for stride in each.strides[:-1]), each.access is Access.STRIDED) for each in nest.operands
        )
        return cls(_pack(nest), wide, guarded, moves)


def _pack(nest: LoopNest) -> int:
    """The most elements that every operand's memory lets a thread treat at once; 1 when stores are not contiguous."""
    contiguous = [each for each in nest.operands if each.access is Access.CONTIGUOUS]
    if any(each.access is not Access.CONTIGUOUS for each in nest.stores):
        return 1
    pack = WIDEST // max(each.operand.dtype.itemsize for each in contiguous)
    width = nest.extents[-1] if len(nest.extents) > 1 else 0
    while pack > 1 and (width % pack or not all(_is_aligned(each, pack) for each in contiguous)):
        pack //= 2
    return max(pack, 1)


def _is_aligned(each: NestOperand, pack: int) -> bool:
    return each.operand.offset % pack == 0 and all(stride % pack == 0 for stride in each.strides[:-1])


class _Writer:
    """Writes the kernel of a nest. A class because its parts share many names."""

    def __init__(self, nest: LoopNest, form: _Form) -> None:
        self.nest, self.form = nest, form
        self.index = "long long" if form.wide else "int"
        self.access = [each.access for each in nest.operands]
        self.dtypes = [each.operand.dtype for each in nest.operands]
        self.rank = len(nest.extents)

    def text(self) -> str:
        lines = [*self._first(), *self._constants()]
        if self.rank == 1 and self.form.pack > 1:
            # The last thread may have fewer elements than a pack.
            lines += [f"if (i0 + {self.form.pack} <= count) {{", *self._packed(), "} else {"]
            lines += ["for (; i0 < count; ++i0) {", *self._single(), "}", "}"]
        else:
            lines += self._packed() if self.form.pack > 1 else self._single()
        body = "\n".join(f"    {line}" for line in lines)
        bounds = f"__launch_bounds__({BLOCK})"
        return f'extern "C" __global__ void {bounds} KERNEL({", ".join(self._parameters())}) {{\n{body}\n}}\n'

    def _parameters(self) -> list[str]:
        names = ["const int* failed"] if self.form.guarded else []
        loads = len(self.nest.loads)
        for number, dtype in enumerate(self.dtypes):
            names.append(f"{'const ' if number < loads else ''}{memory_type(dtype)}* p{number}")
        names.append(f"{self.index} count")
        names += [f"{'long long' if self.form.wide else 'Divisor'} d{axis}" for axis in range(1, self.rank)]
        for number, moves in enumerate(self.form.moves):
            names += [f"{self.index} s{number}_{axis}" for axis, is_moved in enumerate(moves) if is_moved]
        return names

    def _first(self) -> list[str]:
        """Which elements the thread has: i0, i1, ... are the indices of the first."""
        lines = ["if (*failed) return;"] if self.form.guarded else []
        item = f"({self.index})blockIdx.x * {BLOCK} + threadIdx.x"
        if self.rank == 1:
            pack = f" * {self.form.pack}" if self.form.pack > 1 else ""
            return [*lines, f"{self.index} i0 = ({item}){pack};", "if (i0 >= count) return;"]
        lines += [f"{self.index} item = {item};", "if (item >= count) return;"]
        lines.append(f"{self.index} rest = item;")
        for axis in range(self.rank - 1, 0, -1):
            pack = f" * {self.form.pack}" if axis == self.rank - 1 and self.form.pack > 1 else ""
            if self.form.wide:
                lines += [f"long long i{axis} = (rest % d{axis}){pack};", f"rest /= d{axis};"]
            else:
                lines.append(f"int q{axis} = quotient(rest, d{axis});")
                lines += [f"int i{axis} = (rest - q{axis} * (int)d{axis}.divisor){pack};", f"rest = q{axis};"]
        return [*lines, f"{self.index} i0 = rest;"]

    def _offset(self, number: int) -> str:
        """Where an operand's first element lies."""
        terms = []
        for axis, is_moved in enumerate(self.form.moves[number]):
            if is_moved:
                terms.append(f"i{axis} * s{number}_{axis}")
            elif axis == self.rank - 1 and self.access[number] is Access.CONTIGUOUS:
                terms.append(f"i{axis}")
        return " + ".join(terms) or "0"

    def _constants(self) -> list[str]:
        """What is the same for all elements of the thread."""
        lines = []
        for number in range(len(self.nest.loads)):
            if self.access[number] is Access.CONSTANT or (self.access[number] is Access.FIXED and self.rank > 1):
                dtype = self.dtypes[number]
                element = loaded(dtype, f"p{number}[{self._offset(number)}]")
                lines.append(f"const {register_type(dtype)} c{number} = {element};")
        return lines

    def _is_constant(self, number: int) -> bool:
        return self.access[number] in (Access.CONSTANT, Access.FIXED)

    def _single(self) -> list[str]:
        """One element."""
        elements = {
            number: f"p{number}[{self._offset(number)}]"
            for number in range(len(self.dtypes))
            if not self._is_constant(number) or number >= len(self.nest.loads)
        }
        return self._body(elements)

    def _packed(self) -> list[str]:
        """A pack of elements: loaded together, computed one by one, stored together."""
        pack, loads, lines, after = self.form.pack, len(self.nest.loads), [], []
        elements: dict[int, str] = {}
        for number, dtype in enumerate(self.dtypes):
            if self._is_constant(number) and number < loads:
                continue
            if self.access[number] is not Access.CONTIGUOUS:
                elements[number] = f"p{number}[{self._offset(number)} + k * s{number}_{self.rank - 1}]"
                continue
            type_, constant = memory_type(dtype), "const " if number < loads else ""
            place = f"*({constant}Pack<{type_}, {pack}>*)(p{number} + {self._offset(number)})"
            elements[number] = f"a{number}.at[k]"
            if number < loads:
                lines.append(f"const Pack<{type_}, {pack}> a{number} = {place};")
            else:
                lines.append(f"Pack<{type_}, {pack}> a{number};")
                after.append(f"{place} = a{number};")
        lines += ["#pragma unroll", f"for (int k = 0; k < {pack}; ++k) {{", *self._body(elements), "}"]
        return lines + after

    def _body(self, elements: Mapping[int, str]) -> list[str]:
        """The ops on one element of every operand."""
        names: dict[Value, str] = {}
        lines: list[str] = []
        for number, each in enumerate(self.nest.loads):
            dtype = self.dtypes[number]
            if self._is_constant(number):
                names[each.value] = f"c{number}"
            else:
                names[each.value] = f"x{number}"
                lines.append(f"const {register_type(dtype)} x{number} = {loaded(dtype, elements[number])};")
        for place, step in enumerate(self.nest.ops):
            types = [value.dtype for value in step.inputs]
            result = step.results[0]
            expression = function(step.op.name, [names[value] for value in step.inputs], types, result.dtype)
            names[result] = f"y{place}"
            lines.append(f"const {register_type(result.dtype)} y{place} = {expression};")
        for number, each in enumerate(self.nest.stores, start=len(self.nest.loads)):
            lines.append(f"{elements[number]} = {stored(self.dtypes[number], names[each.value])};")
        return lines


_ROW = Row(elementwise_launches, supports_elementwise)
_VIEW = Row(copy_launches, supports_elementwise)

KERNELS: dict[str, Row] = {
    "fused_elementwise": _ROW,
    "assign": _ROW,
    **{name: _ROW for name, op in TABLE.items() if op.family == "elementwise"},
    **{name: _VIEW for name, op in TABLE.items() if op.is_view},
}
