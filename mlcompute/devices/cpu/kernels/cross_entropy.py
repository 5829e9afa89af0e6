"""softmax_cross_entropy and its gradient: logits of rows, or of columns where classes lie on another axis.

Rows of few classes are taken as columns too: a vector then has one class of many rows, and nothing is added up within
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import MAX_SKIPPING_NAN, SUM, LineReduction, fill, larger_number
from mlcompute.devices.cpu.codegen.loops import Line, splat, splat_constant, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue, fma
from mlcompute.devices.cpu.kernels.checked_indices import CheckedIndices, is_index
from mlcompute.devices.cpu.kernels.row_column import ColumnLoops, RowLoops
from mlcompute.devices.cpu.kernels.softmax import exp_of, log_of
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Axis, Operand, Operands, ReductionAxes, iteration_count, shared_rows
from mlcompute.ops.bfloat16 import computed_type, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step

#: Columns worked on at once: what is kept of them fits the first-level cache beside the rows.
_TILE = 256
#: Rows of up to so many classes are taken as columns.
_FEW = 24


def _loops(step: Step, operands: Sequence[Operand]) -> tuple[Axis, ...]:
    """The loops over the logits, the first operand; the others have one element for all classes."""
    axis = step.attributes["axis"]
    logits = operands[0]
    strides = [
        own.strides if own.shape == logits.shape else (*own.strides[:axis], 0, *own.strides[axis + 1 :])
        for own in operands
    ]
    axes = ReductionAxes.of(logits.shape, (axis,), strides).axes
    if axes[-1].reduced and axes[-1].extent <= _FEW and len(axes) > 1 and axes[-2].extent >= vector_lanes():
        axes = (*axes[:-2], axes[-1], axes[-2])
    return axes


def _ownership(
    step: Step, axes: Sequence[Axis], large: Sequence[Operand], every: list[Operand], threads: int
) -> tuple[int, set[int]]:
    """Rows that threads own, and in which of the operands."""
    units = iteration_count([axis for axis in axes[:-1] if not axis.reduced])
    rows = shared_rows(large[0].shape, (step.attributes["axis"],), large, units, threads)
    return rows, {place for place, own in enumerate(every) if rows and own.is_dense and own.shape[0] == rows}


def cross_entropy_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """One pass for the largest logit, one for the sum of exponentials; then one logit is picked.

    The gradient takes one pass over the logits; then the label's class is written. What is logits, or their gradient,
    may be bfloat16.
    """
    if not supports_cross_entropy(step):
        return None
    reads, writes = [operands[value] for value in step.inputs], [operands[value] for value in step.results]
    is_gradient = step.op.name == "softmax_cross_entropy_gradient"
    if is_gradient:  # kernels are given the labels behind the logits
        x, largest, logarithm, labels, *others = reads
        reads = [x, labels, largest, logarithm, *others]
    every, large = reads + writes, [reads[0], *(writes if is_gradient else ())]
    axes = _loops(step, every)
    rows, by_row = _ownership(step, axes, large, every, operands.threads)
    code = Code(step.op.name)
    write = _Rows if axes[-1].reduced else _Columns
    kernel = write(KernelArguments(code), step, every, axes, rows)
    code.later(kernel.depends_on(kernel.loops), kernel.gradient if is_gradient else kernel.forward)
    return [
        Entry(
            step, code, kernel.args.values, reads=reads, writes=writes, rows=rows, by_row=by_row,
            kernel=f"cross entropy{' gradient' if is_gradient else ''} of {write.__name__[1:].lower()}",
            cost=reads[0].size * 2.0, status=None if is_gradient else kernel.checked.status,
        )
    ]  # fmt: skip


class _Kernel:
    """What rows and columns share: the arguments, labels, and the formulas of one row."""

    def __init__(self, args: KernelArguments, step: Step, operands: list[Operand]) -> None:
        self.args, self.code = args, args.code
        self.keep, self.spread = float(step.attributes["keep"]), float(step.attributes["spread"])
        self.ignored: int | None = step.attributes.get("ignored")
        self.classes = operands[0].shape[step.attributes["axis"]]
        self.checked = CheckedIndices(args, operands[1], self.classes)
        self.pointers = [self.checked.pointer if i == 1 else args.pointer(own) for i, own in enumerate(operands)]
        #: In memory.
        self.types = [self.checked.element if i == 1 else MEMORY_TYPES[own.dtype] for i, own in enumerate(operands)]

    def depends_on(self, loops: RowLoops | ColumnLoops) -> str:
        """What the code depends on, beside the arguments it reads."""
        classes = self.classes if self.spread else None
        labels = f"{' '.join(self.types)} {self.checked.is_signed}"
        settings = f"{self.keep!r} {self.spread!r} {self.ignored} {classes}"
        return f"{type(self).__name__} {settings} {labels} {loops.code_key} {vector_lanes()}"

    def loss(
        self,
        label_at: str,
        logit: Callable[[str], SimdValue],
        largest: SimdValue,
        logarithm: SimdValue,
        rest: SimdValue | None,
    ) -> SimdValue:
        """The loss of a row.

        label_at   the address of its label
        logit      the logit of a class
        largest, logarithm   of its logits: the largest, and the logarithm of the sum of exp(logit - largest)
        rest       the sum of logit - largest over all classes, if needed
        """
        code = self.code
        label = self.checked.read(label_at, "0")
        ignored = None
        if self.ignored is not None:
            ignored = code.let(f"icmp eq i64 {label}, {self.ignored}")
            label = code.let(f"select i1 {ignored}, i64 0, i64 {label}")
        picked = logit(self.checked.check(label)) - largest
        loss = (logarithm - picked) * self.keep
        if rest is not None:
            loss = loss + (logarithm * float(self.classes) - rest) * self.spread
        if ignored is not None:
            loss = SimdValue(code, code.let(f"select i1 {ignored}, float 0.0, float {loss.name}"), "float", 1)
        return loss

    def element(
        self, x: SimdValue, largest: SimdValue, logarithm: SimdValue, d_loss: SimdValue, d_softmax: SimdValue
    ) -> SimdValue:
        """The gradient of a logit whose class is not the label."""
        dx = exp_of(x - largest - logarithm) * d_softmax
        return fma(d_loss, -self.spread, dx) if self.spread else dx

    def own_class(self, dx: SimdValue, d_loss: SimdValue) -> SimdValue:
        """The gradient of the label's logit, from what it would be if that were another class."""
        return dx - d_loss * self.keep

    def store(self, address: str, value: SimdValue) -> None:
        self.code.store(address, "float", value.name)


class _Rows(_Kernel):
    """The classes lie side by side, or a stride apart; one row after the other."""

    def __init__(
        self, args: KernelArguments, step: Step, operands: list[Operand], axes: Sequence[Axis], rows: int
    ) -> None:
        super().__init__(args, step, operands)
        self.loops = RowLoops(args, axes, rows, len(operands))
        self.extent = self.loops.reduced[-1].extent

    def at(self, operand: int) -> str:
        return self.loops.address(self.pointers[operand], operand, self.types[operand])

    def line(self, operand: int) -> Line:
        return Line(self.code, self.at(operand), self.types[operand], self.loops.strides[operand])

    def scalar(self, operand: int) -> SimdValue:
        return SimdValue(self.code, self.code.load(self.at(operand), "float"), "float", 1)

    def forward(self) -> None:
        code = self.code
        with self.loops.each_unit():
            x = self.line(0)
            # A NaN that the largest misses makes the sum NaN, and with it the loss.
            maximum = LineReduction(code, MAX_SKIPPING_NAN)
            maximum.add(x, self.extent)
            largest = maximum.result()
            shift = splat(largest)
            total = LineReduction(code, SUM)
            total.add(x, self.extent, lambda value, index, mask: exp_of(value - shift))
            logarithm = log_of(total.result())
            rest = None
            if self.spread:
                sums = LineReduction(code, SUM)
                sums.add(x, self.extent, lambda value, index, mask: value - shift)
                rest = sums.result()
            loss = self.loss(self.at(1), lambda label: x.load(label, lanes=1), largest, logarithm, rest)
            self.store(self.at(2), loss)
            self.store(self.at(3), largest)
            self.store(self.at(4), logarithm)

    def gradient(self) -> None:
        code = self.code
        with self.loops.each_unit():
            x, dx = self.line(0), self.line(6)
            known = [self.scalar(operand) for operand in (2, 3, 4, 5)]
            row = [splat(value) for value in known]
            label = self.checked.read(self.at(1), "0")
            is_valid = self.checked.is_valid(label)
            # From the logit, which dx may overwrite: what dx is stored as may be rounded.
            own = code.let(f"select i1 {is_valid}, i64 {label}, i64 0")
            own_dx = self.own_class(self.element(x.load(own, lanes=1), *known), known[2])
            vector_loop(
                code, 0, self.extent,
                lambda index, mask: dx.store(index, self.element(x.load(index, mask), *row), mask),
            )  # fmt: skip
            with code.when(is_valid):
                dx.store(label, own_dx)


class _Columns(_Kernel):
    """A column has one sample's classes below each other; what is known of the columns so far stays on the stack."""

    def __init__(
        self, args: KernelArguments, step: Step, operands: list[Operand], axes: Sequence[Axis], rows: int
    ) -> None:
        super().__init__(args, step, operands)
        self.loops = ColumnLoops(args, axes, rows, _TILE)
        self.slots = [self.code.aligned_buffer(_TILE) for _ in range(5)]

    def at(self, operand: int) -> str:
        return self.loops.address(self.pointers[operand], operand, self.types[operand])

    def along(self, operand: int, first: str) -> Line:
        """One element per column, of an operand that has one for all classes."""
        return Line(self.code, first, self.types[operand], self.loops.strides[operand])

    def each_class(self, columns: tuple[str, str], operands: Sequence[int], body: Callable[..., None]) -> None:
        """body(index, mask, *lines) for every vector of every class."""
        code = self.code
        first = [self.at(operand) for operand in operands]
        with code.loop(0, self.loops.along.extent) as row:
            lines = [self.loops.row(own, at, row, self.types[own]) for own, at in zip(operands, first, strict=True)]
            vector_loop(code, *columns, lambda index, mask: body(index, mask, *lines))

    def class_of(self, operand: int, first: str, label: str) -> Line:
        """The elements of a class."""
        return self.loops.row(operand, first, label, self.types[operand])

    def forward(self) -> None:
        code = self.code
        with self.loops.each_unit() as columns:
            largest, total, rest = (self.loops.buffer(columns, slot) for slot in self.slots[:3])
            fill(code, largest, columns, splat_constant(code, MAX_SKIPPING_NAN.identity))
            for line in (total, rest):
                fill(code, line, columns, splat_constant(code, 0.0))

            def compare(index: str, mask: str | None, x: Line) -> None:
                largest.store(index, larger_number(largest.load(index, mask), x.load(index, mask)), mask)

            def add(index: str, mask: str | None, x: Line) -> None:
                shifted = x.load(index, mask) - largest.load(index, mask)
                total.store(index, total.load(index, mask) + exp_of(shifted), mask)
                if self.spread:
                    rest.store(index, rest.load(index, mask) + shifted, mask)

            self.each_class(columns, [0], compare)
            self.each_class(columns, [0], add)
            vector_loop(
                code, *columns, lambda index, mask: total.store(index, log_of(total.load(index, mask)), mask)
            )  # fmt: skip
            x = self.at(0)
            labels, losses, *kept = (self.along(operand, self.at(operand)) for operand in range(1, 5))
            with code.loop(*columns) as column:
                m, logarithm = (line.load(column, lanes=1) for line in (largest, total))
                shifted_sum = rest.load(column, lanes=1) if self.spread else None

                def logit(label: str, column: str = column) -> SimdValue:
                    return self.class_of(0, x, label).load(column, lanes=1)

                losses.store(column, self.loss(labels.address(column), logit, m, logarithm, shifted_sum))
                kept[0].store(column, m)
                kept[1].store(column, logarithm)

    def gradient(self) -> None:
        code = self.code
        with self.loops.each_unit() as columns:
            # Gradients of a mean are one repeated number: on the stack they are vectors like any other.
            given = [self.along(operand, self.at(operand)) for operand in (2, 3, 4, 5)]
            *kept, own = (self.loops.buffer(columns, slot) for slot in self.slots)
            labels, x, dx = self.along(1, self.at(1)), self.at(0), self.at(6)

            def each_label(body: Callable[[str, str], None]) -> None:
                with code.loop(*columns) as column:
                    label = self.checked.read(labels.address(column), "0")
                    with code.when(self.checked.is_valid(label)):
                        body(column, label)

            def copy(index: str, mask: str | None) -> None:
                for source, target in zip(given, kept, strict=True):
                    target.store(index, source.load(index, mask), mask)

            def differentiate(index: str, mask: str | None, x: Line, dx: Line) -> None:
                known = [line.load(index, mask) for line in kept]
                dx.store(index, self.element(x.load(index, mask), *known), mask)

            def differentiate_own(index: str, mask: str | None) -> None:
                known = [line.load(index, mask) for line in kept]
                found = self.own_class(self.element(own.load(index, mask), *known), known[2])
                own.store(index, found, mask)

            # From the logit, which dx may overwrite: what dx is stored as may be rounded.
            fill(code, own, columns, splat_constant(code, 0.0))
            each_label(lambda column, label: own.store(column, self.class_of(0, x, label).load(column, lanes=1)))
            vector_loop(code, *columns, copy)
            vector_loop(code, *columns, differentiate_own)
            self.each_class(columns, [0, 6], differentiate)
            each_label(lambda column, label: self.class_of(6, dx, label).store(column, own.load(column, lanes=1)))


def supports_cross_entropy(step: Step) -> bool:
    """float32 or bfloat16, not empty, and labels of a type that kernels read?"""
    x, labels = step.inputs[0], step.inputs[1 if step.op.name == "softmax_cross_entropy" else 3]
    return computed_type(x.dtype) == FLOAT32 and bool(x.size) and is_index(labels.dtype)


def reads_bfloat16(step: Step) -> bool:
    """Are only logits bfloat16, or their gradient?"""
    is_gradient = step.op.name == "softmax_cross_entropy_gradient"
    others = [*step.inputs[1:], *(() if is_gradient else step.results)]
    return supports_cross_entropy(step) and not any(is_bfloat16(value.dtype) for value in others)


KERNELS: dict[str, Maker] = {
    "softmax_cross_entropy": cross_entropy_entries,
    "softmax_cross_entropy_gradient": cross_entropy_entries,
}
SUPPORTS = dict.fromkeys(KERNELS, supports_cross_entropy)
BFLOAT16 = dict.fromkeys(KERNELS, reads_bfloat16)
