"""Two layouts of image ops: (N, C, H, W) as layers speak, (N, H, W, C) as the layout pass may rewrite them.

Volumes have a depth in front of their height.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlcompute.ops.op import Array, ArrayType, Op, Shape, Step, Typed


def to_last(rank: int) -> tuple[int, ...]:
    """Axes that turn channels-first into channels-last: (0, 2, 3, 1) for images."""
    return (0, *range(2, rank), 1)


def to_first(rank: int) -> tuple[int, ...]:
    """Axes that turn channels-last into channels-first: (0, 3, 1, 2) for images."""
    return (0, rank - 1, *range(1, rank - 1))


def last_shape(shape: Shape) -> Shape:
    """(N, C, H, W) -> (N, H, W, C), and (N, C, D, H, W) -> (N, D, H, W, C)"""
    return (shape[0], *shape[2:], shape[1])


def first_shape(shape: Shape) -> Shape:
    """(N, H, W, C) -> (N, C, H, W), and (N, D, H, W, C) -> (N, C, D, H, W)"""
    return (shape[0], shape[-1], *shape[1:-1])


def convolution_shapes(step: Step) -> tuple[Shape, Shape, Shape]:
    """Source, filters and result, channels first, of a channels-last convolution or one of its two gradients."""
    inputs, result = [value.shape for value in step.inputs], step.attributes.get("shape", ())
    if step.op.name == "convolution_weight_gradient":
        return first_shape(inputs[0]), result, first_shape(inputs[1])
    if step.op.name == "convolution_input_gradient":
        return result, inputs[1], first_shape(inputs[0])
    return first_shape(inputs[0]), inputs[1], first_shape(step.results[0].shape)


def either_layout(images: tuple[int, ...], *, result_is_image: bool = True) -> Callable[[type[Op]], type[Op]]:
    """Class decorator: the op also understands the attribute `channels_last=True`.

    images: which inputs are images; results are, all or none. Other attributes keep their channels-first meaning.
    """

    def decorate(cls: type[Op]) -> type[Op]:
        rule, meaning = cls.result, cls.meaning

        def result(*inputs: Typed, channels_last: bool = False, **attributes: Any) -> Any:
            if not channels_last:
                return rule(*inputs, **attributes)
            first = [
                ArrayType(first_shape(x.shape), x.dtype) if index in images else x for index, x in enumerate(inputs)
            ]
            found = rule(*first, **attributes)
            if not result_is_image:
                return found
            if isinstance(found, ArrayType):
                return ArrayType(last_shape(found.shape), found.dtype)
            return tuple(ArrayType(last_shape(one.shape), one.dtype) for one in found)

        def either(*arrays: Array, channels_last: bool = False, **attributes: Any) -> Any:
            if not channels_last:
                return meaning(*arrays, **attributes)
            first = [
                array.transpose(to_first(array.ndim)) if index in images else array
                for index, array in enumerate(arrays)
            ]
            found = meaning(*first, **attributes)
            if not result_is_image:
                return found
            moved = tuple(a.transpose(to_last(a.ndim)) for a in (found if isinstance(found, tuple) else (found,)))
            return moved if isinstance(found, tuple) else moved[0]

        cls.result, cls.meaning = staticmethod(result), staticmethod(either)
        return cls

    return decorate
