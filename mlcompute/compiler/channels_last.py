"""channels_last: images lie channels-last between convolutions and poolings, with visible transposes at the borders.

So do sequences (N, C, L) and volumes: a convolution of sequences is one of images of height 1, and a reshape that
leaves samples and channels alone is the same reshape of the channels-last values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mlcompute.compiler.context import Context
from mlcompute.ops.images import last_shape, to_first, to_last
from mlcompute.ops.op import TABLE, Step, Value

#: Ops that run channels-last, with the inputs that are images.
_IMAGE_OPS = {
    "convolution": (0,),
    "convolution_input_gradient": (0,),
    "convolution_weight_gradient": (0, 1),
    "max_pool": (0,),
    "max_pool_gradient": (0, 1),
    "sum_pool": (0,),
    "sum_pool_gradient": (0,),
}
_POOLS = ("max_pool", "max_pool_gradient", "sum_pool", "sum_pool_gradient")
#: Ranks of sequences, images and volumes.
_RANKS = (3, 4, 5)
#: Reductions over axes, or along one: they are renumbered.
_REDUCTIONS = (
    *("sum", "max", "min", "any", "all"),
    *("normalize", "normalize_gradient", "normalize_groups", "normalize_groups_gradient"),
    *("softmax_cross_entropy", "softmax_cross_entropy_gradient"),
)
#: Ops that move whole pixels or channels: what they say of axes is renumbered. The first input is an image.
_MOVES = ("take", "take_gradient", "slice", "slice_gradient", "pad")


def channels_last(steps: list[Step], context: Context) -> list[Step]:
    """Values keep their names; images inside a region get channels-last twins."""
    if context.index(steps).op_names.isdisjoint(_IMAGE_OPS):
        return steps
    run = _Layout(context)
    for step in steps:
        run.add(step)
    return run.steps


class _Layout:
    def __init__(self, context: Context) -> None:
        self.trace, self.keep = context.trace, context.kept
        self.steps: list[Step] = []
        self.twins: dict[Value, Value] = {}  # channels-first value -> the same channels-last
        self.moved: dict[Value, Value] = {}  # channels-first view that the program makes -> what it shows
        self.strided: set[Value] = set()  # views that are not dense
        self.pooled_first: set[Value] = set()
        self.missing: dict[Value, Step] = {}  # channels-first values that exist only as twins -> step to make them

    def add(self, step: Step) -> None:
        name = step.op.name
        if name in _POOLS and self._stays_first(step):
            for value in step.inputs:
                self.first(value, step)
            self.steps.append(step)
        elif name in _IMAGE_OPS:
            images = _IMAGE_OPS[name]
            inputs = tuple(
                self.last(v, step) if i in images else self.first(v, step) for i, v in enumerate(step.inputs)
            )
            self._emit(step, inputs, {**step.attributes, "channels_last": True}, name != "convolution_weight_gradient")
        elif self._is_inside(step):
            count = 1 if name in _MOVES else len(step.inputs)  # indices are no images
            inputs = (
                *(self._matching(value, step) for value in step.inputs[:count]),
                *(self.first(value, step) for value in step.inputs[count:]),
            )
            self._emit(step, inputs, _renumbered(step), True)
        elif name == "reshape" and self._keeps_channels(step):
            twin, shape = self.twins[step.inputs[0]], last_shape(step.results[0].shape)
            self._emit(step, (twin,), {**step.attributes, "shape": shape}, True)
        elif name == "transpose" and step.inputs[0] in self.twins and self._moves_to(step, to_last):
            (result,) = step.results  # that is the twin
            shown = (self.twins[step.inputs[0]],)
            self.steps.append(Step(TABLE["reshape"], shown, (result,), {"shape": result.shape}, step.layer, step.phase))
        else:
            for value in step.inputs:
                self.first(value, step)
            self.steps.append(step)
            self._record_view(step)

    def _keeps_channels(self, step: Step) -> bool:
        """Does a reshape of an image with a twin leave samples and channels alone?"""
        source, result = step.inputs[0], step.results[0]
        ranks = len(source.shape), len(result.shape)
        return source in self.twins and all(rank in _RANKS for rank in ranks) and source.shape[:2] == result.shape[:2]

    def _moves_to(self, step: Step, order: Callable[[int], tuple[int, ...]]) -> bool:
        """Does a transpose move the channels of an image, and nothing else?"""
        rank = len(step.results[0].shape)
        return rank in _RANKS and tuple(step.attributes["axes"]) == order(rank)

    def _record_view(self, step: Step) -> None:
        """Of a view outside all regions: is it dense, and is it of channels-last values?"""
        if not step.op.is_view:
            return
        (source, *_), (result,) = step.inputs, step.results
        if step.op.name != "reshape" or source in self.strided:
            self.strided.add(result)
        if step.op.name == "transpose" and source not in self.strided and self._moves_to(step, to_first):
            self.moved[result] = source

    def _stays_first(self, step: Step) -> bool:
        """Is a pool outside all regions? It reads every pixel once: moving them would take longer than pooling them."""
        if step.op.name == "max_pool_gradient":
            return step.inputs[1] in self.pooled_first
        stays = step.inputs[0] not in self.twins
        if stays:
            self.pooled_first.add(step.inputs[0])
        return stays

    def _is_inside(self, step: Step) -> bool:
        """Is a step inside a region: does it compute with, or move pixels or channels of, an image that has a twin?"""
        rank = len(step.results[0].shape) if step.results else 0
        if rank not in _RANKS or any(len(value.shape) != rank for value in step.results):
            return False
        if step.phase == "update":  # parameters and their state keep the layout of their tensors
            return False
        large = [value for value in step.inputs if value.shape == step.results[0].shape]
        if step.op.family == "elementwise":
            return any(value in self.twins for value in large) and all(len(v.shape) in (0, rank) for v in step.inputs)
        if step.op.name in _REDUCTIONS:
            return step.inputs[0] in self.twins
        if step.op.name in _MOVES:
            return step.inputs[0] in self.twins and len(step.inputs[0].shape) == rank
        if step.op.name == "concatenate":  # most of it should not have to be transposed
            inside = sum(value.nbytes for value in step.inputs if value in self.twins)
            return 2 * inside >= sum(value.nbytes for value in step.inputs)
        # A repeated statistic: (1, C, 1, 1) to (N, C, H, W).
        return step.op.name == "broadcast" and step.inputs[0] in self.twins and len(step.inputs[0].shape) == rank

    def _emit(self, step: Step, inputs: tuple[Value, ...], attributes: dict[str, Any], images: bool) -> None:
        """The step on twins; its channels-first results are made only if somebody asks for them."""
        if not images:
            self.steps.append(Step(step.op, inputs, step.results, attributes, step.layer, step.phase))
            return
        results = tuple(self.trace.value(last_shape(value.shape), value.dtype) for value in step.results)
        self.steps.append(Step(step.op, inputs, results, attributes, step.layer, step.phase))
        for value, twin in zip(step.results, results, strict=True):
            self.twins[value] = twin
            self.missing[value] = _moved(twin, value, to_first(len(value.shape)), step)
            if value in self.keep:
                self.first(value, step)

    def first(self, value: Value, reader: Step) -> Value:
        """The channels-first value, made from its twin if need be: in the phase of its first reader."""
        step = self.missing.pop(value, None)
        if step is not None:
            self.steps.append(Step(step.op, step.inputs, step.results, step.attributes, step.layer, reader.phase))
        return value

    def last(self, value: Value, step: Step) -> Value:
        """The channels-last twin, made if need be: dense, since a kernel will read it many times."""
        if value in self.moved:
            return self.moved[value]
        if value not in self.twins:
            twin = self.trace.value(last_shape(value.shape), value.dtype)
            moved = _moved(value, twin, to_last(len(value.shape)), step)
            self.steps.append(moved)
            if moved.op.name == "transpose":
                dense = self.trace.value(twin.shape, twin.dtype)
                self.steps.append(Step(TABLE["copy"], (twin,), (dense,), {}, step.layer, step.phase))
                twin = dense
            self.twins[value] = twin
        return self.twins[value]

    def _matching(self, value: Value, step: Step) -> Value:
        """An operand as an elementwise op or reduction inside the region needs it; scalars stay."""
        if not value.shape or value in self.moved:
            return self.moved.get(value, value)
        if value not in self.twins:
            twin = self.trace.value(last_shape(value.shape), value.dtype)
            self.steps.append(_moved(value, twin, to_last(len(value.shape)), step))
            self.twins[value] = twin
        return self.twins[value]


def _moved(source: Value, target: Value, axes: tuple[int, ...], step: Step) -> Step:
    """Axes reordered; where at most one of the moved extents is not 1, that is only another shape."""
    _, channels, *image = source.shape if axes == to_last(len(axes)) else target.shape
    if math.prod(image) == 1 or channels == 1:
        return Step(TABLE["reshape"], (source,), (target,), {"shape": target.shape}, step.layer, step.phase)
    return Step(TABLE["transpose"], (source,), (target,), {"axes": axes}, step.layer, step.phase)


def _renumbered(step: Step) -> dict[str, Any]:
    attributes = dict(step.attributes)
    order = to_last(len(step.inputs[0].shape))
    if "axes" in attributes:
        attributes["axes"] = tuple(sorted(order.index(axis) for axis in attributes["axes"]))
    if "axis" in attributes:
        attributes["axis"] = order.index(attributes["axis"])
    for per_axis in ("shape", "start", "end", "stride", "before", "after"):
        if per_axis in attributes:
            attributes[per_axis] = last_shape(attributes[per_axis])
    return attributes
