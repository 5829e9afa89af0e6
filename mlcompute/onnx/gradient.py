"""The `Gradient` operator: the nodes between xs and y are described once more and differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.errors import ShapeError
from mlcompute.onnx.operands import Known, Operand, Scope, Use
from mlcompute.onnx.rows import Answer, Call, Row
from mlcompute.ops.op import Value


@dataclass(frozen=True)
class GradientRow(Row):
    """A row made for one node: its function knows the nodes it differentiates."""

    operands: Sequence[Operand | None] = ()
    names: Sequence[str] = ()


def gradient_row(
    history: Sequence[tuple[Use, Sequence[str], Sequence[str]]],
    attributes: Mapping[str, Any],
    inputs: Sequence[str],
    find: Callable[[str], Operand | None],
) -> GradientRow:
    """dy/dx for every x of xs, holding zs.   operands: those of the node, then whatever else the nodes between read."""
    xs, y = list(attributes["xs"]), attributes["y"]
    given = [*xs, *attributes.get("zs", ())]
    needed: list[tuple[Use, Sequence[str], Sequence[str]]] = []
    wanted = {y}
    for use, names, outputs in reversed(history):
        if wanted.isdisjoint(outputs) or set(outputs) & set(given):
            continue
        needed.insert(0, (use, names, outputs))
        wanted.update(name for name in names if name)
    if not needed:
        raise ShapeError(f"Gradient: '{y}' does not depend on {xs}")
    computed = {name for _, _, outputs in needed for name in outputs}
    outside: dict[str, Operand] = {}
    for use, names, _ in needed:
        for name, operand in zip(names, use.operands, strict=True):
            if name and name not in computed and name not in given and operand is not None:
                outside[name] = operand
    operands = [find(name) for name in inputs]
    all_names = [*given[: len(inputs)], *outside]

    def describe(call: Call) -> list[Answer]:
        trace = call.trace
        values: dict[str, Value] = {}
        for index, name in enumerate(all_names):
            # Copies: the gradient is that of these values alone, not of whatever else reads the same operands.
            values[name] = ops.copy(call[index]) if call[index].is_floating else call[index]
        start = len(trace.steps)
        for use, names, outputs in needed:
            for name, answer in zip(outputs, _again(use, names, values, call), strict=False):
                if isinstance(answer, Value):
                    values[name] = answer
                elif answer is not None:
                    values[name] = trace.constant(answer)
        target = values[y]
        phase = trace.phase
        seeds = {target: ops.full(target, target.shape, 1.0)}
        found = differentiate(trace, seeds, [values[x] for x in xs])
        trace.phase = phase
        for step in trace.steps[start:]:
            step.phase = phase
        return [found.get(values[x], ops.full(values[x], values[x].shape, 0.0)) for x in xs]

    return GradientRow(
        "Gradient", "ai.onnx.preview.training", describe, operands=[*operands, *outside.values()], names=all_names
    )


def _again(use: Use, names: Sequence[str], values: Mapping[str, Value], call: Call) -> list[Answer]:
    """A use described with values that stand for its operands."""

    def of(operand: Operand) -> Value:
        return values[name_of[id(operand)]]

    name_of = {id(operand): name for name, operand in zip(names, use.operands, strict=True) if operand is not None}
    scope = Scope(call.trace, of, of)
    for operand, name in zip(use.operands, names, strict=True):
        if operand is not None and not isinstance(operand, Known):
            scope.made[id(operand)] = values[name]
    return use.describe(scope)
