"""Attention and its gradients: threads share the heads of all samples; a block of queries at a time stays in the cache.

Per sample and head the keys and values are packed once; per block of queries the scores, their softmax and what follows
are computed in a workspace of the thread's own. Matrices are multiplied by `packed_gemm`, which reads q, k, v in place,
and writes results token by token where that is asked for (`attention_by_token`).

Keys that a mask over all heads forbids to every query of a block, as a causal one does, are left out where no others
come after them. Their probabilities are 0, and so many are left out that sums keep their order: no bit depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.devices.cpu.codegen.addressing import (
    DenseArray,
    StridedArray,
    ThreadWorkspace,
    owned_by_row,
    thread_floats,
)
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.combiners import MAX_SKIPPING_NAN, SUM, LineReduction, Term
from mlcompute.devices.cpu.codegen.loops import Line, Variable, share_units, splat, splat_constant, vector_loop
from mlcompute.devices.cpu.codegen.math import exp, log
from mlcompute.devices.cpu.codegen.simd import SimdValue, literal, select
from mlcompute.devices.cpu.gemm.packed_gemm import (
    FLOPS_PER_NS,
    call_pack,
    call_packed_gemm,
    pack_columns,
    pack_rows,
    packed_gemm,
    padded,
)
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.cpu.runtime.threads import planned_threads
from mlcompute.devices.loop_nest import Operand, Operands, broadcast_strides
from mlcompute.ops.op import FLOAT32, Shape, Step

#: Scores of a block of queries, at most, if a block is to have more than two dozen.
_BLOCK_SCORES = 32768
#: Dozens of queries of a block, at most, where a mask may forbid keys to all of them: a smaller block leaves out more.
#: Just less than the keys that are left out at once.
_MASKED_TILES = 5
#: Queries whose softmax is computed together.
_TOGETHER = 4
#: Blocks of a mask's gradient, if it has so many queries.
_MASK_BLOCKS = 32
#: Keys are left out in multiples of this: of the steps of a sum along a line, and of a panel of the gemm.
_KEYS_AT_ONCE = 64


@dataclass(frozen=True)
class _Sizes:
    samples: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    #: Queries of a block: full tiles of the gemm, which are 6 or 12 rows high.
    block: int

    @classmethod
    def of(cls, step: Step) -> _Sizes:
        q, k, v = step.inputs[_first(step) : _first(step) + 3]
        (samples, heads, queries, width), keys = q.shape, k.shape[2]
        tiles = max(2, _BLOCK_SCORES // (12 * padded(keys)))
        if _has_mask_of_pairs(step):
            tiles = min(tiles, _MASKED_TILES)
        if step.op.name == "attention_mask_gradient":
            # Threads share the blocks of the mask: a mask that all samples share needs several.
            n, m, rows, _ = _four(step.results[0].shape)
            per_mask = -(-_MASK_BLOCKS // (n * m)) if rows == queries else 1
            tiles = min(tiles, max(2, -(-queries // (12 * per_mask))))
        return cls(samples, heads, queries, keys, width, v.shape[3], min(queries, 12 * tiles))

    def cost(self, passes: float) -> float:
        """Nanoseconds of a softmax and of some pairs of matmuls, one with the keys and one with the values."""
        scores = self.samples * self.heads * self.queries * self.keys
        return scores * (2.0 * passes * (self.width + self.value_width) / FLOPS_PER_NS + 1.0)


def _first(step: Step) -> int:
    """Which input q is; k, v, mask and keep follow it."""
    return {"attention": 0, "attention_by_token": 0, "attention_by_token_gradient": 3}.get(step.op.name, 1)


def _is_by_token(step: Step) -> bool:
    return step.op.name in ("attention_by_token", "attention_by_token_gradient")


def _four(mask: Shape) -> Shape:
    """A mask's extents as (n, heads, l, s)."""
    return (1,) * (4 - len(mask)) + mask


def _has_mask_of_pairs(step: Step) -> bool:
    """Is there a mask of queries and keys that all heads of all samples share? It may be a causal one."""
    if not step.attributes["has_mask"] or step.op.name == "attention_mask_gradient":
        return False
    mask = _four(step.inputs[_first(step) + 3].shape)
    return mask[:2] == (1, 1) and mask[2] > 1 and mask[3] > _KEYS_AT_ONCE


def _skips_keys(step: Step) -> bool:
    """May some blocks of queries have fewer keys than others?"""
    s = _Sizes.of(step)
    return _has_mask_of_pairs(step) and s.queries > s.block


def _parts(step: Step) -> dict[str, int]:
    """Parts of a thread's memory, in floats."""
    s = _Sizes.of(step)
    found = _matrices(step, s)
    if _skips_keys(step):
        found |= {"positions": s.keys, "limits": -(-s.queries // s.block)}
    return found


def _matrices(step: Step, s: _Sizes) -> dict[str, int]:
    if step.op.name in ("attention", "attention_by_token"):
        return {
            "keys": padded(s.keys) * s.width,
            "values": padded(s.value_width) * s.keys,
            "scores": padded(s.keys) * s.block,
        }
    if step.op.name == "attention_mask_gradient":
        return {
            "keys": padded(s.keys) * s.width,
            "values": padded(s.keys) * s.value_width,
            "p": padded(s.keys) * s.block,
            "ds": padded(s.keys) * s.block,
        }
    return {
        "keys": padded(s.keys) * s.width,
        "values": padded(s.keys) * s.value_width,
        "key rows": padded(s.width) * s.keys,
        "query rows": padded(s.width) * s.block,
        "dy rows": padded(s.value_width) * s.block,
        "p": padded(s.keys) * s.block,
        "ds": padded(s.keys) * s.block,
    }


def workspace(step: Step) -> int:
    """Bytes for the threads' own memory."""
    if not all(value.dtype == FLOAT32 and value.size for value in step.inputs):
        return 0
    return 4 * thread_floats(_parts(step)) * planned_threads()


class _Packer:
    """Packs rows of an operand (n, heads, rows, width) with the rows or the width as columns of a matmul."""

    def __init__(self, args: KernelArguments, operand: Operand, view: StridedArray, transposed: bool) -> None:
        self._code, self._view = args.code, view
        rows, width = operand.shape[2:]
        by_row, by_column = operand.strides[2:]
        self._transposed = transposed
        columns = rows if transposed else width
        in_lines = by_column == 1 or width == 1
        # Lines are the columns of b if it is transposed, else its rows; a view may swap the two again.
        self._function = args.pointer(pack_columns(columns) if transposed == in_lines else pack_rows(columns))
        self._stride = args.number(by_row if in_lines else by_column)
        self._width = args.number(width)

    def pack(self, unit: tuple[str, str], first: str | int, rows: str, target: str) -> None:
        """Pack some rows of a sample's head."""
        code = self._code
        source = self._view.address(*unit, str(first))
        columns, depth = (rows, self._width) if self._transposed else (self._width, rows)
        call_pack(code, self._function, (0, columns), depth, (source, self._stride), target)


def _can_pack(operand: Operand) -> bool:
    """Do its rows or its columns lie in memory one element after the other?"""
    rows, width = operand.shape[2:]
    by_row, by_column = operand.strides[2:]
    return by_column == 1 or width == 1 or by_row == 1 or rows == 1


class _Kernel:
    """What attention and its gradients share: their operands, the loop over heads, and the probabilities.

    units   what threads share, if not the heads of all samples
    """

    def __init__(self, step: Step, operands: Operands, inputs: Sequence[Operand], units: int = 0) -> None:
        self.step, self.operands = step, operands
        q, k, v, *more = inputs
        self.sizes = s = _Sizes.of(step)
        self.code = code = Code(step.op.name)
        self.args = args = KernelArguments(code)
        self.memory = ThreadWorkspace(args, operands.workspace(step, 0, workspace(step)), _parts(step))
        # Full samples where that is even enough: then no barrier is needed beside kernels that share samples, too.
        is_even = s.samples % operands.threads == 0 or s.samples >= 8 * operands.threads
        self.rows = s.samples if not units and is_even and operands.threads <= self.memory.count else 0
        self.begin, self.end = share_units(args, units or s.samples * s.heads, self.rows, self.memory.max_threads)
        self.heads, self.queries, self.keys, self.width, self.value_width = args.numbers(
            [s.heads, s.queries, s.keys, s.width, s.value_width]
        )
        self.padded_keys, self.block = args.numbers([padded(s.keys), s.block])
        self.q, self.k, self.v = (StridedArray.of(args, operand) for operand in (q, k, v))
        shape = (s.samples, s.heads, s.queries, s.keys)
        broadcast = [
            StridedArray.of(args, Operand(x.base, x.offset, shape, broadcast_strides(x, shape), x.dtype)) for x in more
        ]
        self.mask = broadcast[0] if step.attributes["has_mask"] else None
        self.keep = broadcast[-1] if step.attributes["has_keep"] else None
        self.scale = literal(step.attributes["scale"], "float", 1)
        self.skips_keys = _skips_keys(step)
        if self.skips_keys:  # a thread without work may have no memory either
            with code.when(code.let(f"icmp slt i64 {self.begin}, {self.end}")):
                self._find_limits()

    def _find_limits(self) -> None:
        """How many keys the queries of each block look at: up to the last that the mask allows to one of them."""
        assert self.mask is not None
        code, mask = self.code, self.mask
        positions, limits = (Line(code, self.memory[name], "float") for name in ("positions", "limits"))

        def number(integer: str) -> SimdValue:
            return SimdValue(code, code.let(f"sitofp i64 {integer} to float"), "float", 1)

        with code.loop(0, self.keys) as key:
            positions.store(key, number(code.add(key, 1)))
        with code.loop(0, self.queries, self.block) as first:
            most = Variable(SimdValue(code, literal(0.0, "float", 1), "float", 1))
            with code.loop(first, code.minimum(code.add(first, self.block), self.queries)) as query:
                read = mask.reader("0", "0", query)
                last = LineReduction(code, MAX_SKIPPING_NAN)
                last.add(
                    positions, self.keys, lambda at, index, part: select(read(index, part).differs(-math.inf), at, 0.0)
                )
                found = last.result()
                # Of a query that may look at nothing all keys count: it gives NaN, to all of them.
                found = select(found > 0.0, found, number(self.keys))
                most.set(select(found > most.get(), found, most.get()))
            limits.store(code.div(first, self.block), most.get())

    def limit(self, first: str) -> tuple[str, str]:
        """How many keys the queries from `first` on look at, and the same including those that fill up a panel."""
        if not self.skips_keys:
            return self.keys, self.padded_keys
        code = self.code
        found = Line(code, self.memory["limits"], "float").load(code.div(first, self.block), lanes=1)
        count = code.let(f"fptosi float {found.name} to i64")
        count = code.mul(code.div(code.add(count, _KEYS_AT_ONCE - 1), _KEYS_AT_ONCE), _KEYS_AT_ONCE)
        is_less = code.let(f"icmp slt i64 {count}, {self.keys}")
        limit, filled = (
            code.let(f"select i1 {is_less}, i64 {count}, i64 {most}") for most in (self.keys, self.padded_keys)
        )
        return limit, filled

    def unit(self, number: str) -> tuple[str, str]:
        """Sample and head."""
        return self.code.div(number, self.heads), self.code.rem(number, self.heads)

    def result(self, operand: Operand, rows: str, width: str) -> _Result:
        return _Result(self, self.args.pointer(operand), rows, width, _is_by_token(self.step))

    def logs(self, operand: Operand) -> DenseArray:
        """Logarithms of the softmax's denominators, (n, heads, l)."""
        return DenseArray(self.code, self.args.pointer(operand), (self.heads, self.queries))

    def line(self, block: str, row: str) -> Line:
        """Scores of one query."""
        return Line(self.code, self.code.at(block, self.code.mul(row, self.padded_keys), "float"), "float")

    def _scored(self, unit: tuple[str, str], query: str) -> Term:
        """scale scores + mask of one query."""
        added = self.mask.reader(*unit, query) if self.mask is not None else None
        scale = splat(SimdValue(self.code, self.scale, "float", 1))

        def term(element: SimdValue, index: str, mask: str | None) -> SimdValue:
            value = element * scale
            return value if added is None else value + added(index, mask)

        return term

    def probabilities(
        self,
        block: str,
        rows: str,
        unit: tuple[str, str],
        first: str,
        keys: str,
        drops: bool = False,
        logs: DenseArray | None = None,
    ) -> None:
        """softmax(scale scores + mask) of some queries, in place; dropped out if wanted; `logs` to be written.

        A few queries go through each of three passes together, so that the core need not wait at the end of every
        line for its maximum and its sum.
        """
        code = self.code
        largest, shares = (code.variable(f"[{_TOGETHER} x float]", "undef") for _ in range(2))
        with code.loop(0, rows, _TOGETHER) as start:
            end = code.minimum(code.add(start, _TOGETHER), rows)

            with code.loop(start, end) as row:
                found = LineReduction(code, MAX_SKIPPING_NAN)
                found.add(self.line(block, row), keys, self._scored(unit, code.add(first, row)))
                Line(code, largest, "float").store(code.sub(row, start), found.result())
            with code.loop(start, end) as row:
                line, scored = self.line(block, row), self._scored(unit, code.add(first, row))
                most = Line(code, largest, "float").load(code.sub(row, start), lanes=1)
                offset = splat(most)

                def power(element: SimdValue, index: str, mask: str | None) -> SimdValue:
                    difference = scored(element, index, mask) - offset
                    value = SimdValue(code, exp(code, difference.name, difference.lanes), "float", difference.lanes)
                    line.store(index, value, mask)
                    return value

                found = LineReduction(code, SUM)
                found.add(line, keys, power)
                total = found.result()
                Line(code, shares, "float").store(code.sub(row, start), 1.0 / total)
                if logs is not None:
                    logarithm = SimdValue(code, log(code, total.name, 1), "float", 1)
                    # Of a query that may look at nothing it is that of 0.
                    logarithm = select(most > -math.inf, most + logarithm, most)
                    Line(code, logs.address(*unit, code.add(first, row)), "float").store(0, logarithm)
            with code.loop(start, end) as row:
                share = splat(Line(code, shares, "float").load(code.sub(row, start), lanes=1))
                self.multiply(self.line(block, row), unit, code.add(first, row), keys, share, drops)

    def multiply(
        self,
        line: Line,
        unit: tuple[str, str],
        query: str,
        keys: str,
        share: SimdValue | None = None,
        drops: bool = True,
    ) -> None:
        """Multiply a query's line by a number and by what is kept of it."""
        kept = self.keep.reader(*unit, query) if self.keep is not None and drops else None

        def change(index: str, mask: str | None) -> None:
            value = line.load(index, mask)
            for factor in (share, kept(index, mask) if kept is not None else None):
                value = value if factor is None else value * factor
            line.store(index, value, mask)

        if share is not None or kept is not None:
            vector_loop(self.code, 0, keys, change)

    def scores(
        self,
        multiply: str,
        rows: str,
        a: StridedArray,
        unit: tuple[str, str],
        query: str,
        depth: str,
        b: str,
        block: str,
        keys: str,
    ) -> None:
        """A block of lines, one element per key: rows of a times what was packed with the keys as columns."""
        left = (a.address(*unit, query), a.strides[2], a.strides[3])
        call_packed_gemm(self.code, multiply, (rows, keys, depth), left, b, (block, self.padded_keys))

    def clear(self, pointer: str, count: str) -> None:
        """Zero some floats."""
        line, zero = Line(self.code, pointer, "float"), splat_constant(self.code, 0.0)
        vector_loop(self.code, 0, count, lambda index, mask: line.store(index, zero, mask))

    def entry(self, reads: list[Operand], writes: list[Operand], kernel: str, passes: float) -> Entry:
        return Entry(
            self.step,
            self.code,
            self.args.values,
            reads,
            writes,
            rows=self.rows,
            by_row=owned_by_row([*reads, *writes], self.rows, but=[x for x in reads if len(x.shape) != 4]),
            kernel=kernel,
            cost=self.sizes.cost(passes),
            scratch=[self.memory.buffer],
        )


@dataclass(frozen=True)
class _Result:
    """A result (n, heads, rows, width), or (n, rows, heads, width) by token, in memory."""

    kernel: _Kernel
    pointer: str
    rows: str
    width: str
    by_token: bool

    @property
    def stride(self) -> str:
        """From row to row of a sample's head."""
        return self.kernel.code.mul(self.kernel.heads, self.width) if self.by_token else self.width

    def address(self, unit: tuple[str, str], row: str = "0") -> str:
        """Of a row of a sample's head."""
        extents = (self.rows, self.kernel.heads) if self.by_token else (self.kernel.heads, self.rows)
        (sample, head), array = unit, DenseArray(self.kernel.code, self.pointer, (*extents, self.width))
        return array.address(sample, row, head) if self.by_token else array.address(sample, head, row)

    def clear(self, unit: tuple[str, str]) -> None:
        """Zero all rows of a sample's head."""
        with self.kernel.code.loop(0, self.rows) as row:
            self.kernel.clear(self.address(unit, row), self.width)


def _inputs(step: Step, operands: Operands) -> list[Operand] | None:
    """The operands, if the kernels can read them all."""
    found = [operands[value] for value in step.inputs]
    return found if supports_attention(step) and reads_attention(step, operands) else None


def supports_attention(step: Step) -> bool:
    """float32, and not empty?"""
    return all(value.dtype == FLOAT32 and value.size for value in step.inputs)


def reads_attention(step: Step, operands: Operands) -> bool:
    """Can all matrices be packed?"""
    first = _first(step)
    matrices = [*step.inputs[first : first + 3], *(step.inputs[:1] if first else ())]
    return all(_can_pack(operands[value]) for value in matrices)


def attention_entries(step: Step, operands: Operands) -> Sequence[Entry] | None:
    """q, k, v, mask, keep -> y (and logs)"""
    inputs = _inputs(step, operands)
    if inputs is None:
        return None
    kernel = _Kernel(step, operands, inputs)
    code, args, s, memory = kernel.code, kernel.args, kernel.sizes, kernel.memory
    keys = _Packer(args, inputs[1], kernel.k, transposed=True)
    values = _Packer(args, inputs[2], kernel.v, transposed=False)
    by_keys, by_values = args.pointer(packed_gemm(s.keys)), args.pointer(packed_gemm(s.value_width))
    targets = [operands[value] for value in step.results]
    y = kernel.result(targets[0], kernel.queries, kernel.value_width)
    logs = kernel.logs(targets[1]) if len(targets) > 1 else None
    with code.loop(kernel.begin, kernel.end) as number:
        unit = kernel.unit(number)
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
    inputs = [inputs[0], *inputs[_first(step) :]]
    kernel = _Kernel(step, operands, inputs[1:])
    code, args, s, memory = kernel.code, kernel.args, kernel.sizes, kernel.memory
    dy = StridedArray.of(args, inputs[0])
    keys, values = (_Packer(args, inputs[i], view, transposed=True) for i, view in ((2, kernel.k), (3, kernel.v)))
    key_rows = _Packer(args, inputs[2], kernel.k, transposed=False)
    query_rows, dy_rows = (_Packer(args, inputs[i], view, transposed=False) for i, view in ((1, kernel.q), (0, dy)))
    by_keys, by_width, by_values = (args.pointer(packed_gemm(columns)) for columns in (s.keys, s.width, s.value_width))
    targets = [operands[value] for value in step.results]
    dq = kernel.result(targets[0], kernel.queries, kernel.width)
    dk = kernel.result(targets[1], kernel.keys, kernel.width)
    dv = kernel.result(targets[2], kernel.keys, kernel.value_width)
    p, ds = memory["p"], memory["ds"]
    with code.loop(kernel.begin, kernel.end) as number:
        unit = kernel.unit(number)
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
    sizes, target = _Sizes.of(step), operands[step.results[0]]
    n, heads, queries, _ = _four(target.shape)
    sums_queries = queries != sizes.queries
    blocks = 1 if sums_queries else -(-sizes.queries // sizes.block)
    kernel = _Kernel(step, operands, inputs[1:], units=n * heads * blocks)
    code, args, s, memory = kernel.code, kernel.args, kernel.sizes, kernel.memory
    dy = StridedArray.of(args, inputs[0])
    keys, values = (_Packer(args, inputs[i], view, transposed=True) for i, view in ((2, kernel.k), (3, kernel.v)))
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

    kernel: _Kernel
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


def _add_line(kernel: _Kernel, source: Line, target: Line) -> None:
    """target += source, one element per key"""

    def change(index: str, mask: str | None) -> None:
        target.store(index, target.load(index, mask) + source.load(index, mask), mask)

    vector_loop(kernel.code, 0, kernel.keys, change)


def _softmax_gradient(kernel: _Kernel, p: Line, ds: Line, keys: str, scale: str = "") -> None:
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
