"""recurrent_reserve: the workspace that a library keeps from a recurrent layer's forward pass for its gradient.

    y, h, c, gates, cells = lstm        the op's own form: gates and cells are there for the gradient
    y, h, c, reserve = recurrent        bytes that only the library can read; none where there is no gradient

Which of them are made so the device says, layer by layer: where its library is the faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.compiler.context import Context
from mlcompute.ops.op import TABLE, Array, ArrayType, Op, Step, Typed

_BYTE = np.dtype(np.uint8)


class Recurrent(Op):
    """`lstm` or `rnn` without lengths, with what a library keeps for the gradient.

    the inputs of `lstm` or `rnn`   ->   their results up to the last states   reserve (bytes,), unless that is 0

    cell     "lstm", or the cell of `rnn`
    reserve  bytes kept for the gradient
    """

    name = "recurrent"
    family = "recurrent"

    @staticmethod
    def result(
        x: Typed, wx: Typed, wh: Typed, b: Typed, *states: Typed, cell: str, reverse: bool, reserve: int
    ) -> tuple[ArrayType, ...]:
        (n, steps, _), hidden = x.shape, wh.shape[1]
        shapes = ((n, steps, hidden), *((n, hidden) for _ in states))
        kept = (ArrayType((reserve,), _BYTE),) if reserve else ()
        return (*(ArrayType(shape, x.dtype) for shape in shapes), *kept)

    @staticmethod
    def meaning(*inputs: Array, cell: str, reverse: bool, reserve: int) -> tuple[Array, ...]:
        made = _forward(inputs, cell, reverse)[: len(inputs) - 3]
        return (*made, np.zeros(reserve, _BYTE)) if reserve else made


class RecurrentGradient(Op):
    """Gradients of `recurrent`.

    gradients of its results, its inputs, y and reserve   ->   gradients of its inputs

    is_repeated   may it run several times after one forward pass, so that the reserve must stay as it is?
    """

    name = "recurrent_gradient"
    family = "recurrent"

    @staticmethod
    def result(*values: Typed, cell: str, **options: Any) -> tuple[ArrayType, ...]:
        _, inputs = _parts(values, cell)
        return tuple(ArrayType(each.shape, each.dtype) for each in inputs)

    @staticmethod
    def meaning(*values: Array, cell: str, reverse: bool, is_repeated: bool) -> tuple[Array, ...]:
        given, (x, wx, wh, b, *states) = _parts(values, cell)
        y, *made = _forward((x, wx, wh, b, *states), cell, reverse)
        op, options = _op(cell, reverse)
        found = TABLE[f"{op}_gradient"].meaning(*given, x, wx, wh, *states, y, *made[len(states) :], **options)
        return tuple(found)


RECURRENT, RECURRENT_GRADIENT = Recurrent(), RecurrentGradient()


def _op(cell: str, reverse: bool) -> tuple[str, dict[str, Any]]:
    """The op of a cell, and its attributes."""
    options: dict[str, Any] = {"reverse": reverse, "has_lengths": False}
    return ("lstm", options) if cell == "lstm" else ("rnn", {**options, "cell": cell})


def _forward(inputs: tuple[Array, ...], cell: str, reverse: bool) -> tuple[Array, ...]:
    """y, last states, then what the ops keep."""
    op, options = _op(cell, reverse)
    return tuple(TABLE[op].meaning(*inputs, **options))


def _parts(values: tuple[Any, ...], cell: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the inputs of `recurrent_gradient`: gradients of the results, and the inputs of `recurrent`."""
    states = 2 if cell == "lstm" else 1
    return values[: 1 + states], values[1 + states : -2]


def recurrent_reserve(steps: list[Step], context: Context) -> list[Step]:
    """Recurrent steps, and their gradients, in the forms above where the device wants that."""
    index = context.index(steps)
    if index.op_names.isdisjoint(("lstm", "rnn")):
        return steps
    replaced: dict[Step, Step] = {}
    for step in steps:
        if step.op.name not in ("lstm", "rnn") or step.attributes["has_lengths"]:
            continue
        states = 2 if step.op.name == "lstm" else 1
        own = step.results[1 + states :]
        if not context.kept.isdisjoint(own):
            continue
        readers = list(dict.fromkeys(reader for value in own for reader in index.readers.get(value, ())))
        if len(readers) > 1 or any(reader.op.name != f"{step.op.name}_gradient" for reader in readers):
            continue
        reserve = context.engine.recurrent_reserve(step, trains=bool(readers))
        if reserve is None:
            continue
        gradient = readers[0] if readers else None
        replaced |= library_form(step, gradient, reserve, is_repeated=context.program.runs_in_phases)
    return [replaced.get(step, step) for step in steps] if replaced else steps


def library_form(step: Step, gradient: Step | None, reserve: int, is_repeated: bool) -> dict[Step, Step]:
    """What an `lstm` or `rnn` step and its gradient become, which keep so many bytes between them."""
    states = 2 if step.op.name == "lstm" else 1
    options = {"cell": step.attributes.get("cell", "lstm"), "reverse": step.attributes["reverse"]}
    kept = (step.inputs[0].trace.value((reserve,), _BYTE),) if reserve else ()
    results = (*step.results[: 1 + states], *kept)
    new = Step(RECURRENT, step.inputs, results, {**options, "reserve": reserve}, step.layer, step.phase)
    if gradient is None:
        return {step: new}
    given = (*gradient.inputs[: 1 + states], *step.inputs, step.results[0], *kept)
    more = {**options, "is_repeated": is_repeated}
    back = Step(RECURRENT_GRADIENT, given, gradient.results, more, gradient.layer, gradient.phase)
    return {step: new, gradient: back}
