"""Gradients of a recurrent layer's weights, summed over samples and times.

    dwx = dzᵀ x     dwh = dzᵀ (h before)     db = sums of dz

Samples are cut into slices, each of which is summed by itself, so that a thread reads what it has written: dz and h of
its own samples. What other threads have written comes from their caches, line by line. The slices' sums are added in a
second kernel, always in the same order. Slices are a fact of the machine and of the layer; where there are more threads
than slices, several share the rows of one, which changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.combiners import SUM, fill, reduce_columns
from mlcompute.devices.cpu.codegen.loops import Line, splat_constant, vector_loop
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    LINE,
    Ahead,
    begin_fetching,
    call_packed_gemm,
    pack_row,
    packed_gemm,
    panel_width,
)
from mlcompute.devices.cpu.kernels.recurrent_sequences import (
    Recurrence,
    Sequences,
    fetched_lines,
    slice_floats,
    weight_gradient_parts,
    weight_gradient_slices,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand

Named = dict[str, Operand]


def weight_gradient_entries(
    r: Recurrence, named: Named, buffers: Named, lengths: Sequence[Operand], threads: int
) -> list[Entry]:
    """The sums of every slice, and where there are several, their sum."""
    entries = [_sums_of_slices(r, named, buffers, lengths, threads)]
    if weight_gradient_slices(r) > 1:
        entries.append(_sum_of_slices(r, named, buffers))
    return entries


def _sums_of_slices(r: Recurrence, named: Named, buffers: Named, lengths: Sequence[Operand], threads: int) -> Entry:
    """Threads share the slices, and their rows; samples and times follow each other in blocks."""
    x, y, dwx, dwh, db = (named[name] for name in ("x", "y", "dwx", "dwh", "db"))
    code, count = Code("recurrent_weights"), weight_gradient_slices(r)
    args = KernelArguments(code)
    s = Sequences(args, r, lengths)
    memory = ThreadWorkspace(args, buffers.get("own"), weight_gradient_parts(r))
    # Samples and times one after the other, as they lie.
    dz, outputs = s.dense(buffers["dz"], s.gates), s.dense(y, s.hidden)
    inputs, h_first = s.strided(x), s.dense(buffers["h0"], s.hidden)
    firsts = [args.pointer(operand) for operand in (dwx, dwh, db)]
    # Of one slice alone there are no others, and the address of the first stands in.
    others, sizes = args.pointer(buffers.get("slices", dwx)), args.numbers([dwx.size, dwh.size])
    by_inputs, by_hidden = (args.pointer(packed_gemm(width, fetched=1)) for width in (r.inputs, r.hidden))
    # Of the next block dz is fetched by one product, and y by the other.
    sharing = max(1, threads // count)
    rate_dz = args.number(fetched_lines(r.hidden, DEPTH, DEPTH / LINE))
    rate_y = args.number(fetched_lines(r.inputs, DEPTH, DEPTH * r.hidden / LINE * sharing / r.gates))
    place = code.variable("[2 x i64]", "zeroinitializer")
    slices, between = args.numbers([count, slice_floats(r)])
    # So many threads share the rows of a slice that all have the same to do.
    working = code.minimum("%threads", memory.max_threads)
    divides = code.let(f"icmp eq i64 {code.rem(working, slices)}, 0")
    parts = code.let(f"select i1 {divides}, i64 {code.div(working, slices)}, i64 {working}")
    begin, end = code.share(code.mul(slices, parts), 1, memory.max_threads)
    if s.has_lengths:
        # Without work of its own, a thread has perhaps no memory.
        with code.when(code.let(f"icmp slt i64 {begin}, {end}")):
            fill(code, Line(code, memory["zeros"], "float"), ("0", s.inputs), splat_constant(code, 0.0))
    vectors = code.div(code.add(s.gates, vector_lanes() - 1), vector_lanes())
    with code.loop(begin, end) as unit:
        number, part = code.div(unit, parts), code.rem(unit, parts)
        low, high = (
            code.minimum(code.mul(code.div(code.mul(vectors, edge), parts), vector_lanes()), s.gates)
            for edge in (part, code.add(part, 1))
        )
        start, stop = (
            code.mul(code.div(code.mul(s.samples, edge), slices), s.steps) for edge in (number, code.add(number, 1))
        )
        is_first = code.let(f"icmp eq i64 {number}, 0")
        other, targets = code.at(others, code.mul(code.sub(number, 1), between), "float"), []
        for target, size in zip(firsts, (*sizes, "0"), strict=True):
            targets.append(code.let(f"select i1 {is_first}, ptr {target}, ptr {other}"))
            other = code.at(other, size, "float")
        to_inputs, to_hidden, to_bias = targets
        rows = code.sub(high, low)
        fill(code, Line(code, to_bias, "float"), (low, high), splat_constant(code, 0.0))
        # Of a thread's rows of dzᵀ, those that the inputs and those that the hidden state took part in.
        of_inputs, of_hidden = (low, high), (low, high)
        if r.from_inputs < r.gates:
            of_inputs = (code.minimum(low, s.from_inputs), code.minimum(high, s.from_inputs))
        if r.first_from_hidden:
            of_hidden = (_maximum(code, low, s.first_from_hidden), _maximum(code, high, s.first_from_hidden))
        # Without rows there is nothing to read either.
        has_rows = code.let(f"icmp sgt i64 {rows}, 0")
        with code.loop(start, code.let(f"select i1 {has_rows}, i64 {stop}, i64 {start}"), DEPTH) as first:
            depth = code.minimum(code.sub(stop, first), DEPTH)
            with code.loop(0, depth) as k:
                sample = code.div(code.add(first, k), s.steps)
                time = code.sub(code.add(first, k), code.mul(sample, s.steps))
                row = inputs.address(sample, time)
                if s.has_lengths:
                    row = code.let(f"select i1 {s.is_padding(sample, time)}, ptr {memory['zeros']}, ptr {row}")
                _pack(code, r.inputs, s.inputs, row, memory["x"], k, depth)
                earlier, is_earliest = s.before(time)
                starts = s.starts(sample, earlier, is_earliest)
                before = outputs.address(code.add(code.mul(sample, s.steps), earlier))
                row = code.let(f"select i1 {starts}, ptr {h_first.address(sample)}, ptr {before}")
                _pack(code, r.hidden, s.hidden, row, memory["h"], k, depth)
            block = dz.address(first)
            # Read row by row first: that brings the block into the cache, and the matmuls read it across the rows.
            _add_sums(s, block, depth, Line(code, memory["sums"], "float"), Line(code, to_bias, "float"), (low, high))
            after = code.add(first, depth)
            rows_after, width = code.minimum(code.sub(stop, after), DEPTH), code.mul(depth, s.hidden)
            next_dz, next_y = code.at(dz.address(after), low, "float"), outputs.address(after)
            fetch_dz = Ahead([next_dz], rows, s.gates, rate_dz, place, code.mul(rows_after, s.gates))
            fetch_y = Ahead([next_y], width, width, rate_y, place, code.mul(rows_after, s.hidden))
            for multiply, columns, b, target, (top, bottom), origin, ahead in (
                (by_inputs, s.inputs, memory["x"], to_inputs, of_inputs, "0", fetch_y),
                (by_hidden, s.hidden, memory["h"], to_hidden, of_hidden, s.first_from_hidden, fetch_dz),
            ):
                begin_fetching(code, place)
                a = (code.at(block, top, "float"), 1, s.gates)
                c = (code.at(target, code.mul(code.sub(top, origin), columns), "float"), columns)
                extents = (code.sub(bottom, top), columns, depth)
                adds = code.sub(first, start)
                call_packed_gemm(code, multiply, extents, a, b, c, accumulate=adds, ahead=ahead)
    return Entry(
        r.step,
        code,
        args.values,
        reads=[buffers["dz"], buffers["h0"], x, y, *lengths],
        writes=[dwx, dwh, db, *([buffers["slices"]] if count > 1 else [])],
        kernel=r.kernel("gradients of the weights"),
        cost=r.product_cost(r.inputs + r.hidden),
        scratch=memory.scratch,
    )


def _sum_of_slices(r: Recurrence, named: Named, buffers: Named) -> Entry:
    """The sums of the second slice, then of the third, and so on are added to those of the first."""
    code, count = Code("recurrent_sum_slices"), weight_gradient_slices(r)
    args = KernelArguments(code)
    results = [named[name] for name in ("dwx", "dwh", "db")]
    others, between, further = args.pointer(buffers["slices"]), args.number(slice_floats(r)), args.number(count - 1)
    offset: str | int = 0
    for result in results:
        size, total = args.number(result.size), Line(code, args.pointer(result), "float")
        mine = code.share(size, vector_lanes())
        with code.loop(0, further) as number:
            part = Line(code, code.at(others, code.add(offset, code.mul(between, number)), "float"), "float")
            _add_line(code, part, total, mine)
        offset = code.add(offset, size)
    floats = sum(result.size for result in results)
    return Entry(
        r.step,
        code,
        args.values,
        reads=[buffers["slices"], *results],
        writes=results,
        kernel=r.kernel("sum of slices"),
        cost=0.15 * count * floats,
    )


def _maximum(code: Code, a: str, b: str) -> str:
    return code.let(f"select i1 {code.let(f'icmp sgt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def _pack(code: Code, width: int, columns: str, row: str, block: str, k: str, depth: str) -> None:
    vectors = panel_width(width)
    address = code.at(block, code.mul(k, vectors * vector_lanes()), "float")
    pack_row(code, vectors, (0, columns), Line(code, row, "float"), address, depth)


def _add_sums(s: Sequences, block: str, depth: str, sums: Line, target: Line, columns: tuple[str, str]) -> None:
    """Add the sums of a block of rows to the target; a block is summed apart so that long sums stay accurate."""
    fill(s.code, sums, columns, splat_constant(s.code, 0.0))
    reduce_columns(s.code, SUM, depth, s.gates, Line(s.code, block, "float"), columns, sums)
    _add_line(s.code, sums, target, columns)


def _add_line(code: Code, line: Line, target: Line, bounds: tuple[str, str]) -> None:
    """target += line, from one element to another."""
    vector_loop(
        code,
        *bounds,
        lambda index, mask: target.store(index, target.load(index, mask) + line.load(index, mask), mask),
    )
