"""normalize and normalize_gradient over any axes: statistics of every result, then one pass that writes.

    normalize            y = (x - m) / sqrt(v + epsilon), m = mean and v = biased variance of x
    normalize_gradient   dx = (dn - mean dn - y mean(dn y)) / sqrt(v + epsilon), dn = scale dy; sum dy, sum dy y

Lanes keep few elements in registers, so that memory is read once. Few results with many elements (batch norm) take two
launches: splits of the elements have statistics of their own, and those who write combine them first. Lanes update mean
and variance element by element (Welford), and those of parts become those of all as in T. Chan, G. Golub, R. LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979. All of it is about the first element
of every result, so that a large mean costs no digits.

Elementwise ops before and after (`fuse_normalization`) are computed in the same passes: what they read and write is
then all that moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler.fuse_normalization import core_of
from mlcompute.devices.cuda.codegen.functions import rounded
from mlcompute.devices.cuda.codegen.kernel_source import KernelSource, vector_width
from mlcompute.devices.cuda.codegen.lanes import (
    Lanes,
    accumulator,
    column_step,
    each_element,
    lane_indices,
    lanes_for,
    most_splits,
)
from mlcompute.devices.cuda.codegen.types import is_element, is_floating, loaded, memory_type, register_type, stored
from mlcompute.devices.cuda.kernels.elementwise import supports_elementwise
from mlcompute.devices.cuda.kernels.launch import Launch, Row
from mlcompute.devices.cuda.kernels.normalization_group import Group
from mlcompute.devices.loop_nest import Operand, Operands, ReductionAxes
from mlcompute.devices.normalization_group import Place
from mlcompute.ops.op import Step, Value


@dataclass(frozen=True)
class _Statistics:
    """What lanes find out about their elements. `real` is the type of a number.

    fields     of what a lane keeps
    identity   before the first element
    held       statements over elements in registers: two passes (the second may be empty), and what is between them
    streamed   the same in one pass over memory
    merge      the body of a function of two of them
    about_first   are they about the first element of every result, `origin[v]`?
    """

    fields: tuple[str, ...]
    identity: str
    held: tuple[str, str, str]
    streamed: str
    merge: str
    about_first: bool = False


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
    about_first=True,
)
_ADD_PRODUCTS = _EACH + "{ acc[v].dy += dys[v]; acc[v].dyy += dys[v] * ys[v]; }"
_SUMS = _Statistics(
    ("dy", "dyy"), "0, 0", (_ADD_PRODUCTS, "", ""), _ADD_PRODUCTS, "return Acc{a.dy + b.dy, a.dyy + b.dyy};"
)


@dataclass(frozen=True)
class _Form:
    """One of the cores. Expressions are those of column v; `{0}` and `{1}` are the elements it normalises.

    names         of the arrays of those elements in `statistics`
    statistics    what `total` is
    coefficients  numbers per result: expressions of `total[v]` and of what is known
    expression    of the elements and the coefficients
    found         results with one element per result: expressions of `total[v]`
    numbers       further arguments
    """

    names: tuple[str, ...]
    statistics: _Statistics
    coefficients: dict[str, str]
    expression: str
    found: tuple[str, str]
    numbers: dict[str, float]


def _form(group: Group) -> _Form:
    core = group.core
    epsilon: float = core.attributes["epsilon"]
    # What is fused must not change the numbers, so it is not left to the compiler where a product is rounded.
    times, fma = ("__dmul_rn", "fma") if _real(core).itemsize == 8 else ("__fmul_rn", "fmaf")
    if core.op.name == "normalize":
        spread = "total[v].m2 / total[v].n"
        return _Form(
            names=("xs",),
            statistics=_MOMENTS,
            coefficients={"centre": "total[v].mean", "factor": f"1 / sqrt({spread} + epsilon)"},
            expression=f"{times}({{0}} - origin[v] - centre[ROWS ? 0 : v], factor[ROWS ? 0 : v])",
            found=("origin[v] + total[v].mean", spread),
            numbers={"epsilon": epsilon},
        )
    known = group.known_names("v")
    variance, *scales = (known[value] for value in core.inputs[2:])
    inner = f"{fma}(-{{1}}, linear[ROWS ? 0 : v], {{0}} - constant[ROWS ? 0 : v])"
    return _Form(
        names=("dys", "ys"),
        statistics=_SUMS,
        coefficients={
            "constant": "total[v].dy * share",
            "linear": "total[v].dyy * share",
            "factor": f"{scales[0] if scales else '1'} / sqrt({variance} + epsilon)",
        },
        expression=f"{times}({inner}, factor[ROWS ? 0 : v])",
        found=("total[v].dy", "total[v].dyy"),
        numbers={"epsilon": epsilon, "share": 1 / max(_elements(core), 1)},
    )


def normalization_launches(step: Step, operands: Operands) -> Sequence[Launch]:
    """normalize, normalize_gradient, or one of them with elementwise ops before and after it."""
    group = Group(step, operands)
    if 0 in group.shape:
        return []
    places = group.places
    loops = ReductionAxes.of(group.shape, group.axes, [place.strides for place in places])
    full = [number for number, place in enumerate(places[: len(group.inputs) + len(group.stored)])]
    moving = [number for number in full if loops.axes[-1].strides[number]]
    width = vector_width([place.operand for place in places], loops.axes, moving) if moving else 1
    plan = lanes_for(loops, width, splits_limit=_splits(group.core), hold=True, large_blocks=True)
    if plan.splits == 1:
        return [_Kernel(group, plan, loops).write(None)]
    nbytes = plan.splits * plan.result_count * len(_form(group).statistics.fields) * _real(group.core).itemsize
    parts = operands.workspace(step, 0, nbytes)
    return [_Kernel(group, plan, loops).find(parts), _Kernel(group, plan, loops).write(parts)]


class _Kernel:
    """Writes one kernel. A class because its parts share many names."""

    def __init__(self, group: Group, plan: Lanes, loops: ReductionAxes) -> None:
        self.group, self.plan, self.loops = group, plan, loops
        self.form = _form(group)
        self.real = register_type(group.along[0].dtype)
        self.numbers = {place.name: number for number, place in enumerate(group.places)}
        self.source = KernelSource([place.operand for place in group.places], loops.iterations)

    # Parts of kernels -----------------------------------------------------------------------------------------------

    def _begin(self, read: Mapping[Value, Place], written: Mapping[Value, Place]) -> str:
        """Who a thread is, where its elements are, and what is known of its results."""
        group, source, plan = self.group, self.source, self.plan
        for place in read.values():
            source.pointer(place.name, place.operand)
        for place in written.values():
            source.pointer(place.name, place.operand, written=True)
        for place in group.known.values():
            source.pointer(place.name, place.operand)
        number = np.float64 if self.real == "double" else np.float32
        for name, argument in self.form.numbers.items():
            source.value(name, "real", number(argument))
        used = {place.name for place in (*read.values(), *written.values(), *group.known.values())}
        names = [place.name if place.name in used else "" for place in group.places]
        full = len(group.inputs) + len(group.stored)
        starts = source.unraveled("k", plan.kept, [name and f"{name}_start" for name in names], "k")
        lines = []
        for value, place in group.known.items():
            step = source.index(f"{place.name}_step", column_step(plan, self.numbers[place.name]))
            element = loaded(value.dtype, f"{place.name}[{place.name}_start + v * {step}]")
            lines.append(f"        {place.name}_known[v] = alive ? {element} : 0;")
        lines += [f"        {line}" for line in group.known_lines()]
        return f"""{lane_indices(source, plan)}
    {starts}
{each_element(source, plan, names[:full])}
    {" ".join(group.known_arrays())}
    #pragma unroll
    for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) {{
{chr(10).join(lines)}
    }}"""

    def _loads(self, values: Sequence[Value], places: Mapping[Value, Place]) -> tuple[list[str], dict[Value, str]]:
        """Statements that read groups of elements r, and their elements of column v."""
        lines, elements = [], {}
        for value in values:
            name, kind = places[value].name, memory_type(value.dtype)
            address = f"{name} + {name}_start + {name}_at(r)"
            if self.loops.axes[-1].strides[self.numbers[name]] or self.plan.width == 1:
                lines.append(f"const auto {name}_group = *reinterpret_cast<const Pack<{kind}, WIDTH>*>({address});")
                elements[value] = f"{name}_group.at[v]"
            else:
                lines.append(f"const auto {name}_group = *({address});")
                elements[value] = f"{name}_group"
        return lines, elements

    def _elements(self, read: Mapping[Value, Place], arrays: Sequence[str], stores: Mapping[Value, Place]) -> str:
        """Statements that compute the elements r that are normalised, and store some of what they are made of."""
        along = self.group.along
        targets = [*along, *stores]
        loads, elements = self._loads(self.group.loads_for(targets, read), read)
        lines, names = self.group.lines(targets, elements, {})
        lines += [f"{array}[v] = {names[value]};" for array, value in zip(arrays, along, strict=True)]
        before, inside, after = self._stores(stores, names)
        return self._columns([*loads, *before], [*lines, *inside], after)

    def _stores(
        self, stores: Mapping[Value, Place], names: Mapping[Value, str]
    ) -> tuple[list[str], list[str], list[str]]:
        """Statements before, in and after the loop over columns that store values."""
        before, inside, after = [], [], []
        for value, place in stores.items():
            name, kind = place.name, f"Pack<{memory_type(value.dtype)}, WIDTH>"
            before.append(f"{kind} {name}_made;")
            inside.append(f"{name}_made.at[v] = {stored(value.dtype, names[value])};")
            after.append(f"*reinterpret_cast<{kind}*>({name} + {name}_start + {name}_at(r)) = {name}_made;")
        return before, inside, after

    @staticmethod
    def _columns(before: Sequence[str], inside: Sequence[str], after: Sequence[str]) -> str:
        lines = [*before, "#pragma unroll", "for (int v = 0; v < WIDTH; ++v) {", *(f"    {line}" for line in inside)]
        return "\n".join(f"            {line}" for line in (*lines, "}", *after))

    def _each(self, body: str) -> str:
        """A pass over the elements."""
        if self.plan.items:
            return f"""    #pragma unroll
    for (int j = 0; j < {self.plan.items}; ++j) {{
        const Index r = begin + j * LANES;
        if (r < end) {{
{body}
        }}
    }}"""
        return f"""    #pragma unroll 4
    for (Index r = begin; r < end; r += LANES) {{
{body}
    }}"""

    def _accumulators(self, read: Mapping[Value, Place]) -> str:
        """`acc`, and the origin of every result where statistics are about one: its first element."""
        text = ""
        if self.form.statistics.about_first:
            inside = self._elements(read, ["xs"], {})
            text = f"""
    real origin[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) origin[v] = 0;
    if (alive) {{
            const Index r = 0;
            real xs[WIDTH];
{inside}
            #pragma unroll
            for (int v = 0; v < WIDTH; ++v) origin[v] = xs[ROWS ? 0 : v];
    }}"""
        return f"""{text}
    Acc acc[WIDTH];
    #pragma unroll
    for (int v = 0; v < WIDTH; ++v) acc[v] = Acc{{{self.form.statistics.identity}}};"""

    def _streamed(self, read: Mapping[Value, Place], stores: Mapping[Value, Place]) -> str:
        arrays = " ".join(f"real {name}[WIDTH];" for name in self.form.names)
        body = f"            {arrays}\n{self._elements(read, self.form.names, stores)}\n{self.form.statistics.streamed}"
        return self._each(body)

    def _held(self, read: Mapping[Value, Place]) -> str:
        """The elements in registers, and their statistics."""
        items, names = self.plan.items, self.form.names
        declared = " ".join(f"real {name}_held[{items}][WIDTH];" for name in names)
        arrays = "".join(f"            auto& {name} = {name}_held[j];\n" for name in names)
        first, between, second = self.form.statistics.held
        load = self._each(f"{arrays}{self._elements(read, names, {})}")  # all are on their way before the first is used
        passes = [self._each(f"{arrays}{body}") if body else "" for body in (first, second)]
        return "\n".join(text for text in (f"    {declared}", load, passes[0], between, passes[1]) if text)

    def _launch(self, kernel: str, body: str) -> Launch:
        fields = [(self.real, name) for name in self.form.statistics.fields]
        before = f"using real = {self.real};\n{accumulator(fields, self.form.statistics.merge, self.plan)}"
        return self.source.launch(self.group.step, kernel, before, body, grid=self.plan.grid, block=self.plan.block)

    # Kernels --------------------------------------------------------------------------------------------------------

    def find(self, parts: Operand) -> Launch:
        """Statistics of every split of every result; also stores what is computed for them and needed elsewhere."""
        group, plan, early = self.group, self.plan, self.group.early
        values = group.loads_for([*group.along, *early], group.inputs)
        read = {value: group.inputs[value] for value in values}
        begin = self._begin(read, early)
        self.source.pointer("parts", parts, written=True, element="Acc")
        count = self.source.index("count", plan.result_count)
        number = "k" if plan.rows else "k * WIDTH + v"
        body = f"""{begin}
{self._accumulators(read)}
{self._streamed(read, early)}
    combine_lanes(acc);
    if (alive && lane == 0) {{
        #pragma unroll
        for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) parts[split * {count} + {number}] = acc[v];
    }}"""
        return self._launch(f"statistics in {plan.splits} splits", body)

    def write(self, parts: Operand | None) -> Launch:
        """The results; statistics are found first, or combined from those of the splits."""
        group, plan, form = self.group, self.plan, self.form
        early = {} if parts is None else group.early
        late = {value: place for value, place in group.stored.items() if value not in early}
        lying = {**group.inputs, **early}
        first = form.statistics.about_first or parts is None
        wanted = [*(group.along if first else ()), *late]
        read = {value: lying[value] for value in group.loads_for(wanted, lying)}
        begin = self._begin(read, {**late, **group.found})
        accumulators = self._accumulators(read)
        if parts is not None:
            find = _joined(self.source, plan, parts)
        else:
            find = (self._held(read) if plan.items else self._streamed(read, {})) + "\n    combine_lanes(acc);"
        found = []
        for value, expression in zip(group.core.results[1:], form.found, strict=True):
            if value in group.found:
                place = group.found[value]
                step = self.source.index(f"{place.name}_step", column_step(plan, self.numbers[place.name]))
                number = f"{place.name}[{place.name}_start + v * {step}]"
                found.append(f"            {number} = {stored(value.dtype, f'({expression})')};")
        coefficients = "\n".join(f"        {name}[v] = {value};" for name, value in form.coefficients.items())
        body = f"""{begin}
{accumulators}
{find}
    auto& total = acc;
    real {", ".join(f"{name}[WIDTH]" for name in form.coefficients)};
    #pragma unroll
    for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) {{
{coefficients}
    }}
    if (alive && lane == 0{" && split == 0" if plan.splits > 1 else ""}) {{
        #pragma unroll
        for (int v = 0; v < (ROWS ? 1 : WIDTH); ++v) {{
{chr(10).join(found)}
        }}
    }}
{self._written(read, late)}"""
        return self._launch(self._shown(), body)

    def _written(self, read: Mapping[Value, Place], late: Mapping[Value, Place]) -> str:
        """The last pass: what is stored, from elements in registers or read again."""
        group, items = self.group, self.plan.items
        given = {}
        if items:
            given = {value: f"{name}_held[j][v]" for value, name in zip(group.along, self.form.names, strict=True)}
        loads, elements = self._loads(group.loads_for(late, read, given), read)
        core = rounded(self.form.expression, group.core.results[0].dtype)
        lines, names = group.lines(late, elements, given, core)
        before, inside, after = self._stores(late, names)
        return self._each(self._columns([*loads, *before], [*lines, *inside], after)) if late else ""

    def _shown(self) -> str:
        """What the printed program calls the kernel."""
        others = len(self.group.steps) - 1
        name = self.group.core.op.name + (f" with {others} elementwise ops" if others else "")
        name += f" of {'rows' if self.plan.rows else 'columns'}"
        return name + (f" in {self.plan.splits} splits" if self.plan.splits > 1 else "")


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


def _elements(step: Step) -> int:
    """Of one result."""
    return step.inputs[0].size // max(step.results[1].size, 1)


def _splits(step: Step) -> int:
    return most_splits(step.results[1].size, _elements(step))


def _workspace(step: Step) -> int:
    core = core_of(step)
    splits = _splits(core)
    return splits * core.results[1].size * 3 * _real(core).itemsize if splits > 1 else 0


def supports(step: Step) -> bool:
    """Floating-point numbers that are computed in one type."""
    types = {value.dtype for value in (*step.inputs, *step.results)}
    if not all(is_floating(dtype) and is_element(dtype) for dtype in types):
        return False
    return len({register_type(dtype) for dtype in types}) == 1


def supports_fused(step: Step) -> bool:
    """A supported normalisation among supported elementwise ops."""
    core = core_of(step)
    others = [each for each in step.attributes["steps"] if each is not core]
    return supports(core) and core.results[0].shape != core.results[1].shape and all(map(supports_elementwise, others))


KERNELS: dict[str, Row] = {
    "normalize": Row(normalization_launches, supports=supports, workspace=_workspace),
    "normalize_gradient": Row(normalization_launches, supports=supports, workspace=_workspace),
    "fused_normalization": Row(normalization_launches, supports=supports_fused, workspace=_workspace),
}
