"""Convolutions and their gradients by our own gemm, of any kind: what computes them where there is no library.

    forward, dx   pack filters | per block of pixels and chunk of taps: copy the pixels under them, multiply
    dw            per slice of the pixels and chunk of taps: copy, multiply with dy, add | sum of slices

A bar is a barrier. Copies of a block stay in the thread's cache, and never of more than one block exist. Filters of one
input and one output channel per group are in `convolution_depthwise`. Sums run in the same order on any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, aligned, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, copy_line, fill_line, tail_mask
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    pack_rows,
    packed_gemm,
    padded,
    panel_width,
)
from mlcompute.devices.cpu.kernels.convolution_windows import BLOCK, Windows
from mlcompute.devices.cpu.kernels.slice_sums import sum_of_slices_entry
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Array, Step

#: Bytes for the sums of all slices of the gradient of filters; a single one may take more.
_SUMS = 1 << 20


class Places:
    """Inside a kernel: the tables of windows, and where the pixels of a block lie and begin."""

    def __init__(self, args: KernelArguments, windows: Windows, block: int, groups: int) -> None:
        """`block`: pixels that are noted at a time; `groups`: those that are computed one by one."""
        self.code = code = args.code
        self.rank = len(windows.source)
        self.tables: list[Array] = [windows.class_table(groups), windows.chunk_table(), windows.run_table()]
        self._classes, self._chunks, self._runs = (args.pointer(address_of(table)) for table in self.tables)
        self._widths = [table.shape[1] for table in self.tables]
        self._class_count, self._units = args.numbers([len(windows.classes), int(self.tables[0][-1, 1])])
        self.source, self.target = args.numbers(windows.source), args.numbers(windows.target)
        self._source_steps, self._target_steps = args.numbers(windows.source_steps), args.numbers(windows.target_steps)
        self.depth, self.groups = args.number(windows.depth), args.number(windows.groups)
        #: Channels of all groups.
        self.source_channels = args.number(windows.depth * windows.groups)
        self.target_channels = args.number(windows.columns * windows.groups)
        kinds = 2 + self.rank
        slots = [code.variable(f"[{block} x i64]", "zeroinitializer") for _ in range(kinds)]
        self._samples, self._targets, self._starts = slots[0], slots[1], slots[2:]

    def class_row(self, number: str | int) -> list[str]:
        return self._row(self._classes, self._widths[0], number)

    def chunk_row(self, number: str | int) -> list[str]:
        return self._row(self._chunks, self._widths[1], number)

    def run_row(self, number: str | int) -> list[str]:
        return self._row(self._runs, self._widths[2], number)

    def _row(self, table: str, width: int, number: str | int) -> list[str]:
        first = self.code.at(table, self.code.mul(number, width), "i64")
        return [self.code.load(self.code.at(first, index, "i64"), "i64") for index in range(width)]

    def find(self, first: str, count: str, row: Sequence[str]) -> None:
        """Note where `count` pixels of a class (its row of the table) lie, from the `first` on."""
        code, rank = self.code, self.rank
        remainders, counts = row[6 : 6 + rank], row[6 + rank :]
        with code.loop(0, count) as index:
            rest, places = code.add(first, index), []
            for extent in reversed(counts):
                places.append(code.rem(rest, extent))
                rest = code.div(rest, extent)
            at, sample = rest, rest
            for extent in self.source:
                sample = code.mul(sample, extent)
            for axis, place in enumerate(reversed(places)):
                moved = code.add(remainders[axis], code.mul(place, self._target_steps[axis]))
                at = code.add(code.mul(at, self.target[axis]), moved)
                self._note(self._starts[axis], index, code.mul(place, self._source_steps[axis]))
            self._note(self._samples, index, sample)
            self._note(self._targets, index, code.mul(at, self.target_channels))

    @contextlib.contextmanager
    def blocks(self, max_threads: str) -> Iterator[tuple[str, str, str, str]]:
        """A thread's blocks of pixels, noted: group, number of pixels, first and last chunk of the taps they see."""
        code = self.code
        begin, end = code.share(self._units, 1, max_threads, in_pieces=True)
        with code.loop(0, self._class_count) as number:
            row = self.class_row(number)
            first_unit, last_unit, blocks, pixels, first_chunk, last_chunk = row[:6]
            is_later = code.let(f"icmp sgt i64 {first_unit}, {begin}")
            first = code.let(f"select i1 {is_later}, i64 {first_unit}, i64 {begin}")
            with code.loop(first, code.minimum(last_unit, end)) as unit:
                local = code.sub(unit, first_unit)
                group, start = code.div(local, blocks), code.mul(code.rem(local, blocks), BLOCK)
                count = code.minimum(code.sub(pixels, start), BLOCK)
                self.find(start, count, row)
                yield group, count, first_chunk, last_chunk

    def _note(self, slot: str, index: str, value: str) -> None:
        self.code.store(self.code.at(slot, index, "i64"), "i64", value)

    def target_of(self, index: str) -> str:
        """The first element of a pixel in the target."""
        return self.code.load(self.code.at(self._targets, index, "i64"), "i64")

    def under(self, index: str, offsets: Sequence[str], length: str | int) -> tuple[str, str, str]:
        """Of a run seen from a pixel: the element of the source where it begins, and which of its taps lie inside."""
        code = self.code
        at, inside = code.load(code.at(self._samples, index, "i64"), "i64"), "true"
        places = [
            code.add(code.load(code.at(start, index, "i64"), "i64"), offset)
            for start, offset in zip(self._starts, offsets, strict=True)
        ]
        for axis, place in enumerate(places[:-1]):
            # Unsigned: a row before the first is a very large number.
            exists = code.let(f"icmp ult i64 {place}, {self.source[axis]}")
            inside = code.let(f"and i1 {inside}, {exists}")
        offset = "0"
        for place, extent in zip(places, self.source, strict=True):
            offset = code.add(code.mul(offset, extent), place)
        low = self._clamped(code.sub(0, places[-1]), length)
        high = self._clamped(code.sub(self.source[-1], places[-1]), length)
        low, high = (code.let(f"select i1 {inside}, i64 {bound}, i64 0") for bound in (low, high))
        return code.mul(code.add(at, offset), self.source_channels), low, high

    def _clamped(self, number: str, most: str | int) -> str:
        code = self.code
        positive = code.let(f"select i1 {code.let(f'icmp slt i64 {number}, 0')}, i64 0, i64 {number}")
        return code.minimum(positive, most)

    def copy(self, source: str, count: str, chunk: Sequence[str], target: str) -> None:
        """The pixels under a chunk's taps, a row of its elements for each of `count` pixels; 0 outside the image."""
        code = self.code
        with code.loop(chunk[0], chunk[1]) as number:
            *offsets, length, position = self.run_row(number)
            elements = code.mul(length, self.depth)
            with code.loop(0, count) as index:
                at, low, high = self.under(index, offsets, length)
                begin, end = code.mul(low, self.depth), code.mul(high, self.depth)
                pixels = Line(code, code.at(source, at, "float"), "float")
                row = code.at(target, code.add(code.mul(index, chunk[3]), position), "float")
                line = Line(code, row, "float")
                fill_line(code, line, 0, begin)
                copy_line(code, pixels, line, begin, end)
                fill_line(code, line, end, elements)


# The convolution and the gradient of its input -----------------------------------------------------------------------


def _filter_floats(windows: Windows) -> int:
    """Floats of the packed filters of one group."""
    # With strides and borders beyond a small image no tap may lie on it: the gradient of that image is 0.
    return padded(windows.columns) * max(1, windows.elements)


def _parts(windows: Windows) -> dict[str, int]:
    return {"pixels": BLOCK * windows.widest, "sums": BLOCK * windows.columns}


def image_workspace(windows: Windows) -> int:
    """Bytes for the packed filters, and for every thread's block."""
    return 4 * aligned(windows.groups * _filter_floats(windows)) + threads_bytes(_parts(windows))


def image_entries(
    step: Step, operands: Operands, windows: Windows, image: Operand, weights: Operand, result: Operand
) -> list[Entry]:
    """y, or dx; operands are dense."""
    filters = 4 * aligned(windows.groups * _filter_floats(windows))
    packed = operands.workspace(step, 0, filters)
    rest = operands.workspace(step, filters, image_workspace(windows) - filters)
    return [
        _pack_entry(step, windows, weights, packed),
        _multiply_entry(step, windows, image, packed, result, rest),
    ]


def _pack_entry(step: Step, windows: Windows, weights: Operand, packed: Operand) -> Entry:
    """Filters (outputs, inputs, taps) as panels: (group, panel, tap and channel of the source, column)."""
    code, lanes = Code("convolution_pack"), vector_lanes()
    args = KernelArguments(code)
    order = np.array(windows.taps, np.int64)
    taps, panel = windows.filter_taps, panel_width(windows.columns) * vector_lanes()
    per_channel = (windows.inputs * taps, taps) if windows.is_gradient else (taps, windows.inputs * taps)
    channel_stride, column_stride = args.numbers(per_channel)
    depth, columns, elements = args.numbers([windows.depth, windows.columns, windows.elements])
    panels, per_group = args.numbers([padded(windows.columns) // panel, windows.outputs * windows.inputs * taps])
    source, target, taps_at = args.pointer(weights), args.pointer(packed), args.pointer(address_of(order))
    begin, end = code.share(args.number(windows.groups * (padded(windows.columns) // panel) * windows.elements))
    with code.loop(begin, end) as unit:
        element, line = code.rem(unit, elements), code.div(unit, elements)
        column, group = code.mul(code.rem(line, panels), panel), code.div(line, panels)
        tap = code.load(code.at(taps_at, code.div(element, depth), "i64"), "i64")
        at = code.add(code.mul(group, per_group), code.add(tap, code.mul(code.rem(element, depth), channel_stride)))
        first = code.at(source, code.add(at, code.mul(column, column_stride)), "float")
        row = Line(code, first, "float", column_stride)
        to = Line(code, code.at(target, code.mul(unit, panel), "float"), "float")
        for vector in range(0, panel, lanes):
            mask = tail_mask(code, code.sub(code.sub(columns, column), vector), lanes)
            to.store(vector, row.load(vector, mask))
    kernel, cost = "pack filters", 1.0 * windows.groups * _filter_floats(windows)
    return Entry(
        step, code, args.values, [weights], [packed], kernel=kernel, cost=cost, keeps_alive=[order]
    )  # fmt: skip


def _multiply_entry(
    step: Step, windows: Windows, image: Operand, packed: Operand, result: Operand, rest: Operand
) -> Entry:
    code = Code("convolution_gemm")
    args = KernelArguments(code)
    places = Places(args, windows, BLOCK, windows.groups)
    memory = ThreadWorkspace(args, rest, _parts(windows))
    panel = panel_width(windows.columns) * vector_lanes()
    columns, elements, per_group = args.numbers([windows.columns, windows.elements, _filter_floats(windows)])
    source, filters, target = (args.pointer(operand) for operand in (image, packed, result))
    multiply = args.pointer(packed_gemm(windows.columns))
    with places.blocks(memory.max_threads) as (group, count, first_chunk, last_chunk):
        with code.when(code.let(f"icmp eq i64 {first_chunk}, {last_chunk}")):
            fill_line(code, Line(code, memory["sums"], "float"), 0, code.mul(count, columns))
        from_group = code.at(source, code.mul(group, places.depth), "float")
        with code.loop(first_chunk, last_chunk) as chunk_number:
            chunk = places.chunk_row(chunk_number)
            places.copy(from_group, count, chunk, memory["pixels"])
            at = code.add(code.mul(group, per_group), code.mul(chunk[2], panel))
            call_packed_gemm(
                code, multiply, (count, columns, chunk[3]), (memory["pixels"], chunk[3], 1),
                code.at(filters, at, "float"), (memory["sums"], columns),
                accumulate=code.sub(chunk_number, first_chunk), packed_depth=elements,
            )  # fmt: skip
        to_group = code.at(target, code.mul(group, columns), "float")
        with code.loop(0, count) as index:
            sums = Line(code, code.at(memory["sums"], code.mul(index, columns), "float"), "float")
            to = Line(code, code.at(to_group, places.target_of(index), "float"), "float")
            copy_line(code, sums, to, 0, columns)
    return Entry(
        step,
        code,
        args.values,
        reads=[image, packed],
        writes=[result],
        scratch=memory.scratch,
        kernel="gemm of windows",
        cost=windows.flops / FLOPS_PER_NS + 20.0 * windows.pixels,
        in_pieces=True,
        keeps_alive=[places.tables],
    )


# The gradient of the filters -----------------------------------------------------------------------------------------


def _slices(windows: Windows) -> int:
    """Parts of the pixels with sums of their own: a fact of the machine, not of the number of threads."""
    units = windows.groups * len(windows.chunks)
    most = _SUMS // max(1, 4 * windows.elements * windows.outputs * windows.groups)
    wanted = -(-2 * machine_slices() // units)
    return max(1, min(wanted, most, -(-windows.pixels // DEPTH)))


def _gradient_parts(windows: Windows) -> dict[str, int]:
    return {"pixels": DEPTH * windows.widest, "dy": DEPTH * padded(windows.outputs)}


def _gradient_floats(windows: Windows) -> int:
    return aligned(windows.elements * windows.outputs * windows.groups)


def gradient_workspace(windows: Windows) -> int:
    """Bytes for the sums of all slices, and for every thread's block."""
    return 4 * _slices(windows) * _gradient_floats(windows) + threads_bytes(_gradient_parts(windows))


def gradient_entries(
    step: Step, operands: Operands, windows: Windows, images: Sequence[Operand], result: Operand
) -> list[Entry]:
    """dw; operands are dense."""
    nbytes = 4 * _slices(windows) * _gradient_floats(windows)
    sums = operands.workspace(step, 0, nbytes)
    rest = operands.workspace(step, nbytes, gradient_workspace(windows) - nbytes)
    inputs, outputs, taps = windows.inputs, windows.outputs, len(windows.taps)
    shape, strides = (windows.groups, taps, inputs, outputs), (outputs * inputs * taps, 1, taps, inputs * taps)
    return [
        _sums_entry(step, windows, images, sums, rest),
        sum_of_slices_entry(step, sums, result, (_slices(windows), _gradient_floats(windows)), shape, strides),
    ]


def _sums_entry(step: Step, windows: Windows, images: Sequence[Operand], sums: Operand, rest: Operand) -> Entry:
    """For every slice and group: (tap and input, output)."""
    code = Code("convolution_gemm_filters")
    args = KernelArguments(code)
    places = Places(args, windows, DEPTH, windows.groups)
    memory = ThreadWorkspace(args, rest, _gradient_parts(windows))
    outputs, elements, per_slice = args.numbers([windows.outputs, windows.elements, _gradient_floats(windows)])
    slices, chunks, pixels = args.numbers([_slices(windows), len(windows.chunks), windows.pixels])
    x, dy, target = (args.pointer(operand) for operand in (*images, sums))
    multiply, pack = args.pointer(packed_gemm(windows.outputs)), args.pointer(pack_rows(windows.outputs))
    row = places.class_row(0)
    begin, end = code.share(
        args.number(_slices(windows) * windows.groups * len(windows.chunks)), 1, memory.max_threads, in_pieces=True
    )  # fmt: skip
    with code.loop(begin, end) as unit:
        chunk, line = places.chunk_row(code.rem(unit, chunks)), code.div(unit, chunks)
        group, number = code.rem(line, places.groups), code.div(line, places.groups)
        first, last = (code.div(code.mul(pixels, edge), slices) for edge in (number, code.add(number, 1)))
        at = code.add(code.mul(code.mul(group, elements), outputs), code.mul(chunk[2], outputs))
        to = code.at(target, code.add(code.mul(number, per_slice), at), "float")
        with code.loop(first, last, DEPTH) as start:
            count = code.minimum(code.sub(last, start), DEPTH)
            places.find(start, count, row)
            places.copy(code.at(x, code.mul(group, places.depth), "float"), count, chunk, memory["pixels"])
            here = code.add(code.mul(start, places.target_channels), code.mul(group, outputs))
            call_pack(
                code, pack, (0, outputs), count, (code.at(dy, here, "float"), places.target_channels), memory["dy"]
            )  # fmt: skip
            call_packed_gemm(
                code, multiply, (chunk[3], outputs, count), (memory["pixels"], 1, chunk[3]), memory["dy"],
                (to, outputs), accumulate=code.sub(start, first),
            )  # fmt: skip
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[sums],
        scratch=memory.scratch,
        kernel=f"gemm of windows x{_slices(windows)}",
        cost=windows.flops / FLOPS_PER_NS + 20.0 * windows.pixels,
        in_pieces=True,
        keeps_alive=[places.tables],
    )
