"""Reductions over any axes: sum, max, min, any, all, argmax, argmin; softmax and normalize have files of their own.

Lanes run over the elements of a result (`codegen/lanes.py`), then what they found is combined in a fixed order. Few
results with many elements are cut into splits, and a second launch of the same kind combines those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, kept_strides, vector_width
from mlcompute.devices.cuda.codegen.lanes import (
    Lanes,
    accumulator,
    column_step,
    each_element,
    lane_indices,
    lanes_for,
    most_splits,
)
from mlcompute.devices.cuda.codegen.types import (
    BOOL,
    DType,
    is_floating,
    literal,
    loaded,
    memory_type,
    register_type,
    stored,
)
from mlcompute.devices.cuda.kernels.launch import Launch, Row, supports_elements
from mlcompute.devices.loop_nest import Axis, Operand, Operands, ReductionAxes
from mlcompute.ops.op import Step

_FOLDS = ("sum", "max", "min", "any", "all")
_EXTREMES = ("argmax", "argmin")


@dataclass(frozen=True)
class Combiner:
    """How elements become one.

    fields     of what a lane keeps: (type, name)
    identity   fields before the first element
    seen       fields made of one element: expressions of `x`, a register, and `at`, its number
    merge      the body of a function of two of them, a and b
    result     an expression of `a`, as a register of the result's type
    """

    fields: tuple[tuple[str, str], ...]
    identity: tuple[str, ...]
    seen: tuple[str, ...]
    merge: str
    result: str

    @property
    def nbytes(self) -> int:
        """Size of what a lane keeps, in memory, at most."""
        return 8 * len(self.fields)


def _wide_type(dtype: DType) -> str:
    """A type that holds an element, and that lanes can hand to each other."""
    if is_floating(dtype):
        return "double" if dtype.itemsize == 8 else "float"
    if dtype.itemsize == 8:
        return "long long" if dtype.kind == "i" else "unsigned long long"
    return "unsigned int" if dtype.kind == "u" and dtype.itemsize == 4 else "int"


def _worst(dtype: DType, largest: bool) -> str:
    """What no element is worse than."""
    if is_floating(dtype):
        return literal(dtype, -np.inf if largest else np.inf)
    if dtype == BOOL:
        return "0" if largest else "1"
    number = np.iinfo(dtype).min if largest else np.iinfo(dtype).max
    if number == -(2**63):  # has no literal: it would be the negative of a number that is too large
        return "(-9223372036854775807ll - 1)"
    return f"(({_wide_type(dtype)}){number}{'ull' if dtype.kind == 'u' else 'll'})"


def combiner_for(name: str, dtype: DType, wide: bool = False) -> Combiner:
    """How `name` combines elements of a type. `wide`: do the numbers of elements need 64 bits?"""
    kind = _wide_type(dtype)
    if name == "sum" and dtype == BOOL:
        name = "any"
    if name in ("any", "all"):
        sign, start = ("|", "0") if name == "any" else ("&", "1")
        return Combiner((("int", "v"),), (start,), ("(x != 0)",), f"return Acc{{a.v {sign} b.v}};", "(a.v != 0)")
    if name == "sum":
        if not is_floating(dtype):  # unsigned, so that it wraps around
            kind = "unsigned long long" if dtype.itemsize == 8 else "unsigned int"
        return Combiner((((kind, "v"),)), ("0",), (f"({kind})x",), "return Acc{a.v + b.v};", "a.v")
    worst = _worst(dtype, name.endswith("max"))
    if name in ("max", "min"):
        merge = f"return Acc{{{name}imum(a.v, b.v)}};"
        return Combiner(((kind, "v"),), (worst,), (f"({kind})x",), merge, "a.v")
    sign, index = ">" if name == "argmax" else "<", "long long" if wide else "int"
    nan = " || (p.v != p.v && q.v == q.v)" if is_floating(dtype) else ""
    merge = f"""
    auto better = [](const Acc& p, const Acc& q) {{ return p.v {sign} q.v{nan}; }};
    if (b.at < 0) return a;
    if (a.at < 0) return b;
    if (better(a, b)) return a;
    return better(b, a) || b.at < a.at ? b : a;
"""
    return Combiner(((kind, "v"), (index, "at")), (worst, "-1"), (f"({kind})x", f"({index})at"), merge, "a.at")


def reduction_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """One of the reductions of the op table."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if not y.size:
        return []
    return reduce_axes(step, operands, step.op.name, x, y, _axes(step), _splits(step))


def reduce_axes(
    step: Step, operands: Operands, name: str, x: Operand, y: Operand, axes: Sequence[int], splits: int = 1
) -> Sequence[Launch]:
    """`name` over some axes of x into y, whose extents there are 1.

    splits   how many the step's workspace has memory for
    """
    loops = ReductionAxes.of(x.shape, axes, [x.strides, kept_strides(y, axes)])
    plan = lanes_for(loops, vector_width([x, y], loops.axes, [0]), splits_limit=splits)
    source = KernelSource([x, y], loops.iterations)
    combiner = combiner_for(name, x.dtype, source.wide)
    if plan.splits == 1:
        return [_launch(step, source, combiner, name, plan, x, y)]
    parts = operands.workspace(step, 0, plan.splits * plan.result_count * combiner.nbytes)
    first = _launch(step, source, combiner, name, plan, x, parts, writes_parts=True)
    # The parts of all results lie one after the other, split after split.
    count = plan.result_count
    to = [axis for axis in loops.axes if not axis.reduced]
    if count == 1:
        again = ReductionAxes((Axis(plan.splits, (1, 0), True),))
    else:
        dense, outer = [], count
        for axis in to:
            outer //= axis.extent
            dense.append(Axis(axis.extent, (outer, axis.strides[1])))
        again = ReductionAxes((Axis(plan.splits, (count, 0), True), *dense))
    second = KernelSource([x, y], plan.splits * count)
    return [first, _launch(step, second, combiner, name, lanes_for(again, 1), parts, y, reads_parts=True)]


def _launch(
    step: Step, source: KernelSource, combiner: Combiner, name: str, plan: Lanes, x: Operand, y: Operand,
    *, reads_parts: bool = False, writes_parts: bool = False,
) -> Launch:  # fmt: skip
    """One pass. Parts are what lanes keep, of every split."""
    element = "Acc" if reads_parts else memory_type(x.dtype)
    source.pointer("x", x, element=element)
    source.pointer("y", y, written=True, element="Acc" if writes_parts else None)
    place = source.unraveled("k", plan.kept, ["x_start", "y_start"], "k")
    step_of_y = source.index("y_step", column_step(plan, 1))
    if reads_parts:
        made = "element"
    else:
        at = f"r * {plan.width} + v" if plan.rows else "r"
        made = f"seen({loaded(x.dtype, 'element')}, {at})"
    identity, seen = (", ".join(parts) for parts in (combiner.identity, combiner.seen))
    register = register_type(x.dtype) if is_floating(x.dtype) else memory_type(x.dtype)
    results = 1 if plan.rows else plan.width
    if writes_parts:
        count = source.index("count", plan.result_count)
        group = "k" if plan.rows else "k * WIDTH + v"
        store = f"y[split * {count} + {group}] = a;"
    else:
        store = f"y[y_start + v * {step_of_y}] = {stored(y.dtype, f'({combiner.result})')};"
    before = accumulator(combiner.fields, combiner.merge, plan)
    if not reads_parts:
        before += f"__device__ __forceinline__ Acc seen({register} x, Index at) {{ return Acc{{{seen}}}; }}\n"
    body = f"""{lane_indices(source, plan)}
    {place}
{each_element(source, plan, ["x"])}
    Acc acc[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) acc[v] = Acc{{{identity}}};
    #pragma unroll 4
    for (Index r = begin; r < end; r += LANES) {{
        const auto group = *reinterpret_cast<const Pack<{element}, WIDTH>*>(x + x_start + x_at(r));
        #pragma unroll
        for (int v = 0; v < WIDTH; ++v) {{
            const {element} element = group.at[v];
            acc[v] = merge(acc[v], {made});
        }}
    }}
    combine_lanes(acc);
    if (alive && lane == 0) {{
        #pragma unroll
        for (int v = 0; v < {results}; ++v) {{
            const Acc a = acc[v];
            {store}
        }}
    }}"""
    shown = f"{name} of {'rows' if plan.rows else 'columns'}"
    if plan.splits > 1:
        shown += f" in {plan.splits} splits"
    return source.launch(step, shown, before, body, grid=plan.grid, block=plan.block)


def _axes(step: Step) -> tuple[int, ...]:
    found = step.attributes.get("axes")
    return (step.attributes["axis"],) if found is None else tuple(found)


def _splits(step: Step) -> int:
    x, y = step.inputs[0], step.results[0]
    return most_splits(y.size, x.size // max(y.size, 1))


def _workspace(step: Step) -> int:
    x, splits = step.inputs[0], _splits(step)
    return splits * step.results[0].size * combiner_for(step.op.name, x.dtype).nbytes if splits > 1 else 0


KERNELS: dict[str, Row] = {
    name: Row(reduction_launches, supports=supports_elements, workspace=_workspace) for name in (*_FOLDS, *_EXTREMES)
}
