"""Convolution and its gradients on channels-last images.

As a matmul where filters are large or one of the images has few channels, by Winograd's algorithm, by oneDNN slice by
slice, or by our own loops where it is missing or slow.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen.addressing import thread_floats
from mlcompute.devices.cpu.codegen.arguments import Argument
from mlcompute.devices.cpu.codegen.code import Code, vector, vector_lanes
from mlcompute.devices.cpu.gemm.gemm_blocked import blocked_workspace
from mlcompute.devices.cpu.gemm.matmul import gemm_entry
from mlcompute.devices.cpu.kernels import convolution_depthwise, convolution_gemm
from mlcompute.devices.cpu.kernels.convolution_bands import bands_of
from mlcompute.devices.cpu.kernels.convolution_chunks import Chunks, chunks_entry, whole_lines
from mlcompute.devices.cpu.kernels.convolution_columns import (
    Columns,
    columns_of,
    few_pixels,
    few_pixels_entries,
    gradient_entry,
    gradient_workspace,
    has_few_pixels,
)
from mlcompute.devices.cpu.kernels.convolution_few_channels import few_channels, few_channels_entries
from mlcompute.devices.cpu.kernels.convolution_few_outputs import few_outputs, few_outputs_entries
from mlcompute.devices.cpu.kernels.convolution_pointwise import pointwise_gradient, pointwise_gradient_entries
from mlcompute.devices.cpu.kernels.convolution_windows import Windows
from mlcompute.devices.cpu.kernels.widened import has_bfloat16, widened
from mlcompute.devices.cpu.kernels.winograd import winograd_entries
from mlcompute.devices.cpu.kernels.winograd_sizes import winograd_sizes, winograd_workspace
from mlcompute.devices.cpu.onednn.entries import pointer_setter, primitives_entry, reorder_entry, unbound_call
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.cpu.runtime.threads import machine_pieces, machine_slices
from mlcompute.devices.interrupts import held
from mlcompute.devices.loop_nest import Operand, Operands, dense_strides
from mlcompute.ops.bfloat16 import computed_type, is_bfloat16
from mlcompute.ops.images import convolution_shapes, first_shape
from mlcompute.ops.op import FLOAT32, Shape, Step

_DIRECTIONS = {
    "convolution": "forward",
    "convolution_input_gradient": "backward_data",
    "convolution_weight_gradient": "backward_weights",
}
_NS_PER_FLOP = 1 / 60.0
#: Bytes that slices of a weight gradient may take: for their sums, and for oneDNN's working memory.
_MOST_SLICES = 1 << 20


@functools.lru_cache(maxsize=512)
def _primitive(
    direction: Any, x: Shape, w: Shape, strides: Any, dilations: Any, padding: Any, groups: int, dtype: Any = FLOAT32
) -> onednn.Convolution:
    return onednn.Convolution(direction, x, w, strides, dilations, padding, groups, image=dtype, result=dtype)


def _bytes_per_thread(nbytes: int) -> int:
    """From so many bytes that one thread writes to those of the next."""
    return 4 * thread_floats({"own": -(-nbytes // 4)}) if nbytes else 0


class _Piece(NamedTuple):
    """Some samples, or a band of one: its primitive, and where both its images begin, in elements."""

    primitive: onednn.Convolution
    starts: tuple[int, int]


def _have_one_format(pieces: Sequence[_Piece]) -> bool:
    """Do all read or write the weights in the same format?"""
    return all(piece.primitive.weights == pieces[0].primitive.weights for piece in pieces)


class _Plan:
    """What a convolution step needs: its slices, their primitives, and where its own memory is cut."""

    def __init__(self, step: Step, slices: int) -> None:
        self.direction = _DIRECTIONS[step.op.name]
        a = step.attributes
        if self.direction == "backward_weights":
            x, w = first_shape(step.inputs[0].shape), a["shape"]
        elif self.direction == "backward_data":
            x, w = a["shape"], step.inputs[1].shape
        else:
            x, w = first_shape(step.inputs[0].shape), step.inputs[1].shape
        bands = self._bands(step, x, w, slices)
        self.pieces = bands or self._samples(step, x, w, min(slices, x[0]))
        self.has_samples = not bands
        self.primitives = [piece.primitive for piece in self.pieces]
        first = self.primitives[0]
        self.plain = first.weights_are_plain
        self.weights_bytes = whole_lines(first.weights_bytes)
        copies = 0 if self.plain else 1
        if self.direction == "backward_weights":  # sums of every piece
            copies, self.weights_bytes = len(self.pieces), _bytes_per_thread(first.weights_bytes)
        self.scratch_start = copies * self.weights_bytes
        self.scratch_bytes = _bytes_per_thread(max(p.scratchpad_bytes for p in self.primitives))
        self.nbytes = self.scratch_start + len(self.pieces) * self.scratch_bytes
        self.flops = 2.0 * x[0] * math.prod(convolution_shapes(step)[2][2:]) * math.prod(w)

    def _samples(self, step: Step, x: Shape, w: Shape, slices: int) -> list[_Piece]:
        """As many slices as are wanted, or fewer: those of other sizes may have weights in another format."""
        bounds = [x[0] * s // slices for s in range(slices + 1)]
        sizes = [math.prod(image[1:]) for image in self._images(step)]
        pieces = [
            _Piece(
                self._primitive(step, (end - begin, *x[1:]), w, step.attributes["padding"]),
                (begin * sizes[0], begin * sizes[1]),
            )
            for begin, end in itertools.pairwise(bounds)
        ]
        return pieces if _have_one_format(pieces) else self._samples(step, x, w, slices - 1)

    def _bands(self, step: Step, x: Shape, w: Shape, slices: int) -> list[_Piece] | None:
        _, _, y = convolution_shapes(step)
        cut = bands_of(self.direction, x, w, y, step.attributes, slices)
        if cut is None:
            return None
        pieces = []
        for sample, band in itertools.product(range(x[0]), cut.bands):
            primitive = self._primitive(step, cut.shape(x, band), w, band.padding)
            starts = cut.start(x, sample, band.x[0]), cut.start(y, sample, band.y[0])
            pieces.append(_Piece(primitive, starts[::-1] if self.direction == "backward_data" else starts))
        return pieces if _have_one_format(pieces) else None

    def _primitive(self, step: Step, x: Shape, w: Shape, padding: Shape) -> onednn.Convolution:
        a = step.attributes
        return _primitive(
            self.direction, x, w, a["strides"], a["dilations"], padding, a["groups"], step.inputs[0].dtype
        )

    def _images(self, step: Step) -> tuple[Shape, Shape]:
        """Channels-first shapes of what is read and written; for the gradient of weights, of both images."""
        x, _, y = convolution_shapes(step)
        return (y, x) if self.direction == "backward_data" else (x, y)


def _is_native(step: Step) -> bool:
    values = (*step.inputs, *step.results)
    return bool(step.attributes.get("channels_last")) and all(
        computed_type(v.dtype) == FLOAT32 and v.size for v in values
    )


def _computes_in_bfloat16(step: Step) -> bool:
    """Are all images bfloat16, and is oneDNN fastest with the machine's instructions for them?

    AVX512_BF16 halves the time of a sum, Winograd's algorithm in float32 saves more unless the stride is two; AMX is
    faster than both. With few pixels, bringing the weights into oneDNN's format takes longer than the sums; few
    channels leave its vectors empty.
    """
    images = (step.inputs[0], step.inputs[1] if step.op.name == "convolution_weight_gradient" else step.results[0])
    if not (all(is_bfloat16(image.dtype) for image in images) and onednn.has_bfloat16_convolutions()):
        return False
    if has_few_pixels(step) or _has_few_channels(step) or _writes_past_scratchpad(step):
        return False
    tiles = winograd_sizes(step)
    if tiles is not None and tiles.split is None and not onednn.has_amx_instructions():
        return False
    primitives = _Plan(step, _slices_of(step)).primitives
    is_slow = step.attributes["groups"] > 1 and _is_slow_depthwise(step, primitives)
    return not (is_slow or _reads_what_is_not_there(step, primitives))


def _reads_what_is_not_there(step: Step, primitives: Sequence[onednn.Convolution]) -> bool:
    """Is it a gradient of filters for which oneDNN's kernel for AVX512_BF16 (3.2) leaves its images, with any outcome?

    That is so of dilated filters where channels fill no vectors; and, without the zeros around them, of images no
    wider, and volumes no larger, than from the first tap to the last.
    """
    if step.op.name != "convolution_weight_gradient":
        return False
    suspects = [primitive for primitive in primitives if primitive.implementation.startswith("jit_bf16:")]
    dilations, shape = step.attributes["dilations"], step.attributes["shape"]
    reaches = [dilation * (taps - 1) for dilation, taps in zip(dilations, shape[2:], strict=True)]
    axes = slice(-1, None) if len(reaches) == 2 else slice(None)
    images = {primitive.descriptors["x"].shape[2:] for primitive in suspects}
    pairs = [pair for image in images for pair in zip(reaches[axes], image[axes], strict=True)]
    is_small = any(0 < reach >= extent for reach, extent in pairs)
    return is_small or (bool(suspects) and max(dilations) > 1 and shape[1] % 16 != 0)


def _writes_past_scratchpad(step: Step) -> bool:
    """Is it a gradient of strided pointwise filters, where oneDNN (3.2) copies vectors of channels though x has fewer?

    https://github.com/uxlfoundation/oneDNN/issues/6035
    """
    if step.op.name != "convolution_weight_gradient":
        return False
    a, (_, inputs, *taps) = step.attributes, step.attributes["shape"]
    return inputs < 16 and math.prod(taps) == 1 and a["groups"] == 1 and bool(max(a["strides"]) > 1)


def _has_few_channels(step: Step) -> bool:
    """Are there kernels of our own for one of the images' few channels, given float32 copies?"""
    wide = widened(step)
    return few_channels(wide) is not None or few_outputs(wide) is not None


def reads_bfloat16(step: Step) -> bool:
    """Images in bfloat16 are converted a few at a time; weights, and their gradient, are float32."""
    weights = step.results[0] if step.op.name == "convolution_weight_gradient" else step.inputs[1]
    if weights.dtype != FLOAT32 or not _is_native(step):
        return False
    if few_pixels(step) is not None or _has_few_channels(step) or _writes_past_scratchpad(step):
        return False
    if pointwise_gradient(step) is not None or _converts_in_matmul(step):
        return True
    return winograd_sizes(step) is not None or onednn.load() is not None


def _converts_in_matmul(step: Step) -> bool:
    """Is it a pointwise convolution of images in bfloat16? Our matmul converts a few rows at a time."""
    return step.op.name != "convolution_weight_gradient" and has_bfloat16(step) and _is_pointwise(step)


def _chunks(step: Step) -> Chunks | None:
    """How the batch of a step is cut whose images are in bfloat16."""
    if not has_bfloat16(step):
        return None
    direction, a, (x, w, _) = _DIRECTIONS[step.op.name], step.attributes, convolution_shapes(step)

    def primitive(samples: int) -> onednn.Convolution:
        shape = (samples, *x[1:])
        return _primitive(direction, shape, w, a["strides"], a["dilations"], a["padding"], a["groups"])

    return Chunks.of(step, direction, primitive)


def _chunked_entries(step: Step, operands: Operands, chunks: Chunks) -> Sequence[Entry]:
    """Weights into oneDNN's format, then all chunks; or these, then the sums of all groups."""
    first, second, result = (operands[value] for value in (*step.inputs, step.results[0]))
    nbytes = chunks.weights_bytes
    _, w, y = convolution_shapes(step)
    cost = 2.0 * y[0] * math.prod(y[2:]) * math.prod(w) * _NS_PER_FLOP
    if not chunks.adds:
        if chunks.primitive.weights_are_plain:
            return [chunks_entry(step, operands, chunks, [first, result], [second], cost)]
        packed = operands.workspace(step, 0, nbytes)
        reorder = reorder_entry(step, chunks.primitive.weights_in(), second, packed)
        return [reorder, chunks_entry(step, operands, chunks, [first, result], [packed], cost)]
    parts = [operands.workspace(step, number * nbytes, nbytes) for number in range(2 * chunks.groups)]
    entries = [chunks_entry(step, operands, chunks, [first, second], parts, cost)]
    if chunks.groups > 1:
        entries.append(_sum_entry(step, parts[1::2], chunks.primitive.weights_bytes // 4))
    return [*entries, reorder_entry(step, chunks.primitive.weights_out(), parts[1], result)]


def _slices_of(step: Step) -> int:
    """Parts of the batch: a fact of the machine, as numbers and memory follow from them, not of the thread count."""
    return machine_slices() if step.op.name == "convolution_weight_gradient" else machine_pieces()


def workspace(step: Step) -> int:
    """Bytes for the weights as oneDNN wants them, partial sums of their gradient, and its own working memory."""
    if not _is_native(step):
        return 0
    with held:  # making primitives leaves much to destroy, and what is raised in destructors is lost
        return _method(step).nbytes


class _Method(NamedTuple):
    """How a step is computed: bytes of its workspace; its entries, from its inputs and its result, which are dense."""

    nbytes: int
    entries: Callable[[Operands, Sequence[Operand], Operand], Sequence[Entry]]


#: Kernels of our own for some sizes, and which these are; the first that suits.
_OWN: tuple[tuple[Callable[[Step], Any], Callable[..., Sequence[Entry]]], ...] = (
    (few_pixels, few_pixels_entries),
    (few_channels, few_channels_entries),
    (few_outputs, few_outputs_entries),
    (pointwise_gradient, pointwise_gradient_entries),
)


def _method(step: Step) -> _Method:
    """A matmul or Winograd's algorithm where they suit; else oneDNN: weights into its format, then each slice."""
    if _computes_in_bfloat16(step):
        return _by_slices(step, _Plan(step, _slices_of(step)))
    for sizes_of, entries_of in _OWN:
        sizes = sizes_of(step)
        if sizes is not None:
            return _Method(sizes.nbytes, functools.partial(entries_of, step, sizes=sizes))
    tiles = winograd_sizes(step)
    if tiles is not None:
        nbytes = winograd_workspace(step, tiles)
        return _Method(nbytes, lambda operands, images, result: winograd_entries(step, operands, tiles))
    if _converts_in_matmul(step) or onednn.load() is None or _writes_past_scratchpad(step):
        return _without_library(step)
    chunks = _chunks(step)
    plan = _Plan(step, _slices_of(step)) if chunks is None else chunks
    if _is_slow_depthwise(step, plan.primitives):
        return _without_library(step)
    columns = _as_columns(step, plan)
    if columns is not None:
        nbytes = gradient_workspace(step, columns)
        return _Method(nbytes, lambda operands, images, y: [gradient_entry(step, operands, columns, images, y)])
    if isinstance(plan, Chunks):
        return _Method(plan.nbytes, lambda operands, images, result: _chunked_entries(step, operands, plan))
    return _by_slices(step, plan)


def _by_slices(step: Step, plan: _Plan) -> _Method:
    return _Method(plan.nbytes, lambda operands, images, y: _sliced_entries(step, operands, plan, images, y))


def _without_library(step: Step) -> _Method:
    return _Method(_own_workspace(step), lambda operands, images, y: _own_entries(step, operands, images, y))


def _is_slow_depthwise(step: Step, primitives: Sequence[onednn.Convolution]) -> bool:
    """Has oneDNN no depthwise kernel for this one: dilated, or the gradient of filters that are wider than 3?

    Its other kernels compute blocks of channels, all but one of which are not wanted: up to ten times as long as ours.
    """
    depthwise = convolution_depthwise.is_depthwise(Windows(step))
    return depthwise and not any("dw" in primitive.implementation for primitive in primitives)


def _as_columns(step: Step, plan: _Plan | Chunks) -> Columns | None:
    """A weight gradient that is faster as a matmul, or whose slices would need too much memory."""
    if plan.direction != "backward_weights":
        return None
    has_taps = math.prod(step.attributes["shape"][2:]) > 1
    return columns_of(step) if has_taps or plan.nbytes > _MOST_SLICES else None


def reads_images(step: Step, operands: Operands) -> bool:
    """Are images and weights dense?"""
    return not _is_native(step) or all(operands[value].is_dense for value in step.inputs)


def convolution_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """Operands must be dense: they are copied otherwise."""
    if not _is_native(step):
        return None
    images, result = [operands[value] for value in step.inputs], operands[step.results[0]]
    if not all(operand.is_dense for operand in (*images, result)):
        return None
    return _method(step).entries(operands, images, result)


def _sliced_entries(
    step: Step, operands: Operands, plan: _Plan, images: Sequence[Operand], result: Operand
) -> Sequence[Entry]:
    """By oneDNN: weights into its format, then each slice; or slices, then the gradient of the weights from it."""
    if plan.direction == "backward_weights":
        return _weight_gradient(step, operands, plan, images, result)
    image, weights = images
    packed = operands.workspace(step, 0, plan.weights_bytes) if not plan.plain else weights
    entries = []
    if not plan.plain:
        entries.append(reorder_entry(step, plan.primitives[0].weights_in(), weights, packed))
    names = ("x", "y") if plan.direction == "forward" else ("dy", "dx")
    calls, pointers = [], []
    for number, (primitive, starts) in enumerate(plan.pieces):
        call = unbound_call(primitive)
        calls.append(call)
        pointers += [
            (_from_element(image, starts[0]), pointer_setter(call, names[0])),
            (_from_element(result, starts[1]), pointer_setter(call, names[1])),
            (packed, pointer_setter(call, "w")),
            *_scratch(step, operands, plan, number, call),
        ]
    samples = image.shape[0]
    entry = primitives_entry(step, calls, pointers, [image, packed], [result, *_scratch_operands(step, operands, plan)])
    entry.kernel = f"oneDNN {plan.primitives[0].implementation} x{len(calls)}"
    entry.cost = plan.flops * _NS_PER_FLOP
    if plan.has_samples and len(plan.pieces) == operands.threads:  # exactly the rows other kernels give each thread
        entry.rows, entry.by_row, entry.rows_for = samples, {0, 2}, operands.threads
    return [*entries, entry]


# Without oneDNN -------------------------------------------------------------------------------------------------------


def _own_columns(step: Step) -> Columns | None:
    """A weight gradient over several taps, in blocks that threads share."""
    is_gradient = step.op.name == "convolution_weight_gradient"
    return columns_of(step) if is_gradient and math.prod(step.attributes["shape"][2:]) > 1 else None


def _own_workspace(step: Step) -> int:
    if (columns := _own_columns(step)) is not None:
        return gradient_workspace(step, columns)
    windows = Windows(step)
    kernels = convolution_depthwise if convolution_depthwise.is_depthwise(windows) else convolution_gemm
    is_gradient, is_matmul = step.op.name == "convolution_weight_gradient", _is_pointwise(step)
    if is_matmul and not is_gradient:
        result = step.results[0]
        return blocked_workspace(windows.pixels, result.shape[-1], result.dtype)
    nbytes: int = kernels.gradient_workspace(windows) if is_gradient else kernels.image_workspace(windows)
    return nbytes


def _own_entries(step: Step, operands: Operands, images: Sequence[Operand], result: Operand) -> Sequence[Entry]:
    if (columns := _own_columns(step)) is not None:
        return [gradient_entry(step, operands, columns, images, result)]
    windows = Windows(step)
    kernels = convolution_depthwise if convolution_depthwise.is_depthwise(windows) else convolution_gemm
    entries: list[Entry]
    if step.op.name == "convolution_weight_gradient":
        entries = kernels.gradient_entries(step, operands, windows, images, result)
        return entries
    image, weights = images
    if not _is_pointwise(step):
        entries = kernels.image_entries(step, operands, windows, image, weights, result)
        return entries
    a, y = (_as_matrix(operand, (windows.pixels, operand.shape[-1])) for operand in (image, result))
    w = _as_matrix(weights, weights.shape[:2])
    if step.op.name == "convolution":
        w = w.permuted((1, 0))
    multiply = gemm_entry(step, operands, a, w, y)
    assert multiply is not None
    return [multiply]


def _is_pointwise(step: Step) -> bool:
    """Is every pixel of the result a product with one pixel?"""
    a, (_, w, _) = step.attributes, convolution_shapes(step)
    return math.prod(w[2:]) == a["groups"] == 1 and set(a["strides"]) == {1} and set(a["padding"]) == {0}


def _as_matrix(operand: Operand, shape: Shape) -> Operand:
    return Operand(operand.base, operand.offset, shape, dense_strides(shape), operand.dtype)


# By oneDNN ------------------------------------------------------------------------------------------------------------


def _weight_gradient(
    step: Step, operands: Operands, plan: _Plan, images: Sequence[Operand], result: Operand
) -> Sequence[Entry]:
    """Each slice sums over its samples; the slices' sums are added in order, then brought into plain format."""
    calls, pointers, parts = [], [], []
    for number, (primitive, starts) in enumerate(plan.pieces):
        call = unbound_call(primitive)
        calls.append(call)
        part = operands.workspace(step, number * plan.weights_bytes, plan.weights_bytes)
        parts.append(part)
        pointers += [
            (_from_element(images[0], starts[0]), pointer_setter(call, "x")),
            (_from_element(images[1], starts[1]), pointer_setter(call, "dy")),
            (part, pointer_setter(call, "dw")),
            *_scratch(step, operands, plan, number, call),
        ]
    main = primitives_entry(step, calls, pointers, [*images], [*parts, *_scratch_operands(step, operands, plan)])
    main.kernel = f"oneDNN {plan.primitives[0].implementation} x{len(calls)}"
    main.cost = plan.flops * _NS_PER_FLOP
    entries = [main]
    if len(parts) > 1:
        entries.append(_sum_entry(step, parts, plan.primitives[0].weights_bytes // 4))
    entries.append(reorder_entry(step, plan.primitives[0].weights_out(), parts[0], result))
    return entries


def _from_element(image: Operand, start: int) -> Operand:
    """The image from one element on."""
    return Operand(image.base, image.offset + start, image.shape, image.strides, image.dtype)


def _scratch_operands(step: Step, operands: Operands, plan: _Plan) -> list[Operand]:
    if not plan.scratch_bytes:
        return []
    return [operands.workspace(step, plan.scratch_start, len(plan.pieces) * plan.scratch_bytes)]


def _scratch(
    step: Step, operands: Operands, plan: _Plan, number: int, call: onednn.Call
) -> list[tuple[Operand, Callable[[int], None]]]:
    if "scratchpad" not in call.primitive.descriptors:
        return []
    offset = plan.scratch_start + number * plan.scratch_bytes
    return [(operands.workspace(step, offset, plan.scratch_bytes), pointer_setter(call, "scratchpad"))]


def _sum_entry(step: Step, parts: list[Operand], count: int) -> Entry:
    """parts[0] += parts[1] + ... in order."""
    code, lanes = Code("add_parts"), vector_lanes()
    kind = vector("float", lanes)
    # Blocked weights are padded to full vectors by oneDNN; plain ones may not be: the tail goes one by one.
    total, extra = code.argument(0), code.argument(1)
    target, first = code.argument(2, "ptr"), code.argument(3, "ptr")
    stride = code.argument(4)
    begin, end = code.share(total, lanes)
    full = code.add(begin, code.mul(code.div(code.sub(end, begin), lanes), lanes))
    for width, low, high in ((lanes, begin, full), (1, full, end)):
        type_ = kind if width > 1 else "float"
        with code.loop(low, high, width) as index:
            sum_ = code.variable(type_, code.load(code.at(target, index, "float"), type_))
            with code.loop(0, extra) as part:
                address = code.add(code.mul(part, stride), index)
                value = code.load(code.at(first, address, "float"), type_)
                code.set(type_, sum_, code.let(f"fadd {type_} {code.get(type_, sum_)}, {value}"))
            code.store(code.at(target, index, "float"), type_, code.get(type_, sum_))
    stride_floats = (parts[1].offset - parts[0].offset) // 4
    arguments: list[Argument] = [count, len(parts) - 1, parts[0], parts[1], stride_floats]
    return Entry(step, code, arguments, reads=list(parts), writes=[parts[0]], kernel="sum of slices", cost=count * 0.3)


KERNELS: dict[str, Maker] = dict.fromkeys(_DIRECTIONS, convolution_entries)
WORKSPACES = dict.fromkeys(_DIRECTIONS, workspace)
READS = dict.fromkeys(_DIRECTIONS, reads_images)
BFLOAT16 = dict.fromkeys(KERNELS, reads_bfloat16)
