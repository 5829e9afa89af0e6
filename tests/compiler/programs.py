"""Random small programs: steps over maps, views, reductions, contractions and assignments, for any pass to work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler import Context, Request
from mlcompute.compiler.context import Transform
from mlcompute.compiler.program import Program
from mlcompute.compiler.simplify import drop_unused
from mlcompute.compiler.simplify import simplify as simplify_pass
from mlcompute.compiler.substitution import Substitution
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.null import Null
from mlcompute.ops.op import FLOAT32, Array, Step, Trace, Value, emit_all, run_meaning

PHASES = ("forward", "gradient", "update")
BOOLEAN = np.dtype(np.bool_)


@dataclass(eq=False)
class Drawn:
    """A trace, the values of it somebody wants to read afterwards, and arrays for what it does not compute."""

    trace: Trace
    kept: list[Value] = field(default_factory=list)
    feeds: dict[Value, Array] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        return self.trace.steps

    def run(self, steps: Sequence[Step] | None = None) -> tuple[dict[Value, Array], dict[Value, Array]]:
        """Every value as of the moment it is computed, and what lasting memory holds at the end."""
        memory = {**self.trace.constants, **{value: array.copy() for value, array in self.feeds.items()}}
        for step in self.steps if steps is None else steps:
            with np.errstate(all="ignore"):
                arrays = run_meaning(step, [memory[value] for value in step.inputs])
            memory.update((value, array.copy()) for value, array in zip(step.results, arrays, strict=True))
        return memory, {value: memory[value] for value in self.feeds if value.kind in ("parameter", "state")}


def run(trace: Trace, inputs: list[Value], results: list[Value]) -> list[Array]:
    """What the steps of a trace compute from random inputs."""
    rng = np.random.default_rng(0)
    memory = {value: rng.standard_normal(value.shape).astype(value.dtype) for value in inputs}
    memory.update(trace.constants)
    for step in trace.steps:
        memory.update(zip(step.results, run_meaning(step, [memory[v] for v in step.inputs]), strict=True))
    return [memory[value] for value in results]


class Supporting(Null):
    """A device that supports what a function says it does."""

    def __init__(self, supports: Callable[[Step], bool]) -> None:
        super().__init__()
        self._supports = supports

    def supports(self, step: Step) -> bool:
        return self._supports(step)


@dataclass(eq=False)
class Recorded(Context):
    """Knows what became of every value."""

    became: dict[Value, Value] = field(default_factory=dict)

    def substitute(self, substitution: Substitution) -> None:
        super().substitute(substitution)
        self.became |= {value: substitution[by] for value, by in self.became.items()}
        self.became |= {value: substitution[value] for value in substitution.replaced}

    def final(self, value: Value) -> Value:
        return self.became.get(value, value)


def apply(
    transform: Transform,
    trace: Trace,
    keep: Iterable[Value] = (),
    supports: Callable[[Step], bool] = lambda step: True,
    style: str = "fused",
) -> Recorded:
    """Run one pass over the steps of a trace, which has the new ones afterwards."""
    context = Recorded(Request(), Supporting(supports), Program(style, 1), trace=trace, kept=frozenset(keep))
    trace.steps = transform(trace.steps, context)
    return context


def simplify(steps: list[Step], context: Context) -> list[Step]:
    """The pass, and what nothing kept depends on dropped, as `drop_unread` does."""
    simpler = simplify_pass(steps, context)
    return drop_unused(simpler, context.kept)


def feed(trace: Trace, shape: tuple[int, ...], kind: str = "input") -> Value:
    return trace.value(shape, FLOAT32, kind)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    phases: Sequence[str] = ("forward",),
    assigns: bool = True,
    views: bool = True,
    keeps_views: bool = False,
    most: int = 14,
) -> Drawn:
    """keeps_views: values that only show fed or lasting memory may be among the kept ones."""
    trace = Trace()
    shapes = [(2, 3), (3, 2), (1, 3), (2, 1), (6,)]
    given_ = [feed(trace, draw(st.sampled_from(shapes)), "input") for _ in range(2)]
    lasting = [feed(trace, draw(st.sampled_from(shapes)), "parameter") for _ in range(2)]
    pool = [*given_, *lasting, trace.constant(np.arange(6).reshape(2, 3), FLOAT32)]
    drawn = Drawn(trace)
    kinds = ["map", "map", "map", "reduction", "contraction", "normalize"] + ["view"] * 3 * views
    counts = [draw(st.integers(1, most)) for _ in phases]
    for phase, count in zip(phases, counts, strict=True):
        trace.phase = phase
        for _ in range(count):
            x = draw(st.sampled_from(pool))
            trace.layer = f"layer {len(trace.steps)}"
            pool.extend(_RULES[draw(st.sampled_from(kinds))](draw, pool, x))
        if assigns and (phase == "update" or draw(st.booleans())):
            for target in lasting:
                # A view of overwritten memory: is that the old number or the new? Nobody may ask.
                pool = [value for value in pool if value.kind != "temporary" or not _shows(trace, value, lasting)]
                fitting = [value for value in pool if value.shape == target.shape and value.dtype == target.dtype]
                ops.assign(target, draw(st.sampled_from(fitting)))
    computed = [value for step in trace.steps for value in step.results]
    if not keeps_views:
        computed = [value for value in computed if not _shows(trace, value, [*given_, *lasting])]
    drawn.kept = draw(st.lists(st.sampled_from(computed), max_size=4, unique=True)) if computed else []
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    drawn.feeds = {value: rng.integers(-3, 4, value.shape).astype(value.dtype) for value in (*given_, *lasting)}
    verify_steps(trace.steps)
    return drawn


def _shows(trace: Trace, value: Value, lasting: list[Value]) -> bool:
    makers = {value: step for step in trace.steps for value in step.results}
    while value in makers and makers[value].op.is_view:
        value = makers[value].inputs[0]
    return value in lasting


def _map(draw: st.DrawFn, pool: list[Value], x: Value) -> list[Value]:
    if x.dtype == BOOLEAN:
        return [ops.logical_not(x)]
    partners = [y for y in pool if y.dtype == x.dtype and _broadcasts(x.shape, y.shape)]
    y = draw(st.sampled_from(partners))
    choices = (
        lambda: x + y,
        lambda: x * y,
        lambda: y - x,
        lambda: ops.maximum(x, y),
        lambda: ops.select(x > y, x, y),
        lambda: -x,
        lambda: x * 1.0,
        lambda: x / 1.0,
        lambda: x + 2.0,
        lambda: ops.relu(x),
        lambda: ops.stop_gradient(x),
        lambda: x > 0.0,
    )
    return [draw(st.sampled_from(choices))()]


def _view(draw: st.DrawFn, pool: list[Value], x: Value) -> list[Value]:
    leading = (x.shape[0] + 1) // 2
    choices = [
        lambda: ops.emit("reshape", x, shape=tuple(reversed(x.shape))),
        lambda: ops.emit("reshape", x, shape=(x.size,)),
        lambda: ops.emit("reshape", x, shape=x.shape),
        lambda: ops.slice_axis(x, 0, 0, leading),
        lambda: ops.slice_axis(x, x.rank - 1, 0, (x.shape[-1] + 1) // 2),
        lambda: ops.broadcast(x, (2, *x.shape) if x.rank < 3 else x.shape),
    ]
    if x.rank >= 2:
        choices.append(lambda: ops.transpose(x))
    return [draw(st.sampled_from(choices))()]


def _reduction(draw: st.DrawFn, pool: list[Value], x: Value) -> list[Value]:
    if x.dtype == BOOLEAN:
        return [ops.convert(x, FLOAT32)]
    return [ops.sum_(x, (draw(st.integers(0, x.rank - 1)),))]


def _contraction(draw: st.DrawFn, pool: list[Value], x: Value) -> list[Value]:
    partners = [y for y in pool if y.dtype == x.dtype == FLOAT32 and y.rank == 2 and x.rank == 2]
    partners = [y for y in partners if x.shape[1] == y.shape[0]]
    return [ops.matmul(x, draw(st.sampled_from(partners)))] if partners else []


def _normalize(draw: st.DrawFn, pool: list[Value], x: Value) -> list[Value]:
    """An op with several results, not all of which are used."""
    if x.dtype == BOOLEAN:
        return []
    return list(emit_all("normalize", x, axes=(x.rank - 1,), epsilon=1.0))


_RULES = {"map": _map, "view": _view, "reduction": _reduction, "contraction": _contraction, "normalize": _normalize}


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))
