"""softmax_cross_entropy and its gradient along any axis, one launch each.

Forward, lanes share a row or column as in `softmax.py`, and its first lane picks the label's logit. Backward, every
element is computed by itself: a group of neighbours has one label, or as many as it is wide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute.devices.cuda.codegen.checked_indices import VALID, is_index
from mlcompute.devices.cuda.codegen.indexing import BLOCK, blocks_for
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, grouped, kept_strides, vector_width
from mlcompute.devices.cuda.codegen.lanes import ElementPasses, accumulator, each_element, lane_indices, lanes_for
from mlcompute.devices.cuda.codegen.types import is_element, is_floating, literal, loaded, memory_type, stored
from mlcompute.devices.cuda.codegen.types import register_type as register
from mlcompute.devices.cuda.kernels.launch import Launch, Row, Status
from mlcompute.devices.cuda.kernels.softmax import LARGEST, LOWEST, ONLINE, SUMS
from mlcompute.devices.loop_nest import Axis, Operands, ReductionAxes, collapsed_axes, iteration_count
from mlcompute.ops.cross_entropy import valid_labels
from mlcompute.ops.op import Step


def forward_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """The largest logit and the sum of exponentials of every row; then its loss."""
    x, labels = (operands[value] for value in step.inputs)
    loss, largest, logarithm = (operands[value] for value in step.results)
    if not loss.size:
        return []
    axis, ignored = step.attributes["axis"], step.attributes["ignored"]
    classes = x.shape[axis]
    small = [kept_strides(own, (axis,)) for own in (labels, loss, largest, logarithm)]
    loops = ReductionAxes.of(x.shape, (axis,), [x.strides, *small])
    plan = lanes_for(loops, vector_width([x], loops.axes, [0]), hold=True)
    source = KernelSource([x, labels], loops.iterations)
    source.pointer("x", x)
    source.pointer("labels", labels)
    for name, result in (("loss", loss), ("largest", largest), ("logarithm", logarithm)):
        source.pointer(name, result, written=True)
    number = source.index("classes", classes)
    known = valid_labels(classes, ignored)
    status = source.status(Status(lambda label: f"softmax_cross_entropy: label {label}: {known}"))
    stride = source.index("class_stride", x.strides[axis])
    step_of = [0 if plan.rows else plan.kept[-1].strides[place] // plan.width for place in range(5)]
    names = ("x", "label", "loss", "largest", "logarithm")
    steps = [source.index(f"{name}_step", own) for name, own in zip(names, step_of, strict=True)]
    real = register(x.dtype)
    keep, spread = (literal(loss.dtype, step.attributes[name]) for name in ("keep", "spread"))
    passes = ElementPasses(plan, {"x": x.dtype})
    smooths = step.attributes["spread"] != 0.0
    sums = """
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) acc[v].r += xs[v];"""
    add = sums if smooths else ""
    find = passes.each(LARGEST) + "\n" + passes.each(SUMS + add) if passes.held else passes.each(ONLINE + add)
    rest = " + b.r" if smooths else ""
    merge = f"""
    const {real} m = a.m > b.m ? a.m : b.m;
    return Acc{{m, a.s * exp(a.m - m) + b.s * exp(b.m - m), a.r{rest}}};
"""
    smoothed = f" + {spread} * ({real})classes * (m + l) - {spread} * total[v].r" if smooths else ""
    body = f"""{lane_indices(source, plan)}
    {source.unraveled("k", plan.kept, ["x_start", *(f"{name}_at" for name in names[1:])], "k")}
{each_element(source, plan, ["x"])}
    Acc acc[WIDTH], total[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) acc[v] = Acc{{{LOWEST[real]}, 0, 0}};
{passes.load()}
{find}
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) total[v] = acc[v];
    combine_lanes(total);
    if (lane != 0 || !alive) return;
    #pragma unroll
    for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) {{
        const {real} m = total[v].m, l = log(total[v].s);
        const long long label = (long long)labels[label_at + v * {steps[1]}];
        const bool counts = {"true" if ignored is None else f"label != {ignored}ll"};
        {real} found = 0;
        if (counts && valid(label, {number}, {status})) {{
            const {real} picked = {loaded(x.dtype, f"x[x_start + v * {steps[0]} + (Index)label * {stride}]")};
            found = {keep} * (l - (picked - m)){smoothed};
        }}
        loss[loss_at + v * {steps[2]}] = found;
        largest[largest_at + v * {steps[3]}] = m;
        logarithm[logarithm_at + v * {steps[4]}] = l;
    }}"""
    before = VALID + accumulator([(real, "m"), (real, "s"), (real, "r")], merge, plan)
    shown = f"cross entropy of {'rows' if plan.rows else 'columns'}"
    return [source.launch(step, shown, before, body, grid=plan.grid, block=plan.block)]


def gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """d_softmax e^(x - largest - logarithm) - d_loss (spread + keep at the label), some neighbours per thread."""
    x, *others = (operands[value] for value in step.inputs)
    dx = operands[step.results[0]]
    if not dx.size:
        return []
    axis, rank = step.attributes["axis"], len(x.shape)
    # How far the number of the class moves along each axis: it is an operand that lies nowhere.
    counting = tuple(int(place == axis) for place in range(rank))
    names = ("largest", "logarithm", "labels", "d_loss", "d_softmax")
    small = dict(zip(names, others, strict=True))
    strides = [x.strides, dx.strides, counting, *(kept_strides(own, (axis,)) for own in small.values())]
    axes = sorted_axes(x.shape, strides)
    width = vector_width([x, dx], axes, [0, 1])
    loops = grouped(axes, width)
    count = iteration_count(loops)
    source = KernelSource([x, dx], x.size)
    source.pointer("x", x)
    for name, own in small.items():
        source.pointer(name, own)
    source.pointer("dx", dx, written=True)
    total = source.index("total", count)
    inner = axes[-1].strides
    moves = [
        source.index(f"{name}_step", stride) if stride else "0"  # what a group shares is then read once
        for name, stride in zip(("class", *names), inner[2:], strict=True)
    ]
    real = register(x.dtype)
    keep, spread = (literal(small["d_loss"].dtype, step.attributes[name]) for name in ("keep", "spread"))
    offsets = ["x_start", "dx_start", "class_start", *(f"{name}_start" for name in names)]
    at = {name: f"{name}[{name}_start + v * {move}]" for name, move in zip(names, moves[1:], strict=True)}
    group = f"Pack<{memory_type(x.dtype)}, WIDTH>"
    body = f"""    const Index k = (Index)blockIdx.x * {BLOCK} + threadIdx.x;
    if (k >= {total}) return;
    {source.unraveled("k", loops, offsets, "k")}
    const {group} xs = *reinterpret_cast<const {group}*>(x + x_start);
    {group} made;
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) {{
        const {real} d_label = {at["d_loss"]};
        {real} found = {at["d_softmax"]} * exp({loaded(x.dtype, "xs.at[v]")} - {at["largest"]} - {at["logarithm"]});
        {f"found -= {spread} * d_label;" if step.attributes["spread"] else ""}
        if ((long long)(class_start + v * {moves[0]}) == (long long){at["labels"]}) found -= {keep} * d_label;
        made.at[v] = {stored(dx.dtype, "found")};
    }}
    *reinterpret_cast<{group}*>(dx + dx_start) = made;"""
    before = f"constexpr int WIDTH = {width};\n"
    return [source.launch(step, "cross entropy gradient", before, body, grid=blocks_for(count), block=BLOCK)]


def sorted_axes(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> list[Axis]:
    """Loops in the order in which the first operand lies in memory, collapsed."""
    order = sorted(range(len(shape)), key=lambda axis: -strides[0][axis])
    return collapsed_axes(tuple(shape[axis] for axis in order), [tuple(own[axis] for axis in order) for own in strides])


def _supports(step: Step) -> bool:
    """Floating-point logits, and labels of any integer type."""
    x, labels = step.inputs[0], step.inputs[1 if step.op.name == "softmax_cross_entropy" else 3]
    real = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    others = step.results if step.op.name == "softmax_cross_entropy" else (*step.inputs[1:3], *step.inputs[4:])
    floats = is_floating(x.dtype) and is_element(x.dtype) and all(value.dtype == real for value in others)
    return floats and is_index(labels.dtype)


KERNELS: dict[str, Row] = {
    "softmax_cross_entropy": Row(forward_launches, supports=_supports),
    "softmax_cross_entropy_gradient": Row(gradient_launches, supports=_supports),
}
