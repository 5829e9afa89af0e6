"""softmax and log_softmax along any axis, in one launch.

Every lane has a largest element m and a sum s of exp(x - m); two of those become one by rescaling the sums. Where lanes
have few elements, they keep them in registers. Else m grows while elements are read (M. Milakov, N. Gimelshein, "Online
normalizer calculation for softmax", 2018), and they are read again to write the results.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, vector_width
from mlcompute.devices.cuda.codegen.lanes import (
    ElementPasses,
    accumulator,
    each_element,
    lane_indices,
    lanes_for,
    store_group,
)
from mlcompute.devices.cuda.codegen.types import register_type
from mlcompute.devices.cuda.kernels.launch import Launch, Row, supports_floats
from mlcompute.devices.loop_nest import Operands, ReductionAxes
from mlcompute.ops.op import Step

# m starts at the lowest finite number, so that lanes without elements, or with -inf only, add nothing: exp(-inf - m)
# is 0. An infinite element makes the sum NaN by inf - inf, and NaN stays NaN, as in the op's definition.
LOWEST = {"float": "-0x1.fffffep+127f", "double": "-0x1.fffffffffffffp+1023"}

#: Statements of a pass over elements: acc[v].m and acc[v].s of what was read so far.
LARGEST = """            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) acc[v].m = xs[v] > acc[v].m ? xs[v] : acc[v].m;"""
EXPONENTIALS = """            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) {
                xs[v] = exp(xs[v] - acc[v].m);
                acc[v].s += xs[v];
            }"""
SUMS = """            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) acc[v].s += exp(xs[v] - acc[v].m);"""
#: The same in one pass: sums are corrected when something larger comes. Neighbours of a row have one sum, and what is
#: done depends on no number, or lanes would wait for each other.
ONLINE = """            #pragma unroll
            for (int first = 0; first < WIDTH; first += ROWS ? WIDTH : 1) {
                auto most = acc[first].m;
                #pragma unroll
                for (int v = first; v < (ROWS ? WIDTH : first + 1); ++v) most = xs[v] > most ? xs[v] : most;
                acc[first].s *= exp(acc[first].m - most);
                acc[first].m = most;
                #pragma unroll
                for (int v = first; v < (ROWS ? WIDTH : first + 1); ++v) acc[first].s += exp(xs[v] - most);
            }"""


def softmax_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """Every result is a row or a column of x, scaled."""
    x, y = operands[step.inputs[0]], operands[step.results[0]]
    if not y.size:
        return []
    loops = ReductionAxes.of(x.shape, (step.attributes["axis"],), [x.strides, y.strides])
    plan = lanes_for(loops, vector_width([x, y], loops.axes, [0, 1]), hold=True)
    source = KernelSource([x, y], loops.iterations)
    source.pointer("x", x)
    source.pointer("y", y, written=True)
    real, is_log = register_type(x.dtype), step.op.name == "log_softmax"
    passes = ElementPasses(plan, {"x": x.dtype})
    if not passes.held:
        find, result = passes.each(ONLINE), "exp(xs[v] - total[ROWS ? 0 : v].m) * last[ROWS ? 0 : v]"
        last = "1 / total[v].s"
    else:
        # Registers then hold exp(x - m) with the lane's own m.
        find = passes.each(LARGEST) + "\n" + passes.each(SUMS if is_log else EXPONENTIALS)
        result, last = "xs[v] * last[v]", "exp(acc[v].m - total[ROWS ? 0 : v].m) / total[ROWS ? 0 : v].s"
    if is_log:
        result, last = "xs[v] - total[ROWS ? 0 : v].m - last[ROWS ? 0 : v]", "log(total[v].s)"
    merge = f"""
    const {real} m = a.m > b.m ? a.m : b.m;
    return Acc{{m, a.s * exp(a.m - m) + b.s * exp(b.m - m)}};
"""
    place = source.unraveled("k", plan.kept, ["x_start", "y_start"], "k")
    body = f"""{lane_indices(source, plan)}
    {place}
{each_element(source, plan, ["x", "y"])}
    Acc acc[WIDTH], total[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) acc[v] = Acc{{{LOWEST[real]}, 0}};
{passes.load()}
{find}
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) total[v] = acc[v];
    combine_lanes(total);
    {real} last[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) last[v] = {last};
{passes.each(store_group(y.dtype, f"({result})"))}"""
    before = accumulator([(real, "m"), (real, "s")], merge, plan)
    shown = f"{step.op.name} of {'rows' if plan.rows else 'columns'}"
    return [source.launch(step, shown, before, body, grid=plan.grid, block=plan.block)]


KERNELS: dict[str, Row] = {name: Row(softmax_launches, supports=supports_floats) for name in ("softmax", "log_softmax")}
