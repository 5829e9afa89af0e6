"""Elementwise kernels: single ops, fused groups of them, assigns, and copies of views that need memory of their own.

A step becomes a `LoopNest`, and `_Writer` writes any nest: vectors along the innermost loop, then the rest one by one;
copies that exchange axes go by squares, other nests with operands whose axes are exchanged by tiles, and those with a
few columns by vectors of several rows (`transposes`). Long chains of ops are cut into stages (`elementwise_stages`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.devices.cpu.codegen.arguments import Argument
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector, vector_lanes
from mlcompute.devices.cpu.codegen.streaming import STREAM_ALIGNMENT, has_streaming_stores, stream
from mlcompute.devices.cpu.kernels.elementwise_ops import (
    emit_elementwise,
    load_element,
    register_type,
    store_element,
    supports_elementwise,
)
from mlcompute.devices.cpu.kernels.elementwise_stages import BLOCK, Stage, stages_of
from mlcompute.devices.cpu.kernels.transposes import (
    TILE_COLUMNS,
    TILE_ROWS,
    FewColumns,
    Rows,
    Tiling,
    Transpose,
    few_columns,
    source_axis,
    tiling,
    vectors_of_rows,
)
from mlcompute.devices.cpu.runtime.entry import Entry, Maker, always
from mlcompute.devices.loop_nest import Access, LoopNest, NestOperand, Operand, Operands, copy_nest, elementwise_nest
from mlcompute.ops.op import FLOAT32, TABLE, Step, Value, inner_steps

#: Iterations per unit of sharing where there are too few rows to share.
CHUNK = 1024


def elementwise_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One elementwise op, an assign, or a fused group of them."""
    steps = inner_steps(step) if isinstance(step.op, FusedElementwise) else (step,)
    entry = fused_entry(step, steps, operands)
    return None if entry is None else [entry]


def fused_entry(
    step: Step, steps: Sequence[Step], operands: Operands, elsewhere: Mapping[Value, Operand] | None = None
) -> Entry | None:
    """Elementwise steps and assigns in one loop nest; `elsewhere`: values that lie in other memory than planned."""
    if not all(map(_supports, steps)):
        return None
    return loop_entry(step, elementwise_nest(step, steps, operands, elsewhere), operands.threads)


def _supports(step: Step) -> bool:
    types = [value.dtype for value in step.inputs]
    if step.op.name == "assign":
        return types[0] == types[1]
    return supports_elementwise(step.op.name, types, step.results[0].dtype)


def copy_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """A view that needs memory of its own."""
    return [loop_entry(step, copy_nest(step, operands), operands.threads)]


#: Estimated nanoseconds from which on a loop nest is cut into pieces.
_LONG = 100_000.0
#: Code written before, by everything it depends on: large networks repeat few different loops.
_written: dict[object, Code] = {}


def loop_entry(step: Step, nest: LoopNest, threads: int) -> Entry:
    """A loop nest as a kernel. Arguments: units, iterations per unit, extents, each operand's address and strides."""
    nest = nest.shared_by(threads)
    sharing = nest.sharing(CHUNK, threads)
    arguments: list[Argument] = [sharing.units, sharing.per_unit, *nest.extents]
    first_arguments = []
    for each in nest.operands:
        first_arguments.append(len(arguments))
        arguments += [each.operand, *each.strides]
    cost = nest.iterations * (0.02 * len(nest.operands) + 0.013 * len(nest.ops))
    in_pieces = cost > _LONG  # a short one is not worth the instructions
    updates = tuple(map(_is_parameter, nest.stores))
    structure = nest.structure(), source_axis(nest), few_columns(nest), tiling(nest), vector_lanes(), in_pieces, updates
    code = _written.get(structure) or _code(structure, nest, first_arguments, in_pieces)
    return Entry(
        step,
        code,
        arguments,
        reads=[each.operand for each in nest.loads],
        writes=[each.operand for each in nest.stores],
        rows=sharing.rows,
        by_row=nest.dense_operands,
        kernel=nest.kernel_name,
        cost=cost,
        in_pieces=in_pieces,
        streams=any(each.streams for each in nest.stores),
    )


def _is_parameter(store: NestOperand) -> bool:
    """Is it a parameter that is updated?"""
    return store.operand.base.kind == "parameter"


def _code(structure: object, nest: LoopNest, first_arguments: list[int], in_pieces: bool) -> Code:
    code = Code("elementwise", level=2)
    code.later(repr(structure), lambda: _Writer(code, nest, first_arguments).write(in_pieces))
    _written[structure] = code  # only now: another thread may compile what it finds here
    return code


class _Writer:
    """Writes one loop nest. A class because its parts share many names."""

    def __init__(self, code: Code, nest: LoopNest, first_arguments: list[int]) -> None:
        self.code, self.nest, self.rank = code, nest, len(nest.extents)
        self.access = [each.access for each in nest.operands]
        self.dtypes = [each.operand.dtype for each in nest.operands]
        self.pointers = [code.argument(first, "ptr") for first in first_arguments]
        self.strides = [[code.argument(first + 1 + axis) for axis in range(self.rank)] for first in first_arguments]
        #: Registers of operands that do not move along the innermost loop.
        self.hoisted: dict[int, str] = {}

    def write(self, in_pieces: bool) -> None:
        code = self.code
        units, per_unit = code.argument(0), code.argument(1)
        extents = [code.argument(2 + axis) for axis in range(self.rank)]
        begin, end = code.share(units, in_pieces=in_pieces)
        begin = code.mul(begin, per_unit)
        end = code.minimum(code.mul(end, per_unit), extents[0])
        axis = source_axis(self.nest)
        if axis is not None:
            self._by_squares(axis, begin, end, extents)
            return
        self._hoist(Access.CONSTANT, self.pointers)
        tiles = tiling(self.nest)
        if tiles is not None:
            self._by_tiles(tiles, begin, end, extents)
            return
        few = few_columns(self.nest)
        if few is not None:
            self._by_rows(few, begin, end, extents)
            return
        stages = stages_of(self.nest)
        if len(stages) > 1 and not self._streamed():
            self._in_stages(stages, begin, end, extents)
            return
        self._loops(0, begin, end, extents, self.pointers)

    def _loops(self, axis: int, begin: str, end: str, extents: list[str], pointers: list[str]) -> None:
        code = self.code
        if axis == self.rank - 1:
            self._hoist(Access.FIXED, pointers)
            self._innermost(begin, end, pointers)
            return
        with code.loop(begin, end) as index:
            self._loops(axis + 1, "0", extents[axis + 1], extents, self._moved(pointers, axis, index))

    def _moved(self, pointers: list[str], axis: int, index: str) -> list[str]:
        """Where all operands are at an index of an axis."""
        code = self.code
        return [
            pointer
            if self.access[number] is Access.CONSTANT
            else code.at(pointer, code.mul(index, self.strides[number][axis]), MEMORY_TYPES[self.dtypes[number]])
            for number, pointer in enumerate(pointers)
        ]

    def _by_squares(self, axis: int, begin: str, end: str, extents: list[str]) -> None:
        """A copy whose source lies in one piece along another axis than its target."""
        code, pointers, element = self.code, self.pointers, MEMORY_TYPES[self.dtypes[0]]
        bounds = [(begin, end), *(("0", extent) for extent in extents[1:])]
        with contextlib.ExitStack() as loops:
            for outer in range(self.rank - 1):
                if outer != axis:
                    index = loops.enter_context(code.loop(*bounds[outer]))
                    steps = [code.mul(index, strides[outer]) for strides in self.strides]
                    pointers = [code.at(*at, element) for at in zip(pointers, steps, strict=True)]
            transpose = Transpose(code, element, self.strides[0][-1], self.strides[1][axis])
            transpose.write(pointers[0], pointers[1], bounds[axis], extents[-1])

    def _by_tiles(self, tiles: Tiling, begin: str, end: str, extents: list[str]) -> None:
        """Some loads lie in one piece along another axis: of every tile they are transposed before it is computed."""
        code, pointers, axis = self.code, self.pointers, tiles.axis
        bounds = [(begin, end), *(("0", extent) for extent in extents[1:])]
        with contextlib.ExitStack() as loops:
            for outer in range(self.rank - 1):
                if outer != axis:
                    pointers = self._moved(pointers, outer, loops.enter_context(code.loop(*bounds[outer])))
            row = loops.enter_context(code.loop(*bounds[axis], TILE_ROWS))
            column = loops.enter_context(code.loop("0", extents[-1], TILE_COLUMNS))
            last_row = code.minimum(code.add(row, TILE_ROWS), bounds[axis][1])
            last_column = code.minimum(code.add(column, TILE_COLUMNS), extents[-1])
            transposed = {}
            for number in tiles.loads:
                element, stride = MEMORY_TYPES[self.dtypes[number]], self.strides[number][-1]
                source = code.at(code.at(pointers[number], row, element), code.mul(column, stride), element)
                transposed[number] = code.aligned_buffer(TILE_ROWS * TILE_COLUMNS)
                tile = Transpose(code, element, stride, str(TILE_COLUMNS))
                tile.write(source, transposed[number], ("0", code.sub(last_row, row)), code.sub(last_column, column))
                self.access[number] = Access.CONTIGUOUS
            with code.loop(row, last_row) as index:
                lines = self._moved(pointers, axis, index)
                start = code.sub(code.mul(code.sub(index, row), TILE_COLUMNS), column)
                for number, buffer in transposed.items():
                    lines[number] = code.at(buffer, start, MEMORY_TYPES[self.dtypes[number]])
                self._hoist(Access.FIXED, lines)
                self._innermost(column, last_column, lines)

    def _in_stages(self, stages: Sequence[Stage], begin: str, end: str, extents: list[str]) -> None:
        """Blocks of a few rows, or of a part of one: every stage runs over a block before the next one does."""
        code, lanes, pointers = self.code, vector_lanes(), self.pointers
        bounds = [(begin, end), *(("0", extent) for extent in extents[1:])]
        kept = {
            value: code.aligned_buffer(BLOCK, MEMORY_TYPES[value.dtype]) for stage in stages for value in stage.keeps
        }
        with contextlib.ExitStack() as loops:
            for outer in range(self.rank - 2):
                pointers = self._moved(pointers, outer, loops.enter_context(code.loop(*bounds[outer])))
            first_column, last_column = bounds[-1]
            full = code.mul(code.div(code.sub(last_column, first_column), lanes), lanes)
            rows, together = bounds[-2] if self.rank > 1 else ("0", "1"), "1"
            if self.rank > 1:
                together = code.intrinsic("smax", "i64", code.div(BLOCK, code.intrinsic("smax", "i64", full, "1")), "1")
            row = loops.enter_context(code.loop(*rows, together))
            last_row = code.minimum(code.add(row, together), rows[1])

            def lines(index: str) -> list[str]:
                return self._moved(pointers, self.rank - 2, index) if self.rank > 1 else pointers

            with code.loop(first_column, code.add(first_column, full), BLOCK) as column:
                last = code.minimum(code.add(column, BLOCK), code.add(first_column, full))
                for stage in stages:
                    with code.loop(row, last_row) as index:
                        at = code.mul(code.sub(index, row), code.sub(last, column))
                        block = {
                            value: code.at(kept[value], code.sub(at, column), MEMORY_TYPES[value.dtype])
                            for value in (*stage.reads, *stage.keeps)
                        }
                        self._stage(stage, block, lines(index), column, last)
            with code.loop(row, last_row) as index:
                own = lines(index)
                self._hoist(Access.FIXED, own)
                with code.loop(code.add(first_column, full), last_column) as column:
                    self._body(column, own, 1, self.hoisted)

    def _stage(self, stage: Stage, block: dict[Value, str], pointers: list[str], begin: str, end: str) -> None:
        """One stage along a row: `block` is where values between stages lie, as if from column 0 on."""
        code, lanes = self.code, vector_lanes()
        known: dict[Value, str] = {}
        for number in stage.loads:
            if self.access[number] in (Access.CONSTANT, Access.FIXED):
                dtype = self.dtypes[number]
                scalar = self.hoisted.get(number) or load_element(code, pointers[number], dtype, 1)
                known[self.nest.loads[number].value] = code.splat(scalar, register_type(dtype), lanes)
        with code.loop(begin, end, lanes) as index:
            registers = dict(known)
            for number in stage.loads:
                if self.nest.loads[number].value not in known:
                    registers[self.nest.loads[number].value] = self._load(number, pointers[number], index, lanes)
            for value in stage.reads:
                address = code.at(block[value], index, MEMORY_TYPES[value.dtype])
                registers[value] = load_element(code, address, value.dtype, lanes)
            registers = self._apply(registers, lanes, stage.ops)
            for value in stage.keeps:
                address = code.at(block[value], index, MEMORY_TYPES[value.dtype])
                store_element(code, address, value.dtype, registers[value], lanes)
            for number in stage.stores:
                self._store(number, pointers[number], index, registers[self.nest.operands[number].value], lanes)

    def _by_rows(self, few: FewColumns, begin: str, end: str, extents: list[str]) -> None:
        """Vectors of several rows, each of a few columns."""
        code, pointers, axis, lanes = self.code, self.pointers, few.axis, vector_lanes()
        bounds = [(begin, end), *(("0", extent) for extent in extents[1:])]
        with contextlib.ExitStack() as loops:
            for outer in range(self.rank - 1):
                if outer != axis:
                    pointers = self._moved(pointers, outer, loops.enter_context(code.loop(*bounds[outer])))

            def vectors(number: int, pointer: str) -> list[str]:
                stride = self.strides[number][-1]
                return vectors_of_rows(code, few, few.loads[number], self.dtypes[number], pointer, stride)

            loads = range(len(few.loads))
            repeated = {n: vectors(n, pointers[n]) for n in loads if few.loads[n] is Rows.REPEATED}
            first, last = bounds[axis]
            full = code.add(first, code.mul(code.div(code.sub(last, first), lanes), lanes))
            with code.loop(first, full, lanes) as row:
                lines = self._moved(pointers, axis, row)
                loaded = [repeated.get(number) or vectors(number, lines[number]) for number in loads]
                for column in range(few.columns):
                    found = {each.value: loaded[number][column] for number, each in enumerate(self.nest.loads)}
                    registers = self._apply(found, lanes)
                    for number, each in enumerate(self.nest.stores, start=len(loads)):
                        dtype = self.dtypes[number]
                        address = code.at(lines[number], column * lanes, MEMORY_TYPES[dtype])
                        store_element(code, address, dtype, registers[each.value], lanes)
            with code.loop(full, last) as row:
                lines = self._moved(pointers, axis, row)
                self._hoist(Access.FIXED, lines)
                self._innermost("0", extents[-1], lines)

    def _hoist(self, access: Access, pointers: list[str]) -> None:
        """Load what does not change along the innermost loop once, before it."""
        for number in range(len(self.nest.loads)):
            if self.access[number] is access:
                self.hoisted[number] = load_element(self.code, pointers[number], self.dtypes[number], 1)

    def _innermost(self, begin: str, end: str, pointers: list[str]) -> None:
        code, streamed = self.code, self._streamed()
        if not streamed:
            self._along(begin, end, pointers)
            return
        # A streaming store that is not aligned is a fault.
        bits = "0"
        for number in streamed:
            start = code.let(f"ptrtoint ptr {self._address(number, pointers[number], begin)} to i64")
            bits = code.let(f"or i64 {bits}, {start}")
        aligned = code.let(f"icmp eq i64 {code.let(f'and i64 {bits}, {STREAM_ALIGNMENT - 1}')}, 0")
        streams = code.let(f"and i1 {aligned}, {code.let(f'icmp ne i64 {code.stream_bit()}, 0')}")
        with code.when(streams):
            self._along(begin, end, pointers, frozenset(streamed))
        with code.when(code.let(f"xor i1 {streams}, true")):
            self._along(begin, end, pointers)

    def _streamed(self) -> list[int]:
        """Operands that may be stored past the caches."""
        if not has_streaming_stores():
            return []
        return [
            number
            for number, each in enumerate(self.nest.stores, start=len(self.nest.loads))
            if (each.streams or _is_parameter(each))
            and self.access[number] is Access.CONTIGUOUS
            and self.dtypes[number] == FLOAT32
        ]

    def _along(self, begin: str, end: str, pointers: list[str], streamed: frozenset[int] = frozenset()) -> None:
        """The innermost loop; `streamed` operands are stored past the caches."""
        code, lanes = self.code, vector_lanes()
        full = code.add(begin, code.mul(code.div(code.sub(end, begin), lanes), lanes))
        splats = {
            number: code.splat(scalar, register_type(self.dtypes[number]), lanes)
            for number, scalar in self.hoisted.items()
        }
        with code.loop(begin, full, lanes) as index:
            self._body(index, pointers, lanes, splats, streamed)
        with code.loop(full, end) as index:
            self._body(index, pointers, 1, self.hoisted)

    def _body(
        self,
        index: str,
        pointers: list[str],
        lanes: int,
        hoisted: dict[int, str],
        streamed: frozenset[int] = frozenset(),
    ) -> None:
        registers: dict[Value, str] = {}
        for number, each in enumerate(self.nest.loads):
            if number in hoisted:
                registers[each.value] = hoisted[number]
            else:
                registers[each.value] = self._load(number, pointers[number], index, lanes)
        registers = self._apply(registers, lanes)
        for number, each in enumerate(self.nest.stores, start=len(self.nest.loads)):
            if number in streamed:
                address = self._address(number, pointers[number], index)
                stream(self.code, address, vector("float", lanes), registers[each.value])
            else:
                self._store(number, pointers[number], index, registers[each.value], lanes)

    def _apply(self, loaded: dict[Value, str], lanes: int, ops: Sequence[Step] | None = None) -> dict[Value, str]:
        """What was loaded, and the results of ops: all of them unless told otherwise."""
        registers = dict(loaded)
        for step in self.nest.ops if ops is None else ops:
            types = [value.dtype for value in step.inputs]
            operands = [registers[value] for value in step.inputs]
            registers[step.results[0]] = emit_elementwise(
                self.code, step.op.name, step.attributes, operands, types, step.results[0].dtype, lanes
            )
        return registers

    def _address(self, number: int, pointer: str, index: str) -> str:
        contiguous = self.access[number] is Access.CONTIGUOUS
        step = index if contiguous else self.code.mul(index, self.strides[number][-1])
        return self.code.at(pointer, step, MEMORY_TYPES[self.dtypes[number]])

    def _load(self, number: int, pointer: str, index: str, lanes: int) -> str:
        code, dtype = self.code, self.dtypes[number]
        if lanes == 1 or self.access[number] is Access.CONTIGUOUS:
            return load_element(code, self._address(number, pointer, index), dtype, lanes)
        element = register_type(dtype)
        vector = f"<{lanes} x {element}>"
        gathered = "poison"
        for lane in range(lanes):
            address = self._address(number, pointer, code.add(index, lane))
            scalar = load_element(code, address, dtype, 1)
            gathered = code.let(f"insertelement {vector} {gathered}, {element} {scalar}, i64 {lane}")
        return gathered

    def _store(self, number: int, pointer: str, index: str, register: str, lanes: int) -> None:
        code, dtype = self.code, self.dtypes[number]
        if lanes == 1 or self.access[number] is Access.CONTIGUOUS:
            store_element(code, self._address(number, pointer, index), dtype, register, lanes)
            return
        element = register_type(dtype)
        for lane in range(lanes):
            scalar = code.let(f"extractelement <{lanes} x {element}> {register}, i64 {lane}")
            address = self._address(number, pointer, code.add(index, lane))
            store_element(code, address, dtype, scalar, 1)


KERNELS: dict[str, Maker] = {
    "fused_elementwise": elementwise_entries,
    "assign": elementwise_entries,
    "reshape": copy_entries,
    **{name: elementwise_entries for name, op in TABLE.items() if op.family == "elementwise" and not op.expansion},
}
BFLOAT16 = dict.fromkeys(("fused_elementwise", "assign"), always)
