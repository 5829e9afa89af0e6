"""What attention and its gradients share: blocks of queries, packed keys and values, probabilities.

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
    prefetch,
    threads_bytes,
)
from mlcompute.devices.cpu.codegen.arguments import KernelArguments
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.combiners import MAX_SKIPPING_NAN, SUM, LineReduction, Term
from mlcompute.devices.cpu.codegen.loops import Line, Variable, share_units, splat, splat_constant, vector_loop
from mlcompute.devices.cpu.codegen.math import exp, log
from mlcompute.devices.cpu.codegen.simd import SimdValue, literal, select
from mlcompute.devices.cpu.gemm.packed_gemm import (
    FLOPS_PER_NS,
    LINE,
    call_pack,
    call_packed_gemm,
    pack_columns,
    pack_rows,
    padded,
)
from mlcompute.devices.cpu.runtime.entry import Entry
from mlcompute.devices.loop_nest import Operand, Operands, broadcast_strides
from mlcompute.ops.op import FLOAT32, Shape, Step

#: Scores of a block of queries, at most, if a block is to have more than two dozen.
_BLOCK_SCORES = 32768
#: Queries of a block where a mask may forbid keys to all of them: a smaller block leaves out more. As many as keys are
#: left out at once, so that the first block of a causal mask looks at as many keys as it has queries.
_MASKED_BLOCK = 64
#: Queries whose softmax is computed together.
_TOGETHER = 4
#: Blocks of a mask's gradient, if it has so many queries.
_MASK_BLOCKS = 32
#: Bytes of q, k and v that a thread fetches before it begins with them: its cache holds them beside the packed ones.
_FETCHED = 1 << 18
#: Keys are left out in multiples of this: of the steps of a sum along a line, and of a panel of the gemm.
_KEYS_AT_ONCE = 64


@dataclass(frozen=True)
class Sizes:
    """Extents of q (samples, heads, queries, width), k (.., keys, width) and v (.., keys, value width)."""

    samples: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    #: Queries of a block: mostly full tiles of the gemm, which are 6 or 12 rows high.
    block: int

    @classmethod
    def of(cls, step: Step) -> Sizes:
        q, k, v = step.inputs[first_input(step) : first_input(step) + 3]
        (samples, heads, queries, width), keys = q.shape, k.shape[2]
        tiles = max(2, _BLOCK_SCORES // (12 * padded(keys)))
        if step.op.name == "attention_mask_gradient":
            # Threads share the blocks of the mask: a mask that all samples share needs several.
            n, m, rows, _ = four_extents(step.results[0].shape)
            per_mask = -(-_MASK_BLOCKS // (n * m)) if rows == queries else 1
            tiles = min(tiles, max(2, -(-queries // (12 * per_mask))))
        block = min(queries, 12 * tiles, _MASKED_BLOCK if _has_mask_of_pairs(step) else queries)
        return cls(samples, heads, queries, keys, width, v.shape[3], block)

    def cost(self, passes: float) -> float:
        """Nanoseconds of a softmax and of some pairs of matmuls, one with the keys and one with the values."""
        scores = self.samples * self.heads * self.queries * self.keys
        return scores * (2.0 * passes * (self.width + self.value_width) / FLOPS_PER_NS + 1.0)


def first_input(step: Step) -> int:
    """Which input q is; k, v, mask and keep follow it."""
    return {"attention": 0, "attention_by_token": 0, "attention_by_token_gradient": 3}.get(step.op.name, 1)


def _is_by_token(step: Step) -> bool:
    return step.op.name in ("attention_by_token", "attention_by_token_gradient")


def four_extents(mask: Shape) -> Shape:
    """A mask's extents as (n, heads, l, s)."""
    return (1,) * (4 - len(mask)) + mask


def _has_mask_of_pairs(step: Step) -> bool:
    """Is there a mask of queries and keys that all heads of all samples share? It may be a causal one."""
    if not step.attributes["has_mask"] or step.op.name == "attention_mask_gradient":
        return False
    mask = four_extents(step.inputs[first_input(step) + 3].shape)
    return mask[:2] == (1, 1) and mask[2] > 1 and mask[3] > _KEYS_AT_ONCE


def _skips_keys(step: Step) -> bool:
    """May some blocks of queries have fewer keys than others?"""
    s = Sizes.of(step)
    return _has_mask_of_pairs(step) and s.queries > s.block


def _parts(step: Step) -> dict[str, int]:
    """Parts of a thread's memory, in floats."""
    s = Sizes.of(step)
    found = _matrices(step, s)
    if _skips_keys(step):
        found |= {"positions": s.keys, "limits": -(-s.queries // s.block)}
    return found


def _matrices(step: Step, s: Sizes) -> dict[str, int]:
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
    return threads_bytes(_parts(step))


class Packer:
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


def can_pack(operand: Operand) -> bool:
    """Do its rows or its columns lie in memory one element after the other?"""
    rows, width = operand.shape[2:]
    by_row, by_column = operand.strides[2:]
    return by_column == 1 or width == 1 or by_row == 1 or rows == 1


class AttentionKernel:
    """What attention and its gradients share: their operands, the loop over heads, and the probabilities.

    units   what threads share, if not the heads of all samples
    """

    def __init__(self, step: Step, operands: Operands, inputs: Sequence[Operand], units: int = 0) -> None:
        self.step = step
        q, k, v, *more = inputs
        self.sizes = s = Sizes.of(step)
        self.code = code = Code(step.op.name)
        self.args = args = KernelArguments(code)
        self.memory = ThreadWorkspace.of(args, operands, step, _parts(step))
        # Full samples where that is even enough: then no barrier is needed beside kernels that share samples, too.
        is_even = s.samples % operands.threads == 0 or s.samples >= 8 * operands.threads
        self.rows = s.samples if not units and is_even and operands.threads <= self.memory.count else 0
        shared = units or s.samples * s.heads
        self.begin, self.end = share_units(args, shared, self.rows, self.memory.max_threads, in_pieces=True)
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

    def fetch(self, unit: tuple[str, str], *others: StridedArray) -> None:
        """Fetch what a sample's head reads, others of as many rows as q too: mostly other threads have written it.

        One head's part of a token is a few cache lines, too few for the processor to see where the next ones lie.
        """
        s, code = self.sizes, self.code
        read = s.queries * (s.width + s.value_width * len(others)) + s.keys * (s.width + s.value_width)
        if 4 * read > _FETCHED:
            return
        matrices = [(self.q, self.queries, self.width), (self.k, self.keys, self.width)]
        matrices += [(self.v, self.keys, self.value_width), *((x, self.queries, self.value_width) for x in others)]
        for array, rows, width in matrices:
            if array.last == 1:
                with code.loop(0, rows) as row, code.loop(0, width, LINE) as place:
                    prefetch([Line(code, array.address(*unit, row), "float")], place)

    def unit(self, number: str) -> tuple[str, str]:
        """Sample and head."""
        return self.code.div(number, self.heads), self.code.rem(number, self.heads)

    def result(self, operand: Operand, rows: str, width: str) -> Result:
        return Result(self, self.args.pointer(operand), rows, width, _is_by_token(self.step))

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
        largest, shares = (code.aligned_buffer(_TOGETHER) for _ in range(2))
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
            in_pieces=True,
            scratch=self.memory.scratch,
        )


@dataclass(frozen=True)
class Result:
    """A result (n, heads, rows, width), or (n, rows, heads, width) by token, in memory."""

    kernel: AttentionKernel
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
