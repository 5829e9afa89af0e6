"""Depthwise convolutions and their gradients, a channel to a channel: loops whose vectors are neighbouring channels.

    forward, dx   filters to (tap, channel) | per pixel: note the taps inside the image, then sum over them
    dw            per slice of the pixels: add dy times the pixel under every tap | sum of slices

A bar is a barrier. Images may be bfloat16; filters, their gradients and sums are floats. Where there is no library
these do what a matmul would do badly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, aligned, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import Line, Variable, add_line, fill_line, splat_constant, vector_loop
from mlcompute.devices.cpu.gemm.packed_gemm import DEPTH
from mlcompute.devices.cpu.kernels.convolution_gemm import Places
from mlcompute.devices.cpu.kernels.convolution_windows import BLOCK, Windows
from mlcompute.devices.cpu.kernels.slice_sums import sum_of_slices_entry
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: Nanoseconds per multiplication and addition.
_NS_PER_FLOP = 1 / 12.0


def is_depthwise(windows: Windows) -> bool:
    """Has every group one channel, of the source and of the target?"""
    return windows.groups > 1 and windows.depth == windows.columns == 1


# The convolution and the gradient of its input -----------------------------------------------------------------------


def _filter_floats(windows: Windows) -> int:
    # With strides and borders beyond a small image no tap may lie on it: the gradient of that image is 0.
    return aligned(max(1, len(windows.taps)) * windows.groups)


def _parts(windows: Windows) -> dict[str, int]:
    # Two words of 64 bits for every tap.
    return {"taps": 4 * len(windows.taps)}


def image_workspace(windows: Windows) -> int:
    """Bytes for the filters, and for every thread's list of taps."""
    return 4 * _filter_floats(windows) + threads_bytes(_parts(windows))


def image_entries(
    step: Step, operands: Operands, windows: Windows, image: Operand, weights: Operand, result: Operand
) -> list[Entry]:
    """y, or dx; operands are dense."""
    nbytes = 4 * _filter_floats(windows)
    filters = operands.workspace(step, 0, nbytes)
    rest = operands.workspace(step, nbytes, image_workspace(windows) - nbytes)
    return [
        _transpose_entry(step, windows, weights, filters),
        _multiply_entry(step, windows, image, filters, result, rest),
    ]


def _transpose_entry(step: Step, windows: Windows, weights: Operand, filters: Operand) -> Entry:
    """(channel, tap) to (tap in the order of the tables, channel)."""
    code = Code("depthwise_filters")
    args = KernelArguments(code)
    order = np.array(windows.taps, np.int64)
    taps, filter_taps, channels = args.numbers([len(windows.taps), windows.filter_taps, windows.groups])
    source, target, taps_at = args.pointer(weights), args.pointer(filters), args.pointer(address_of(order))
    begin, end = code.share(taps)
    with code.loop(begin, end) as number, code.loop(0, channels) as channel:
        tap = code.load(code.at(taps_at, number, "i64"), "i64")
        value = code.load(code.at(source, code.add(code.mul(channel, filter_taps), tap), "float"), "float")
        code.store(code.at(target, code.add(code.mul(number, channels), channel), "float"), "float", value)
    cost = 1.0 * len(windows.taps) * windows.groups
    return Entry(
        step, code, args.values, [weights], [filters], kernel="transpose filters", cost=cost, keeps_alive=[order]
    )  # fmt: skip


def _multiply_entry(
    step: Step, windows: Windows, image: Operand, filters: Operand, result: Operand, rest: Operand
) -> Entry:
    code = Code("depthwise")
    args = KernelArguments(code)
    places = Places(args, windows, BLOCK, 1)  # all channels together
    memory = ThreadWorkspace(args, rest, _parts(windows))
    source, weights, target = (args.pointer(operand) for operand in (image, filters, result))
    with places.blocks(memory.max_threads) as (_, count, first_chunk, last_chunk), code.loop(0, count) as index:
        taps = _taps_inside(places, index, first_chunk, last_chunk, memory["taps"])
        to = _line(code, target, places.target_of(index), result)
        _sum_over(places, taps, memory["taps"], (source, MEMORY_TYPES[image.dtype]), weights, to)
    return Entry(
        step,
        code,
        args.values,
        reads=[image, filters],
        writes=[result],
        scratch=memory.scratch,
        kernel="depthwise",
        cost=windows.flops * _NS_PER_FLOP,
        in_pieces=True,
        keeps_alive=[places.tables],
    )


def _taps_inside(places: Places, index: str, first_chunk: str, last_chunk: str, words: str) -> str:
    """Note (element of the source, element of the filters) for every tap inside the image; how many there are."""
    code = places.code
    found = code.variable("i64", "0")
    with code.loop(first_chunk, last_chunk) as number:
        first, last, start, _ = places.chunk_row(number)
        with code.loop(first, last) as run:
            *offsets, _, position = places.run_row(run)
            at, low, high = places.under(index, offsets, 1)
            with code.when(code.let(f"icmp slt i64 {low}, {high}")):
                word = code.at(words, code.mul(code.get("i64", found), 2), "i64")
                code.store(word, "i64", at)
                filter_at = code.mul(code.add(start, position), places.groups)
                code.store(code.at(word, 1, "i64"), "i64", filter_at)
                code.set("i64", found, code.add(code.get("i64", found), 1))
    return code.get("i64", found)


def _line(code: Code, pointer: str, start: str, image: Operand) -> Line:
    """Elements of an image from one on."""
    element = MEMORY_TYPES[image.dtype]
    return Line(code, code.at(pointer, start, element), element)


def _sum_over(places: Places, taps: str, words: str, source: tuple[str, str], weights: str, to: Line) -> None:
    """to = Σ pixel times filter, over the taps that were noted. `source` is a pointer and its elements' type."""
    code = places.code

    def channels(channel: str, mask: str | None) -> None:
        total = Variable(splat_constant(code, 0.0))
        with code.loop(0, taps) as tap:
            word = code.at(words, code.mul(tap, 2), "i64")
            pixel, weight = (
                Line(code, code.at(pointer, code.load(code.at(word, number, "i64"), "i64"), element), element)
                for number, (pointer, element) in enumerate((source, (weights, "float")))
            )
            product = pixel.load(channel, mask).intrinsic("fmuladd", weight.load(channel, mask), total.get())
            total.set(product)
        to.store(channel, total.get(), mask)

    vector_loop(code, 0, places.groups, channels)


# The gradient of the filters -----------------------------------------------------------------------------------------


def _slices(windows: Windows) -> int:
    """Parts of the pixels with sums of their own: a fact of the machine, not of the number of threads."""
    return max(1, min(machine_slices(), -(-windows.pixels // DEPTH)))


def gradient_workspace(windows: Windows) -> int:
    """Bytes for the sums of all slices, and of a block of pixels of each."""
    return 8 * _slices(windows) * _filter_floats(windows)


def gradient_entries(
    step: Step, operands: Operands, windows: Windows, images: Sequence[Operand], result: Operand
) -> list[Entry]:
    """dw; operands are dense."""
    slices, floats = _slices(windows), _filter_floats(windows)
    sums = operands.workspace(step, 0, 4 * slices * floats)
    blocks = operands.workspace(step, 4 * slices * floats, 4 * slices * floats)
    code = Code("depthwise_filter_gradient")
    args = KernelArguments(code)
    places = Places(args, windows, DEPTH, 1)
    count, pixels, floats_at, elements = args.numbers(
        [slices, windows.pixels, floats, len(windows.taps) * windows.groups]
    )
    x, dy, target, scratch = (args.pointer(operand) for operand in (*images, sums, blocks))
    row, runs = places.class_row(0), args.number(len(windows.runs))
    begin, end = code.share(count)
    with code.loop(begin, end) as number:
        first, last = (code.div(code.mul(pixels, edge), count) for edge in (number, code.add(number, 1)))
        total, block = (code.at(at, code.mul(number, floats_at), "float") for at in (target, scratch))
        fill_line(code, Line(code, total, "float"), 0, elements)
        with code.loop(first, last, DEPTH) as start:
            many = code.minimum(code.sub(last, start), DEPTH)
            places.find(start, many, row)
            fill_line(code, Line(code, block, "float"), 0, elements)
            with code.loop(0, many) as index:
                gradient = _line(code, dy, places.target_of(index), images[1])
                with code.loop(0, runs) as run:
                    *offsets, _, _ = places.run_row(run)
                    at, low, high = places.under(index, offsets, 1)
                    with code.when(code.let(f"icmp slt i64 {low}, {high}")):
                        pixel = _line(code, x, at, images[0])
                        own = Line(code, code.at(block, code.mul(run, places.groups), "float"), "float")
                        _add_products(places, gradient, pixel, own)
            add_line(code, Line(code, block, "float"), Line(code, total, "float"), 0, elements)
    main = Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[sums],
        scratch=[blocks],
        kernel=f"depthwise x{slices}",
        cost=windows.flops * _NS_PER_FLOP,
        keeps_alive=[places.tables],
    )
    shape, strides = (len(windows.taps), windows.groups), (1, len(windows.taps))
    return [main, sum_of_slices_entry(step, sums, result, (slices, floats), shape, strides)]


def _add_products(places: Places, gradient: Line, pixel: Line, sums: Line) -> None:
    def body(channel: str, mask: str | None) -> None:
        old = sums.load(channel, mask)
        sums.store(channel, gradient.load(channel, mask).intrinsic("fmuladd", pixel.load(channel, mask), old), mask)

    vector_loop(places.code, 0, places.groups, body)
