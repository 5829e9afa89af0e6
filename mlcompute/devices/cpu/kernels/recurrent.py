"""LSTM, GRU and simple recurrent layers: threads share the samples and run full sequences without a barrier.

    forward    pack weights | per time: matmuls into the gates, then the cell in place
    gradient   pack weights | per time, backwards: the cell, then a matmul | dx, dh0 by samples, dw by rows

A bar is a barrier. Matrices are multiplied by `packed_gemm`, so no number depends on how samples are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import DenseArray, owned_by_row
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.combiners import fill
from mlcompute.devices.cpu.codegen.loops import Line, copy_line, splat_constant
from mlcompute.devices.cpu.gemm.packed_gemm import (
    LINE,
    Ahead,
    begin_fetching,
    call_packed_gemm,
    packed_gemm,
)
from mlcompute.devices.cpu.kernels import recurrent_cells as cells
from mlcompute.devices.cpu.kernels.recurrent_sequences import (
    BLOCK,
    Recurrence,
    Sequences,
    can_pack,
    can_run,
    fetched_lines,
    pack_entry,
    workspace,
    workspace_parts,
)
from mlcompute.devices.cpu.kernels.recurrent_weight_gradients import Named, weight_gradient_entries
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: A thread with fewer samples multiplies the inputs of all times at once, sample by sample: for one time alone there
#: are too few rows to make reading the weights worth while. With more, the gates of one time stay in the cache.
_FEW_SAMPLES = 8


# Forward ------------------------------------------------------------------------------------------------------------


def recurrent_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """x, wx, wh, b, h0 (and c0), lengths -> y, h (and c), gates (and cells)"""
    r = Recurrence.of(step)
    if not can_run(r) or not reads_recurrent(step, operands):
        return None
    named = {name: operands[value] for name, value in r.values.items()}
    lengths = [] if r.lengths is None else [operands[r.lengths]]
    x, wx, wh, b = (named[name] for name in ("x", "wx", "wh", "b"))
    buffers = workspace_parts(r, operands)
    pack = pack_entry(r, [(wx, buffers["wx"]), (wh, buffers["wh"])], transposed=True)
    results = [operands[value] for value in step.results]
    code, status = Code("recurrent"), np.zeros(1, np.int64)
    args = KernelArguments(code)
    s = Sequences(args, r, lengths)
    begin, end = code.share(s.samples)
    if s.has_lengths:
        s.check_lengths(begin, end, status)
    m = cells.Forward(
        s.dense(named["y"], s.steps, s.hidden),
        s.dense(named["h"], s.hidden),
        s.dense(named["gates"], s.steps, s.gates),
        s.strided(b),
        s.dense(named["c"], s.hidden) if r.has_cells else None,
        s.dense(named["cells"], s.steps, s.hidden) if r.has_cells else None,
    )
    s.copy_states(begin, end, s.strided(named["h0"]), m.h)
    if m.c is not None:
        s.copy_states(begin, end, s.strided(named["c0"]), m.c)
    by_input = args.pointer(packed_gemm(r.from_inputs, block=BLOCK))
    by_hidden = args.pointer(packed_gemm(r.from_hidden, fetched=1, block=BLOCK))
    next_time = NextTime(s, r.from_hidden, r.hidden)
    packed_x, packed_h = args.pointer(buffers["wx"]), args.pointer(buffers["wh"])
    inputs = s.strided(x)
    count, between = code.sub(end, begin), code.mul(s.steps, s.gates)
    few = code.let(f"icmp slt i64 {count}, {_FEW_SAMPLES}")
    with code.when(few), code.loop(begin, end) as sample:
        extents = (s.steps, s.from_inputs, s.inputs)
        a = (inputs.address(sample), inputs.strides[1], inputs.strides[2])
        call_packed_gemm(code, by_input, extents, a, packed_x, (m.gates.address(sample), s.gates))
    with code.loop(0, s.steps) as visited:
        time = s.time(visited)
        sums = m.gates.address(begin, time)
        with code.when(code.let(f"xor i1 {few}, true")):
            a = (inputs.address(begin, time), inputs.strides[0], inputs.strides[2])
            call_packed_gemm(code, by_input, (count, s.from_inputs, s.inputs), a, packed_x, (sums, between))
        if r.from_inputs < r.gates:
            with code.loop(begin, end) as sample:
                rest = code.at(m.gates.address(sample, time), s.from_inputs, "float")
                fill(code, Line(code, rest, "float"), ("0", s.hidden), splat_constant(code, 0.0))
        target = (code.at(sums, s.first_from_hidden, "float"), between)
        extents = (count, s.from_hidden, s.hidden)
        ahead = next_time.ahead([m.gates], begin, end, s.after(time))
        state = (*s.state_before(begin, time, m.h, m.y), 1)
        call_packed_gemm(code, by_hidden, extents, state, packed_h, target, accumulate=1, ahead=ahead)
        with code.loop(begin, end) as sample:
            cells.cell(s, sample, time, m)
    s.copy_last_states(begin, end, m.y, m.h)
    if m.c is not None and m.cells is not None:
        s.copy_last_states(begin, end, m.cells, m.c)
    firsts = [named[name] for name in ("h0", "c0") if name in named]
    reads = [x, buffers["wx"], buffers["wh"], b, *firsts, *lengths]
    entry = Entry(
        step,
        code,
        args.values,
        reads,
        results,
        rows=r.samples,
        by_row=owned_by_row([*reads, *results], r.samples, but=(buffers["wx"], buffers["wh"], b)),
        kernel=r.kernel(),
        cost=r.product_cost(r.inputs + r.hidden) + (r.gate_count + 1) * r.cell_cost,
        status=status if lengths else None,
    )
    return [pack, entry]


class NextTime:
    """Fetches what the cells read or write at the next time while the hidden state is multiplied: see `Ahead`."""

    def __init__(self, s: Sequences, columns: int, depth: int) -> None:
        """Of a product into so many columns, summed over a depth."""
        self._sequences, self._place = s, s.code.variable("[2 x i64]", "zeroinitializer")
        self._rate = s.args.number(fetched_lines(columns, depth, s.recurrence.gates / LINE))

    def ahead(self, arrays: Sequence[DenseArray], begin: str, end: str, time: str) -> Ahead:
        """The gates, or dz, of some samples at a time, which may lie outside the sequence."""
        s, code = self._sequences, self._sequences.code
        begin_fetching(code, self._place)
        pitch = code.mul(s.steps, s.gates)
        addresses = [array.address(begin, time) for array in arrays]
        return Ahead(addresses, s.gates, pitch, self._rate, self._place, code.mul(code.sub(end, begin), pitch))


# Gradient -----------------------------------------------------------------------------------------------------------


def recurrent_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """dy, dh (and dc), x, wx, wh, h0 (and c0), y, gates (and cells), lengths -> dx, dwx, dwh, db, dh0 (and dc0)"""
    r = Recurrence.of(step)
    if not can_run(r) or not reads_recurrent(step, operands):
        return None
    named = {name: operands[value] for name, value in r.values.items()}
    lengths = [] if r.lengths is None else [operands[r.lengths]]
    buffers = workspace_parts(r, operands)
    pack = pack_entry(r, [(named["wx"], buffers["wx"]), (named["wh"], buffers["wh"])], transposed=False)
    return [
        pack,
        _through_time(r, named, buffers, lengths),
        _first_state_gradient(r, named, buffers, lengths),
        _input_gradient(r, named, buffers),
        *weight_gradient_entries(r, named, buffers, lengths, operands.threads),
    ]


def _through_time(r: Recurrence, named: Named, buffers: Named, lengths: Sequence[Operand]) -> Entry:
    """The gradients of the gates' sums, dz, and of the states up to the first time."""
    code = Code("recurrent_gradient")
    args = KernelArguments(code)
    s = Sequences(args, r, lengths)
    begin, end = code.share(s.samples)
    copied = [("dh", buffers["dh"]), ("h0", buffers["h0"])]
    if r.has_cells:
        copied += [("dc", named["dc0"]), ("c0", buffers["c0"])]
    states = []
    for name, target in copied:
        source, state = s.strided(named[name]), s.dense(target, s.hidden)
        s.copy_states(begin, end, source, state)
        states.append(state)
    dh, h_first, *of_cells = states
    dz = s.dense(buffers["dz"], s.steps, s.gates)
    gates, y = s.dense(named["gates"], s.steps, s.gates), s.dense(named["y"], s.steps, s.hidden)
    m = cells.Backward(s.strided(named["dy"]), gates, y, h_first, dz, dh)
    if r.has_cells:
        dc, c_first = of_cells
        m = replace(m, c_first=c_first, cells=s.dense(named["cells"], s.steps, s.hidden), dc=dc)
    multiply, packed = args.pointer(packed_gemm(r.hidden, fetched=2, block=BLOCK)), args.pointer(buffers["wh"])
    next_time = NextTime(s, r.hidden, r.from_hidden)
    count, between = code.sub(end, begin), code.mul(s.steps, s.gates)
    with code.loop(0, s.steps) as undone:
        time = s.time(code.sub(code.sub(s.steps, 1), undone))
        with code.loop(begin, end) as sample:
            cells.cell_gradient(s, sample, time, m)
        a = (code.at(dz.address(begin, time), s.first_from_hidden, "float"), between, 1)
        extents, running = (count, s.hidden, s.from_hidden), (dh.address(begin), s.hidden)
        earlier, is_first = s.before(time)
        ahead = next_time.ahead([gates, dz], begin, end, earlier)
        with code.when(code.let(f"xor i1 {is_first}, true")):
            adds = int(r.keeps_gradient)
            call_packed_gemm(code, multiply, extents, a, packed, running, accumulate=adds, ahead=ahead)
    known = [named[name] for name in ("dy", "dh", "dc", "h0", "c0", "y", "gates", "cells") if name in named]
    reads = [*known, buffers["wh"], *lengths]
    writes = [buffers["dz"], *(target for _, target in copied)]
    return Entry(
        r.step,
        code,
        args.values,
        reads,
        writes,
        rows=r.samples,
        by_row=owned_by_row([*reads, *writes], r.samples, but=list(buffers.values())),
        kernel=r.kernel("back through time"),
        cost=r.product_cost(r.hidden) + 2 * r.cell_cost,
    )


def _first_state_gradient(r: Recurrence, named: Named, buffers: Named, lengths: Sequence[Operand]) -> Entry:
    """dh0 = dz wh of the first time, and what goes there as it is: mostly nobody reads it, and it is left out."""
    code = Code("recurrent_first_state")
    args = KernelArguments(code)
    s = Sequences(args, r, lengths)
    begin, end = code.share(s.samples)
    dz, target = s.dense(buffers["dz"], s.steps, s.gates), s.dense(named["dh0"], s.hidden)
    if r.keeps_gradient:
        dh = s.dense(buffers["dh"], s.hidden)
        with code.loop(begin, end) as sample:
            copy_line(code, dh.line(sample), target.line(sample), 0, s.hidden)
    multiply = args.pointer(packed_gemm(r.hidden, block=BLOCK))
    extents = (code.sub(end, begin), s.hidden, s.from_hidden)
    a = code.at(dz.address(begin, s.time("0")), s.first_from_hidden, "float"), code.mul(s.steps, s.gates), 1
    c, adds = (target.address(begin), s.hidden), int(r.keeps_gradient)
    call_packed_gemm(code, multiply, extents, a, args.pointer(buffers["wh"]), c, accumulate=adds)
    return Entry(
        r.step,
        code,
        args.values,
        reads=[buffers["dz"], buffers["dh"], buffers["wh"]],
        writes=[named["dh0"]],
        rows=r.samples,
        by_row={3},
        kernel=r.kernel("gradient of the first state"),
        cost=r.product_cost(r.hidden) / r.steps,
    )


def _input_gradient(r: Recurrence, named: Named, buffers: Named) -> Entry:
    """dx = dz wx, for all times of a thread's samples at once."""
    code = Code("recurrent_inputs")
    args = KernelArguments(code)
    s = Sequences(args, r, [])
    begin, end = code.share(s.samples)
    dz, target = s.dense(buffers["dz"], s.steps, s.gates), s.dense(named["dx"], s.steps, s.inputs)
    rows, multiply = code.mul(code.sub(end, begin), s.steps), args.pointer(packed_gemm(r.inputs, block=BLOCK))
    extents = (rows, s.inputs, s.from_inputs)
    a, c = (dz.address(begin), s.gates, 1), (target.address(begin), s.inputs)
    call_packed_gemm(code, multiply, extents, a, args.pointer(buffers["wx"]), c)
    return Entry(
        r.step,
        code,
        args.values,
        reads=[buffers["dz"], buffers["wx"]],
        writes=[named["dx"]],
        rows=r.samples,
        by_row={2},
        kernel=r.kernel("gradient of the inputs"),
        cost=r.product_cost(r.inputs),
    )


def supports_recurrent(step: Step) -> bool:
    """Are all types those the kernels are written for, and is there anything to do?"""
    return can_run(Recurrence.of(step))


def reads_recurrent(step: Step, operands: Operands) -> bool:
    """Can the weights be packed; for the gradient, do the rows of x lie side by side, and is what was saved dense?"""
    r = Recurrence.of(step)
    named = {name: operands[value] for name, value in r.values.items()}
    if not (can_pack(named["wx"]) and can_pack(named["wh"])):
        return False
    if not r.is_gradient:
        return True
    saved, x = [named[name] for name in ("y", "gates", "cells") if name in named], named["x"]
    return all(operand.is_dense for operand in saved) and (x.strides[2] == 1 or x.shape[2] == 1)


KERNELS: dict[str, Maker] = {
    "lstm": recurrent_entries,
    "lstm_gradient": recurrent_gradient_entries,
    "rnn": recurrent_entries,
    "rnn_gradient": recurrent_gradient_entries,
}
WORKSPACES = dict.fromkeys(KERNELS, workspace)
READS = dict.fromkeys(KERNELS, reads_recurrent)
SUPPORTS = dict.fromkeys(KERNELS, supports_recurrent)
