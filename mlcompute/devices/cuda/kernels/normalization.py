"""normalize and normalize_gradient over any axes: statistics of every result, then one pass that writes.

    normalize            y = (x - m) / sqrt(v + epsilon), m = mean and v = biased variance of x
    normalize_gradient   dx = (dn - mean dn - y mean(dn y)) / sqrt(v + epsilon), dn = scale dy; sum dy, sum dy y

Lanes keep few elements in registers, so that memory is read once. Few results with many elements (batch norm) take two
launches: splits of the elements have statistics of their own, and those who write combine them first. Lanes update mean
and variance element by element (Welford), and those of parts become those of all as in T. Chan, G. Golub, R. LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979. All of it is about the first element
of every result, so that a large mean costs no digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, kept_strides, vector_width
from mlcompute.devices.cuda.codegen.lanes import (
    ElementPasses,
    Lanes,
    accumulator,
    column_step,
    each_element,
    lanes_for,
    most_splits,
    store_group,
    whoami,
)
from mlcompute.devices.cuda.codegen.types import is_element, is_floating, loaded, register_type, stored
from mlcompute.devices.cuda.kernels.launch import Launch, Row
from mlcompute.devices.loop_nest import Operand, Operands, ReductionAxes
from mlcompute.ops.op import Step


@dataclass(frozen=True)
class _Statistics:
    """What lanes find out about their elements. `real` is the type of a number.

    fields     of what a lane keeps
    identity   before the first element
    held       statements over elements in registers: two passes (the second may be empty), and what is between them
    streamed   the same in one pass over memory
    merge      the body of a function of two of them
    origin     the operand whose first element is the origin of a result: `origin[v]`; empty for none
    """

    fields: tuple[str, ...]
    identity: str
    held: tuple[str, str, str]
    streamed: str
    merge: str
    origin: str = ""


_EACH = "            #pragma unroll\n            for (int v = 0; v < WIDTH; ++v) "
# Counts are those of the lane; they are the same in every column of a group.
_MOMENTS = _Statistics(
    ("n", "mean", "m2"),
    "0, 0, 0",
    (
        _EACH + "{ acc[v].n += 1; acc[v].mean += xs[v] - origin[v]; }",
        "    #pragma unroll\n    for (int v = 0; v < WIDTH; ++v) if (acc[v].n > 0) acc[v].mean /= acc[v].n;",
        _EACH + "{ const real d = xs[v] - origin[v] - acc[v].mean; acc[v].m2 += d * d; }",
    ),
    "            const real count = acc[0].n + 1, share = 1 / count;\n"
    + _EACH
    + """{
                const real x = xs[v] - origin[v], d = x - acc[v].mean;
                acc[v].n = count;
                acc[v].mean += d * share;
                acc[v].m2 += d * (x - acc[v].mean);
            }""",
    """
    const real n = a.n + b.n;
    if (n == 0) return a;
    const real d = b.mean - a.mean, share = b.n / n;
    return Acc{n, a.mean + d * share, a.m2 + b.m2 + d * d * a.n * share};
""",
    "x",
)
_ADD_PRODUCTS = _EACH + "{ acc[v].dy += dys[v]; acc[v].dyy += dys[v] * ys[v]; }"
_SUMS = _Statistics(
    ("dy", "dyy"), "0, 0", (_ADD_PRODUCTS, "", ""), _ADD_PRODUCTS, "return Acc{a.dy + b.dy, a.dyy + b.dyy};"
)


@dataclass(frozen=True)
class _Form:
    """One of the ops. Everything has a name in the kernel; expressions are those of column v.

    read          operands along the elements: `NAMEs[v]`
    written       the operand along the elements that `expression` goes to
    known         operands with one element per result that are read: `NAME_known[v]`
    found         operands with one element per result that are written, and what: expressions of `total[v]`
    statistics    what `total` is
    coefficients  numbers per result: expressions of `total[v]` and of what is known
    expression    of the elements and the coefficients
    numbers       further arguments
    """

    read: dict[str, Operand]
    written: tuple[str, Operand]
    known: dict[str, Operand]
    found: dict[str, tuple[Operand, str]]
    statistics: _Statistics
    coefficients: dict[str, str]
    expression: str
    numbers: dict[str, float]

    @property
    def operands(self) -> dict[str, Operand]:
        """All of them, in the order of the loops' strides."""
        found = {name: operand for name, (operand, _) in self.found.items()}
        return {**self.read, self.written[0]: self.written[1], **self.known, **found}

    @property
    def along(self) -> list[Operand]:
        """Those that have all elements."""
        return [*self.read.values(), self.written[1]]


def normalize_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """y, mean and variance."""
    x, (y, mean, variance) = operands[step.inputs[0]], (operands[value] for value in step.results)
    spread = "total[v].m2 / total[v].n"
    form = _Form(
        read={"x": x},
        written=("y", y),
        known={},
        found={"mean": (mean, "origin[v] + total[v].mean"), "variance": (variance, spread)},
        statistics=_MOMENTS,
        coefficients={"centre": "total[v].mean", "factor": f"1 / sqrt({spread} + epsilon)"},
        expression="(xs[v] - origin[v] - centre[ROWS ? 0 : v]) * factor[ROWS ? 0 : v]",
        numbers={"epsilon": step.attributes["epsilon"]},
    )
    return _launches(step, operands, form)


def normalize_gradient_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """dx, sum dy and sum dy y."""
    dy, y, variance, *scales = (operands[value] for value in step.inputs)
    dx, shift, slope = (operands[value] for value in step.results)
    known = {"variance": variance}
    if scales:
        known["scale"] = scales[0]
    factor = f"{'scale_known[v]' if scales else '1'} / sqrt(variance_known[v] + epsilon)"
    form = _Form(
        read={"dy": dy, "y": y},
        written=("dx", dx),
        known=known,
        found={"shift": (shift, "total[v].dy"), "slope": (slope, "total[v].dyy")},
        statistics=_SUMS,
        coefficients={"constant": "total[v].dy * share", "linear": "total[v].dyy * share", "factor": factor},
        expression="(dys[v] - constant[ROWS ? 0 : v] - ys[v] * linear[ROWS ? 0 : v]) * factor[ROWS ? 0 : v]",
        numbers={"epsilon": step.attributes["epsilon"], "share": 1 / max(_elements(step), 1)},
    )
    return _launches(step, operands, form)


def _launches(step: Step, operands: Operands, form: _Form) -> Sequence[Launch]:
    axes = step.attributes["axes"]
    along, everything = form.along, list(form.operands.values())
    if not along[0].size:
        return []
    single = everything[len(along) :]
    strides = [*(each.strides for each in along), *(kept_strides(each, axes) for each in single)]
    loops = ReductionAxes.of(along[0].shape, axes, strides)
    width = vector_width(along, loops.axes, range(len(along)))
    plan = lanes_for(loops, width, splits_limit=_splits(step), hold=True, large_blocks=True)
    if plan.splits == 1:
        return [_write(step, form, plan, loops.iterations, None)]
    nbytes = plan.splits * plan.result_count * len(form.statistics.fields) * _real(step).itemsize
    parts = operands.workspace(step, 0, nbytes)
    return [_find(step, form, plan, loops.iterations, parts), _write(step, form, plan, loops.iterations, parts)]


def _before(form: _Form, plan: Lanes) -> str:
    real = _real_type(form)
    fields = [(real, name) for name in form.statistics.fields]
    return f"using real = {real};\n{accumulator(fields, form.statistics.merge, plan)}"


def _start(source: KernelSource, form: _Form, plan: Lanes, names: Sequence[str]) -> str:
    """Who a thread is and where its elements are; `names` are operands in the order of the axes' strides."""
    starts = [name and f"{name}_start" for name in names]
    begin, origin = "", form.statistics.origin
    if origin:
        dtype = form.read[origin].dtype
        element = loaded(dtype, f"{origin}[{origin}_start + {origin}_at(0) + (ROWS ? 0 : v)]")
        # Groups of columns are neighbours: a width of more than 1 is only possible for those.
        begin = f"""
    real origin[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) origin[v] = alive ? {element} : 0;"""
    return f"""{whoami(source, plan)}
    {source.unraveled("k", plan.kept, starts, "k")}
{each_element(source, plan, names[: len(form.along)])}{begin}
    Acc acc[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) acc[v] = Acc{{{form.statistics.identity}}};"""


def _passes(form: _Form, plan: Lanes) -> ElementPasses:
    return ElementPasses(plan, {name: operand.dtype for name, operand in form.read.items()})


def _find(step: Step, form: _Form, plan: Lanes, iterations: int, parts: Operand) -> Launch:
    """Statistics of every split of every result."""
    source = KernelSource(list(form.read.values()), iterations)
    for name, operand in form.read.items():
        source.pointer(name, operand)
    source.pointer("parts", parts, written=True, element="Acc")
    count = source.index("count", plan.result_count)
    group = "k" if plan.rows else "k * WIDTH + v"
    body = f"""{_start(source, form, plan, list(form.read))}
{_passes(form, plan).each(form.statistics.streamed)}
    combine_lanes(acc);
    if (alive && lane == 0) {{
        #pragma unroll
        for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) parts[(Index)blockIdx.y * {count} + {group}] = acc[v];
    }}"""
    shown = f"statistics in {plan.splits} splits"
    return source.launch(step, shown, _before(form, plan), body, grid=plan.grid, block=plan.block)


def _write(step: Step, form: _Form, plan: Lanes, iterations: int, parts: Operand | None) -> Launch:
    """The results; statistics are found first, or combined from those of the splits."""
    everything, real = form.operands, _real_type(form)
    source = KernelSource(list(everything.values()), iterations)
    for name, operand in everything.items():
        source.pointer(name, operand, written=name in form.found or name == form.written[0])
    number = np.float64 if real == "double" else np.float32
    for name, value in form.numbers.items():
        source.value(name, "real", number(value))
    steps = {name: source.index(f"{name}_step", column_step(plan, i)) for i, name in enumerate(everything)}
    passes = _passes(form, plan)
    find = passes.load() + "\n" + _found(form, passes) if parts is None else _joined(source, plan, parts)
    lines = []
    for name, operand in form.known.items():
        element = loaded(operand.dtype, f"{name}[{name}_start + v * {steps[name]}]")
        lines.append(f"        {name}_known[v] = alive ? {element} : 0;")
    lines += [f"        {name}[v] = {value};" for name, value in form.coefficients.items()]
    store = "\n".join(
        f"        {name}[{name}_start + v * {steps[name]}] = {stored(operand.dtype, f'({value})')};"
        for name, (operand, value) in form.found.items()
    )
    declared = [*(f"{name}_known[WIDTH]" for name in form.known), *(f"{name}[WIDTH]" for name in form.coefficients)]
    target, made = form.written
    body = f"""{_start(source, form, plan, list(everything))}
{find}
    auto& total = acc;
    real {", ".join(declared)};
    #pragma unroll
    for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) {{
{chr(10).join(lines)}
    }}
    if (alive && lane == 0{" && blockIdx.y == 0" if plan.splits > 1 else ""}) {{
        #pragma unroll
        for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) {{
{store}
        }}
    }}
{passes.each(store_group(target, made.dtype, f"({form.expression})"))}"""
    shown = f"{step.op.name} of {'rows' if plan.rows else 'columns'}"
    if plan.splits > 1:
        shown += f" in {plan.splits} splits"
    return source.launch(step, shown, _before(form, plan), body, grid=plan.grid, block=plan.block)


def _found(form: _Form, passes: ElementPasses) -> str:
    """Statistics of the lanes' own elements."""
    if not passes.held:
        return passes.each(form.statistics.streamed) + "\n    combine_lanes(acc);"
    first, between, second = form.statistics.held
    text = [passes.each(first), between, *([passes.each(second)] if second else []), "    combine_lanes(acc);"]
    return "\n".join(text)


def _joined(source: KernelSource, plan: Lanes, parts: Operand) -> str:
    """Statistics of all splits: every lane combines some."""
    source.pointer("parts", parts, element="Acc")
    count, splits = source.index("count", plan.result_count), source.index("splits", plan.splits)
    group = "k" if plan.rows else "k * WIDTH + v"
    each = "1" if plan.rows else "WIDTH"
    return f"""    if (alive) {{
        #pragma unroll 4
        for (Index split = lane; split < {splits}; split += LANES) {{
            #pragma unroll
            for (int v = 0; v < {each}; ++v) acc[v] = merge(acc[v], parts[split * {count} + {group}]);
        }}
    }}
    combine_lanes(acc, {splits});"""


def _real(step: Step) -> np.dtype[np.float64] | np.dtype[np.float32]:
    return np.dtype(np.float64) if step.inputs[0].dtype == np.float64 else np.dtype(np.float32)


def _real_type(form: _Form) -> str:
    return register_type(next(iter(form.read.values())).dtype)


def _elements(step: Step) -> int:
    """Of one result."""
    return step.inputs[0].size // max(step.results[1].size, 1)


def _splits(step: Step) -> int:
    return most_splits(step.results[1].size, _elements(step))


def _workspace(step: Step) -> int:
    splits = _splits(step)
    return splits * step.results[1].size * 3 * _real(step).itemsize if splits > 1 else 0


def supports(step: Step) -> bool:
    """Floating-point numbers that are computed in one type."""
    types = {value.dtype for value in (*step.inputs, *step.results)}
    if not all(is_floating(dtype) and is_element(dtype) for dtype in types):
        return False
    return len({register_type(dtype) for dtype in types}) == 1


KERNELS: dict[str, Row] = {
    "normalize": Row(normalize_launches, supports=supports, workspace=_workspace),
    "normalize_gradient": Row(normalize_gradient_launches, supports=supports, workspace=_workspace),
}
