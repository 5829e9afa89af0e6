"""LSTM forward and back: threads share the samples and run whole sequences without meeting.

    forward    pack weights | per time: products into the gates, then the cell in place
    gradient   pack weights | per time, backwards: the cell, then a product | dx by samples, weights' gradients by rows

A bar is a meeting. The products are those of `products`, so no number depends on how samples are shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cpu.code import Code, vector_lanes
from mlcompute.devices.cpu.entry import Entry, Maker
from mlcompute.devices.cpu.kernels.folds import SUM, fill, fold_columns
from mlcompute.devices.cpu.kernels.places import Dense, Strided, ThreadMemory, fetch, owned
from mlcompute.devices.cpu.kernels.products import DEPTH, call_product, pack_row, panel_width, product
from mlcompute.devices.cpu.kernels.sequences import (
    Sequences,
    Sizes,
    can_run,
    pack_entry,
    rooms,
    weight_gradient_parts,
    workspace,
)
from mlcompute.devices.cpu.kernels.walks import Line, Words, each_vector, number
from mlcompute.devices.cpu.lanes import Lanes
from mlcompute.devices.cpu.math import sigmoid, tanh
from mlcompute.devices.cpu.operands import Operand, Operands
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
    sizes, room = Sizes.of(step), rooms(step, operands)
    pack = pack_entry(step, [(wx, room["wx"]), (wh, room["wh"])], turned=True)
    if pack is None:
        return None
    results = [operands[value] for value in step.results]
    code, status = Code("lstm"), np.zeros(1, np.int64)
    words = Words(code)
    s = Sequences(words, step, sizes, lengths)
    begin, end = code.share(s.samples)
    if s.has_lengths:
        s.check_lengths(begin, end, status)
    states = (s.strided(h0), s.strided(c0))
    y, cells = (s.dense(results[index], s.steps, s.hidden) for index in (0, 4))
    h, c = (s.dense(results[index], s.hidden) for index in (1, 2))
    gates = s.dense(results[3], s.steps, s.gates)
    for first, state in zip(states, (h, c), strict=True):
        s.copy_states(begin, end, first, state)
    multiply = words.pointer(product(sizes.gates))
    packed_x, packed_h = words.pointer(room["wx"]), words.pointer(room["wh"])
    inputs, biases = s.strided(x), s.strided(b)
    count, between = code.sub(end, begin), code.mul(s.steps, s.gates)
    few = code.let(f"icmp slt i64 {count}, {_FEW_SAMPLES}")
    with code.when(few), code.loop(begin, end) as sample:
        extents = (s.steps, s.gates, s.inputs)
        a = (inputs.place(sample), inputs.strides[1], inputs.strides[2])
        call_product(code, multiply, extents, a, packed_x, (gates.place(sample), s.gates))
    with code.loop(0, s.steps) as visited:
        time = s.time(visited)
        target = (gates.place(begin, time), between)
        with code.when(code.let(f"xor i1 {few}, true")):
            a = (inputs.place(begin, time), inputs.strides[0], inputs.strides[2])
            call_product(code, multiply, (count, s.gates, s.inputs), a, packed_x, target)
        extents = (count, s.gates, s.hidden)
        call_product(code, multiply, extents, (h.place(begin), s.hidden, 1), packed_h, target, accumulate=1)
        with code.loop(begin, end) as sample:
            _cell(s, sample, time, biases, (y, h, c, gates, cells))
    reads = [x, room["wx"], room["wh"], b, h0, c0, *lengths]
    entry = Entry(
        step,
        code,
        words.arguments,
        reads,
        results,
        rows=sizes.samples,
        by_row=owned([*reads, *results], sizes.samples, but=(room["wx"], room["wh"], b)),
        kernel="lstm",
        cost=sizes.product_cost(sizes.inputs + sizes.hidden) + 5 * sizes.cell_cost,
        keeps_alive=[status],
        status=status if lengths else None,
    )
    return [pack, entry]


def _cell(
    s: Sequences, sample: str, time: str, biases: Strided, results: tuple[Dense, Dense, Dense, Dense, Dense]
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
        fetch(written_next, index, to_write=True)
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
            line.store(index, number(code, 0.0), mask)
        cells_line.store(index, c_line.load(index, mask), mask)

    if not s.has_lengths:
        s.each_unit(advance)
        return
    padding = s.is_padding(sample, time)
    with code.when(padding):
        s.each_unit(stay)
    with code.when(code.let(f"xor i1 {padding}, true")):
        s.each_unit(advance)


def _sigmoid(x: Lanes) -> Lanes:
    return Lanes(x.code, sigmoid(x.code, x.name, x.lanes), x.element, x.lanes)


def _tanh(x: Lanes) -> Lanes:
    return Lanes(x.code, tanh(x.code, x.name, x.lanes), x.element, x.lanes)


# Gradient -----------------------------------------------------------------------------------------------------------


def lstm_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """dy, dh, dc, x, wx, wh, h0, c0, y, gates, cells, lengths -> dx, dwx, dwh, db, dh0, dc0"""
    dy, dh, dc, x, wx, wh, h0, c0, y, gates, cells, *lengths = (operands[value] for value in step.inputs)
    saved = (y, gates, cells)
    # Rows of x are copied in vectors for the weights' gradient.
    fits = all(operand.is_dense for operand in saved) and (x.strides[2] == 1 or x.shape[2] == 1)
    if not fits or not can_run([dy, dh, dc, x, wx, wh, h0, c0, *saved], lengths):
        return None
    room = rooms(step, operands)
    pack = pack_entry(step, [(wx, room["wx"]), (wh, room["wh"])], turned=False)
    if pack is None:
        return None
    return [
        pack,
        _through_time(step, operands, room, lengths),
        _input_gradient(step, operands, room),
        _weight_gradients(step, operands, room, lengths),
    ]


def _through_time(step: Step, operands: Operands, room: dict[str, Operand], lengths: Sequence[Operand]) -> Entry:
    """The gradients of the gates' sums, dz, and of the first states, which hold the running ones."""
    dy, dh, dc, _, _, _, h0, c0, _, gates, cells, *_ = (operands[value] for value in step.inputs)
    dh0, dc0 = (operands[value] for value in step.results[4:])
    code, sizes = Code("lstm_gradient"), Sizes.of(step)
    words = Words(code)
    s = Sequences(words, step, sizes, lengths)
    begin, end = code.share(s.samples)
    firsts = [s.strided(operand) for operand in (dh, dc, h0, c0)]
    states = [s.dense(operand, s.hidden) for operand in (dh0, dc0, room["h0"], room["c0"])]
    for source, state in zip(firsts, states, strict=True):
        s.copy_states(begin, end, source, state)
    dh_state, dc_state, _, c_first = states
    multiply, packed = words.pointer(product(sizes.hidden)), words.pointer(room["wh"])
    dz = s.dense(room["dz"], s.steps, s.gates)
    known = (s.strided(dy), s.dense(gates, s.steps, s.gates), s.dense(cells, s.steps, s.hidden), c_first)
    count, between = code.sub(end, begin), code.mul(s.steps, s.gates)
    with code.loop(0, s.steps) as undone:
        time = s.time(code.sub(code.sub(s.steps, 1), undone))
        with code.loop(begin, end) as sample:
            _cell_gradient(s, sample, time, known, (dz, dh_state, dc_state))
        a, target = (dz.place(begin, time), between, 1), (dh_state.place(begin), s.hidden)
        # Samples in their padding have dz = 0 and keep what they have.
        call_product(code, multiply, (count, s.hidden, s.gates), a, packed, target, accumulate=int(s.has_lengths))
    reads = [dy, dh, dc, h0, c0, gates, cells, room["wh"], *lengths]
    writes = [room["dz"], room["h0"], room["c0"], dh0, dc0]
    return Entry(
        step,
        code,
        words.arguments,
        reads,
        writes,
        rows=sizes.samples,
        by_row=owned([*reads, *writes], sizes.samples, but=list(room.values())),
        kernel="lstm, back through time",
        cost=sizes.product_cost(sizes.hidden) + 2 * sizes.cell_cost,
    )


def _cell_gradient(
    s: Sequences,
    sample: str,
    time: str,
    known: tuple[Strided, Dense, Dense, Dense],
    results: tuple[Dense, Dense, Dense],
) -> None:
    """dz of one sample at one time; dc goes on to the time before, dh is used up."""
    (dy, gates, cells, c_first), (dz, dh, dc) = known, results
    code = s.code
    earlier, is_first = s.before(time)
    # In the padding cells hold the state, so at a late start too this is the one before.
    place = code.let(f"select i1 {is_first}, ptr {c_first.place(sample)}, ptr {cells.place(sample, earlier)}")
    c_before, c_now = Line(code, place, "float"), cells.line(sample, time)
    gate_lines, dz_lines = gates.lines(4, s.hidden, sample, time), dz.lines(4, s.hidden, sample, time)
    dy_at, dh_line, dc_line = dy.reader(sample, time), dh.line(sample), dc.line(sample)
    read_next = [*gates.lines(4, s.hidden, sample, earlier), cells.line(sample, s.before(earlier)[0])]
    written_next = dz.lines(4, s.hidden, sample, earlier)

    def retreat(index: str, mask: str | None) -> None:
        fetch(read_next, index)
        fetch(written_next, index, to_write=True)
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
            dh_line.store(index, number(code, 0.0), mask)

    def stay(index: str, mask: str | None) -> None:
        for line in dz_lines:
            line.store(index, number(code, 0.0), mask)

    if not s.has_lengths:
        s.each_unit(retreat)
        return
    padding = s.is_padding(sample, time)
    with code.when(padding):
        s.each_unit(stay)
    with code.when(code.let(f"xor i1 {padding}, true")):
        s.each_unit(retreat)


def _input_gradient(step: Step, operands: Operands, room: dict[str, Operand]) -> Entry:
    """dx = dz wx, for all times of a thread's samples at once."""
    dx, sizes = operands[step.results[0]], Sizes.of(step)
    code = Code("lstm_inputs")
    words = Words(code)
    s = Sequences(words, step, sizes, [])
    begin, end = code.share(s.samples)
    dz, target = s.dense(room["dz"], s.steps, s.gates), s.dense(dx, s.steps, s.inputs)
    rows, multiply = code.mul(code.sub(end, begin), s.steps), words.pointer(product(sizes.inputs))
    extents = (rows, s.inputs, s.gates)
    a, c = (dz.place(begin), s.gates, 1), (target.place(begin), s.inputs)
    call_product(code, multiply, extents, a, words.pointer(room["wx"]), c)
    return Entry(
        step,
        code,
        words.arguments,
        reads=[room["dz"], room["wx"]],
        writes=[dx],
        rows=sizes.samples,
        by_row={2},
        kernel="lstm, gradient of the inputs",
        cost=sizes.product_cost(sizes.inputs),
    )


def _weight_gradients(step: Step, operands: Operands, room: dict[str, Operand], lengths: Sequence[Operand]) -> Entry:
    """dwx = dzᵀ x,  dwh = dzᵀ (h before),  db = sums of dz: threads share the rows, samples and times in blocks."""
    x, y = operands[step.inputs[3]], operands[step.inputs[8]]
    dwx, dwh, db = (operands[value] for value in step.results[1:4])
    code, sizes, lanes = Code("lstm_weights"), Sizes.of(step), vector_lanes()
    words = Words(code)
    s = Sequences(words, step, sizes, lengths)
    memory = ThreadMemory(words, room["own"], weight_gradient_parts(sizes))
    dz, h_first = s.dense(room["dz"], s.steps, s.gates), s.dense(room["h0"], s.hidden)
    inputs, outputs = s.strided(x), s.dense(y, s.steps, s.hidden)
    to_inputs, to_hidden, to_bias = (words.pointer(operand) for operand in (dwx, dwh, db))
    by_inputs, by_hidden = words.pointer(product(sizes.inputs)), words.pointer(product(sizes.hidden))
    begin, end = code.share(s.gates, lanes, memory.most)
    rows = code.sub(end, begin)
    fill(code, Line(code, to_bias, "float"), (begin, end), number(code, 0.0))
    # Without rows of its own, a thread has nothing to read either, and perhaps no memory.
    has_rows = code.let(f"icmp sgt i64 {rows}, 0")
    if s.has_lengths:
        with code.when(has_rows):
            fill(code, Line(code, memory["zeros"], "float"), ("0", s.inputs), number(code, 0.0))
    total = code.mul(s.samples, s.steps)
    with code.loop(0, code.let(f"select i1 {has_rows}, i64 {total}, i64 0"), DEPTH) as first:
        depth = code.minimum(code.sub(total, first), DEPTH)
        with code.loop(0, depth) as k:
            sample = code.div(code.add(first, k), s.steps)
            time = code.sub(code.add(first, k), code.mul(sample, s.steps))
            row = inputs.place(sample, time)
            if s.has_lengths:
                row = code.let(f"select i1 {s.is_padding(sample, time)}, ptr {memory['zeros']}, ptr {row}")
            _pack(code, sizes.inputs, s.inputs, row, memory["x"], k, depth)
            earlier, is_first = s.before(time)
            late = s.starts_late(sample, earlier)
            starts = is_first if late is None else code.let(f"or i1 {is_first}, {late}")
            row = code.let(f"select i1 {starts}, ptr {h_first.place(sample)}, ptr {outputs.place(sample, earlier)}")
            _pack(code, sizes.hidden, s.hidden, row, memory["h"], k, depth)
        block = code.at(dz.pointer, code.mul(first, s.gates), "float")
        # Read row by row first: that brings the block into the cache, and the products walk it across the rows.
        _add_sums(s, block, depth, Line(code, memory["sums"], "float"), Line(code, to_bias, "float"), (begin, end))
        a = (code.at(block, begin, "float"), 1, s.gates)
        for multiply, columns, b, target in (
            (by_inputs, s.inputs, memory["x"], to_inputs),
            (by_hidden, s.hidden, memory["h"], to_hidden),
        ):
            c = (code.at(target, code.mul(begin, columns), "float"), columns)
            call_product(code, multiply, (rows, columns, depth), a, b, c, accumulate=first)
    return Entry(
        step,
        code,
        words.arguments,
        reads=[room["dz"], room["h0"], x, y, *lengths],
        writes=[dwx, dwh, db],
        kernel="lstm, gradients of the weights",
        cost=sizes.product_cost(sizes.inputs + sizes.hidden),
        scratch=[memory.room],
    )


def _pack(code: Code, width: int, columns: str, row: str, block: str, k: str, depth: str) -> None:
    vectors = panel_width(width)
    place = code.at(block, code.mul(k, vectors * vector_lanes()), "float")
    pack_row(code, vectors, (0, columns), Line(code, row, "float"), place, depth)


def _add_sums(s: Sequences, block: str, depth: str, sums: Line, target: Line, columns: tuple[str, str]) -> None:
    """Add the sums of a block of rows to the target; a block is summed apart so that long sums stay accurate."""
    fill(s.code, sums, columns, number(s.code, 0.0))
    fold_columns(s.code, SUM, depth, s.gates, Line(s.code, block, "float"), columns, sums)
    each_vector(
        s.code,
        *columns,
        lambda index, mask: target.store(index, target.load(index, mask) + sums.load(index, mask), mask),
    )


KERNELS: dict[str, Maker] = {"lstm": lstm_entries, "lstm_gradient": lstm_gradient_entries}
WORKSPACES = {"lstm": workspace, "lstm_gradient": workspace}
