"""Are a graph's gradients right? Every layer against finite differences, every compiled gradient against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcompute.compiler import compile_program
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.lower import Lowering
from mlcompute.debug import bindings_of_copies
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import ExecutionError
from mlcompute.feeding import Named
from mlcompute.graph import Node
from mlcompute.layers.layer import Layer
from mlcompute.ops.op import Array, Step, Trace, Value, run_meaning
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

FLOAT64 = np.dtype(np.float64)
#: Relative errors up to which a gradient counts as right: of float64 differences, and of float32 arithmetic.
DIFFERENCES, COMPILED = 1e-5, 1e-3


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

    Each layer's derivative, in float64 and at the values it meets in this very graph, is compared with central
    differences in a few random directions. Then the compiled float32 gradients of all parameters are compared with
    float64.
    """
    if not isinstance(graph, TrainingGraph):
        raise TypeError(f"check_gradients: needs a TrainingGraph, not {type(graph).__name__}")
    graph.wait()
    batch = graph._batch(batch_size, "check_gradients")
    data = graph._named_data("check_gradients", inputs_data, loss_labels_data, loss_label_weights_data)
    description = graph._compile_if_needed()
    graph._expect_labels()
    if not description.losses:
        raise ExecutionError("check_gradients: the graph has no loss", fix="give the training graph a loss layer")
    assert graph._device is not None
    engine = graph._device.engine
    program = compile_program(description, engine, "split", batch)
    phases = ("forward", "gradient")
    memory = bindings_of_copies("check_gradients", graph, program, phases, data, ExecutionOptions.NONE)
    fed = {tensor: memory[value] for tensor, value in program.inputs.items() if value in memory}
    kept = {tensor: memory[value].copy() for tensor, value in program.persistent.items()}
    keys = [memory[value] for value, _ in program.random_keys]
    executable = engine.build(program, engine.allocate(program.plan.nbytes))
    executable.run(phases, memory)
    compiled = {
        tensor: executable.read(program.gradients[tensor])
        for tensor in description.parameters
        if tensor in program.gradients
    }
    exact = _Exact(description.nodes, {**fed, **kept}, keys, description.label_weights)
    whole = exact.gradients([node.results[0] for node in description.losses], description.parameters)
    rng = np.random.default_rng(0)
    rows: list[Checked] = []
    for node in description.nodes:
        rows += exact.check(node, rng, directions, compiled, whole)
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
        self.feeds = feeds
        self.names = {}
        for step in self.run.trace.steps:
            for value in step.results:
                self.names[value] = step.layer

    def _lower(self, nodes: Iterable[Node]) -> Lowering:
        run = Lowering(training=True, float_type=FLOAT64)
        run.weights_of = self.weights
        for node in nodes:
            run.add(node.layer, [*node.sources, *node.labels], node.results)
        return run

    def gradients(self, losses: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[Tensor, Array]:
        """Gradients of the sum of the losses, in float64."""
        run = self._lower(self.nodes)
        seeds = {run.values[loss]: _ones(run.trace, run.values[loss]) for loss in losses}
        found = differentiate(run.trace, seeds, [run.values[tensor] for tensor in wanted if tensor in run.values])
        feeds = {value: self.arrays[tensor] for tensor, value in run.values.items() if tensor in self.arrays}
        feeds.update(dict(zip((key for key, _ in run.random_keys), self.keys, strict=True)))
        memory = _interpret(run.trace, feeds)
        return {t: memory[found[run.values[t]]] for t in wanted if t in run.values and run.values[t] in found}

    def check(
        self,
        node: Node,
        rng: np.random.Generator,
        directions: int,
        compiled: dict[Tensor, Array],
        whole: dict[Tensor, Array],
    ) -> list[Checked]:
        """One layer by itself, at the values it has in the graph."""
        keys_before = self._keys_before(node)
        slots = {f"source {i}": tensor for i, tensor in enumerate(node.sources)}
        slots |= {name: slot.tensor for name, slot in node.layer.parameters.items()}
        run, cotangents = self._alone(node, rng)
        at = {tensor: self.memory[self.run.values[tensor]] for tensor in run.persistent}
        wanted = [t for t in slots.values() if t in run.values and run.values[t].is_floating]
        seeds = {run.values[r]: run.trace.constant(c, FLOAT64) for r, c in cotangents.items()}
        forward = list(run.trace.steps)
        found = differentiate(run.trace, seeds, [run.values[tensor] for tensor in wanted]) if seeds else {}
        fixed = dict(zip((key for key, _ in run.random_keys), keys_before, strict=True))
        memory = _interpret(run.trace, {**{run.values[t]: a for t, a in at.items()}, **fixed})

        def objective(changed: dict[Tensor, Array]) -> float:
            feeds = {run.values[t]: changed.get(t, a) for t, a in at.items()}
            values = _interpret(run.trace, {**feeds, **fixed}, forward)
            return float(sum(np.sum(c * values[run.values[r]]) for r, c in cotangents.items()))

        rows = []
        for slot, tensor in slots.items():
            if tensor not in wanted:
                continue
            value = run.values[tensor]
            gradient = memory[found[value]] if value in found else np.zeros(value.shape)
            error = _worst(objective, tensor, at[tensor], gradient, rng, directions) if seeds else None
            against = None
            if tensor in compiled and tensor in whole and not slot.startswith("source"):
                against = _relative(compiled[tensor], whole[tensor])
            rows.append(Checked(self._name(node), slot, error, against))
        return rows

    def _alone(self, node: Node, rng: np.random.Generator) -> tuple[Lowering, dict[Tensor, Array]]:
        run = self._lower([node])
        results = [tensor for tensor in node.results if run.values[tensor].is_floating]
        return run, {tensor: rng.standard_normal(run.values[tensor].shape) for tensor in results}

    def _keys_before(self, node: Node) -> list[Array]:
        """The random keys this layer uses in the whole graph."""
        before = self._lower(self.nodes[: self.nodes.index(node)])
        return self.keys[len(before.random_keys) :][: len(self._lower([node]).random_keys)]

    def _name(self, node: Node) -> str:
        return self.names.get(self.run.values[node.results[0]], node.layer.label)


def _worst(
    objective: Callable[[dict[Tensor, Array]], float],
    tensor: Tensor,
    at: Array,
    gradient: Array,
    rng: np.random.Generator,
    directions: int,
) -> float | None:
    """The largest relative error over some directions; None where the function has a kink in all of them.

    At a kink (a tie in a maximum, a ReLU at 0) the slopes on both sides differ, and any derivative between them is
    right.
    """
    middle, errors = objective({}), []
    for _ in range(directions):
        direction = rng.standard_normal(at.shape)
        actual = float(np.sum(gradient * direction))
        found = []
        for step in (1e-5, 1e-6, 1e-7):
            up, down = objective({tensor: at + step * direction}), objective({tensor: at - step * direction})
            expected = (up - down) / (2 * step)
            # What rounding of the objective itself can do to a difference is no error of the derivative.
            noise = 4 * np.finfo(np.float64).eps * max(abs(up), abs(down)) / step
            scale = max(abs(expected), float(np.linalg.norm(gradient)), 1e-12)
            if abs(up + down - 2 * middle) / step <= 1e-2 * scale + noise:
                found.append(max(0.0, abs(actual - expected) - noise) / scale)
        if found:
            errors.append(min(found))
    return max(errors, default=None)


def _relative(actual: Array, expected: Array) -> float:
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(actual.astype(np.float64) - expected)) / max(scale, 1e-12)


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _ones(trace: Trace, value: Value) -> Value:
    return trace.constant(np.ones(value.shape), FLOAT64)


def _interpret(trace: Trace, feeds: dict[Value, Array], steps: Sequence[Step] | None = None) -> dict[Value, Array]:
    """Every step in memory of its own."""
    memory = {**trace.constants, **feeds}
    for step in trace.steps if steps is None else steps:
        with np.errstate(all="ignore"):
            arrays = run_meaning(step, [memory[value] for value in step.inputs])
        memory.update(zip(step.results, arrays, strict=True))
    return memory
