"""Pixel shuffle: channels become pixels, for super-resolution; and back."""

from __future__ import annotations

from collections.abc import Sequence

from mlcompute import ops
from mlcompute.layers.arguments import whole
from mlcompute.layers.layer import ALL_TYPES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor


class PixelShuffleLayer(Layer):
    """y[n, c, h r + i, w r + j] = x[n, c r² + i r + j, h, w].   x (n, c r², h, w)   ->   y (n, c, h r, w r)

    factor  r, by how much height and width grow
    """

    default_label = "PixelShuffle"
    source_types = ALL_TYPES
    moves_data = True

    factor = ReadOnly[int]("By how much height and width grow.")

    def __init__(self, factor: int) -> None:
        super().__init__()
        self._factor = whole(self.who, "factor", factor, least=1)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        n, channels, h, w = _image(self, x.shape)
        r = self._factor
        self.expect(
            channels % (r * r) == 0,
            f"{channels} channels cannot become blocks of {r} x {r} pixels",
            source=x.shape,
            expected=f"a multiple of {r * r} channels",
        )
        return [TensorDescriptor((n, channels // (r * r), h * r, w * r), data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        (n, channels, h, w), r = x.shape, self._factor
        c = channels // (r * r)
        blocks = ops.transpose(ops.reshape(x, (n, c, r, r, h, w)), (0, 1, 4, 2, 5, 3))
        return ops.reshape(blocks, (n, c, h * r, w * r))


class PixelUnshuffleLayer(Layer):
    """y[n, c r² + i r + j, h, w] = x[n, c, h r + i, w r + j].   x (n, c, h r, w r)   ->   y (n, c r², h, w)

    factor  r, by how much height and width shrink
    """

    default_label = "PixelUnshuffle"
    source_types = ALL_TYPES
    moves_data = True

    factor = ReadOnly[int]("By how much height and width shrink.")

    def __init__(self, factor: int) -> None:
        super().__init__()
        self._factor = whole(self.who, "factor", factor, least=1)

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        (x,) = sources
        n, c, height, width = _image(self, x.shape)
        r = self._factor
        self.expect(
            height % r == 0 and width % r == 0,
            f"an image of {height} x {width} cannot be cut into blocks of {r} x {r} pixels",
            source=x.shape,
            expected=f"multiples of {r}",
        )
        return [TensorDescriptor((n, c * r * r, height // r, width // r), data_type=x.data_type)]

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return 1

    def forward(self, run: Forward, *sources: Value) -> Value:
        (x,) = sources
        (n, c, height, width), r = x.shape, self._factor
        h, w = height // r, width // r
        blocks = ops.transpose(ops.reshape(x, (n, c, h, r, w, r)), (0, 1, 3, 5, 2, 4))
        return ops.reshape(blocks, (n, c * r * r, h, w))


def _image(layer: Layer, shape: Shape) -> tuple[int, int, int, int]:
    layer.expect(len(shape) == 4, f"the source has shape {shape}", expected="four axes (n, c, h, w)")
    n, c, h, w = shape
    return n, c, h, w
