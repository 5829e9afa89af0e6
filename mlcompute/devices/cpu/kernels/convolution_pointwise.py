"""The gradient of the filters of a pointwise convolution (1x1) with stride one: a product over all pixels.

    x (pixels, c)     dy (pixels, o)     ->     dw (o, c) = dyᵀ x, or (xᵀ dy)ᵀ where that fills more of the vectors

    per slice of the pixels, and some of them at a time: pack x or dy, multiply, add | sum of slices

A bar is a barrier. Every slice reads its pixels once, from the first to the last, and its sums stay in the cache: the
images, which often come from memory, are most of what is read. Nothing is packed where rows are one panel, unless they
are bfloat16: what is multiplied is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mlcompute.devices.cpu.codegen.addressing import ThreadWorkspace, thread_floats, threads_bytes
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code, vector_lanes
from mlcompute.devices.cpu.codegen.loops import Line, copy_line
from mlcompute.devices.cpu.gemm.packed_gemm import (
    DEPTH,
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    in_wide_panels,
    pack_rows,
    packed_gemm,
    padded,
    panel_width,
)
from mlcompute.devices.cpu.kernels.slice_sums import sum_of_slices_entry
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.images import convolution_shapes
from mlcompute.ops.op import FLOAT32, Step

#: Bytes of the sums of a slice, which stay in the cache, and of all slices.
_SUMS, _ALL_SUMS = 1 << 18, 1 << 20
#: Pixels that a slice should have at least.
_LEAST_PIXELS = 64


class Pointwise(NamedTuple):
    """Extents of the product: (rows, pixels) times (pixels, columns).

    rotated   are the outputs its columns, and not the inputs?
    types     of the images, rows then columns, as LLVM calls them
    """

    pixels: int
    rows: int
    columns: int
    rotated: bool
    types: tuple[str, str]

    @property
    def packed_columns(self) -> int:
        """Columns, and a few more where panels would be a vector each."""
        is_narrow = self.columns <= vector_lanes() or panel_width(self.columns) > 1
        return self.columns if is_narrow else in_wide_panels(self.columns)

    @property
    def is_packed(self) -> bool:
        """Are columns one panel as they lie?"""
        return self.types[1] == "float" and panel_width(self.packed_columns) * vector_lanes() == self.columns

    @property
    def slice_stride(self) -> int:
        """Floats from the sums of a slice to those of the next: threads do not write side by side."""
        return thread_floats({"sums": self.rows * self.columns})

    @property
    def slices(self) -> int:
        """Parts of the pixels: a fact of the machine, not of the number of threads."""
        return max(1, min(machine_slices(), self.pixels // _LEAST_PIXELS))

    @property
    def thread_parts(self) -> dict[str, int]:
        packed = {} if self.is_packed else {"packed": DEPTH * padded(self.packed_columns)}
        return packed if self.types[0] == "float" else packed | {"rows": DEPTH * self.rows}

    @property
    def nbytes(self) -> int:
        """Bytes for the sums of all slices, and for every thread's packed pixels."""
        return 4 * self.slices * self.slice_stride + threads_bytes(self.thread_parts)


def pointwise_gradient(step: Step) -> Pointwise | None:
    """The sizes of a step that this kernel computes; None for all others."""
    if step.op.name != "convolution_weight_gradient":
        return None
    a, (_, w, y) = step.attributes, convolution_shapes(step)
    if math.prod(w[2:]) != 1 or a["groups"] != 1 or set(a["strides"]) != {1} or set(a["padding"]) != {0}:
        return None
    if step.results[0].dtype != FLOAT32 or not all(v.dtype == FLOAT32 or is_bfloat16(v.dtype) for v in step.inputs):
        return None
    rotated = w[0] > w[1]  # the more columns, the fewer of them are zeros that fill vectors
    rows, columns = sorted(w[:2])
    sums = 4 * rows * columns
    x, dy = (MEMORY_TYPES[value.dtype] for value in step.inputs)
    sizes = Pointwise(y[0] * math.prod(y[2:]), rows, columns, rotated, (x, dy) if rotated else (dy, x))
    if 2 * columns < vector_lanes() or sums > _SUMS or sums * sizes.slices > _ALL_SUMS:
        return None
    return sizes


def pointwise_gradient_entries(
    step: Step, operands: Operands, images: Sequence[Operand], result: Operand, sizes: Pointwise
) -> Sequence[Entry]:
    """dw; operands are dense."""
    nbytes = 4 * sizes.slices * sizes.slice_stride
    sums, rest = operands.workspace(step, 0, nbytes), operands.workspace(step, nbytes, sizes.nbytes - nbytes)
    strides = (1, sizes.rows) if sizes.rotated else (sizes.columns, 1)
    shape = sizes.rows, sizes.columns
    summed = sum_of_slices_entry(step, sums, result, (sizes.slices, sizes.slice_stride), shape, strides)
    return [_products_entry(step, sizes, images, sums, rest), summed]


def _products_entry(step: Step, sizes: Pointwise, images: Sequence[Operand], sums: Operand, rest: Operand) -> Entry:
    """The product of every slice."""
    code = Code("pointwise_gradient")
    args = KernelArguments(code)
    memory = ThreadWorkspace(args, rest, sizes.thread_parts)
    left, right = map(args.pointer, images if sizes.rotated else reversed(images))
    pixels, rows, columns, slices, slice_stride = args.numbers([*sizes[:3], sizes.slices, sizes.slice_stride])
    target = args.pointer(sums)
    multiply = args.pointer(packed_gemm(sizes.packed_columns))
    pack = args.pointer(pack_rows(sizes.packed_columns, sizes.types[1]))
    begin, end = code.share(slices, 1, memory.max_threads, in_pieces=True)
    with code.loop(begin, end) as number:
        own = code.at(target, code.mul(number, slice_stride), "float")
        first, last = (code.div(code.mul(pixels, edge), slices) for edge in (number, code.add(number, 1)))
        with code.loop(first, last, DEPTH) as start:
            count = code.minimum(code.sub(last, start), DEPTH)
            a, b = (
                Line(code, code.at(image, code.mul(start, width), type_), type_)
                for image, width, type_ in zip((left, right), (rows, columns), sizes.types, strict=True)
            )
            if "rows" in sizes.thread_parts:
                copy_line(code, a, Line(code, memory["rows"], "float"), 0, code.mul(count, rows))
                a = a._replace(pointer=memory["rows"])
            if not sizes.is_packed:
                call_pack(code, pack, (0, columns), count, (b.pointer, columns), memory["packed"])
                b = b._replace(pointer=memory["packed"])
            extents, accumulate = (rows, columns, count), code.sub(start, first)
            call_packed_gemm(code, multiply, extents, (a.pointer, 1, rows), b.pointer, (own, columns), accumulate)
    return Entry(
        step,
        code,
        args.values,
        reads=list(images),
        writes=[sums],
        scratch=memory.scratch,
        kernel=f"gemm of pixels x{sizes.slices}",
        cost=2.0 * math.prod(sizes[:3]) / FLOPS_PER_NS,
        in_pieces=True,
    )
