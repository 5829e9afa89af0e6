"""attention_by_token: attention gives its results token by token, and keeps what its gradient would compute again.

    y = attention(q, k, v)          (n, heads, l, d)     then transposed and copied to (n, l, heads d) for a matmul
    y, logs = attention_by_token    (n, l, heads, d)     the copy is gone; `logs`, a number per query and head, stay

The gradient needs the softmax's denominators, and sum p dp of every query. The first are kept, the second is sum dy y:
so it goes through the keys once instead of twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.compiler.context import Context
from mlcompute.compiler.simplify import drop_unused
from mlcompute.ops.op import FLOAT32, TABLE, Array, ArrayType, Op, Step, Typed, Value

#: (n, heads, l, d) <-> (n, l, heads, d)
_SWAP = (0, 2, 1, 3)


class AttentionByToken(Op):
    """y of `attention`, transposed, and the logarithms of the softmax's denominators.

    the inputs of `attention`   ->   y (n, l, heads, dv)   logs (n, heads, l): log sum exp(scale q kᵀ + mask)

    is_causal   is it known that the mask forbids the keys after a query, and adds nothing else?
    """

    name = "attention_by_token"
    family = "attention"

    @staticmethod
    def result(q: Typed, k: Typed, v: Typed, *more: Typed, **options: Any) -> tuple[ArrayType, ArrayType]:
        n, heads, queries, _ = q.shape
        return ArrayType((n, queries, heads, v.shape[3]), q.dtype), ArrayType((n, heads, queries), FLOAT32)

    @staticmethod
    def meaning(
        q: Array, k: Array, v: Array, *more: Array, is_causal: bool = False, **options: Any
    ) -> tuple[Array, Array]:
        scores = (q @ np.swapaxes(k, -1, -2)) * q.dtype.type(options["scale"])
        if options["has_mask"]:
            scores = scores + more[0]
        y = TABLE["attention"].meaning(q, k, v, *more, **options)
        with np.errstate(divide="ignore"):
            logs = np.logaddexp.reduce(scores.astype(np.float64), axis=-1)
        return np.transpose(y, _SWAP), logs.astype(np.float32)


class AttentionByTokenGradient(Op):
    """Gradients of `attention_by_token`, transposed like its result.

    dy (n, heads, l, dv), then both results and the inputs of `attention_by_token`
    ->   dq (n, l, heads, d)   dk (n, s, heads, d)   dv (n, s, heads, dv)
    """

    name = "attention_by_token_gradient"
    family = "attention"

    @staticmethod
    def result(dy: Typed, y: Typed, logs: Typed, *inputs: Typed, **options: Any) -> tuple[ArrayType, ...]:
        return tuple(ArrayType(tuple(x.shape[axis] for axis in _SWAP), x.dtype) for x in inputs[:3])

    @staticmethod
    def meaning(
        dy: Array, y: Array, logs: Array, *inputs: Array, is_causal: bool = False, **options: Any
    ) -> tuple[Array, ...]:
        found = TABLE["attention_gradient"].meaning(dy, *inputs, **options)
        return tuple(np.transpose(array, _SWAP) for array in found)


class AttentionByTokenJoinedGradient(Op):
    """The results of `attention_by_token_gradient` side by side, for as many keys as queries.

    its inputs   ->   (n, l, 3 heads, d): the heads of dq, then those of dk, then those of dv
    """

    name = "attention_by_token_joined_gradient"
    family = "attention"

    @staticmethod
    def result(dy: Typed, y: Typed, logs: Typed, *inputs: Typed, **options: Any) -> ArrayType:
        n, heads, length, width = inputs[0].shape
        return ArrayType((n, length, 3 * heads, width), inputs[0].dtype)

    @staticmethod
    def meaning(dy: Array, y: Array, logs: Array, *inputs: Array, **options: Any) -> Array:
        return np.concatenate(AttentionByTokenGradient.meaning(dy, y, logs, *inputs, **options), axis=2)


BY_TOKEN, BY_TOKEN_GRADIENT, JOINED_GRADIENT = (
    AttentionByToken(),
    AttentionByTokenGradient(),
    AttentionByTokenJoinedGradient(),
)


def attention_by_token(steps: list[Step], context: Context) -> list[Step]:
    """Attention and its gradient, where the device supports that, in the forms above."""
    if "attention" not in context.index(steps).op_names:
        return steps
    run = _Rewriting(context)
    for step in steps:
        run.add(step)
    return _joined(drop_unused(run.steps, context.kept), context)


def _joined(steps: list[Step], context: Context) -> list[Step]:
    """Gradients that are only concatenated, dq dk dv, are written side by side in the first place."""
    index = context.index(steps)
    replaced: dict[Step, Step | None] = {}
    for step in steps:
        maker = index.makers.get(step.inputs[0]) if step.op.name == "concatenate" else None
        if maker is None or maker.op is not BY_TOKEN_GRADIENT or step.inputs != maker.results:
            continue
        if step.attributes["axis"] != 2 or any(
            value in context.kept or index.readers[value] != [step] for value in step.inputs
        ):
            continue
        new = Step(JOINED_GRADIENT, maker.inputs, step.results, maker.attributes, maker.layer, maker.phase)
        if context.engine.supports(new):
            replaced |= {maker: new, step: None}
    return [each for step in steps if (each := replaced.get(step, step)) is not None] if replaced else steps


class _Rewriting:
    def __init__(self, context: Context) -> None:
        self.trace, self.kept, self.engine = context.trace, context.kept, context.engine
        self.steps: list[Step] = []
        self.replaced: dict[Value, Value] = {}  # what is the same as a result
        self.made: dict[object, tuple[Value, Value]] = {}  # inputs and options -> results
        self.shown: dict[Value, Value] = {}  # a result in the order of the old ops -> the result
        self.reshaped: dict[Value, Value] = {}  # a constant of another shape -> the constant
        self.causal: dict[Value, bool] = {}  # is a constant a causal mask?

    def add(self, step: Step) -> None:
        if not self.replaced.keys().isdisjoint(step.inputs):
            inputs = tuple(self.replaced.get(value, value) for value in step.inputs)
            step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
        new: Step | None = None
        if step.op.name == "reshape" and step.inputs[0].kind == "constant":
            self.reshaped[step.results[0]] = step.inputs[0]
        if step.op.name == "attention":
            new = self._new(BY_TOKEN, step, step.inputs)
            if new is not None:
                self.made[_key(step, step.inputs)] = new.results[0], new.results[1]
        elif step.op.name == "attention_gradient":
            made = self.made.get(_key(step, step.inputs[1:]))
            if made is not None:
                new = self._new(BY_TOKEN_GRADIENT, step, (step.inputs[0], *made, *step.inputs[1:]))
        elif step.op.name == "transpose" and step.attributes["axes"] == _SWAP and step.inputs[0] in self.shown:
            (result,) = step.results
            if result not in self.kept:
                self.replaced[result] = self.shown[step.inputs[0]]
                return
        if new is None:
            self.steps.append(step)
            return
        self.steps.append(new)
        for old, result in zip(step.results, new.results, strict=False):
            self.steps.append(Step(TABLE["transpose"], (result,), (old,), {"axes": _SWAP}, step.layer, step.phase))
            self.shown[old] = result

    def _new(self, op: Op, step: Step, inputs: tuple[Value, ...]) -> Step | None:
        """The step in its new form, if the device supports that."""
        attributes = {**step.attributes, "is_causal": self._is_causal(step)}
        types = op.result(*inputs, **attributes)
        assert not isinstance(types, ArrayType)
        results = tuple(self.trace.value(each.shape, each.dtype) for each in types)
        new = Step(op, inputs, results, attributes, step.layer, step.phase)
        return new if self.engine.supports(new) else None

    def _is_causal(self, step: Step) -> bool:
        """Is the mask a constant with -inf after the diagonal, and else 0, for as many keys as queries?"""
        first = 1 if step.op.name == "attention_gradient" else 0
        q, k, _, *more = step.inputs[first:]
        if not step.attributes["has_mask"]:
            return False
        mask, one = self.reshaped.get(more[0], more[0]), (q.shape[2], q.shape[2])
        if mask.kind != "constant" or k.shape[2] != q.shape[2] or (1, 1, *more[0].shape)[-4:] != (1, 1, *one):
            return False
        if mask not in self.causal:
            array = self.trace.constants[mask].reshape(one)
            self.causal[mask] = bool(np.array_equal(array, np.triu(np.full_like(array, -np.inf), 1)))
        return self.causal[mask]


def _key(step: Step, inputs: tuple[Value, ...]) -> object:
    return inputs, tuple(sorted(step.attributes.items()))
