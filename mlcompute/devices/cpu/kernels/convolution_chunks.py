"""oneDNN's float32 convolutions on images in bfloat16: a few samples at a time are converted, convolved, and stored.

What a thread converts stays in its second-level cache, and takes little memory. Chunks are dealt to groups by shape and
machine alone, and every group adds up its own gradient of the weights: results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import MEMORY_TYPES, Code
from mlcompute.devices.cpu.codegen.loops import Line, add_line, copy_line
from mlcompute.devices.cpu.onednn.entries import pointer_setter, report_status, unbound_call
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.cpu.runtime.threads import machine_slices
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.op import Step

#: Bytes of a chunk in float32, about: its images before and after, beside each other in the second-level cache.
_CHUNK = 384 * 1024
#: From the images of a step to the roles of the primitive: those it reads, then what it writes.
_IMAGES = {"forward": ("x", "y"), "backward_data": ("dy", "dx"), "backward_weights": ("x", "dy")}

Primitive = Callable[[int], onednn.Convolution]


@dataclass(frozen=True)
class Chunks:
    """How a batch is cut, and where the step's memory is: weights, sums of weights, then the images of each group."""

    direction: str
    primitive: onednn.Convolution
    count: int
    groups: int
    elements: tuple[int, ...]  # of each image in a chunk

    @classmethod
    def of(cls, step: Step, direction: str, primitive: Primitive) -> Chunks:
        """`primitive`: the convolution of so many samples."""
        images = step.inputs if direction == "backward_weights" else (step.inputs[0], step.results[0])
        samples = images[0].shape[0]
        each = [value.size // samples for value in images]
        most = max(1, min(_CHUNK // (4 * sum(each)), -(-samples // machine_slices())))
        size = max(d for d in range(1, most + 1) if samples % d == 0)
        count = samples // size
        elements = tuple(size * one for one in each)
        return cls(direction, primitive(size), count, min(count, machine_slices()), elements)

    @property
    def primitives(self) -> list[onednn.Convolution]:
        return [self.primitive]

    @property
    def adds(self) -> bool:
        """Is the result a sum over all chunks?"""
        return self.direction == "backward_weights"

    @property
    def weights_bytes(self) -> int:
        return whole_lines(self.primitive.weights_bytes)

    @property
    def first_image(self) -> int:
        """Where the groups' own memory begins: after packed weights, or two gradients of them per group."""
        if self.adds:
            return 2 * self.groups * self.weights_bytes
        return 0 if self.primitive.weights_are_plain else self.weights_bytes

    @property
    def group_bytes(self) -> int:
        return sum(whole_lines(4 * one) for one in self.elements) + whole_lines(self.primitive.scratchpad_bytes)

    @property
    def nbytes(self) -> int:
        return self.first_image + self.groups * self.group_bytes


def whole_lines(nbytes: int) -> int:
    """As many bytes as whole cache lines have."""
    return -(-nbytes // 64) * 64


def chunks_entry(
    step: Step,
    operands: Operands,
    chunks: Chunks,
    images: Sequence[Operand],
    weights: Sequence[Operand],
    cost: float,
) -> Entry:
    """All chunks.

    images    two: those that are read, and where there is one that is written
    weights   packed, to read; or, to write, for each group the gradient of a chunk and the sum of these
    cost      estimated nanoseconds
    """
    code = Code("convolution_chunks")
    args = KernelArguments(code)
    status = np.zeros(1, np.int64)
    groups, failed = args.number(chunks.groups), args.pointer(status)
    calls, pointers, scratch = [], [], []
    first_call = len(args.values)
    for group in range(chunks.groups):
        call = unbound_call(chunks.primitive)
        calls.append(call)
        args.values.append(address_of(call.native_arguments))
        offset = chunks.first_image + group * chunks.group_bytes
        for role, elements in zip(_IMAGES[chunks.direction], chunks.elements, strict=True):
            place = operands.workspace(step, offset, 4 * elements)
            pointers.append((place, pointer_setter(call, role)))
            scratch.append(place)
            offset += whole_lines(4 * elements)
        if "scratchpad" in chunks.primitive.descriptors:
            place = operands.workspace(step, offset, chunks.primitive.scratchpad_bytes)
            pointers.append((place, pointer_setter(call, "scratchpad")))
            scratch.append(place)
        if chunks.adds:
            pointers.append((weights[2 * group], pointer_setter(call, "dw")))
        else:
            pointers.append((weights[0], pointer_setter(call, "w")))
    given = [args.pointer(image) for image in images]
    types = [MEMORY_TYPES[image.dtype] for image in images]
    own = [args.pointer(scratch[index]) for index in range(2)]
    apart, count = args.numbers([chunks.group_bytes, chunks.count])
    lengths = args.numbers(chunks.elements)
    reads = (0, 1) if chunks.adds else (0,)
    parts, between, floats = "", "", ""
    if chunks.adds:
        parts = args.pointer(weights[0])
        between, floats = args.numbers([chunks.weights_bytes, chunks.primitive.weights_bytes // 4])

    begin, end = code.share(groups)
    with code.loop(begin, end) as number:
        native = code.let(f"load ptr, ptr {code.at('%arguments', code.add(number, first_call), 'i64')}")
        execute, primitive, stream = (code.let(f"load ptr, ptr {code.at(native, word, 'i64')}") for word in range(3))
        arguments = code.let(f"load ptr, ptr {code.at(native, 4, 'i64')}")
        roles = code.let(f"trunc i64 {code.load(code.at(native, 3, 'i64'), 'i64')} to i32")
        copies = [Line(code, code.at(place, code.mul(number, apart), "i8"), "float") for place in own]
        first, last = (code.div(code.mul(count, bound), groups) for bound in (number, code.add(number, 1)))
        with code.loop(first, last) as chunk:
            lines = [
                Line(code, code.at(pointer, code.mul(chunk, length), type_), type_)
                for pointer, length, type_ in zip(given, lengths, types, strict=True)
            ]
            for image in reads:
                copy_line(code, lines[image], copies[image], 0, lengths[image])
            found = code.let(f"call i32 {execute}(ptr {primitive}, ptr {stream}, i32 {roles}, ptr {arguments})")
            report_status(code, found, failed)
            if not chunks.adds:
                copy_line(code, copies[1], lines[1], 0, lengths[1])
            else:
                part = Line(code, code.at(parts, code.mul(code.mul(number, 2), between), "i8"), "float")
                total = Line(code, code.at(part.pointer, between, "i8"), "float")
                is_first = code.let(f"icmp eq i64 {chunk}, {first}")
                with code.when(is_first):
                    copy_line(code, part, total, 0, floats)
                with code.when(code.let(f"xor i1 {is_first}, true")):
                    add_line(code, part, total, 0, floats)
    packed = [] if chunks.adds else [weights[0]]
    return Entry(
        step,
        code,
        args.values,
        reads=[*(images if chunks.adds else images[:1]), *packed],
        writes=list(weights) if chunks.adds else [images[1]],
        kernel=f"oneDNN {chunks.primitive.implementation}, {chunks.count} chunks in float32",
        cost=cost,
        keeps_alive=list(calls),
        scratch=scratch,
        pointers=pointers,
        status=status,
        reason=lambda code: f"oneDNN could not run {chunks.primitive.what}: {onednn.meaning(code)}",
    )
