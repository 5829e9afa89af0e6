"""What recurrent kernels do at one time with one sample: the cell, forward and back, of an lstm and of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.addressing import DenseArray, StridedArray, prefetch
from mlcompute.devices.cpu.codegen.loops import Line, splat_constant
from mlcompute.devices.cpu.codegen.math import sigmoid, tanh
from mlcompute.devices.cpu.codegen.simd import SimdValue, select
from mlcompute.devices.cpu.kernels.recurrent_sequences import Sequences
from mlcompute.ops.rnn import CELLS, Functions


def _sigmoid(x: SimdValue) -> SimdValue:
    return SimdValue(x.code, sigmoid(x.code, x.name, x.lanes), x.element, x.lanes)


def _tanh(x: SimdValue) -> SimdValue:
    return SimdValue(x.code, tanh(x.code, x.name, x.lanes), x.element, x.lanes)


_FUNCTIONS = Functions(_sigmoid, _tanh, lambda x: x.at_least(0.0), lambda y, a: select(y > 0.0, a, 0.0))


@dataclass(frozen=True)
class Forward:
    """Memory of the forward pass; c and cells are of an lstm alone.

    Without lengths, h and c hold the first states until all times have been visited: what neighbouring threads write at
    every time would lie side by side there, and take turns in their caches.
    """

    y: DenseArray
    h: DenseArray
    gates: DenseArray
    biases: StridedArray
    c: DenseArray | None = None
    cells: DenseArray | None = None


@dataclass(frozen=True)
class Backward:
    """Memory of the way back: what is known (the first states among it), and the running gradients."""

    dy: StridedArray
    gates: DenseArray
    y: DenseArray
    h_first: DenseArray
    dz: DenseArray
    dh: DenseArray
    c_first: DenseArray | None = None
    cells: DenseArray | None = None
    dc: DenseArray | None = None


Body = Callable[[str, "str | None"], None]


def cell(s: Sequences, sample: str, time: str, m: Forward) -> None:
    """The gates, which hold their sums, and all states of one sample at one time."""
    code, count = s.code, s.recurrence.gate_count
    y_line, gate_lines = m.y.line(sample, time), m.gates.lines(count, s.hidden, sample, time)
    h_before = Line(code, s.state_before(sample, time, m.h, m.y)[0], "float")
    # With lengths, states stay as they are in the padding: there they are kept apart.
    running = [m.h.line(sample)] if s.has_lengths else []
    after = s.after(time)
    written_next = [m.y.line(sample, after)]
    bias_lines = [m.biases.reader(start=code.mul(k, s.hidden)) for k in range(count)]
    if m.cells is not None and m.c is not None:
        cells_line = m.cells.line(sample, time)
        c_before = Line(code, s.state_before(sample, time, m.c, m.cells)[0], "float")
        running_cells = [m.c.line(sample)] if s.has_lengths else []
        written_next.append(m.cells.line(sample, after))

    def sums(index: str, mask: str | None) -> list[SimdValue]:
        prefetch(written_next, index, to_write=True)
        return [line.load(index, mask) + bias(index, mask) for line, bias in zip(gate_lines, bias_lines, strict=True)]

    # Two loops: in one, the chain of dependent instructions would be longer than processors look ahead.
    def apply_gates(index: str, mask: str | None) -> None:
        i, f, g, o = sums(index, mask)
        gates = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
        for line, value in zip(gate_lines, gates, strict=True):
            line.store(index, value, mask)

    def advance_lstm(index: str, mask: str | None) -> None:
        i, f, g, o = (line.load(index, mask) for line in gate_lines)
        c_next = f * c_before.load(index, mask) + i * g
        h_next = o * _tanh(c_next)
        for line in (cells_line, *running_cells):
            line.store(index, c_next, mask)
        for line in (y_line, *running):
            line.store(index, h_next, mask)

    def advance(index: str, mask: str | None) -> None:
        zs = sums(index, mask)
        kept, h_next = CELLS[s.recurrence.step.attributes["cell"]].forward(_FUNCTIONS, zs, h_before.load(index, mask))
        for line, value in zip(gate_lines, kept, strict=True):
            line.store(index, value, mask)
        for line in (y_line, *running):
            line.store(index, h_next, mask)

    def stay(index: str, mask: str | None) -> None:
        for line in (*gate_lines, y_line):
            line.store(index, splat_constant(code, 0.0), mask)
        if m.cells is not None:
            cells_line.store(index, c_before.load(index, mask), mask)

    s.each_sequence_unit(sample, time, [advance] if m.cells is None else [apply_gates, advance_lstm], stay)


def cell_gradient(s: Sequences, sample: str, time: str, m: Backward) -> None:
    """dz of one sample at one time; what of dh and dc does not go through dz goes on to the time before."""
    code, count = s.code, s.recurrence.gate_count
    earlier, is_first = s.before(time)
    gate_lines, dz_lines = m.gates.lines(count, s.hidden, sample, time), m.dz.lines(count, s.hidden, sample, time)
    dy_at, dh_line = m.dy.reader(sample, time), m.dh.line(sample)
    zero = splat_constant(code, 0.0)
    body: Body
    if m.cells is not None and m.c_first is not None and m.dc is not None:
        # In the padding cells hold the state, so at a late start too this is the one before.
        address = code.let(
            f"select i1 {is_first}, ptr {m.c_first.address(sample)}, ptr {m.cells.address(sample, earlier)}"
        )
        c_before, c_now, dc_line = Line(code, address, "float"), m.cells.line(sample, time), m.dc.line(sample)
        read_next = [m.cells.line(sample, s.before(earlier)[0])]

        def retreat_lstm(index: str, mask: str | None) -> None:
            prefetch(read_next, index)
            i, f, g, o = (line.load(index, mask) for line in gate_lines)
            squashed = _tanh(c_now.load(index, mask))
            dh_now = dh_line.load(index, mask) + dy_at(index, mask)
            dc_now = dc_line.load(index, mask) + dh_now * o * (1.0 - squashed * squashed)
            dzs = (
                dc_now * g * i * (1.0 - i),
                dc_now * c_before.load(index, mask) * f * (1.0 - f),
                dc_now * i * (1.0 - g * g),
                dh_now * squashed * o * (1.0 - o),
            )
            for line, value in zip(dz_lines, dzs, strict=True):
                line.store(index, value, mask)
            dc_line.store(index, dc_now * f, mask)
            if s.has_lengths:
                dh_line.store(index, zero, mask)

        body = retreat_lstm
    else:
        starts = s.starts(sample, earlier, is_first)
        address = code.let(f"select i1 {starts}, ptr {m.h_first.address(sample)}, ptr {m.y.address(sample, earlier)}")
        h_before = Line(code, address, "float")
        read_next = [m.y.line(sample, s.before(earlier)[0])]

        def retreat(index: str, mask: str | None) -> None:
            prefetch(read_next, index)
            kept = [line.load(index, mask) for line in gate_lines]
            dh_now = dh_line.load(index, mask) + dy_at(index, mask)
            rule = CELLS[s.recurrence.step.attributes["cell"]]
            dzs, through = rule.backward(_FUNCTIONS, dh_now, kept, h_before.load(index, mask))
            for line, value in zip(dz_lines, dzs, strict=True):
                line.store(index, value, mask)
            dh_line.store(index, zero if through is None else through, mask)

        body = retreat

    def stay(index: str, mask: str | None) -> None:
        for line in dz_lines:
            line.store(index, zero, mask)

    s.each_sequence_unit(sample, time, [body], stay)
