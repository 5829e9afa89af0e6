"""Gradients of imported graphs in float64, and the finite differences they must agree with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.lower import Lowering
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.ops.op import Array, Trace, Value, run_meaning
from mlcompute.tensor import Tensor

FLOAT64 = np.dtype(np.float64)


@dataclass
class Lowered:
    """An imported graph as steps in float64: values of its floating inputs and weights, and of its outputs."""

    trace: Trace
    variables: dict[str, Value]
    others: dict[Value, Array]
    start: dict[str, Array]
    outputs: list[Value]


def lowered(graph: ImportedGraph, given: dict[str, Array]) -> Lowered:
    run = Lowering(training=False, float_type=FLOAT64)
    used = {tensor for node in graph.nodes for tensor in node.sources}
    variables: dict[str, Value] = {}
    others: dict[Value, Array] = {}
    start: dict[str, Array] = {}
    for name, tensor in graph.inputs.items():
        if tensor not in used:
            continue
        value = run.input(tensor)
        data = np.asarray(given[name]).reshape(value.shape).astype(value.dtype)
        if value.dtype == FLOAT64:
            variables[name], start[name] = value, _generic(data)
        else:
            others[value] = data
    for node in graph.nodes:
        run.add(node.layer, node.sources, node.results)
    for tensor, value in run.persistent.items():
        data = _data(tensor).astype(value.dtype)
        if value.dtype == FLOAT64:
            variables[tensor.label], start[tensor.label] = value, _generic(data)
        else:
            others[value] = data
    outputs = [run.values[tensor] for tensor in graph.outputs.values() if run.values[tensor].dtype == FLOAT64]
    return Lowered(run.trace, variables, others, start, outputs)


def _generic(data: Array) -> Array:
    """Numbers close by that are finite, all different and on no kink: examples like whole numbers and ties."""
    random = np.random.default_rng(data.size)
    filled = np.where(np.isfinite(data) & (np.abs(data) < 1e6), data, random.standard_normal(data.shape))
    return np.asarray(filled + 0.01 * random.standard_normal(data.shape))


def _data(tensor: Tensor) -> Array:
    data = tensor.data
    assert data is not None
    return data


def evaluate(low: Lowered, at: dict[str, Array], wanted: list[Value]) -> list[Array]:
    """Values of a trace by the NumPy meanings."""
    arrays: dict[Value, Array] = {**low.trace.constants, **low.others}
    arrays.update({low.variables[name]: array for name, array in at.items()})
    with np.errstate(all="ignore"):
        for step in low.trace.steps:
            results = run_meaning(step, [arrays[value] for value in step.inputs])
            arrays.update(zip(step.results, results, strict=True))
    return [arrays[value] for value in wanted]


def check_gradients(graph: ImportedGraph, given: dict[str, Array], seed: int = 0) -> tuple[int, list[str]]:
    """Compare dL/dv along a random direction for every floating input and weight: how many agree, and what differs.

    L is a random weighing of all outputs; the difference quotient is central and in float64.
    """
    low = lowered(graph, given)
    if not low.outputs or not low.variables:
        return 0, []
    random = np.random.default_rng(seed)
    weights = [random.standard_normal(output.shape) for output in low.outputs]
    seeds = {output: low.trace.constant(weight) for output, weight in zip(low.outputs, weights, strict=True)}
    steps = len(low.trace.steps)
    found = differentiate(low.trace, seeds, list(low.variables.values()))
    gradients = {name: found.get(value) for name, value in low.variables.items()}
    wanted = [ops.copy(gradient) for gradient in gradients.values() if gradient is not None]
    computed = iter(evaluate(low, low.start, wanted))
    analytic = {name: None if g is None else next(computed) for name, g in gradients.items()}
    del low.trace.steps[steps:]
    problems: list[str] = []
    agreed = 0
    for name in low.variables:
        direction = random.standard_normal(low.start[name].shape)
        slope = _slope(low, weights, name, direction)
        gradient = analytic[name]
        inner = 0.0 if gradient is None else float(np.sum(gradient * direction))
        if not np.isfinite(slope):  # an output is infinite here
            continue
        if not np.isclose(inner, slope, rtol=1e-4, atol=1e-5 * max(1.0, abs(slope))):
            problems.append(f"{name}: gradient {inner:.8g}, difference quotient {slope:.8g}")
        elif gradient is not None:
            agreed += 1
    return agreed, problems


def _slope(low: Lowered, weights: list[Any], name: str, direction: Array) -> float:
    h = 1e-6
    sides = []
    for sign in (1.0, -1.0):
        at = {**low.start, name: low.start[name] + sign * h * direction}
        values = evaluate(low, at, low.outputs)
        with np.errstate(all="ignore"):
            sides.append(sum(float(np.sum(w * v)) for w, v in zip(weights, values, strict=True)))
    return (sides[0] - sides[1]) / (2 * h) if np.isfinite(sides).all() else np.nan
