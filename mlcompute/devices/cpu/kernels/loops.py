"""Loop nests over maps: single ones, merged groups, and copies of views that need memory of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.devices.cpu.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.entry import Argument, Entry, Maker
from mlcompute.devices.cpu.kernels.maps import emit_map, load_element, store_element, supports_map
from mlcompute.devices.cpu.operands import Operand, Operands, broadcast_strides, collapse
from mlcompute.ops.op import TABLE, Shape, Step, Value, inner_steps

#: Elements per unit of sharing where there are too few rows to share.
CHUNK = 1024


def map_entry(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One map or a merged group of them."""
    steps = inner_steps(step) if isinstance(step.op, FusedElementwise) else (step,)
    entry = map_loop(step, steps, operands)
    return None if entry is None else [entry]


def map_loop(
    step: Step, steps: Sequence[Step], operands: Operands, elsewhere: Mapping[Value, Operand] | None = None
) -> Entry | None:
    """The loop of some maps and assigns; `elsewhere`: values that lie in other memory than planned."""
    for inner in steps:
        types = [value.dtype for value in inner.inputs]
        if inner.op.name == "assign":
            if inner.inputs[0].dtype != inner.inputs[1].dtype:
                return None
        elif not supports_map(inner.op.name, types, inner.results[0].dtype):
            return None
    shape = _iteration_shape(steps)
    made = {value for inner in steps for value in inner.results}
    maps = [inner for inner in steps if inner.op.name != "assign"]
    inputs = list(dict.fromkeys(value for inner in maps for value in inner.inputs if value not in made))
    stores: list[tuple[Value, Operand]] = [(value, operands[value]) for value in step.results]
    for inner in steps:
        if inner.op.name == "assign":
            stores.append((inner.inputs[1], operands[inner.inputs[0]]))
            if inner.inputs[1] not in made and inner.inputs[1] not in inputs:
                inputs.append(inner.inputs[1])
    known = elsewhere or {}
    return loop_entry(step, maps, shape, [(v, known.get(v) or operands[v]) for v in inputs], stores)


def copy_entry(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """A view that needs memory of its own: its source in row-major order."""
    source, result = operands[step.inputs[0]], operands[step.results[0]]
    if step.op.name == "reshape":
        shape, target = step.inputs[0].shape, Operand(result.base, 0, step.inputs[0].shape, (), result.dtype)
        target = Operand(result.base, result.offset, shape, _dense(shape), result.dtype)
    else:
        shape, target = step.results[0].shape, result
        source = Operands([step], {step.results[0]: step.inputs[0]})[step.results[0]]
    value = step.inputs[0]
    return [loop_entry(step, [], shape, [(value, source)], [(value, target)])]


def assign_entry(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """A value stored into lasting memory."""
    target, value = step.inputs
    if target.dtype != value.dtype:
        return None
    return [loop_entry(step, [], value.shape, [(value, operands[value])], [(value, operands[target])])]


def _dense(shape: Shape) -> tuple[int, ...]:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def _iteration_shape(steps: Sequence[Step]) -> Shape:
    for step in steps:
        if step.results:
            return step.results[0].shape
    return steps[0].inputs[1].shape


def loop_entry(
    step: Step,
    maps: Sequence[Step],
    shape: Shape,
    inputs: Sequence[tuple[Value, Operand]],
    stores: Sequence[tuple[Value, Operand]],
) -> Entry:
    """Walk `shape` once: load every input, apply the maps, store the results."""
    walked = [operand for _, operand in inputs] + [operand for _, operand in stores]
    extents, walks = collapse(shape, [broadcast_strides(operand, shape) for operand in walked])
    rank = len(extents)
    rows, per_row, shared_rows = _rows(shape, extents)
    arguments: list[Argument] = [rows, per_row, *extents]
    places = []
    for operand, walk in zip(walked, walks, strict=True):
        places.append(len(arguments))
        arguments += [operand, *walk]
    kinds = [_kind(walk) for walk in walks]
    structure = _structure(rank, maps, inputs, stores, kinds)
    code = _written.get(structure)
    if code is None:
        code = Code("loop", thorough=True)
        _LoopWriter(code, rank, maps, inputs, stores, places, kinds).write()
        _written[structure] = code
    total = 1
    for extent in extents:
        total *= extent
    return Entry(
        step,
        code,
        arguments,
        reads=[operand for _, operand in inputs],
        writes=[operand for _, operand in stores],
        rows=shared_rows,
        by_row={i for i, operand in enumerate(walked) if operand.shape == shape and operand.is_dense},
        kernel="loop" if len(maps) < 2 else f"loop of {len(maps)} maps",
        cost=total * (0.15 * len(walked) + 0.1 * len(maps)),
    )


#: Loops written before, by everything their code depends on: large networks repeat few different ones.
_written: dict[object, Code] = {}


def _structure(
    rank: int,
    maps: Sequence[Step],
    inputs: Sequence[tuple[Value, Operand]],
    stores: Sequence[tuple[Value, Operand]],
    kinds: list[str],
) -> object:
    """What a loop's code depends on, and nothing else: values are numbers, extents and strides are arguments."""
    numbers: dict[Value, int] = {}
    for value, _ in inputs:
        numbers.setdefault(value, len(numbers))
    applied = []
    for step in maps:
        sources = tuple(numbers[value] for value in step.inputs)
        types = tuple(value.dtype.char for value in (*step.inputs, *step.results))
        applied.append((step.op.name, repr(sorted(step.attributes.items())), sources, types))
        for value in step.results:
            numbers[value] = len(numbers)
    types = tuple(operand.dtype.char for _, operand in (*inputs, *stores))
    taken = tuple(numbers[value] for value, _ in inputs), tuple(numbers[value] for value, _ in stores)
    return rank, tuple(kinds), types, tuple(applied), taken, vector_lanes()


def _rows(shape: Shape, extents: list[int]) -> tuple[int, int, int]:
    """How threads share the outermost walked axis: (units, steps per unit, rows they own or 0)."""
    first = next((extent for extent in shape if extent != 1), 1)
    leads = bool(shape) and shape[0] == first
    if leads and extents[0] % first == 0 and first >= 8:
        return first, extents[0] // first, first
    if len(extents) == 1:
        return -(-extents[0] // CHUNK), CHUNK, 0
    return extents[0], 1, 0


def _kind(walk: list[int]) -> str:
    """How an operand moves along the innermost axis: fixed, row (one after the other) or strided; or not at all."""
    if not any(walk):
        return "still"
    return {0: "fixed", 1: "row"}.get(walk[-1], "strided")


class _LoopWriter:
    """Writes one loop nest. Kept apart because its parts share many names."""

    def __init__(
        self,
        code: Code,
        rank: int,
        maps: Sequence[Step],
        inputs: Sequence[tuple[Value, Operand]],
        stores: Sequence[tuple[Value, Operand]],
        places: list[int],
        kinds: list[str],
    ) -> None:
        self.code, self.rank, self.maps = code, rank, maps
        self.inputs, self.stores, self.kinds = inputs, stores, kinds
        self.pointers = [code.argument(place, "ptr") for place in places]
        self.walks = [[code.argument(place + 1 + axis) for axis in range(rank)] for place in places]
        self.dtypes = [operand.dtype for _, operand in (*inputs, *stores)]
        self.fixed: dict[int, str] = {}

    def write(self) -> None:
        code = self.code
        units, per_unit = code.argument(0), code.argument(1)
        extents = [code.argument(2 + axis) for axis in range(self.rank)]
        begin, end = code.share(units)
        begin = code.mul(begin, per_unit)
        end = code.minimum(code.mul(end, per_unit), extents[0])
        self._hoist("still", self.pointers)
        self._nest(0, begin, end, extents, self.pointers)

    def _nest(self, axis: int, begin: str, end: str, extents: list[str], pointers: list[str]) -> None:
        code = self.code
        if axis == self.rank - 1:
            self._hoist("fixed", pointers)
            self._inner(begin, end, pointers)
            return
        with code.loop(begin, end) as index:
            moved = []
            for number, pointer in enumerate(pointers):
                if self.kinds[number] == "still":
                    moved.append(pointer)
                    continue
                step = code.mul(index, self.walks[number][axis])
                moved.append(code.at(pointer, step, MEMORY_TYPES[self.dtypes[number]]))
            self._nest(axis + 1, "0", extents[axis + 1], extents, moved)

    def _hoist(self, kind: str, pointers: list[str]) -> None:
        """Load what does not change along the innermost axis once, before it."""
        for number in range(len(self.inputs)):
            if self.kinds[number] == kind:
                self.fixed[number] = load_element(self.code, pointers[number], self.dtypes[number], 1)

    def _inner(self, begin: str, end: str, pointers: list[str]) -> None:
        code, lanes = self.code, vector_lanes()
        whole = code.add(begin, code.mul(code.div(code.sub(end, begin), lanes), lanes))
        splats = {number: self._splat(number, lanes) for number in self.fixed}
        with code.loop(begin, whole, lanes) as index:
            self._body(index, pointers, lanes, splats)
        with code.loop(whole, end) as index:
            self._body(index, pointers, 1, self.fixed)

    def _splat(self, number: int, lanes: int) -> str:
        kind = "i1" if MEMORY_TYPES[self.dtypes[number]] == "i8" and self.dtypes[number].kind == "b" else None
        return self.code.splat(self.fixed[number], kind or MEMORY_TYPES[self.dtypes[number]], lanes)

    def _body(self, index: str, pointers: list[str], lanes: int, fixed: dict[int, str]) -> None:
        code = self.code
        registers: dict[Value, str] = {}
        for number, (value, _) in enumerate(self.inputs):
            if number in fixed:
                registers[value] = fixed[number]
            else:
                registers[value] = self._load(number, pointers[number], index, lanes)
        for step in self.maps:
            types = [value.dtype for value in step.inputs]
            operands = [registers[value] for value in step.inputs]
            registers[step.results[0]] = emit_map(
                code, step.op.name, step.attributes, operands, types, step.results[0].dtype, lanes
            )
        for number, (value, _) in enumerate(self.stores, start=len(self.inputs)):
            self._store(number, pointers[number], index, registers[value], lanes)

    def _place(self, number: int, pointer: str, index: str) -> str:
        step = index if self.kinds[number] == "row" else self.code.mul(index, self.walks[number][-1])
        return self.code.at(pointer, step, MEMORY_TYPES[self.dtypes[number]])

    def _load(self, number: int, pointer: str, index: str, lanes: int) -> str:
        code, dtype = self.code, self.dtypes[number]
        if lanes == 1 or self.kinds[number] == "row":
            return load_element(code, self._place(number, pointer, index), dtype, lanes)
        element = "i1" if dtype.kind == "b" else MEMORY_TYPES[dtype]
        vector = f"<{lanes} x {element}>"
        gathered = "poison"
        for lane in range(lanes):
            place = self._place(number, pointer, code.add(index, lane))
            scalar = load_element(code, place, dtype, 1)
            gathered = code.let(f"insertelement {vector} {gathered}, {element} {scalar}, i64 {lane}")
        return gathered

    def _store(self, number: int, pointer: str, index: str, register: str, lanes: int) -> None:
        code, dtype = self.code, self.dtypes[number]
        if lanes == 1 or self.kinds[number] == "row":
            store_element(code, self._place(number, pointer, index), dtype, register, lanes)
            return
        element = "i1" if dtype.kind == "b" else MEMORY_TYPES[dtype]
        for lane in range(lanes):
            scalar = code.let(f"extractelement <{lanes} x {element}> {register}, i64 {lane}")
            place = self._place(number, pointer, code.add(index, lane))
            store_element(code, place, dtype, scalar, 1)


KERNELS: dict[str, Maker] = {
    "fused_elementwise": map_entry,
    "assign": assign_entry,
    "reshape": copy_entry,
    **{name: map_entry for name, op in TABLE.items() if op.family == "elementwise"},
}
