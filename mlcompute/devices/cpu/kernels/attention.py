"""Attention and its gradients: threads share the heads of all samples; a block of queries at a time stays in the cache.

    y = softmax(q kᵀ scale + mask) v     q (n, heads, l, width), k (n, heads, s, width), v (n, heads, s, value width)

`attention_blocks` has what the three kernels share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.addressing import (
    StridedArray,
)
from mlcompute.devices.cpu.codegen.combiners import SUM, LineReduction
from mlcompute.devices.cpu.codegen.loops import Line, splat, vector_loop
from mlcompute.devices.cpu.codegen.simd import SimdValue
from mlcompute.devices.cpu.gemm.packed_gemm import (
    call_packed_gemm,
    packed_gemm,
)
from mlcompute.devices.cpu.kernels.attention_blocks import (
    AttentionKernel,
    Packer,
    Sizes,
    can_pack,
    first_input,
    four_extents,
    workspace,
)
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operand, Operands, broadcast_strides
from mlcompute.ops.op import FLOAT32, Step


def _inputs(step: Step, operands: Operands) -> list[Operand] | None:
    """The operands, if the kernels can read them all."""
    found = [operands[value] for value in step.inputs]
    return found if supports_attention(step) and reads_attention(step, operands) else None


def supports_attention(step: Step) -> bool:
    """float32, and not empty?"""
    return all(value.dtype == FLOAT32 and value.size for value in step.inputs)


def reads_attention(step: Step, operands: Operands) -> bool:
    """Can all matrices be packed?"""
    first = first_input(step)
    matrices = [*step.inputs[first : first + 3], *(step.inputs[:1] if first else ())]
    return all(can_pack(operands[value]) for value in matrices)


def attention_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """q, k, v, mask, keep -> y (and logs)"""
    inputs = _inputs(step, operands)
    if inputs is None:
        return None
    kernel = AttentionKernel(step, operands, inputs)
    code, args, s, memory = kernel.code, kernel.args, kernel.sizes, kernel.memory
    keys = Packer(args, inputs[1], kernel.k, transposed=True)
    values = Packer(args, inputs[2], kernel.v, transposed=False)
    by_keys, by_values = args.pointer(packed_gemm(s.keys)), args.pointer(packed_gemm(s.value_width))
    targets = [operands[value] for value in step.results]
    y = kernel.result(targets[0], kernel.queries, kernel.value_width)
    logs = kernel.logs(targets[1]) if len(targets) > 1 else None
    with code.loop(kernel.begin, kernel.end) as number:
        unit = kernel.unit(number)
        kernel.fetch(unit)
        keys.pack(unit, 0, kernel.keys, memory["keys"])
        values.pack(unit, 0, kernel.keys, memory["values"])
        with code.loop(0, kernel.queries, kernel.block) as first:
            rows = code.minimum(kernel.block, code.sub(kernel.queries, first))
            limit, filled = kernel.limit(first)
            scores = memory["scores"]
            kernel.scores(by_keys, rows, kernel.q, unit, first, kernel.width, memory["keys"], scores, filled)
            kernel.probabilities(scores, rows, unit, first, limit, drops=True, logs=logs)
            extents, a = (rows, kernel.value_width, limit), (scores, kernel.padded_keys, 1)
            target_lines = (y.address(unit, first), y.stride)
            call_packed_gemm(code, by_values, extents, a, memory["values"], target_lines, packed_depth=kernel.keys)
    return [kernel.entry(inputs, targets, "attention", 1.0)]


def attention_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """dy, q, k, v, mask, keep -> dq, dk, dv

    By token, y and logs follow dy. They are not read: a score minus a logarithm loses digits where scores are large.
    """
    inputs = _inputs(step, operands)
    if inputs is None:
        return None
    inputs = [inputs[0], *inputs[first_input(step) :]]
    kernel = AttentionKernel(step, operands, inputs[1:])
    code, args, s, memory = kernel.code, kernel.args, kernel.sizes, kernel.memory
    dy = StridedArray.of(args, inputs[0])
    keys, values = (Packer(args, inputs[i], view, transposed=True) for i, view in ((2, kernel.k), (3, kernel.v)))
    key_rows = Packer(args, inputs[2], kernel.k, transposed=False)
    query_rows, dy_rows = (Packer(args, inputs[i], view, transposed=False) for i, view in ((1, kernel.q), (0, dy)))
    by_keys, by_width, by_values = (args.pointer(packed_gemm(columns)) for columns in (s.keys, s.width, s.value_width))
    targets = [operands[value] for value in step.results]
    dq = kernel.result(targets[0], kernel.queries, kernel.width)
    dk = kernel.result(targets[1], kernel.keys, kernel.width)
    dv = kernel.result(targets[2], kernel.keys, kernel.value_width)
    p, ds = memory["p"], memory["ds"]
    with code.loop(kernel.begin, kernel.end) as number:
        unit = kernel.unit(number)
        kernel.fetch(unit, dy)
        for packer, name in ((keys, "keys"), (values, "values"), (key_rows, "key rows")):
            packer.pack(unit, 0, kernel.keys, memory[name])
        if kernel.skips_keys:  # the first block may not reach them all
            dk.clear(unit)
            dv.clear(unit)
        with code.loop(0, kernel.queries, kernel.block) as first:
            rows = code.minimum(kernel.block, code.sub(kernel.queries, first))
            limit, filled = kernel.limit(first)
            query_rows.pack(unit, first, rows, memory["query rows"])
            dy_rows.pack(unit, first, rows, memory["dy rows"])
            kernel.scores(by_keys, rows, kernel.q, unit, first, kernel.width, memory["keys"], p, filled)
            kernel.scores(by_keys, rows, dy, unit, first, kernel.value_width, memory["values"], ds, filled)
            kernel.probabilities(p, rows, unit, first, limit)
            with code.loop(0, rows) as row:
                query, p_line, ds_line = code.add(first, row), kernel.line(p, row), kernel.line(ds, row)
                kernel.multiply(ds_line, unit, query, limit)
                _softmax_gradient(kernel, p_line, ds_line, limit, kernel.scale)
                kernel.multiply(p_line, unit, query, limit)
            adds = "1" if kernel.skips_keys else first
            transposed = ("1", kernel.padded_keys)
            call_packed_gemm(
                code, by_width, (rows, kernel.width, limit), (ds, kernel.padded_keys, 1), memory["key rows"],
                (dq.address(unit, first), dq.stride), packed_depth=kernel.keys,
            )  # fmt: skip
            call_packed_gemm(
                code, by_width, (limit, kernel.width, rows), (ds, *transposed), memory["query rows"],
                (dk.address(unit), dk.stride), accumulate=adds,
            )  # fmt: skip
            call_packed_gemm(
                code, by_values, (limit, kernel.value_width, rows), (p, *transposed), memory["dy rows"],
                (dv.address(unit), dv.stride), accumulate=adds,
            )  # fmt: skip
    return [kernel.entry(inputs, targets, "attention gradient", 2.5)]


def attention_mask_gradient_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """dy, q, k, v, mask, keep -> dmask

    Threads share the blocks of queries of the mask; what a block is repeated over is added to it in a fixed order.
    """
    inputs = _inputs(step, operands)
    if inputs is None:
        return None
    sizes, target = Sizes.of(step), operands[step.results[0]]
    n, heads, queries, _ = four_extents(target.shape)
    sums_queries = queries != sizes.queries
    blocks = 1 if sums_queries else -(-sizes.queries // sizes.block)
    kernel = AttentionKernel(step, operands, inputs[1:], units=n * heads * blocks)
    code, args, s, memory = kernel.code, kernel.args, kernel.sizes, kernel.memory
    dy = StridedArray.of(args, inputs[0])
    keys, values = (Packer(args, inputs[i], view, transposed=True) for i, view in ((2, kernel.k), (3, kernel.v)))
    by_keys = args.pointer(packed_gemm(s.keys))
    mask_heads, mask_blocks, samples_each, heads_each, queries_each = args.numbers(
        [heads, blocks, s.samples // n, s.heads // heads, s.queries if sums_queries else s.block]
    )
    shape = (s.samples, s.heads, s.queries, s.keys)
    broadcast = Operand(target.base, target.offset, shape, broadcast_strides(target, shape), target.dtype)
    result = _MaskGradient(kernel, StridedArray.of(args, broadcast))
    p, ds = memory["p"], memory["ds"]
    with code.loop(kernel.begin, kernel.end) as number:
        plane, begin = code.div(number, mask_blocks), code.mul(code.rem(number, mask_blocks), queries_each)
        end = code.minimum(code.add(begin, queries_each), kernel.queries)
        first_sample, first_head = code.div(plane, mask_heads), code.rem(plane, mask_heads)
        result.clear((first_sample, first_head), begin, end)
        with code.loop(0, samples_each) as i, code.loop(0, heads_each) as j:
            unit = code.add(first_sample, i), code.add(first_head, j)
            for packer, name in ((keys, "keys"), (values, "values")):
                packer.pack(unit, 0, kernel.keys, memory[name])
            with code.loop(begin, end, kernel.block) as first:
                rows = code.minimum(kernel.block, code.sub(end, first))
                limit, filled = kernel.limit(first)
                kernel.scores(by_keys, rows, kernel.q, unit, first, kernel.width, memory["keys"], p, filled)
                kernel.scores(by_keys, rows, dy, unit, first, kernel.value_width, memory["values"], ds, filled)
                kernel.probabilities(p, rows, unit, first, limit)
                with code.loop(0, rows) as row:
                    kernel.multiply(kernel.line(ds, row), unit, code.add(first, row), limit)
                    _softmax_gradient(kernel, kernel.line(p, row), kernel.line(ds, row), limit)
                if sums_queries:  # together first: a long sum of single lines would round more
                    with code.loop(1, rows) as row:
                        _add_line(kernel, kernel.line(ds, row), kernel.line(ds, "0"))
                    rows = "1"
                with code.loop(0, rows) as row:
                    result.add(kernel.line(ds, row), unit, code.add(first, row))
    return [kernel.entry(inputs, [target], "attention mask gradient", 1.0)]


@dataclass(frozen=True)
class _MaskGradient:
    """The gradient of a mask, broadcast as if it had one line per query; a line is one number if keys share it."""

    kernel: AttentionKernel
    target: StridedArray

    def _line(self, unit: tuple[str, str], query: str) -> Line:
        return Line(self.kernel.code, self.target.address(*unit, query), "float")

    def clear(self, unit: tuple[str, str], begin: str, end: str) -> None:
        """Zero the lines of some queries."""
        code, width = self.kernel.code, self.kernel.keys if self.target.last else "1"
        with code.loop(begin, end) as query:
            self.kernel.clear(self._line(unit, query).pointer, width)

    def add(self, ds: Line, unit: tuple[str, str], query: str) -> None:
        """Add what one query of a sample's head contributes."""
        line = self._line(unit, query)
        if self.target.last:
            _add_line(self.kernel, ds, line)
            return
        total = LineReduction(self.kernel.code, SUM)
        total.add(ds, self.kernel.keys, lambda element, index, mask: element)
        line.store(0, line.load(0, lanes=1) + total.result())


def _add_line(kernel: AttentionKernel, source: Line, target: Line) -> None:
    """target += source, one element per key"""

    def change(index: str, mask: str | None) -> None:
        target.store(index, target.load(index, mask) + source.load(index, mask), mask)

    vector_loop(kernel.code, 0, kernel.keys, change)


def _softmax_gradient(kernel: AttentionKernel, p: Line, ds: Line, keys: str, scale: str = "") -> None:
    """ds = scale p (dp - sum dp p), in place of dp."""
    code = kernel.code
    total = LineReduction(code, SUM)
    total.add(ds, keys, lambda dp, index, mask: dp * p.load(index, mask))
    mean = splat(total.result())
    factor = splat(SimdValue(code, scale, "float", 1)) if scale else None

    def change(index: str, mask: str | None) -> None:
        value = p.load(index, mask) * (ds.load(index, mask) - mean)
        ds.store(index, value if factor is None else value * factor, mask)

    vector_loop(code, 0, keys, change)


KERNELS: dict[str, Maker] = {
    "attention": attention_entries,
    "attention_by_token": attention_entries,
    "attention_gradient": attention_gradient_entries,
    "attention_by_token_gradient": attention_gradient_entries,
    "attention_mask_gradient": attention_mask_gradient_entries,
}
WORKSPACES = dict.fromkeys(KERNELS, workspace)
READS = dict.fromkeys(KERNELS, reads_attention)
SUPPORTS = dict.fromkeys(KERNELS, supports_attention)
