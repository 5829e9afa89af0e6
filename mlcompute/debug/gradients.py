"""Gradient checks: every layer against finite differences, every compiled gradient against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler import compile_program
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.expand import expanded
from mlcompute.compiler.lower import Lowering
from mlcompute.compiler.substitution import Substitution
from mlcompute.errors import ExecutionError
from mlcompute.foreign_names import instead_of_graph
from mlcompute.graph import Node
from mlcompute.layers.gradient import GradientLayer
from mlcompute.layers.layer import Layer
from mlcompute.ops.op import Array, Step, Trace, Value, run_meaning
from mlcompute.runtime.call_data import batch_of, named_data
from mlcompute.runtime.calls import expect_labels
from mlcompute.runtime.dry_run import bindings_of_copies
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.session import session_of
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

FLOAT64 = np.dtype(np.float64)
#: Relative errors up to which a gradient counts as right: of float64 differences, and of float32 arithmetic.
DIFFERENCES, COMPILED = 1e-5, 1e-3
#: Points around the data at which a gradient that differs is looked at again.
NEIGHBOURS = 8
EPSILON, EPSILON32 = float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps)
#: A result may be off by so many times what rounding every number on the way once does to it: long sums round often.
ROUNDINGS = 64


@dataclass(frozen=True)
class Checked:
    """One gradient of one layer.

    slot         whose gradient: "source 0", or the name of a parameter
    differences  relative error of the derivative in float64 against central differences, None where a kink spoils both
    compiled     relative error of the compiled graph's gradient against float64; None for sources
    """

    layer: str
    slot: str
    differences: float | None
    compiled: float | None

    @property
    def is_right(self) -> bool:
        """Are both errors as small as rounding explains?"""
        return (self.differences or 0.0) <= DIFFERENCES and (self.compiled or 0.0) <= COMPILED


@dataclass(frozen=True)
class GradientReport:
    """What `check_gradients` found. `print` it for a table; true when every gradient is right."""

    rows: tuple[Checked, ...]

    @property
    def wrong(self) -> list[Checked]:
        """The gradients that are not right."""
        return [row for row in self.rows if not row.is_right]

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        width = max([len("layer"), *(len(row.layer) for row in self.rows)])
        slots = max([len("gradient of"), *(len(row.slot) for row in self.rows)])
        lines = [f"{'layer':<{width}}  {'gradient of':<{slots}}  {'differences':>11}  {'compiled':>9}"]
        for row in self.rows:
            cells = [f"{error:.1e}" if error is not None else "-" for error in (row.differences, row.compiled)]
            mark = "" if row.is_right else "   wrong"
            lines.append(f"{row.layer:<{width}}  {row.slot:<{slots}}  {cells[0]:>11}  {cells[1]:>9}{mark}")
        wrong = f"{len(self.wrong)} of {len(self.rows)} gradients are wrong"
        return "\n".join([*lines, wrong if self.wrong else "all gradients are right"])


def check_gradients(
    graph: TrainingGraph,
    inputs_data: Named,
    loss_labels_data: Named | None = None,
    loss_label_weights_data: Named | None = None,
    *,
    batch_size: int = 0,
    directions: int = 3,
) -> GradientReport:
    """Check a compiled training graph on some data, layer by layer; nothing in the graph changes.

    Each layer's derivative, in float64 and at the values that occur in this graph, is compared with central
    differences in a few random directions. Then the compiled float32 gradients of all parameters are compared with
    float64.
    """
    if not isinstance(graph, TrainingGraph):
        raise TypeError(f"check_gradients: needs a TrainingGraph, not {instead_of_graph(graph)}")
    session = session_of(graph)
    session.wait()
    batch = batch_of(session, batch_size, "check_gradients")
    data = named_data(session, "check_gradients", inputs_data, loss_labels_data, loss_label_weights_data)
    request = session.compile_if_needed()
    expect_labels(session)
    if not request.minimised:
        raise ExecutionError("check_gradients: the graph has no loss", fix="give the training graph a loss layer")
    engine = session.current.engine
    program = compile_program(request, engine, "split", batch)
    phases = ("forward", "gradient")
    memory = bindings_of_copies("check_gradients", session, program, phases, data)
    fed = {tensor: memory[value] for tensor, value in program.inputs.items() if value in memory}
    kept = {tensor: memory[value].copy() for tensor, value in program.persistent.items()}
    keys = [memory[value] for value, _ in program.random_keys]
    executable = engine.build(program, engine.allocate(program.plan.nbytes))
    executable.run_once(engine, phases, memory)
    compiled = {
        tensor: executable.read(program.gradients[tensor])
        for tensor in request.parameters
        if tensor in program.gradients
    }
    exact = _Exact(request.nodes, {**fed, **kept}, keys, request.label_weights)
    against = exact.compare(request.minimised, compiled)
    rng = np.random.default_rng(0)
    rows: list[Checked] = []
    for node in request.nodes:
        if not isinstance(node.layer, GradientLayer):  # by itself it has nothing to differentiate
            rows += exact.check(node, rng, directions, against)
    return GradientReport(tuple(rows))


class _Exact:
    """The graph in float64, by the NumPy meaning of every op."""

    def __init__(
        self, nodes: Sequence[Node], arrays: dict[Tensor, Array], keys: list[Array], weights: dict[Layer, Tensor]
    ) -> None:
        self.nodes, self.keys, self.weights = nodes, keys, weights
        self.run = self._lower(nodes)
        self.arrays = {tensor: _wide(array) for tensor, array in arrays.items()}
        feeds = {value: self.arrays[tensor] for tensor, value in self.run.values.items() if tensor in self.arrays}
        feeds.update(dict(zip((key for key, _ in self.run.random_keys), keys, strict=True)))
        self.memory = _interpret(self.run.trace, feeds)
        self.names = {}
        for step in self.run.trace.steps:
            for value in step.results:
                self.names[value] = step.layer

    def _lower(self, nodes: Iterable[Node]) -> Lowering:
        run = Lowering(training=True, float_type=FLOAT64)
        run.weights_of = self.weights
        for node in nodes:
            run.add(node.layer, [*node.sources, *node.labels], node.results, node.updates)
        return run

    def compare(self, losses: Sequence[Tensor], compiled: dict[Tensor, Array]) -> dict[Tensor, float]:
        """Relative errors of compiled gradients.

        Where a maximum is nearly a tie or a ReLU's source nearly 0, rounding decides which way the gradient goes, and
        both ways are right. So a gradient that differs is also compared with those at points a rounding away: only
        what lies outside all of them counts. And where large numbers cancel, up to a gradient that is truly 0 (of a
        bias before a batch normalization, say), nothing but their rounding is left: that is no error either.
        """
        wanted = list(compiled)
        exact = self._gradients(losses, wanted, self.arrays)
        errors = {tensor: _relative(compiled[tensor], exact[tensor], exact[tensor]) for tensor in exact}
        if all(error <= COMPILED for error in errors.values()):
            return errors
        rng = np.random.default_rng(0)
        low, high = dict(exact), dict(exact)
        roundings: dict[Tensor, list[float]] = {tensor: [] for tensor in exact}
        for _ in range(NEIGHBOURS):
            moved = {tensor: _moved(array, rng) for tensor, array in self.arrays.items()}
            for tensor, gradient in self._gradients(losses, wanted, moved).items():
                low[tensor], high[tensor] = np.minimum(low[tensor], gradient), np.maximum(high[tensor], gradient)
            rounded = self._gradients(losses, wanted, self.arrays, _Rounding(rng, EPSILON32))
            for tensor, gradient in rounded.items():
                roundings[tensor].append(float(np.linalg.norm(gradient - exact[tensor])))
        return {
            # The median: one that rounding sends the other way at a tie tells nothing of the others.
            t: _relative(
                compiled[t],
                np.clip(compiled[t], low[t], high[t]),
                exact[t],
                noise=ROUNDINGS * float(np.median(roundings[t])),
            )
            for t in exact
        }

    def _gradients(
        self,
        losses: Sequence[Tensor],
        wanted: Sequence[Tensor],
        arrays: dict[Tensor, Array],
        rounding: _Rounding | None = None,
    ) -> dict[Tensor, Array]:
        """Gradients of the sum of the losses, in float64; `rounding`: as if in less."""
        run = self._lower(self.nodes)
        seeds = {run.values[loss]: run.trace.constant(np.ones(run.values[loss].shape), FLOAT64) for loss in losses}
        found = differentiate(run.trace, seeds, [run.values[tensor] for tensor in wanted if tensor in run.values])
        feeds = {value: arrays[tensor] for tensor, value in run.values.items() if tensor in arrays}
        feeds.update(dict(zip((key for key, _ in run.random_keys), self.keys, strict=True)))
        inner = Substitution() if rounding is None else _in_small_ops(run.trace)
        memory = _interpret(run.trace, feeds, rounding=rounding)
        return {t: memory[inner[found[run.values[t]]]] for t in wanted if t in run.values and run.values[t] in found}

    def check(
        self, node: Node, rng: np.random.Generator, directions: int, against: dict[Tensor, float]
    ) -> list[Checked]:
        """One layer by itself, at the values it has in the graph."""
        slots = {f"source {i}": tensor for i, tensor in enumerate(node.sources)}
        slots |= {name: slot.tensor for name, slot in node.layer.parameters.items()}
        alone = _Alone((self._lower([node]), self._lower([node])), node, self.memory_of, self._keys_before(node))
        slots = {slot: tensor for slot, tensor in slots.items() if alone.is_differentiable(tensor)}
        errors = alone.errors(list(slots.values()), rng, directions)
        return [
            Checked(self._name(node), slot, errors[t], None if slot.startswith("source") else against.get(t))
            for slot, t in slots.items()
        ]

    def memory_of(self, tensor: Tensor) -> Array:
        """What a tensor holds in the graph."""
        return self.memory[self.run.values[tensor]]

    def _keys_before(self, node: Node) -> list[Array]:
        """The random keys this layer uses in the whole graph."""
        before = self._lower(self.nodes[: self.nodes.index(node)])
        return self.keys[len(before.random_keys) :][: len(self._lower([node]).random_keys)]

    def _name(self, node: Node) -> str:
        return self.names.get(self.run.values[node.results[0]], node.layer.label)


class _Alone:
    """One layer: its results, and its derivative against central differences.

    Where a result has a kink (a tie in a maximum, a ReLU at 0), its slopes on both sides differ and any derivative
    between them is right, so such results are left out. Which ones those are is seen from the function alone, never
    from the derivative that is checked.
    """

    def __init__(
        self, runs: tuple[Lowering, Lowering], node: Node, at: Callable[[Tensor], Array], keys: list[Array]
    ) -> None:
        run, rounded = runs
        self.run = run
        self.results = [run.values[t] for t in node.results if run.values[t].is_floating]
        self.at = {tensor: at(tensor) for tensor in run.persistent}
        self.fixed = dict(zip((key for key, _ in run.random_keys), keys, strict=True))
        self.forward = list(run.trace.steps)
        # The same once more in small ops, for rounding happens inside the large ones, too.
        inner = _in_small_ops(rounded.trace)
        self._rounded = rounded
        self._rounded_results = [inner[rounded.values[t]] for t in node.results if rounded.values[t].is_floating]
        self._rounded_keys = dict(zip((key for key, _ in rounded.random_keys), keys, strict=True))

    def is_differentiable(self, tensor: Tensor) -> bool:
        """Is this a floating tensor the layer reads?"""
        return tensor in self.run.values and self.run.values[tensor].is_floating

    def errors(
        self, tensors: Sequence[Tensor], rng: np.random.Generator, directions: int
    ) -> dict[Tensor, float | None]:
        """The largest relative error over some directions, for each tensor; None where every result has a kink."""
        ways = [(t, rng.standard_normal(self.at[t].shape)) for t in tensors for _ in range(directions)]
        weights = [rng.standard_normal(result.shape) for result in self.results]
        if not self.results:
            return dict.fromkeys(tensors)
        middle, found = self._values({}), [list[float]() for _ in ways]
        rounded = [self._rounded_values(_Rounding(rng, EPSILON)) for _ in range(NEIGHBOURS)]
        spread = [_spread(result, [other[i] for other in rounded]) for i, result in enumerate(middle)]
        derivative = self._derivative(tensors)
        for step in (1e-5, 1e-6, 1e-7):
            sides = [
                (self._values({t: self.at[t] + step * d}), self._values({t: self.at[t] - step * d})) for t, d in ways
            ]
            smooth = [
                np.logical_and.reduce([_is_smooth(up[i], middle[i], down[i], spread[i]) for up, down in sides])
                for i in range(len(self.results))
            ]
            if not any(mask.any() for mask in smooth):
                continue
            cotangents = [np.where(mask, weight, 0.0) for mask, weight in zip(smooth, weights, strict=True)]
            gradients = derivative(cotangents)
            # What rounding, of the results and of everything before them, does to a difference is no error of the
            # derivative: where that is truly 0, there is nothing else.
            noise = ROUNDINGS * _noise(cotangents, middle, rounded) / step
            for (tensor, direction), (up, down), errors in zip(ways, sides, found, strict=True):
                actual = float(np.sum(gradients[tensor] * direction))
                expected = 0.0
                for weight, mask, high, low in zip(cotangents, smooth, up, down, strict=True):
                    expected += float(np.sum(weight[mask] * (high - low)[mask])) / (2 * step)
                scale = max(abs(expected), float(np.linalg.norm(gradients[tensor])), 1e-12)
                error = abs(actual - expected)
                errors.append((error if error <= DIFFERENCES * scale else max(0.0, error - noise)) / scale)
        worst: dict[Tensor, float | None] = {}
        for tensor in tensors:
            of_tensor = [min(errors) for (t, _), errors in zip(ways, found, strict=True) if t is tensor and errors]
            worst[tensor] = max(of_tensor, default=None)
        return worst

    def _values(self, changed: dict[Tensor, Array]) -> list[Array]:
        feeds = {self.run.values[t]: changed.get(t, a) for t, a in self.at.items()}
        memory = _interpret(self.run.trace, {**feeds, **self.fixed}, self.forward)
        return [memory[result] for result in self.results]

    def _rounded_values(self, rounding: _Rounding) -> list[Array]:
        feeds = {self._rounded.values[t]: a for t, a in self.at.items()} | self._rounded_keys
        memory = _interpret(self._rounded.trace, feeds, rounding=rounding)
        return [memory[result] for result in self._rounded_results]

    def _derivative(self, tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], dict[Tensor, Array]]:
        """Gradients of the tensors, given those of the results."""
        seeds = {result: self.run.trace.value(result.shape, FLOAT64, "input") for result in self.results}
        found = differentiate(self.run.trace, seeds, [self.run.values[tensor] for tensor in tensors])

        def gradients(cotangents: Sequence[Array]) -> dict[Tensor, Array]:
            feeds = {self.run.values[t]: a for t, a in self.at.items()} | self.fixed
            feeds |= dict(zip(seeds.values(), cotangents, strict=True))
            memory = _interpret(self.run.trace, feeds)
            values = {tensor: self.run.values[tensor] for tensor in tensors}
            return {t: memory[found[v]] if v in found else np.zeros(v.shape) for t, v in values.items()}

        return gradients


def _is_smooth(up: Array, middle: Array, down: Array, spread: Array) -> Array:
    """Where both slopes agree, but for rounding: bending is of second order in the step, a kink of first."""
    with np.errstate(all="ignore"):
        slope = np.maximum(np.abs(up - middle), np.abs(middle - down))
        smooth: Array = np.abs(up + down - 2 * middle) <= 1e-3 * slope + 8 * (EPSILON * np.abs(middle) + spread)
    return smooth


def _spread(exact: Array, rounded: Sequence[Array]) -> Array:
    """How far roundings move every number, at most."""
    with np.errstate(all="ignore"):
        spread: Array = np.max([np.abs(other - exact) for other in rounded], axis=0)
    return spread


def _moved(array: Array, rng: np.random.Generator) -> Array:
    """The same numbers a few float32 roundings away."""
    if array.dtype != FLOAT64:
        return array
    moved: Array = array * (1 + 16 * np.finfo(np.float32).eps * rng.standard_normal(array.shape))
    return moved


def _noise(weights: Sequence[Array], exact: Sequence[Array], rounded: Sequence[Sequence[Array]]) -> float:
    """How far roundings move a weighted sum of results, in the median."""
    with np.errstate(all="ignore"):
        moves = [
            abs(sum(float(np.sum(w * (b - a), where=w != 0.0)) for w, a, b in zip(weights, exact, other, strict=True)))
            for other in rounded
        ]
    return float(np.median(moves))


def _relative(actual: Array, expected: Array, scale: Array, noise: float = 0.0) -> float:
    """|actual - expected| / |scale|; errors that are not small count only as far as they are larger than `noise`."""
    error, size = float(np.linalg.norm(actual.astype(np.float64) - expected)), max(float(np.linalg.norm(scale)), 1e-12)
    return (max(0.0, error - noise) if error > COMPILED * size else error) / size


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _in_small_ops(trace: Trace) -> Substitution:
    """Rewrite the steps of a trace without composite ops; gives what became of values."""
    trace.steps, found = expanded(trace.steps, trace, lambda step: step.op.expansion is None, "check_gradients")
    return found


class _Rounding:
    """Moves every number by up to one rounding, at random: what many such runs differ in is the noise of rounding."""

    def __init__(self, rng: np.random.Generator, epsilon: float) -> None:
        self._rng, self._epsilon = rng, epsilon

    def __call__(self, array: Array) -> Array:
        moved: Array = array * (1.0 + self._epsilon * self._rng.uniform(-1.0, 1.0, array.shape))
        return moved


def _interpret(
    trace: Trace,
    feeds: dict[Value, Array],
    steps: Sequence[Step] | None = None,
    rounding: _Rounding | None = None,
) -> dict[Value, Array]:
    """Every step in memory of its own."""
    memory = {**trace.constants, **feeds}
    for step in trace.steps if steps is None else steps:
        with np.errstate(all="ignore"):
            arrays = run_meaning(step, [memory[value] for value in step.inputs])
            if rounding is not None and not step.op.is_view:
                arrays = tuple(rounding(array) if array.dtype == FLOAT64 else array for array in arrays)
        memory.update(zip(step.results, arrays, strict=True))
    return memory
