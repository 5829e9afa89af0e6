"""A convolution, or one of its gradients, in plain numbers as cuDNN wants them."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.loop_nest import dense_strides
from mlcompute.ops.bfloat16 import is_bfloat16
from mlcompute.ops.images import first_shape, last_shape
from mlcompute.ops.op import Shape, Step

_TYPES = {np.dtype(np.float32): dnn.DATA_FLOAT, np.dtype(np.float16): dnn.DATA_HALF}


class Direction(enum.Enum):
    """What is computed from the other two: y from x and w, dx from dy and w, or dw from x and dy."""

    FORWARD = "convolution"
    INPUT_GRADIENT = "convolution_input_gradient"
    WEIGHT_GRADIENT = "convolution_weight_gradient"


@dataclass(frozen=True)
class ConvolutionProblem:
    """Shapes are channels-first whatever the layout: x (N, C, H, W), w (O, C / groups, kh, kw), y (N, O, OH, OW).

    Volumes have one axis more in front of H.

    channels_last   how all three lie in memory: pixels with all their channels, or one channel after the other
    padding         (top, bottom, left, right)
    alignment       bytes that all addresses are multiples of
    """

    direction: Direction
    data_type: int
    x: Shape
    w: Shape
    y: Shape
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    channels_last: bool
    alignment: int = 16

    def memory_strides(self, shape: Shape) -> tuple[int, ...]:
        """Elements from one index to the next along each axis of a channels-first shape."""
        if not self.channels_last:
            return dense_strides(shape)
        n, *image, c = dense_strides(last_shape(shape))
        return (n, c, *image)

    @property
    def reorders_weights(self) -> bool:
        """Do the kernel's elements lie elsewhere than in the op's (O, C / groups, kh, kw)?"""
        return self.channels_last and self.w[1] > 1 and math.prod(self.w[2:]) > 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.data_type == dnn.DATA_FLOAT else 2

    @property
    def flops(self) -> float:
        return 2.0 * math.prod(self.y) * math.prod(self.w[1:])


def problem_of(step: Step) -> ConvolutionProblem | None:
    """What a convolution step computes; None when its types or sizes are not cuDNN's."""
    values, a = (*step.inputs, *step.results), step.attributes
    data_type = dnn.DATA_BFLOAT16 if is_bfloat16(values[0].dtype) else _TYPES.get(values[0].dtype)
    direction = Direction(step.op.name)
    # The gradient of weights is made in their type; who asks for it in another converts it.
    alike = values[:2] if direction is Direction.WEIGHT_GRADIENT else values
    if data_type is None or any(v.dtype != values[0].dtype for v in alike) or any(v.size == 0 for v in values):
        return None
    if a["padding"][::2] != a["padding"][1::2] and set(a["dilations"]) != {1}:
        # cuDNN 9.19 gives wrong numbers for the gradient of some such weights ("all at once" in the tests). Most of its
        # users ask for the same padding on opposite sides only.
        return None
    last = bool(a.get("channels_last"))

    def image(shape: Shape) -> Shape:
        return first_shape(shape) if last else shape

    if direction is Direction.FORWARD:
        x, w, y = image(values[0].shape), values[1].shape, image(values[2].shape)
    elif direction is Direction.INPUT_GRADIENT:
        x, w, y = a["shape"], values[1].shape, image(values[0].shape)
    else:
        x, w, y = image(values[0].shape), a["shape"], image(values[1].shape)
    return ConvolutionProblem(
        direction, data_type, tuple(x), tuple(w), tuple(y), tuple(a["strides"]), tuple(a["dilations"]),
        tuple(a["padding"]), a["groups"], last,
    )  # fmt: skip
