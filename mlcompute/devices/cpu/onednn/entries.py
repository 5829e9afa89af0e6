"""oneDNN primitives as entries of a program: native code executes them, threads share them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from mlcompute.devices.cpu.codegen.arguments import Argument
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.onednn.library import meaning
from mlcompute.devices.cpu.onednn.primitives import Call, Primitive, Reorder
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Step


def unbound_call(primitive: Primitive) -> Call:
    """A call whose addresses are set later, by `pointer_setter`."""
    return primitive.bind(**dict.fromkeys(primitive.descriptors, 0))


def pointer_setter(call: Call, role: str) -> Callable[[int], None]:
    """A function that sets the address of a role."""
    return functools.partial(call.set_pointer, role)


def reorder_entry(step: Step, reorder: Reorder, source: Operand, target: Operand) -> Entry:
    """A copy into another layout."""
    call = unbound_call(reorder)
    roles = list(reorder.descriptors)
    pointers = [(source, pointer_setter(call, roles[0])), (target, pointer_setter(call, roles[1]))]
    entry = primitives_entry(step, [call], pointers, [source], [target])
    entry.kernel = f"oneDNN {reorder.implementation}"
    entry.cost = 2000.0
    return entry


def primitives_entry(
    step: Step,
    calls: list[Call],
    pointers: list[tuple[Operand, Callable[[int], None]]],
    reads: list[Operand],
    writes: list[Operand],
) -> Entry:
    """Calls of primitives, which threads share; `pointers`: operands whose addresses go into the calls."""
    status = np.zeros(1, np.int64)
    arguments: list[Argument] = [len(calls), status, *(address_of(call.native_arguments) for call in calls)]
    return Entry(
        step,
        _primitives_code(),
        arguments,
        reads,
        writes,
        kernel="oneDNN",
        pointers=pointers,
        keeps_alive=list(calls),
        status=status,
        reason=lambda code: f"oneDNN could not run {calls[0].primitive.what}: {meaning(code)}",
    )


@functools.cache
def _primitives_code() -> Code:
    """Execute the thread's share of a list of primitives."""
    code = Code("primitives")
    failed = code.argument(1, "ptr")
    begin, end = code.share(code.argument(0))
    with code.loop(begin, end) as index:
        slot = code.at("%arguments", code.add(index, 2), "i64")
        call = code.let(f"load ptr, ptr {slot}")
        execute, primitive, stream = (code.let(f"load ptr, ptr {code.at(call, number, 'i64')}") for number in range(3))
        address = code.at(call, 3, "i64")
        count = code.let(f"trunc i64 {code.let(f'load i64, ptr {address}')} to i32")
        arguments = code.let(f"load ptr, ptr {code.at(call, 4, 'i64')}")
        status = code.let(f"call i32 {execute}(ptr {primitive}, ptr {stream}, i32 {count}, ptr {arguments})")
        report_status(code, status, failed)
    return code


def report_status(code: Code, status: str, address: str) -> None:
    """Store an i32 status that is not 0 where the engine looks for it."""
    with code.when(code.let(f"icmp ne i32 {status}, 0")):
        code.do(f"store atomic i64 {code.let(f'zext i32 {status} to i64')}, ptr {address} release, align 8")
