"""y = a b in bfloat16 instructions, where the machine has them: both factors in bfloat16, sums in float32.

A factor in float32 (weights, say) is rounded into the step's own memory first; a result in bfloat16 is summed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.kernels.widened import conversion_entry, same_order
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand, Operands
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import FLOAT32, Step, Value

#: Smaller products are faster by our own gemm than converted, packed and multiplied by a library.
_LEAST_EXTENT, _LEAST_PRODUCTS = 32, 1 << 20


def suits(a: Value, b: Value) -> bool:
    """Are there instructions, and enough to multiply?"""
    m, k, n = *a.shape[-2:], b.shape[-1]
    return min(m, k, n) >= _LEAST_EXTENT and m * k * n >= _LEAST_PRODUCTS and bool(onednn.bfloat16_gemm())


def bfloat16_workspace(step: Step) -> int:
    """Bytes for factors in bfloat16 that are not, and for a result in float32 that is none."""
    return sum(nbytes for _, nbytes in _copies(step))


def _copies(step: Step) -> list[tuple[Value, int]]:
    factors = [(value, 2 * value.size) for value in dict.fromkeys(step.inputs) if not is_bfloat16(value.dtype)]
    results = [(value, 4 * value.size) for value in step.results if is_bfloat16(value.dtype)]
    return [(value, -(-nbytes // 64) * 64) for value, nbytes in (*factors, *results)]


def bfloat16_entries(
    step: Step, operands: Operands, multiply: Callable[[Operand, Operand, Operand], Entry | None]
) -> Sequence[Entry] | None:
    """`multiply`: the entry of a product of factors in bfloat16 whose result is float32."""
    places = {value: operands[value] for value in (*step.inputs, *step.results)}
    start = 0
    for value, nbytes in _copies(step):
        narrow = value in step.inputs
        dtype = bfloat16() if narrow else FLOAT32
        strides = same_order(operands[value]) if narrow else None
        places[value] = operands.workspace(step, start, nbytes).holding(value.shape, dtype, strides)
        start += nbytes
    a, b, y = (places[value] for value in (*step.inputs, step.results[0]))
    product = multiply(a, b, y)
    if product is None:
        return None
    threads, changed = operands.threads, [value for value, _ in _copies(step)]
    before = [conversion_entry(step, v, operands[v], places[v], threads) for v in changed if v in step.inputs]
    after = [conversion_entry(step, v, places[v], operands[v], threads) for v in changed if v in step.results]
    return [*before, product, *after]
