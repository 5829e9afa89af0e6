"""Convolution: standard, grouped, depthwise and transposed, along one, two or three axes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from mlcompute import ops
from mlcompute.enums import ConvolutionType, PaddingPolicy
from mlcompute.errors import ShapeError
from mlcompute.layers.arguments import member, whole
from mlcompute.layers.layer import FLOATS, Forward, Layer, parameter_of
from mlcompute.layers.read_only import ReadOnly
from mlcompute.layers.windows import AXES, Sizes, WindowDescriptor
from mlcompute.ops.op import Shape, Value
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor, TensorDescriptor, TensorParameter


class ConvolutionDescriptor(WindowDescriptor):
    """Kernel, channels, groups, strides, dilation and padding of a convolution; every pair is (y, x). Immutable.

    spatial_axes   2 for images (n, c, h, w), 1 for sequences (n, c, l), 3 for volumes (n, c, d, h, w); what are pairs
                   otherwise then has one or three entries
    kernel_sizes   one number or (height, width); or give kernel_width and kernel_height instead
    group_count    channels are split into that many independent convolutions; DEPTHWISE always has as many
                   groups as input channels
    padding_sizes  with USE_PADDING_SIZE: zeros on both sides of each axis

    >>> import mlcompute as mlc
    >>> mlc.ConvolutionDescriptor((3, 5), 4, 8, strides=2).kernel_width
    5
    """

    convolution_type = ReadOnly[ConvolutionType]("Standard, transposed or depthwise.")
    input_feature_channel_count = ReadOnly[int]("Channels of the source.")
    output_feature_channel_count = ReadOnly[int]("Channels of the result.")
    group_count = ReadOnly[int]("Into how many independent convolutions the channels are split.")

    def __init__(
        self,
        kernel_sizes: Sizes = (1, 1),
        input_feature_channel_count: int = 1,
        output_feature_channel_count: int = 1,
        convolution_type: ConvolutionType = ConvolutionType.STANDARD,
        group_count: int = 1,
        strides: Sizes = (1, 1),
        dilation_rates: Sizes = (1, 1),
        padding_policy: PaddingPolicy = PaddingPolicy.SAME,
        padding_sizes: Sizes | None = None,
        *,
        kernel_width: int | None = None,
        kernel_height: int | None = None,
        spatial_axes: int = 2,
    ) -> None:
        kernel_sizes = _kernel(kernel_sizes, kernel_width, kernel_height)
        super().__init__(kernel_sizes, strides, dilation_rates, padding_policy, padding_sizes, spatial_axes)
        who = "ConvolutionDescriptor"
        self._convolution_type = member(who, "convolution_type", ConvolutionType, convolution_type)
        inputs = whole(who, "input_feature_channel_count", input_feature_channel_count, 1)
        outputs = whole(who, "output_feature_channel_count", output_feature_channel_count, 1)
        groups = whole(who, "group_count", group_count, 1)
        if self._convolution_type == ConvolutionType.DEPTHWISE:
            if groups not in (1, inputs):
                raise ShapeError(
                    f"{who}: a depthwise convolution of {inputs} channels has {inputs} groups, not {groups}",
                    fix="leave group_count out",
                )
            groups = inputs
        if inputs % groups or outputs % groups:
            raise ShapeError(
                f"{who}: {inputs} input and {outputs} output channels cannot be divided among {groups} groups",
                fix="make both channel counts multiples of the number of groups",
            )
        self._input_feature_channel_count, self._output_feature_channel_count = inputs, outputs
        self._group_count = groups

    @classmethod
    def convolution_transpose(
        cls,
        kernel_sizes: Sizes = (1, 1),
        input_feature_channel_count: int = 1,
        output_feature_channel_count: int = 1,
        group_count: int = 1,
        strides: Sizes = (1, 1),
        dilation_rates: Sizes = (1, 1),
        padding_policy: PaddingPolicy = PaddingPolicy.SAME,
        padding_sizes: Sizes | None = None,
        *,
        kernel_width: int | None = None,
        kernel_height: int | None = None,
        spatial_axes: int = 2,
    ) -> ConvolutionDescriptor:
        """A transposed convolution: the result is larger than the source by the strides."""
        return cls(
            _kernel(kernel_sizes, kernel_width, kernel_height),
            input_feature_channel_count,
            output_feature_channel_count,
            ConvolutionType.TRANSPOSED,
            group_count,
            strides,
            dilation_rates,
            padding_policy,
            padding_sizes,
            spatial_axes=spatial_axes,
        )

    @classmethod
    def depthwise_convolution(
        cls,
        kernel_sizes: Sizes = (1, 1),
        input_feature_channel_count: int = 1,
        channel_multiplier: int = 1,
        strides: Sizes = (1, 1),
        dilation_rates: Sizes = (1, 1),
        padding_policy: PaddingPolicy = PaddingPolicy.SAME,
        padding_sizes: Sizes | None = None,
        *,
        kernel_width: int | None = None,
        kernel_height: int | None = None,
        spatial_axes: int = 2,
    ) -> ConvolutionDescriptor:
        """Every input channel on its own, giving `channel_multiplier` output channels each."""
        inputs = whole("ConvolutionDescriptor", "input_feature_channel_count", input_feature_channel_count, 1)
        multiplier = whole("ConvolutionDescriptor", "channel_multiplier", channel_multiplier, 1)
        return cls(
            _kernel(kernel_sizes, kernel_width, kernel_height),
            inputs,
            inputs * multiplier,
            ConvolutionType.DEPTHWISE,
            inputs,
            strides,
            dilation_rates,
            padding_policy,
            padding_sizes,
            spatial_axes=spatial_axes,
        )

    @property
    def is_convolution_transpose(self) -> bool:
        """Is the type TRANSPOSED?"""
        return self._convolution_type == ConvolutionType.TRANSPOSED

    @property
    def uses_depthwise_convolution(self) -> bool:
        """Is the type DEPTHWISE?"""
        return self._convolution_type == ConvolutionType.DEPTHWISE


class WeightsAndBiases(Layer):
    """What layers of a `ConvolutionDescriptor` share: weights, and perhaps biases, one per output channel."""

    source_types = FLOATS

    weights_parameter = ReadOnly[TensorParameter]("The weights as the optimizer sees them.")
    biases_parameter = ReadOnly[TensorParameter | None](
        "The biases as the optimizer sees them; None when there are none."
    )

    def __init__(self, weights: Tensor, biases: Tensor | None, descriptor: ConvolutionDescriptor) -> None:
        super().__init__()
        if not isinstance(descriptor, ConvolutionDescriptor):
            given = type(descriptor).__name__
            raise TypeError(f"{type(self).__name__}: descriptor must be a ConvolutionDescriptor, not {given}")
        self._descriptor = descriptor
        outputs, (fan_in, fan_out, meaning) = descriptor.output_feature_channel_count, self._fans()
        self._weights = self.sized(weights, "weights", outputs * fan_in, f"{outputs} outputs x {meaning}")
        state_of(self._weights).set_fans(fan_in, fan_out)
        self._biases = biases if biases is None else self.sized(biases, "biases", outputs, f"{outputs} outputs")
        self._weights_parameter = TensorParameter(weights)
        self._biases_parameter = parameter_of(biases)

    @abstractmethod
    def _fans(self) -> tuple[int, int, str]:
        """Weights per output, weights per input, and what the former are."""

    @property
    def parameters(self) -> dict[str, TensorParameter]:
        if self._biases_parameter is None:
            return {"weights": self._weights_parameter}
        return {"weights": self._weights_parameter, "biases": self._biases_parameter}


class ConvolutionLayer(WeightsAndBiases):
    """y[n,o,i,j] = b[o] + sum over c,u,v of w[o,c,u,v] x[n, c, i*sy + u*dy - top, j*sx + v*dx - left].

    x (n, in, h, w)   w (out, in/groups, kernel height, kernel width)   b (out)   ->   y (n, out, h', w')
    Sequences (n, in, l) and volumes (n, in, d, h, w) alike, where the descriptor's spatial_axes is 1 or 3.

    weights   out * in/groups * kernel elements in that order, for transposed convolutions too, in any shape,
              e.g. (1, out * in/groups, kh, kw)
    biases    out elements, or None
    """

    default_label = "Convolution"

    descriptor = ReadOnly[ConvolutionDescriptor]("What the layer was made with.")
    weights = ReadOnly[Tensor]("Elements in (out, in/groups, kernel height, kernel width) order.")
    biases = ReadOnly[Tensor | None]("One element per output channel; None when there are none.")

    # Python begins its message about a wrong argument with the class the constructor stands in.
    def __init__(self, weights: Tensor, biases: Tensor | None, descriptor: ConvolutionDescriptor) -> None:
        super().__init__(weights, biases, descriptor)

    def _fans(self) -> tuple[int, int, str]:
        d = self._descriptor
        inputs, outputs = (
            d.input_feature_channel_count // d.group_count,
            d.output_feature_channel_count // d.group_count,
        )
        area = math.prod(d.kernel_sizes)
        return inputs * area, outputs * area, f"{inputs} inputs x {' x '.join(map(str, d.kernel_sizes))}"

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        d = self._descriptor
        inputs = d.input_feature_channel_count
        self.expect(
            len(x.shape) == 2 + d.spatial_axes,
            f"the source has {len(x.shape)} axes, {2 + d.spatial_axes} are needed: {AXES[d.spatial_axes]}",
            source=x.shape,
        )
        n, channels, *source = x.shape
        self.expect(
            channels == inputs,
            f"input_feature_channel_count is {inputs}, the source has {channels} channels",
            source=x.shape,
            fix=f"set input_feature_channel_count={channels} or reshape the source",
        )
        image = (d.transposed_image if d.is_convolution_transpose else d.result_image)(tuple(source))
        self.expect(
            min(image) >= 1,
            f"the result would be {' x '.join(map(str, image))}",
            source=x.shape,
            kernel=f"{d.kernel_sizes} covering {d.reach}, strides {d.strides}, {d.padding_policy.name}",
            fix=f"use smaller {'padding_sizes' if d.is_convolution_transpose else 'kernel_sizes or dilation_rates'}",
        )
        return [TensorDescriptor((n, d.output_feature_channel_count, *image), data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        axes = self._descriptor.spatial_axes
        if axes == 1:
            # A sequence is an image of one row: the same memory, and the same kernels.
            x = ops.reshape(x, (*x.shape[:2], 1, x.shape[2]))
        y = self._transposed(run, x) if self._descriptor.is_convolution_transpose else self._direct(run, x)
        if self._biases is not None:
            y = y + run.read(self._biases, (1, y.shape[1], *(1,) * (y.rank - 2)))
        return ops.reshape(y, (*y.shape[:2], *y.shape[-axes:]))

    def _direct(self, run: Forward, x: Value) -> Value:
        d = self._descriptor
        inputs, outputs, groups = d.input_feature_channel_count, d.output_feature_channel_count, d.group_count
        return ops.convolution(
            x,
            run.read(self._weights, (outputs, inputs // groups, *self._planar(d.kernel_sizes))),
            strides=self._planar(d.strides),
            dilations=self._planar(d.dilation_rates),
            padding=self._planar(d.padding(x.shape[-d.spatial_axes :]), (0, 0)),
            groups=groups,
        )

    def _transposed(self, run: Forward, x: Value) -> Value:
        """The gradient, with respect to its source, of the convolution that maps our result to our source."""
        d = self._descriptor
        inputs, outputs, groups = d.input_feature_channel_count, d.output_feature_channel_count, d.group_count
        w = run.read(self._weights, (groups, outputs // groups, inputs // groups, math.prod(d.kernel_sizes)))
        kernel = self._planar(d.kernel_sizes)
        w = ops.reshape(ops.transpose(w, (0, 2, 1, 3)), (inputs, outputs // groups, *kernel))
        return ops.convolution_input_gradient(
            x,
            w,
            shape=(x.shape[0], outputs, *self._planar(d.transposed_image(x.shape[-d.spatial_axes :]))),
            strides=self._planar(d.strides),
            dilations=self._planar(d.dilation_rates),
            padding=self._planar(d.crop(), (0, 0)),
            groups=groups,
        )

    def _planar(self, sizes: Shape, row: Shape = (1,)) -> Shape:
        """What ops are told: of sequences, as of images of one row."""
        return (*row, *sizes) if self._descriptor.spatial_axes == 1 else sizes


def _kernel(sizes: Sizes, width: int | None, height: int | None) -> Sizes:
    """The kernel from whichever of its two spellings was used."""
    if width is None and height is None:
        return sizes
    if width is None or height is None or sizes != (1, 1):
        raise ShapeError(
            "ConvolutionDescriptor: the kernel is given twice or in part",
            expected="kernel_sizes alone, or both kernel_width and kernel_height",
        )
    return height, width
