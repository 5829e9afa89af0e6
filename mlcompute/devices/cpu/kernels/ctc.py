"""CTC loss and its gradient: threads share the samples; the labels of a sample, with blanks between, are vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import (
    StridedArray,
    ThreadWorkspace,
    aligned,
    threads_bytes,
)
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.loops import Line, Variable, fill_line, splat, splat_constant, vector_loop
from mlcompute.devices.cpu.codegen.math import exp, log
from mlcompute.devices.cpu.codegen.simd import SimdValue, select
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.ctc import LOG_ZERO
from mlcompute.ops.op import FLOAT32, Step

#: Floats before a row of states: those two places before the first are read.
_FRONT = 16


def _parts(step: Step) -> dict[str, int]:
    """A thread's own memory, in floats: what there is per state, alpha of all times, two rows of beta."""
    steps, width = step.inputs[0].shape[1], _width(step)
    single = dict.fromkeys(("labels", "skips", "emitted", "posterior"), width)
    return {**single, "alpha": steps * width, "beta": 2 * width}


def _width(step: Step) -> int:
    """Floats of a row of states, with the places around them that are read."""
    return aligned(_FRONT + 2 * step.inputs[1].shape[1] + 1 + 2)


def _workspace(step: Step) -> int:
    return threads_bytes(_parts(step)) if step.inputs[0].dtype == FLOAT32 else 0


def ctc_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """log probabilities, targets, input lengths, target lengths -> loss, gradient"""
    x, targets, lengths, target_lengths = (operands[value] for value in step.inputs)
    loss, gradient = (operands[value] for value in step.results)
    integers = (targets, lengths, target_lengths)
    if x.dtype != FLOAT32 or not x.size or any(operand.dtype != np.int32 for operand in integers):
        return None
    code, status = Code("ctc_loss"), np.zeros(1, np.int64)
    args = KernelArguments(code)
    sample_kernel = _Sample(args, step, ThreadWorkspace.of(args, operands, step, _parts(step)))
    failed = args.pointer(status)
    n, steps, classes = x.shape
    samples, t_count, c_count, longest = args.numbers([n, steps, classes, targets.shape[1]])
    scores, to_loss, to_gradient = StridedArray.of(args, x), args.pointer(loss), args.pointer(gradient)
    wanted, own = args.pointer(targets), args.numbers(list(targets.strides))
    times = args.pointer(lengths), args.number(lengths.strides[0])
    counts = args.pointer(target_lengths), args.number(target_lengths.strides[0])
    begin, end = code.share(samples, max_threads=sample_kernel.memory.max_threads)
    with code.loop(begin, end) as sample:
        length = _integer(code, times[0], code.mul(sample, times[1]))
        labels = _integer(code, counts[0], code.mul(sample, counts[1]))
        bad = code.let(f"icmp uge i64 {code.sub(length, 1)}, {t_count}")
        bad = code.let(f"or i1 {bad}, {code.let(f'icmp ugt i64 {labels}, {longest}')}")
        with code.when(bad):
            code.do(f"store i64 1, ptr {failed}")
        with code.when(code.let(f"xor i1 {bad}, true")):
            first = code.let(f"getelementptr i32, ptr {wanted}, i64 {code.mul(sample, own[0])}")
            sample_kernel.write(
                (length, labels, c_count, t_count),
                scores.address(sample),
                (scores.strides[1], scores.strides[2]),
                (first, own[1], failed),
                code.at(to_loss, sample, "float"),
                code.at(to_gradient, code.mul(sample, code.mul(t_count, c_count)), "float"),
            )
    states = 2 * targets.shape[1] + 1
    entry = Entry(
        step,
        code,
        args.values,
        [x, targets, lengths, target_lengths],
        [loss, gradient],
        rows=0,
        kernel="ctc loss",
        cost=n * steps * (20.0 * states + 0.3 * classes),
        scratch=sample_kernel.memory.scratch,
        status=status,
    )
    return [entry]


def _integer(code: Code, pointer: str, offset: str) -> str:
    value = code.load(code.at(pointer, offset, "i32"), "i32")
    return code.let(f"sext i32 {value} to i64")


def _log_sum(terms: Sequence[SimdValue]) -> SimdValue:
    """log of the sum of exp of each."""
    most = terms[0]
    for term in terms[1:]:
        most = select(term > most, term, most)
    total = None
    for term in terms:
        part = SimdValue(term.code, exp(term.code, (term - most).name, term.lanes), term.element, term.lanes)
        total = part if total is None else total + part
    assert total is not None
    return most + SimdValue(total.code, log(total.code, total.name, total.lanes), total.element, total.lanes)


class _Sample:
    """The code for one sample."""

    def __init__(self, args: KernelArguments, step: Step, memory: ThreadWorkspace) -> None:
        self.code, self.memory = args.code, memory
        self.width, self.blank = args.number(_width(step)), args.number(step.attributes["blank"])
        self.zero_infinity: bool = step.attributes["zero_infinity"]

    def row(self, name: str, index: str | int = 0) -> Line:
        """A row of states of the thread's memory."""
        start = self.code.at(self.memory[name], self.code.mul(index, self.width), "float")
        return Line(self.code, self.code.at(start, _FRONT, "float"), "float")

    def empty(self, name: str, index: str | int = 0) -> None:
        """Fill a row, and the places around it, with log(0)."""
        start = self.code.at(self.memory[name], self.code.mul(index, self.width), "float")
        fill_line(self.code, Line(self.code, start, "float"), 0, self.width, LOG_ZERO)

    def write(
        self,
        extents: tuple[str, str, str, str],
        scores: str,
        strides: tuple[str, str],
        targets: tuple[str, str, str],
        loss: str,
        gradient: str,
    ) -> None:
        code = self.code
        length, labels, classes, times = extents
        self.states = states = code.add(code.mul(labels, 2), 1)
        self.last, self.has_labels = code.sub(states, 1), code.let(f"icmp sgt i64 {labels}, 0")
        self.scores, self.strides = scores, strides
        self._write_labels(targets, classes)
        for row in (0, 1):
            self.empty("beta", row)
        self._alpha(length)
        final = self.row("alpha", code.sub(length, 1))
        total = Variable(final.load(self.last, lanes=1))
        with code.when(self.has_labels):
            total.set(_log_sum([final.load(self.last, lanes=1), final.load(code.sub(self.last, 1), lanes=1)]))
        value = total.get()
        impossible = (value < LOG_ZERO / 10).name
        written = Variable(-value)
        fills = Line(code, gradient, "float")
        all_elements = code.mul(times, classes)
        fill_line(code, fills, 0, all_elements)
        with code.when(impossible):
            written.set(value.like(0.0 if self.zero_infinity else math.inf))
            if not self.zero_infinity:
                fill_line(code, fills, 0, all_elements, math.nan)
        code.store(loss, "float", written.get().name)
        with code.when(code.let(f"xor i1 {impossible}, true")):
            self._gradient(length, classes, value, gradient)

    def _write_labels(self, targets: tuple[str, str, str], classes: str) -> None:
        """The label of every state, and whether it may follow the one two before: 0 or log(0)."""
        code, (first, stride, failed) = self.code, targets
        labels, skips = self.memory["labels"], self.row("skips")
        self.empty("skips")
        with code.loop(0, self.states) as state:
            is_label = code.let(f"trunc i64 {state} to i1")
            slot = code.variable("i64", self.blank)
            with code.when(is_label):
                label = _integer(code, first, code.mul(code.div(state, 2), stride))
                outside = code.let(f"icmp uge i64 {label}, {classes}")
                with code.when(outside):
                    code.do(f"store i64 1, ptr {failed}")
                code.set("i64", slot, code.let(f"select i1 {outside}, i64 0, i64 {label}"))
            label = code.get("i64", slot)
            code.store(code.at(labels, state, "i32"), "i32", code.let(f"trunc i64 {label} to i32"))
            follows = code.let(f"and i1 {is_label}, {code.let(f'icmp sge i64 {state}, 3')}")
            with code.when(follows):
                before = self.label(code.sub(state, 2))
                may = code.let(f"icmp ne i64 {before}, {label}")
                allowed = splat_constant(code, 0.0, lanes=1)
                with code.when(may):
                    skips.store(state, allowed)

    def label(self, state: str) -> str:
        return _integer(self.code, self.memory["labels"], state)

    def _emit(self, time: str) -> Line:
        """What every state's label has at a time."""
        code, emitted = self.code, self.row("emitted")
        at_time = code.at(self.scores, code.mul(time, self.strides[0]), "float")
        with code.loop(0, self.states) as state:
            address = code.at(at_time, code.mul(self.label(state), self.strides[1]), "float")
            value = SimdValue(code, code.load(address, "float"), "float", 1)
            emitted.store(state, value.at_least(LOG_ZERO))
        return emitted

    def _alpha(self, length: str) -> None:
        code, skips = self.code, self.row("skips")
        self.empty("alpha", 0)
        emitted, start = self._emit("0"), self.row("alpha", 0)
        start.store(0, emitted.load(0, lanes=1))
        with code.when(self.has_labels):
            start.store(1, emitted.load(1, lanes=1))
        with code.loop(1, length) as time:
            self.empty("alpha", time)
            emitted = self._emit(time)
            before, now = self.row("alpha", code.sub(time, 1)), self.row("alpha", time)

            def advance(
                index: str, mask: str | None, before: Line = before, now: Line = now, emitted: Line = emitted
            ) -> None:
                stay, step = before.load(index, mask), before.load(code.sub(index, 1), mask)
                skip = before.load(code.sub(index, 2), mask) + skips.load(index, mask)
                now.store(index, _log_sum([stay, step, skip]) + emitted.load(index, mask), mask)

            vector_loop(code, 0, self.states, advance)

    def _gradient(self, length: str, classes: str, total: SimdValue, gradient: str) -> None:
        """Beta from the last time to the first, and minus the probability of every label at every time."""
        code, skips, posterior = self.code, self.row("skips"), self.row("posterior")
        with code.loop(0, length) as undone:
            time = code.sub(code.sub(length, 1), undone)
            emitted = self._emit(time)
            parity = code.let(f"and i64 {undone}, 1")
            now, after = self.row("beta", parity), self.row("beta", code.sub(1, parity))
            is_end = code.let(f"icmp eq i64 {undone}, 0")
            with code.when(is_end):
                now.store(self.last, emitted.load(self.last, lanes=1))
                with code.when(self.has_labels):
                    before_last = code.sub(self.last, 1)
                    now.store(before_last, emitted.load(before_last, lanes=1))

            def retreat(
                index: str, mask: str | None, now: Line = now, after: Line = after, emitted: Line = emitted
            ) -> None:
                stay, step = after.load(index, mask), after.load(code.add(index, 1), mask)
                later = code.add(index, 2)
                skip = after.load(later, mask) + skips.load(later, mask)
                now.store(index, _log_sum([stay, step, skip]) + emitted.load(index, mask), mask)

            with code.when(code.let(f"xor i1 {is_end}, true")):
                vector_loop(code, 0, self.states, retreat)
            alpha, whole = self.row("alpha", time), splat(total)

            def weigh(
                index: str, mask: str | None, now: Line = now, alpha: Line = alpha, emitted: Line = emitted,
                whole: SimdValue = whole,
            ) -> None:  # fmt: skip
                sums = alpha.load(index, mask) + now.load(index, mask) - emitted.load(index, mask) - whole
                value = SimdValue(code, exp(code, sums.name, sums.lanes), "float", sums.lanes)
                posterior.store(index, value, mask)

            vector_loop(code, 0, self.states, weigh)
            target = Line(code, code.at(gradient, code.mul(time, classes), "float"), "float")
            with code.loop(0, self.states) as state:
                label = self.label(state)
                target.store(label, target.load(label, lanes=1) - posterior.load(state, lanes=1))


KERNELS: dict[str, Maker] = {"ctc_loss": ctc_entries}
WORKSPACES = {"ctc_loss": _workspace}
