"""lower_precision: activations and their gradients are stored in bfloat16, and matmuls read it; all else is float32.

    h = x w           x and w as bfloat16, the sum in float32, h as bfloat16: half the memory, half the bytes to move
    y = gelu(h + b)   read as bfloat16, computed in float32, rounded once where it is stored
    dw = xᵀ dh        bfloat16 factors, a float32 result: weights, their gradients and the optimizer keep their digits

What a kernel computes and nobody stores is not rounded: normalised values between a normalisation and the elementwise
steps after it, and elementwise results that the gradient pass computes again (`rematerialize`).

Values keep their names in float32. Those that are stored in bfloat16 get a twin; `convert` steps stand where one is
needed in the other type, next to the elementwise steps they will be fused with. Within a group of elementwise steps
that become one kernel nothing is rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcompute.compiler.context import Context
from mlcompute.compiler.conversion import conversion
from mlcompute.compiler.fuse_normalization import NORMALIZATIONS
from mlcompute.compiler.mark_kept import kept_in_one_call
from mlcompute.compiler.rematerialize import recomputed_by_elementwise
from mlcompute.compiler.simplify import drop_unused
from mlcompute.ops.bfloat16 import bfloat16, is_bfloat16
from mlcompute.ops.op import FLOAT32, ArrayType, Step, Value, overwritten_by

#: Products: they read bfloat16 whatever they are given, unless the device mixes types. Op -> which inputs.
_PRODUCTS = {
    "matmul": (0, 1),
    "convolution": (0, 1),
    "convolution_input_gradient": (0, 1),
    "convolution_weight_gradient": (0, 1),
    "attention": (0, 1, 2),
    "attention_gradient": (0, 1, 2, 3),
    "attention_mask_gradient": (0, 1, 2, 3),
}
#: Products whose result may be float32 nevertheless.
_WITH_RESULT_TYPE = ("matmul", "convolution", "convolution_input_gradient", "convolution_weight_gradient")
#: Ops that only move numbers, or pick one of them.
_MOVES = {"pad": (0,), "gather": (0,), "slice_gradient": (0,), "copy": (0,), "stop_gradient": (0,), "max_pool": (0,)}
#: Ops that take activations as they lie; `concatenate`, which takes any number, is another.
_FOLLOWERS = {
    **_MOVES,
    "max_pool_with_indices": (0,),
    "max_pool_gradient": (0, 1),
    "max_pool_indices_gradient": (0,),
    "sum_pool": (0,),
    "sum_pool_gradient": (0,),
    "normalize": (0,),
    "normalize_gradient": (0, 1),
    "normalize_groups": (0,),
    "normalize_groups_gradient": (0, 1),
    "softmax_cross_entropy_gradient": (0,),
}
#: Ops that read bfloat16 and give float32, or whole numbers.
_READERS = dict.fromkeys(
    ("sum", "max", "min", "argmax", "argmin", "softmax", "log_softmax", "softmax_cross_entropy"), (0,)
)
#: Their float32 results, and what is computed from those alone, are no activations.
_STATISTICS = ("random_uniform", *_READERS)

_Uses = dict[Value, list[tuple[Step, Value]]]


def lower_precision(steps: list[Step], context: Context) -> list[Step]:
    """The same steps with activations in bfloat16. What is rounded does not depend on the style of execution."""
    # Programs that are run in phases have more steps: what nothing is trained by, but can be read. They decide nothing.
    in_phases = context.program.runs_in_phases
    decisive = drop_unused(steps, kept_in_one_call(context)) if in_phases else steps
    groups = _elementwise_groups(decisive)
    narrow, repeated = _stored_narrow(decisive, context, groups)
    if len(decisive) < len(steps):
        others = set(steps).difference(decisive)
        alone = _elementwise_groups([step for step in steps if step in others])
        groups |= {step: -number for step, number in alone.items()}
        also, again = _stored_narrow(steps, context, groups)
        narrow |= also.intersection(value for step in others for value in step.results)
        repeated |= {number for number in again if number < 0}
        for step in steps:  # the others' views of what is decided without them show it as it is
            if step.op.is_view:
                (narrow.add if step.inputs[0] in narrow else narrow.discard)(step.results[0])
    run = _Rewriting(context, groups, narrow, repeated, _pooled(steps))
    for step in steps:
        run.add(step)
    return drop_unused(run.steps, context.kept)


# Which values -------------------------------------------------------------------------------------------------------


def _stored_narrow(steps: list[Step], context: Context, groups: dict[Step, int]) -> tuple[set[Value], set[int]]:
    """Values that will lie in memory as bfloat16; groups of elementwise steps that the gradient pass computes again."""
    uses = _uses(steps)
    exact = _exact(steps, context, uses)
    losses = _loss_layers(steps, context)
    narrow: set[Value] = set()
    activations: set[Value] = set()  # and their gradients: worth half the memory
    repeated: set[int] = set()
    smallest = context.engine.smallest_bfloat16
    recomputed = recomputed_by_elementwise(steps, context)
    pooled = _pooled(steps)
    fuses_normalization = context.fuses_elementwise and context.engine.traits.fuses_normalization

    def worth(value: Value) -> bool:
        return value.size >= smallest

    def holds(value: Value, some: set[Value]) -> bool:
        return value in some or (some is activations and value.kind == "input")

    for step in steps:
        name, results = step.op.name, step.results
        if not results or (step.phase == "update" and not step.op.is_view):
            continue
        result = results[0]
        if step.op.is_view:
            for some in (narrow, activations):
                if holds(step.inputs[0], some):
                    some.add(result)
        elif step in groups:
            from_activation = any(v.shape == result.shape and holds(v, activations) for v in step.inputs)
            if from_activation and step.layer not in losses:
                activations.add(result)
            if result.dtype != FLOAT32 or result in exact:
                continue
            readers = uses.get(result, ())
            is_factor = any(reader.op.name in _PRODUCTS for reader, _ in readers)
            leaves_group = any(groups.get(reader) != groups[step] for reader, _ in readers)
            is_repeated = any(reader in groups and reader.results[0].shape != seen.shape for reader, seen in readers)
            if leaves_group and not is_repeated and (result in activations or is_factor) and worth(result):
                activations.add(result)
                if result in recomputed and _is_read_by_elementwise(result, uses):
                    repeated.add(groups[step])
                else:
                    narrow.add(result)
        elif name in _PRODUCTS:
            activations.update(results)
            narrow.update(v for v in results if v.dtype == FLOAT32 and v not in exact and uses.get(v) and worth(v))
        elif places := _follower_places(step):
            if any(holds(step.inputs[place], activations) for place in places):
                activations.add(result)
            stays_in_kernel = name in NORMALIZATIONS and fuses_normalization and _is_read_by_elementwise(result, uses)
            if result not in exact and not stays_in_kernel and not narrow.isdisjoint(_followed(step, places, pooled)):
                narrow.add(result)
        elif name not in _STATISTICS:
            activations.add(result)
            # Converted once, instead of by each of those that want it so.
            wanted = any(reader.op.name in _PRODUCTS or _follower_places(reader) for reader, _ in uses.get(result, ()))
            if wanted and result.dtype == FLOAT32 and result not in exact and worth(result):
                narrow.add(result)
    return narrow, repeated


def _is_read_by_elementwise(value: Value, uses: _Uses) -> bool:
    """Do only elementwise steps read a value, each over as many elements?"""
    return all(
        reader.op.family == "elementwise" and reader.op.name not in _MOVES and reader.results[0].shape == seen.shape
        for reader, seen in uses.get(value, ())
    )


def _uses(steps: list[Step]) -> _Uses:
    """Value -> the steps that read it, and what of it they read: the value itself, or a view."""
    uses: _Uses = {}
    for step in reversed(steps):
        for value in dict.fromkeys(step.inputs):
            known = uses.setdefault(value, [])
            if step.op.is_view:
                known.extend(uses.get(step.results[0], ()))
            else:
                known.append((step, value))
    return uses


def _exact(steps: list[Step], context: Context, uses: _Uses) -> set[Value]:
    """Values that must stay float32: gradients of parameters, what is stored into parameters and states, and what
    only leads to these."""
    program = context.program
    exact = {program.gradients[tensor] for tensor in program.persistent if tensor in program.gradients}
    for step in reversed(steps):
        for value in step.results:
            readers = [reader for reader, _ in uses.get(value, ())]
            leads_there = any(reader.phase == "update" or not reader.op.is_pure for reader in readers)
            if value in exact or leads_there or (readers and all(_adds_to(reader, exact) for reader in readers)):
                exact.add(value)
        if step.op.is_view and step.results[0] in exact:
            exact.add(step.inputs[0])
    return exact


def _adds_to(step: Step, exact: set[Value]) -> bool:
    simple = step.op.family == "elementwise" or step.op.name in (*_MOVES, "sum", "concatenate")
    return simple and step.results[0] in exact


def _elementwise_groups(steps: list[Step]) -> dict[Step, int]:
    """Elementwise step -> the number of its group: neighbours of one shape and phase, which become one kernel."""
    groups: dict[Step, int] = {}
    number = 0
    made: set[Value] = set()  # by the group, and views of that
    hanging: set[Value] = set()  # the views among them
    last: Step | None = None
    for step in steps:
        if step.op.is_view:
            if step.inputs[0] in made:
                made.update(step.results)
                hanging.update(step.results)
            continue
        is_one = step.op.family == "elementwise" and step.op.name not in _MOVES
        fits = last is not None and (step.phase, step.results[0].shape if step.results else None) == (
            last.phase,
            last.results[0].shape,
        )
        if not (is_one and fits and hanging.isdisjoint(step.inputs)):
            number += 1
            made, hanging = set(), set()
        last = step if is_one else None
        if is_one:
            groups[step] = number
            made.update(step.results)
    return groups


def _loss_layers(steps: list[Step], context: Context) -> set[str]:
    """Layers whose results are minimised."""
    values = context.program.values
    minimised = {values[tensor] for tensor in context.request.minimised if tensor in values}
    return {step.layer for step in steps if not minimised.isdisjoint(step.results)} - {""}


def _follower_places(step: Step) -> tuple[int, ...]:
    """Which inputs of a step are activations it takes in either type, all alike."""
    if step.op.name == "concatenate":
        return tuple(range(len(step.inputs)))
    return _FOLLOWERS.get(step.op.name, ())


def _pooled(steps: list[Step]) -> dict[Value, Value]:
    """Indices of maxima -> the values that were pooled."""
    return {step.results[1]: step.inputs[0] for step in steps if step.op.name == "max_pool_with_indices"}


def _followed(step: Step, places: tuple[int, ...], pooled: dict[Value, Value]) -> list[Value]:
    """The activations whose type decides that of a step: these places, and what pooling has written as indices.

    Programs that are run in phases read the pooled values themselves, and are to round alike.
    """
    return [*(step.inputs[place] for place in places), *(pooled[value] for value in step.inputs if value in pooled)]


# Steps --------------------------------------------------------------------------------------------------------------


class _Rewriting:
    """One loop over the steps, with the forms that values have so far."""

    def __init__(
        self,
        context: Context,
        groups: dict[Step, int],
        narrow: set[Value],
        repeated: set[int],
        pooled: dict[Value, Value],
    ) -> None:
        self.trace, self.kept, self.engine = context.trace, context.kept, context.engine
        self.mixes = context.engine.traits.mixes_types
        self.groups, self.narrow, self.repeated, self.pooled = groups, narrow, repeated, pooled
        self.steps: list[Step] = []
        self.twins: dict[Value, Value] = {}  # float32 value -> the same in bfloat16
        self.views: dict[Value, Step] = {}  # float32 value -> the step that shows it, when it is a view
        self.joined: dict[Value, Step] = {}  # weights side by side -> the step that puts them there
        self.wide: dict[Value, Value] = {}  # float32 value -> its twin in float32 again
        #: The same within one group of elementwise steps, or what is not rounded yet.
        self.near: dict[int, dict[Value, Value]] = {}

    def add(self, step: Step) -> None:
        if step.op.is_view:
            self._add_view(step)
            return
        if step in self.groups and step.phase != "update":
            self._add_elementwise(step)
            return
        if step.op.name in NORMALIZATIONS and step.inputs[0] in self.narrow and step.results[0] not in self.narrow:
            self._add_normalization(step)
            return
        places = () if step.phase == "update" else self._narrow_places(step)
        if step.op.name == "concatenate" and all(self._root(value).kind == "parameter" for value in step.inputs):
            self.joined[step.results[0]] = step
        if not (places and self._add_narrow(step, places)):
            inputs = tuple([self._as_float32(value, step) for value in step.inputs])
            self._append(step, inputs, [value.dtype for value in step.results], step.attributes)
        if step.phase != "update":
            for target in overwritten_by(step):  # what was converted before is another number now
                self.twins = {value: twin for value, twin in self.twins.items() if self._root(value) is not target}

    def _add_view(self, step: Step) -> None:
        """A view of a twin where its source is stored as one; else as it is, and of a twin when somebody asks."""
        (source,), (result,) = step.inputs[:1], step.results
        self.views[result] = step
        if source in self.narrow:
            if result in self.kept:
                self.steps.append(conversion(self._as_bfloat16(result, step), result, step))
        else:
            self.steps.append(step)

    def _add_elementwise(self, step: Step) -> None:
        """In float32, between conversions that will be part of its kernel."""
        group = self.groups[step]
        near = self.near.setdefault(group, {})
        inputs = []
        for value in step.inputs:
            if value in self.narrow:
                if value not in near:
                    near[value] = self._converted(self._as_bfloat16(value, step), FLOAT32, step)
                value = near[value]
            inputs.append(value)
        (result,) = step.results
        self.steps.append(Step(step.op, tuple(inputs), step.results, step.attributes, step.layer, step.phase))
        if result in self.narrow:
            if group not in self.repeated:  # else from the rounded number, which the gradient pass starts from
                near[result] = result
            self.twins[result] = self._converted(result, bfloat16(), step)

    def _add_normalization(self, step: Step) -> None:
        """In float32, with a conversion before it that will be part of its kernel."""
        source = self._converted(self._as_bfloat16(step.inputs[0], step), FLOAT32, step)
        self._append(step, (source, *step.inputs[1:]), [value.dtype for value in step.results], step.attributes)

    def _narrow_places(self, step: Step) -> tuple[int, ...]:
        """Which inputs of a step are to be read in bfloat16."""
        name = step.op.name
        if name in _PRODUCTS and (name in _WITH_RESULT_TYPE or not self.mixes):
            return _PRODUCTS[name]
        places = _follower_places(step) or _READERS.get(name, ()) or _PRODUCTS.get(name, ())
        return () if self.narrow.isdisjoint(_followed(step, places, self.pooled)) else places

    def _add_narrow(self, step: Step, places: tuple[int, ...]) -> bool:
        """The step on bfloat16, if the device supports that."""
        if any(step.inputs[place].dtype != FLOAT32 for place in places):
            return False
        attributes = [step.attributes]
        if step.op.name in _WITH_RESULT_TYPE:
            if self.mixes:  # each operand as it lies
                places = tuple([place for place in places if step.inputs[place] in self.narrow])
                stored = bfloat16() if step.results[0] in self.narrow else FLOAT32
                attributes = [{**step.attributes, "to": stored}]
                if not places and stored == FLOAT32:
                    return False
            elif step.results[0] not in self.narrow:
                attributes.insert(0, {**step.attributes, "to": FLOAT32})
        for tried in attributes:
            types = [
                ArrayType(value.shape, bfloat16() if place in places else value.dtype)
                for place, value in enumerate(step.inputs)
            ]
            found = step.op.result(*types, **tried)
            results = (found,) if isinstance(found, ArrayType) else found
            if self._supports(step, types, results, tried):
                inputs = tuple(
                    [
                        self._as_bfloat16(value, step) if place in places else self._as_float32(value, step)
                        for place, value in enumerate(step.inputs)
                    ]
                )
                self._append(step, inputs, [one.dtype for one in results], tried)
                return True
        return False

    def _supports(
        self, step: Step, inputs: list[ArrayType], results: tuple[ArrayType, ...], attributes: dict[str, Any]
    ) -> bool:
        """Would the device run the step on such operands?"""
        values = [self.trace.value(one.shape, one.dtype) for one in (*inputs, *results)]
        count = len(inputs)
        tried = Step(step.op, tuple(values[:count]), tuple(values[count:]), attributes, step.layer, step.phase)
        return self.engine.supports(tried)

    def _append(
        self, step: Step, inputs: tuple[Value, ...], types: list[np.dtype[Any]], attributes: dict[str, Any]
    ) -> None:
        """The step, with results of these types, and each result in the type it is stored in."""
        results = [
            value if type_ == value.dtype and value not in self.narrow else self.trace.value(value.shape, type_)
            for value, type_ in zip(step.results, types, strict=True)
        ]
        self.steps.append(Step(step.op, inputs, tuple(results), attributes, step.layer, step.phase))
        for value, result in zip(step.results, results, strict=True):
            if value in self.narrow:
                is_twin = is_bfloat16(result.dtype)
                self.twins[value] = result if is_twin else self._converted(result, bfloat16(), step)
                if value in self.kept:
                    self.steps.append(conversion(self.twins[value], value, step))
            elif result is not value:
                self.steps.append(conversion(result, value, step))

    def _as_bfloat16(self, value: Value, reader: Step) -> Value:
        """The twin of a value, made if need be; of a view, the same view of its source's twin.

        Weights are converted before they are put side by side: half as many bytes are moved then.
        """
        twin = self.twins.get(value)
        if twin is None:
            view, joined = self.views.get(value), self.joined.get(value)
            if joined is not None:
                parts = tuple([self._as_bfloat16(part, reader) for part in joined.inputs])
                twin = self.trace.value(value.shape, bfloat16())
                self.steps.append(Step(joined.op, parts, (twin,), joined.attributes, joined.layer, reader.phase))
            elif view is None:
                twin = self._converted(value, bfloat16(), reader)
            else:
                source = self._as_bfloat16(view.inputs[0], reader)
                twin = self.trace.value(value.shape, source.dtype)
                # The source may be older than this phase, and only this reader needs the view.
                self.steps.append(Step(view.op, (source,), (twin,), view.attributes, view.layer, reader.phase))
            self.twins[value] = twin
        return twin

    def _as_float32(self, value: Value, reader: Step) -> Value:
        """The value itself, or the numbers it is stored with. They do not depend on whether somebody keeps it."""
        if value not in self.narrow:
            return value
        if value not in self.wide:
            self.wide[value] = self._converted(self._as_bfloat16(value, reader), FLOAT32, reader)
        return self.wide[value]

    def _root(self, value: Value) -> Value:
        """The value whose memory a value shows."""
        while value in self.views:
            value = self.views[value].inputs[0]
        return value

    def _converted(self, value: Value, to: np.dtype[Any], step: Step) -> Value:
        result = self.trace.value(value.shape, to)
        self.steps.append(conversion(value, result, step))
        return result
