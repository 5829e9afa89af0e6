"""LSTM forward and back: threads share the samples and run full sequences without a barrier.

    forward    pack weights | per time: matmuls into the gates, then the cell in place
    gradient   pack weights | per time, backwards: the cell, then a matmul | dx by samples, weights' gradients by rows

A bar is a barrier. Matrices are multiplied by `packed_gemm`, so no number depends on how samples are shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import DenseArray, StridedArray, ThreadWorkspace, owned_by_row, prefetch
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import SUM, fill, reduce_columns
from mlcompute.devices.cpu.codegen.loops import Line, splat_constant, vector_loop
from mlcompute.devices.cpu.codegen.math import sigmoid, tanh
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.gemm.packed_gemm import DEPTH, call_packed_gemm, pack_row, packed_gemm, panel_width
from mlcompute.devices.cpu.kernels.recurrent_sequences import (
    Sequences,
    Sizes,
    can_run,
    pack_entry,
    weight_gradient_parts,
    workspace,
    workspace_parts,
)
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: A thread with fewer samples multiplies the inputs of all times at once, sample by sample: for one time alone there
#: are too few rows to make reading the weights worth while. With more, the gates of one time stay in the cache.
_FEW_SAMPLES = 8


# Forward ------------------------------------------------------------------------------------------------------------


def lstm_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """x, wx, wh, b, h0, c0, lengths -> y, h, c, gates, cells"""
    x, wx, wh, b, h0, c0, *lengths = (operands[value] for value in step.inputs)
    if not can_run([x, wx, wh, b, h0, c0], lengths):
        return None
    sizes, buffers = Sizes.of(step), workspace_parts(step, operands)
    pack = pack_entry(step, [(wx, buffers["wx"]), (wh, buffers["wh"])], transposed=True)
    if pack is None:
        return None
    results = [operands[value] for value in step.results]
    code, status = Code("lstm"), np.zeros(1, np.int64)
    args = KernelArguments(code)
    s = Sequences(args, step, sizes, lengths)
    begin, end = code.share(s.samples)
    if s.has_lengths:
        s.check_lengths(begin, end, status)
    states = (s.strided(h0), s.strided(c0))
    y, cells = (s.dense(results[index], s.steps, s.hidden) for index in (0, 4))
    h, c = (s.dense(results[index], s.hidden) for index in (1, 2))
    gates = s.dense(results[3], s.steps, s.gates)
    for first, state in zip(states, (h, c), strict=True):
        s.copy_states(begin, end, first, state)
    multiply = args.pointer(packed_gemm(sizes.gates))
    packed_x, packed_h = args.pointer(buffers["wx"]), args.pointer(buffers["wh"])
    inputs, biases = s.strided(x), s.strided(b)
    count, between = code.sub(end, begin), code.mul(s.steps, s.gates)
    few = code.let(f"icmp slt i64 {count}, {_FEW_SAMPLES}")
    with code.when(few), code.loop(begin, end) as sample:
        extents = (s.steps, s.gates, s.inputs)
        a = (inputs.address(sample), inputs.strides[1], inputs.strides[2])
        call_packed_gemm(code, multiply, extents, a, packed_x, (gates.address(sample), s.gates))
    with code.loop(0, s.steps) as visited:
        time = s.time(visited)
        target = (gates.address(begin, time), between)
        with code.when(code.let(f"xor i1 {few}, true")):
            a = (inputs.address(begin, time), inputs.strides[0], inputs.strides[2])
            call_packed_gemm(code, multiply, (count, s.gates, s.inputs), a, packed_x, target)
        extents = (count, s.gates, s.hidden)
        call_packed_gemm(code, multiply, extents, (h.address(begin), s.hidden, 1), packed_h, target, accumulate=1)
        with code.loop(begin, end) as sample:
            _cell(s, sample, time, biases, (y, h, c, gates, cells))
    reads = [x, buffers["wx"], buffers["wh"], b, h0, c0, *lengths]
    entry = Entry(
        step,
        code,
        args.values,
        reads,
        results,
        rows=sizes.samples,
        by_row=owned_by_row([*reads, *results], sizes.samples, but=(buffers["wx"], buffers["wh"], b)),
        kernel="lstm",
        cost=sizes.product_cost(sizes.inputs + sizes.hidden) + 5 * sizes.cell_cost,
        keeps_alive=[status],
        status=status if lengths else None,
    )
    return [pack, entry]


def _cell(
    s: Sequences,
    sample: str,
    time: str,
    biases: StridedArray,
    results: tuple[DenseArray, DenseArray, DenseArray, DenseArray, DenseArray],
) -> None:
    """The gates, which hold their sums, and all states of one sample at one time."""
    y, h, c, gates, cells = results
    code = s.code
    y_line, cells_line, h_line, c_line = y.line(sample, time), cells.line(sample, time), h.line(sample), c.line(sample)
    gate_lines = gates.lines(4, s.hidden, sample, time)
    after = s.after(time)
    written_next = [*gates.lines(4, s.hidden, sample, after), y.line(sample, after), cells.line(sample, after)]
    bias_lines = [biases.reader(start=code.mul(k, s.hidden)) for k in range(4)]

    def advance(index: str, mask: str | None) -> None:
        prefetch(written_next, index, to_write=True)
        zs = [line.load(index, mask) + bias(index, mask) for line, bias in zip(gate_lines, bias_lines, strict=True)]
        i, f, g, o = _sigmoid(zs[0]), _sigmoid(zs[1]), _tanh(zs[2]), _sigmoid(zs[3])
        c_next = f * c_line.load(index, mask) + i * g
        h_next = o * _tanh(c_next)
        for line, value in zip(gate_lines, (i, f, g, o), strict=True):
            line.store(index, value, mask)
        for line, value in ((c_line, c_next), (cells_line, c_next), (h_line, h_next), (y_line, h_next)):
            line.store(index, value, mask)

    def stay(index: str, mask: str | None) -> None:
        for line in (*gate_lines, y_line):
            line.store(index, splat_constant(code, 0.0), mask)
        cells_line.store(index, c_line.load(index, mask), mask)

    if not s.has_lengths:
        s.each_unit(advance)
        return
    padding = s.is_padding(sample, time)
    with code.when(padding):
        s.each_unit(stay)
    with code.when(code.let(f"xor i1 {padding}, true")):
        s.each_unit(advance)


def _sigmoid(x: SimdValue) -> SimdValue:
    return SimdValue(x.code, sigmoid(x.code, x.name, x.lanes), x.element, x.lanes)


def _tanh(x: SimdValue) -> SimdValue:
    return SimdValue(x.code, tanh(x.code, x.name, x.lanes), x.element, x.lanes)


# Gradient -----------------------------------------------------------------------------------------------------------


def lstm_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """dy, dh, dc, x, wx, wh, h0, c0, y, gates, cells, lengths -> dx, dwx, dwh, db, dh0, dc0"""
    dy, dh, dc, x, wx, wh, h0, c0, y, gates, cells, *lengths = (operands[value] for value in step.inputs)
    saved = (y, gates, cells)
    # Rows of x are copied in vectors for the weights' gradient.
    fits = all(operand.is_dense for operand in saved) and (x.strides[2] == 1 or x.shape[2] == 1)
    if not fits or not can_run([dy, dh, dc, x, wx, wh, h0, c0, *saved], lengths):
        return None
    buffers = workspace_parts(step, operands)
    pack = pack_entry(step, [(wx, buffers["wx"]), (wh, buffers["wh"])], transposed=False)
    if pack is None:
        return None
    return [
        pack,
        _through_time(step, operands, buffers, lengths),
        _input_gradient(step, operands, buffers),
        _weight_gradients(step, operands, buffers, lengths),
    ]


def _through_time(step: Step, operands: Operands, buffers: dict[str, Operand], lengths: Sequence[Operand]) -> Entry:
    """The gradients of the gates' sums, dz, and of the first states, which hold the running ones."""
    dy, dh, dc, _, _, _, h0, c0, _, gates, cells, *_ = (operands[value] for value in step.inputs)
    dh0, dc0 = (operands[value] for value in step.results[4:])
    code, sizes = Code("lstm_gradient"), Sizes.of(step)
    args = KernelArguments(code)
    s = Sequences(args, step, sizes, lengths)
    begin, end = code.share(s.samples)
    firsts = [s.strided(operand) for operand in (dh, dc, h0, c0)]
    states = [s.dense(operand, s.hidden) for operand in (dh0, dc0, buffers["h0"], buffers["c0"])]
    for source, state in zip(firsts, states, strict=True):
        s.copy_states(begin, end, source, state)
    dh_state, dc_state, _, c_first = states
    multiply, packed = args.pointer(packed_gemm(sizes.hidden)), args.pointer(buffers["wh"])
    dz = s.dense(buffers["dz"], s.steps, s.gates)
    known = (s.strided(dy), s.dense(gates, s.steps, s.gates), s.dense(cells, s.steps, s.hidden), c_first)
    count, between = code.sub(end, begin), code.mul(s.steps, s.gates)
    with code.loop(0, s.steps) as undone:
        time = s.time(code.sub(code.sub(s.steps, 1), undone))
        with code.loop(begin, end) as sample:
            _cell_gradient(s, sample, time, known, (dz, dh_state, dc_state))
        a, target = (dz.address(begin, time), between, 1), (dh_state.address(begin), s.hidden)
        # Samples in their padding have dz = 0 and keep what they have.
        call_packed_gemm(code, multiply, (count, s.hidden, s.gates), a, packed, target, accumulate=int(s.has_lengths))
    reads = [dy, dh, dc, h0, c0, gates, cells, buffers["wh"], *lengths]
    writes = [buffers["dz"], buffers["h0"], buffers["c0"], dh0, dc0]
    return Entry(
        step,
        code,
        args.values,
        reads,
        writes,
        rows=sizes.samples,
        by_row=owned_by_row([*reads, *writes], sizes.samples, but=list(buffers.values())),
        kernel="lstm, back through time",
        cost=sizes.product_cost(sizes.hidden) + 2 * sizes.cell_cost,
    )


def _cell_gradient(
    s: Sequences,
    sample: str,
    time: str,
    known: tuple[StridedArray, DenseArray, DenseArray, DenseArray],
    results: tuple[DenseArray, DenseArray, DenseArray],
) -> None:
    """dz of one sample at one time; dc goes on to the time before, dh is used up."""
    (dy, gates, cells, c_first), (dz, dh, dc) = known, results
    code = s.code
    earlier, is_first = s.before(time)
    # In the padding cells hold the state, so at a late start too this is the one before.
    address = code.let(f"select i1 {is_first}, ptr {c_first.address(sample)}, ptr {cells.address(sample, earlier)}")
    c_before, c_now = Line(code, address, "float"), cells.line(sample, time)
    gate_lines, dz_lines = gates.lines(4, s.hidden, sample, time), dz.lines(4, s.hidden, sample, time)
    dy_at, dh_line, dc_line = dy.reader(sample, time), dh.line(sample), dc.line(sample)
    read_next = [*gates.lines(4, s.hidden, sample, earlier), cells.line(sample, s.before(earlier)[0])]
    written_next = dz.lines(4, s.hidden, sample, earlier)

    def retreat(index: str, mask: str | None) -> None:
        prefetch(read_next, index)
        prefetch(written_next, index, to_write=True)
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
            dh_line.store(index, splat_constant(code, 0.0), mask)

    def stay(index: str, mask: str | None) -> None:
        for line in dz_lines:
            line.store(index, splat_constant(code, 0.0), mask)

    if not s.has_lengths:
        s.each_unit(retreat)
        return
    padding = s.is_padding(sample, time)
    with code.when(padding):
        s.each_unit(stay)
    with code.when(code.let(f"xor i1 {padding}, true")):
        s.each_unit(retreat)


def _input_gradient(step: Step, operands: Operands, buffers: dict[str, Operand]) -> Entry:
    """dx = dz wx, for all times of a thread's samples at once."""
    dx, sizes = operands[step.results[0]], Sizes.of(step)
    code = Code("lstm_inputs")
    args = KernelArguments(code)
    s = Sequences(args, step, sizes, [])
    begin, end = code.share(s.samples)
    dz, target = s.dense(buffers["dz"], s.steps, s.gates), s.dense(dx, s.steps, s.inputs)
    rows, multiply = code.mul(code.sub(end, begin), s.steps), args.pointer(packed_gemm(sizes.inputs))
    extents = (rows, s.inputs, s.gates)
    a, c = (dz.address(begin), s.gates, 1), (target.address(begin), s.inputs)
    call_packed_gemm(code, multiply, extents, a, args.pointer(buffers["wx"]), c)
    return Entry(
        step,
        code,
        args.values,
        reads=[buffers["dz"], buffers["wx"]],
        writes=[dx],
        rows=sizes.samples,
        by_row={2},
        kernel="lstm, gradient of the inputs",
        cost=sizes.product_cost(sizes.inputs),
    )


def _weight_gradients(step: Step, operands: Operands, buffers: dict[str, Operand], lengths: Sequence[Operand]) -> Entry:
    """dwx = dzᵀ x,  dwh = dzᵀ (h before),  db = sums of dz: threads share the rows, samples and times in blocks."""
    x, y = operands[step.inputs[3]], operands[step.inputs[8]]
    dwx, dwh, db = (operands[value] for value in step.results[1:4])
    code, sizes, lanes = Code("lstm_weights"), Sizes.of(step), vector_lanes()
    args = KernelArguments(code)
    s = Sequences(args, step, sizes, lengths)
    memory = ThreadWorkspace(args, buffers["own"], weight_gradient_parts(sizes))
    dz, h_first = s.dense(buffers["dz"], s.steps, s.gates), s.dense(buffers["h0"], s.hidden)
    inputs, outputs = s.strided(x), s.dense(y, s.steps, s.hidden)
    to_inputs, to_hidden, to_bias = (args.pointer(operand) for operand in (dwx, dwh, db))
    by_inputs, by_hidden = args.pointer(packed_gemm(sizes.inputs)), args.pointer(packed_gemm(sizes.hidden))
    begin, end = code.share(s.gates, lanes, memory.max_threads)
    rows = code.sub(end, begin)
    fill(code, Line(code, to_bias, "float"), (begin, end), splat_constant(code, 0.0))
    # Without rows of its own, a thread has nothing to read either, and perhaps no memory.
    has_rows = code.let(f"icmp sgt i64 {rows}, 0")
    if s.has_lengths:
        with code.when(has_rows):
            fill(code, Line(code, memory["zeros"], "float"), ("0", s.inputs), splat_constant(code, 0.0))
    total = code.mul(s.samples, s.steps)
    with code.loop(0, code.let(f"select i1 {has_rows}, i64 {total}, i64 0"), DEPTH) as first:
        depth = code.minimum(code.sub(total, first), DEPTH)
        with code.loop(0, depth) as k:
            sample = code.div(code.add(first, k), s.steps)
            time = code.sub(code.add(first, k), code.mul(sample, s.steps))
            row = inputs.address(sample, time)
            if s.has_lengths:
                row = code.let(f"select i1 {s.is_padding(sample, time)}, ptr {memory['zeros']}, ptr {row}")
            _pack(code, sizes.inputs, s.inputs, row, memory["x"], k, depth)
            earlier, is_first = s.before(time)
            late = s.starts_late(sample, earlier)
            starts = is_first if late is None else code.let(f"or i1 {is_first}, {late}")
            row = code.let(f"select i1 {starts}, ptr {h_first.address(sample)}, ptr {outputs.address(sample, earlier)}")
            _pack(code, sizes.hidden, s.hidden, row, memory["h"], k, depth)
        block = code.at(dz.pointer, code.mul(first, s.gates), "float")
        # Read row by row first: that brings the block into the cache, and the matmuls read it across the rows.
        _add_sums(s, block, depth, Line(code, memory["sums"], "float"), Line(code, to_bias, "float"), (begin, end))
        a = (code.at(block, begin, "float"), 1, s.gates)
        for multiply, columns, b, target in (
            (by_inputs, s.inputs, memory["x"], to_inputs),
            (by_hidden, s.hidden, memory["h"], to_hidden),
        ):
            c = (code.at(target, code.mul(begin, columns), "float"), columns)
            call_packed_gemm(code, multiply, (rows, columns, depth), a, b, c, accumulate=first)
    return Entry(
        step,
        code,
        args.values,
        reads=[buffers["dz"], buffers["h0"], x, y, *lengths],
        writes=[dwx, dwh, db],
        kernel="lstm, gradients of the weights",
        cost=sizes.product_cost(sizes.inputs + sizes.hidden),
        scratch=[memory.buffer],
    )


def _pack(code: Code, width: int, columns: str, row: str, block: str, k: str, depth: str) -> None:
    vectors = panel_width(width)
    address = code.at(block, code.mul(k, vectors * vector_lanes()), "float")
    pack_row(code, vectors, (0, columns), Line(code, row, "float"), address, depth)


def _add_sums(s: Sequences, block: str, depth: str, sums: Line, target: Line, columns: tuple[str, str]) -> None:
    """Add the sums of a block of rows to the target; a block is summed apart so that long sums stay accurate."""
    fill(s.code, sums, columns, splat_constant(s.code, 0.0))
    reduce_columns(s.code, SUM, depth, s.gates, Line(s.code, block, "float"), columns, sums)
    vector_loop(
        s.code,
        *columns,
        lambda index, mask: target.store(index, target.load(index, mask) + sums.load(index, mask), mask),
    )


KERNELS: dict[str, Maker] = {"lstm": lstm_entries, "lstm_gradient": lstm_gradient_entries}
WORKSPACES = {"lstm": workspace, "lstm_gradient": workspace}
