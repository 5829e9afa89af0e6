"""What every contender runs: data, initial weights and arithmetic of each workload. The models are theirs to write."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Weights = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
#: Multiply-adds of one product in the forward pass, and whether the gradient of its input is needed too.
Product = tuple[int, bool]

LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
NORM_EPSILON, HEADS, HIDDEN = 1e-5, 4, 128
#: Extent of the kernels of convolutions of an image network.
_KERNELS = {"convolution": 3, "dilated": 3, "pointwise": 1, "depthwise": 3, "halving": 4, "transposed": 4}
#: Of a group normalization.
GROUPS = 8
#: Channels of a head in GPT-2, and how many times as wide as inside a bottleneck of ResNet-50 is outside.
HEAD_WIDTH, EXPANSION = 64, 4


class ImageLayer(NamedTuple):
    """One layer of an image network.

    kind   convolution, dilated (by its stride), pointwise (1x1), depthwise, halving (4x4, half the extents), transposed
           (4x4, twice the extents), norm, groupnorm, relu, silu, pool, upsample (nearest, twice the extents), keep,
           concatenate (with what was kept last), mean (of each channel), dense
    name   of its weights
    """

    kind: str
    name: str
    outputs: int
    stride: int


@dataclass(frozen=True)
class Workload:
    """One network with its batch.

    shapes    of the weights by name, in PyTorch's conventions and order: dense (out, in), convolution (out, in, k, k)
    products  matrix products and convolutions of the forward pass
    tokens    inputs are token numbers, and there is one label per token
    layers    of an image network, one after the other
    target    shape of a target whose mean squared error is the loss; empty: cross entropy with integer class labels
    """

    name: str
    describes: str
    model: str
    input_shape: tuple[int, ...]
    classes: int
    shapes: Shapes
    products: list[Product]
    tokens: bool = False
    layers: tuple[ImageLayer, ...] = ()
    target: tuple[int, ...] = ()

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs, and integer class labels or a target."""
        rng = np.random.default_rng(0)
        if self.tokens:
            inputs = rng.integers(0, self.classes, self.input_shape).astype(np.int32)
            return inputs, rng.integers(0, self.classes, self.input_shape)
        inputs = rng.standard_normal(self.input_shape).astype(np.float32)
        if self.target:
            return inputs, rng.standard_normal(self.target).astype(np.float32)
        return inputs, rng.integers(0, self.classes, self.input_shape[0])

    def weights(self) -> Weights:
        """Initial weights: normal with variance 1 / fan-in; scales of normalizations 1, biases 0."""
        rng = np.random.default_rng(1)

        def initial(name: str, shape: tuple[int, ...]) -> np.ndarray:
            if len(shape) == 1:
                return np.full(shape, float(name.endswith("scale")), np.float32)
            return np.asarray(rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])), np.float32)

        return {name: initial(name, shape) for name, shape in self.shapes.items()}

    def flops(self, mode: str) -> int:
        """Multiplications and additions in the products of one step; everything else is not counted."""
        if mode == "infer":
            return 2 * sum(count for count, _ in self.products)
        # Forward, gradient of the weights, and gradient of the input unless the input is the data.
        return 2 * sum(count * (3 if needs_input_gradient else 2) for count, needs_input_gradient in self.products)

    def loss(self, scores: np.ndarray) -> float:
        """Mean squared error of predictions, or mean cross entropy of (..., classes), against the batch's labels."""
        if self.target:
            return float(np.square(scores.astype(np.float64) - self.batch()[1]).mean())
        scores = scores.reshape(-1, self.classes).astype(np.float64)
        labels = self.batch()[1].reshape(-1)
        top = scores.max(1, keepdims=True)
        logs = scores - top - np.log(np.exp(scores - top).sum(1, keepdims=True))
        return float(-logs[np.arange(len(labels)), labels].mean())


def dense(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, size: int) -> Shapes:
    return {f"{name}.scale": (size,), f"{name}.shift": (size,)}


def mlp(name: str, batch: int, *sizes: int) -> Workload:
    shapes: Shapes = {}
    products = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        shapes |= dense(f"fc{index}", inputs, outputs)
        products.append((batch * inputs * outputs, index > 0))
    title = f"MLP {'-'.join(map(str, sizes))}, batch {batch}"
    return Workload(name, title, "mlp", (batch, sizes[0]), sizes[-1], shapes, products)


def lenet(batch: int = 64) -> Workload:
    shapes = {"conv0.weight": (32, 1, 5, 5), "conv0.bias": (32,), "conv1.weight": (64, 32, 5, 5), "conv1.bias": (64,)}
    shapes |= dense("fc0", 3136, 256) | dense("fc1", 256, 10)
    forward = [28 * 28 * 32 * 25, 14 * 14 * 64 * 32 * 25, 3136 * 256, 256 * 10]
    products = [(batch * count, index > 0) for index, count in enumerate(forward)]
    return Workload("lenet", f"LeNet 32-64 5x5, batch {batch}", "lenet", (batch, 1, 28, 28), 10, shapes, products)


def resnet20(batch: int = 32, name: str = "resnet20") -> Workload:
    return resnet(name, f"ResNet-20, batch {batch}", (batch, 3, 32, 32), 3, [16] * 3 + [32] * 3 + [64] * 3)


def resnet(name: str, title: str, input_shape: tuple[int, ...], kernel: int, blocks: Sequence[int]) -> Workload:
    """Blocks of two 3x3 convolutions; one with other channels than the one before halves the image.

    A stem of 7x7 has a stride of 2 and is followed by max pooling.
    """
    batch, _, side, _ = input_shape
    channels = blocks[0]
    shapes: Shapes = {"stem.weight": (channels, 3, kernel, kernel), **norm("stem", channels)}
    side //= 2 if kernel == 7 else 1
    products = [(batch * side * side * channels * 3 * kernel * kernel, False)]
    side //= 2 if kernel == 7 else 1
    for index, outputs in enumerate(blocks):
        side //= 2 if outputs != channels else 1
        for part, inputs in enumerate((channels, outputs)):
            shapes |= {f"block{index}.conv{part}.weight": (outputs, inputs, 3, 3)}
            shapes |= norm(f"block{index}.norm{part}", outputs)
            products.append((batch * side * side * outputs * inputs * 9, True))
        if channels != outputs:
            shapes |= {f"block{index}.shortcut.weight": (outputs, channels, 1, 1)}
            shapes |= norm(f"block{index}.shortcut", outputs)
            products.append((batch * side * side * outputs * channels, True))
        channels = outputs
    shapes |= dense("fc", channels, 10)
    products.append((batch * channels * 10, True))
    return Workload(name, title, "resnet", input_shape, 10, shapes, products)


def blocks(shapes: Iterable[str]) -> list[tuple[str, int]]:
    """(name, stride) of every block of a ResNet, by the names of its weights."""
    names = [name.removesuffix(".conv0.weight") for name in shapes if name.endswith(".conv0.weight")]
    return [(name, 2 if f"{name}.shortcut.weight" in shapes else 1) for name in names]


def image_network(name: str, title: str, input_shape: tuple[int, ...], text: str, regresses: bool = False) -> Workload:
    """Layers by their kinds, as "convolution:16/2 relu pool dense:10": outputs after a colon, stride after a slash."""
    batch, channels, side, _ = input_shape
    shapes: Shapes = {}
    products: list[Product] = []
    layers = []
    kept: list[int] = []
    for index, word in enumerate(text.split()):
        found = re.fullmatch(r"([a-z]+)(?::(\d+))?(?:/(\d+))?", word)
        assert found is not None
        kind, outputs, stride = found[1], int(found[2] or channels), int(found[3] or 1)
        at = f"{kind}{index}"
        layers.append(ImageLayer(kind, at, outputs, stride))
        if kind in _KERNELS:
            kernel, inputs = _KERNELS[kind], 1 if kind == "depthwise" else channels
            transposed = kind == "transposed"
            shapes[f"{at}.weight"] = (channels, outputs, 4, 4) if transposed else (outputs, inputs, kernel, kernel)
            shapes[f"{at}.bias"] = (outputs,)
            step = 1 if kind == "dilated" else 2 if kind == "halving" else stride
            products.append((batch * (side // step) ** 2 * outputs * inputs * kernel * kernel, bool(products)))
            side = side * 2 if transposed else side // step
        elif kind in ("norm", "groupnorm"):
            shapes |= norm(at, channels)
        elif kind == "dense":
            shapes |= dense(at, channels, outputs)
            products.append((batch * channels * outputs, True))
        elif kind == "keep":
            kept.append(channels)
        elif kind == "concatenate":
            outputs = channels + kept.pop()
        side = side // 2 if kind == "pool" else side * 2 if kind == "upsample" else side
        channels = outputs
    target = (batch, channels, side, side) if regresses else ()
    return Workload(
        name, title, "image_network", input_shape, channels, shapes, products, layers=tuple(layers), target=target
    )


def lstm(batch: int = 32, time: int = 50, inputs: int = 64) -> Workload:
    # Gates in the order input, forget, cell, output.
    shapes = {"input.weight": (4 * HIDDEN, inputs), "hidden.weight": (4 * HIDDEN, HIDDEN), "gates.bias": (4 * HIDDEN,)}
    shapes |= dense("fc", HIDDEN, 10)
    products = [
        (batch * time * inputs * 4 * HIDDEN, False),
        (batch * time * HIDDEN * 4 * HIDDEN, True),
        (batch * HIDDEN * 10, True),
    ]
    title = f"LSTM {inputs}->{HIDDEN}, {time} steps, batch {batch}"
    return Workload("lstm", title, "lstm", (batch, time, inputs), 10, shapes, products)


def stacked_lstm(batch: int = 32, time: int = 50, inputs: int = 64) -> Workload:
    """Two layers, each in both directions; the mean over time is classified."""
    shapes: Shapes = {}
    products: list[Product] = []
    for layer, width in enumerate((inputs, 2 * HIDDEN)):
        for direction in ("forward", "backward"):
            at = f"layer{layer}.{direction}"
            shapes |= {f"{at}.input.weight": (4 * HIDDEN, width), f"{at}.hidden.weight": (4 * HIDDEN, HIDDEN)}
            shapes |= {f"{at}.gates.bias": (4 * HIDDEN,)}
            products += [(batch * time * width * 4 * HIDDEN, layer > 0), (batch * time * HIDDEN * 4 * HIDDEN, True)]
    shapes |= dense("fc", 2 * HIDDEN, 10)
    products.append((batch * 2 * HIDDEN * 10, True))
    title = f"Bidirectional LSTM {inputs}->{HIDDEN}, 2 layers, {time} steps, batch {batch}"
    return Workload("stacked_lstm", title, "stacked_lstm", (batch, time, inputs), 10, shapes, products)


def transformer(batch: int = 8, time: int = 64, d: int = 128, layers: int = 2, vocabulary: int = 256) -> Workload:
    shapes: Shapes = {"embedding": (vocabulary, d)}
    products: list[Product] = []
    tokens = batch * time
    for index in range(layers):
        at = f"layer{index}"
        shapes |= dense(f"{at}.qkv", d, 3 * d) | dense(f"{at}.out", d, d)
        shapes |= dense(f"{at}.up", d, 4 * d) | dense(f"{at}.down", 4 * d, d)
        shapes |= norm(f"{at}.norm0", d) | norm(f"{at}.norm1", d)
        products += [(tokens * d * d * factor, True) for factor in (3, 1, 4, 4)]
        products += [(tokens * time * d, True)] * 2  # scores, and their product with the values
    shapes |= dense("fc", d, vocabulary)
    products.append((tokens * d * vocabulary, True))
    title = f"Transformer d{d}, {layers} layers, {time} tokens, batch {batch}"
    return Workload("transformer", title, "transformer", (batch, time), vocabulary, shapes, products, tokens=True)


def bottleneck_stride(stage: int, index: int) -> int:
    """Stride of the 3x3 convolution of a bottleneck: every stage but the first halves the image."""
    return 2 if stage > 0 and index == 0 else 1


def resnet50(
    batch: int = 64, side: int = 224, width: int = 64, counts: Sequence[int] = (3, 4, 6, 3), classes: int = 1000
) -> Workload:
    """Bottlenecks whose 3x3 convolution has the stride, as in most implementations since the first."""
    shapes: Shapes = {"stem.weight": (width, 3, 7, 7), **norm("stem", width)}
    input_shape = (batch, 3, side, side)
    products = [(batch * (side // 2) ** 2 * width * 3 * 49, False)]
    side, inputs = side // 4, width  # after the stem and its max pooling
    for stage, count in enumerate(counts):
        inside = width << stage
        outputs = EXPANSION * inside
        for index in range(count):
            at, stride = f"stage{stage}.block{index}", bottleneck_stride(stage, index)
            parts = [("conv0", inside, inputs, 1, side), ("conv1", inside, inside, 3, side // stride)]
            parts.append(("conv2", outputs, inside, 1, side // stride))
            if index == 0:
                parts.append(("shortcut", outputs, inputs, 1, side // stride))
            for name, into, of, kernel, extent in parts:
                shapes |= {f"{at}.{name}.weight": (into, of, kernel, kernel), **norm(f"{at}.{name}", into)}
                products.append((batch * extent * extent * into * of * kernel * kernel, True))
            side, inputs = side // stride, outputs
    shapes |= dense("fc", inputs, classes)
    products.append((batch * inputs * classes, True))
    title = f"ResNet-{2 + 3 * sum(counts)}, {input_shape[2]} x {input_shape[3]}, batch {batch}"
    return Workload("resnet50", title, "resnet50", input_shape, classes, shapes, products)


def gpt2(
    batch: int = 8, time: int = 512, d: int = 768, layers: int = 12, vocabulary: int = 50304, name: str = "gpt2"
) -> Workload:
    """Decoder with learned positions, GELU (tanh) and a head that shares the weights of the embedding.

    The vocabulary of 50257 is rounded up to a multiple of 128, as is usual.
    """
    shapes: Shapes = {"embedding": (vocabulary, d), "positions": (time, d)}
    products: list[Product] = []
    tokens = batch * time
    for index in range(layers):
        at = f"layer{index}"
        shapes |= norm(f"{at}.norm0", d) | dense(f"{at}.qkv", d, 3 * d) | dense(f"{at}.out", d, d)
        shapes |= norm(f"{at}.norm1", d) | dense(f"{at}.up", d, 4 * d) | dense(f"{at}.down", 4 * d, d)
        products += [(tokens * d * d * factor, True) for factor in (3, 1, 4, 4)]
        products += [(tokens * time * d // 2, True)] * 2  # scores and their product with the values, half forbidden
    shapes |= norm("norm", d)
    products.append((tokens * d * vocabulary, True))
    count = sum(math.prod(shape) for shape in shapes.values())
    title = f"GPT-2 {count / 1e6:.0f}M, {time} tokens, batch {batch}"
    return Workload(name, title, "gpt2", (batch, time), vocabulary, shapes, products, tokens=True)


def convnext(batch: int = 16, side: int = 32, width: int = 64, count: int = 4) -> Workload:
    """Blocks of depthwise 7x7, layer normalization of channels and two dense layers with GELU (tanh) between them.

    Images are cut into patches of 2x2 first.
    """
    shapes: Shapes = {"stem.weight": (width, 3, 2, 2), "stem.bias": (width,)}
    pixels = batch * side * side
    products = [(pixels * width * 3 * 4, False)]
    for index in range(count):
        at = f"block{index}"
        shapes |= {f"{at}.depthwise.weight": (width, 1, 7, 7), f"{at}.depthwise.bias": (width,)}
        shapes |= norm(f"{at}.norm", width) | dense(f"{at}.up", width, 4 * width)
        shapes |= dense(f"{at}.down", 4 * width, width)
        products += [(pixels * width * factor, True) for factor in (49, 4 * width, 4 * width)]
    shapes |= dense("fc", width, 10)
    products.append((batch * width * 10, True))
    title = f"ConvNeXt-like, {count} blocks of {width}, {side} x {side}, batch {batch}"
    return Workload("convnext", title, "convnext", (batch, 3, 2 * side, 2 * side), 10, shapes, products)


def wavenet(batch: int = 4, time: int = 2048, width: int = 32, count: int = 8) -> Workload:
    """Causal convolutions of sequences with 2 taps, 1, 2, 4 .. steps apart, gated by tanh and sigmoid.

    What the layers add to the sequence is added up, too; its mean over time is classified.
    """
    shapes: Shapes = {"stem.weight": (width, 1, 1), "stem.bias": (width,)}
    products = [(batch * time * width, False)]
    for index in range(count):
        at = f"layer{index}"
        shapes |= {f"{at}.dilated.weight": (2 * width, width, 2), f"{at}.dilated.bias": (2 * width,)}
        shapes |= {f"{at}.out.weight": (width, width, 1), f"{at}.out.bias": (width,)}
        products += [(batch * time * width * width * factor, True) for factor in (4, 1)]
    shapes |= dense("fc", width, 10)
    products.append((batch * width * 10, True))
    title = f"WaveNet-like, {count} dilated layers of {width}, {time} steps, batch {batch}"
    return Workload("wavenet", title, "wavenet", (batch, 1, time), 10, shapes, products)


def bottlenecks(names: Iterable[str]) -> list[tuple[str, int, int]]:
    """(name, stage, number in its stage) of every bottleneck among the names of weights."""
    found = (re.fullmatch(r"(stage(\d+)\.block(\d+))\.conv0\.weight", name) for name in names)
    return [(match[1], int(match[2]), int(match[3])) for match in found if match]


def layer_count(names: Iterable[str], weight: str = "qkv.weight") -> int:
    """Layers of a transformer, or of another network whose layers have such a weight each."""
    return sum(name.endswith(weight) for name in names)


def channels_last(weights: Weights, order: tuple[int, int, int, int]) -> Weights:
    """Weights for contenders that keep images as (n, h, w, c): kernels transposed, LeNet's dense layer permuted.

    order   how (out, in, k, k) becomes what the framework's convolution takes
    """
    found = {name: w.transpose(order) if w.ndim == 4 else w for name, w in weights.items()}
    if "conv1.weight" in weights:
        w = weights["fc0.weight"]
        found["fc0.weight"] = w.reshape(256, 64, 7, 7).transpose(0, 2, 3, 1).reshape(256, 3136)
    return {name: np.ascontiguousarray(w) for name, w in found.items()}


#: Run by every contender before its memory is measured, so that libraries loaded at first use do not count.
TINY = mlp("tiny", 4, 8, 4, 2)
WORKLOADS = {
    workload.name: workload
    for workload in (
        mlp("mlp1", 1, 784, 128, 10),
        mlp("mlp32", 32, 784, 128, 10),
        mlp("mlp64", 64, 784, 512, 256, 10),
        lenet(),
        resnet20(),
        lstm(),
        transformer(),
    )
}
_SEPARABLE = "depthwise{} norm relu pointwise:{} norm relu "
_GROUP_NORMALIZED = "groupnorm silu convolution:{0} groupnorm silu convolution:{0} "
#: Further kinds of networks, for a CPU's table when they are asked for.
MORE = {
    workload.name: workload
    for workload in (
        image_network(
            "unet", "U-Net 16-32-64, 64 x 64, batch 8", (8, 3, 64, 64),
            "convolution:16 relu convolution:16 relu keep pool convolution:32 relu convolution:32 relu keep pool "
            "convolution:64 relu convolution:64 relu upsample concatenate convolution:32 relu convolution:32 relu "
            "upsample concatenate convolution:16 relu convolution:16 relu pointwise:1",
            regresses=True,
        ),
        mlp("wide_mlp", 256, 1024, 4096, 4096, 10),
        gpt2(4, 128, 256, 4, 512, "gpt"),
        image_network(
            "vgg", "VGG-like 64-128-256, batch 32", (32, 3, 32, 32),
            "convolution:64 relu convolution:64 relu pool convolution:128 relu convolution:128 relu pool "
            "convolution:256 relu convolution:256 relu pool mean dense:10",
        ),
        resnet(
            "resnet18", "ResNet-18, 64 x 64, batch 16", (16, 3, 64, 64), 7, [64, 64, 128, 128, 256, 256, 512, 512]
        ),
        image_network(
            "autoencoder", "Autoencoder with transposed convolutions, batch 32", (32, 3, 32, 32),
            "convolution:32/2 relu convolution:64/2 relu transposed:32 relu transposed:3",
            regresses=True,
        ),
        image_network(
            "dcgan", "DCGAN-like autoencoder, 4x4 with stride 2, 64 x 64, batch 16", (16, 3, 64, 64),
            "halving:64 relu halving:128 norm relu halving:256 norm relu transposed:128 norm relu "
            "transposed:64 norm relu transposed:3",
            regresses=True,
        ),
        image_network(
            "mobilenet", "MobileNet-like, depthwise convolutions, batch 32", (32, 3, 32, 32),
            "convolution:32 norm relu "
            + "".join(_SEPARABLE.format(*sizes) for sizes in (("", 64), ("/2", 128), ("", 128), ("/2", 256), ("", 256)))
            + "mean dense:10",
        ),
        image_network(
            "diffusion", "U-Net 32-64-128 with group normalization and SiLU, 32 x 32, batch 8", (8, 3, 32, 32),
            "convolution:32 " + _GROUP_NORMALIZED.format(32) + "keep convolution:64/2 " + _GROUP_NORMALIZED.format(64)
            + "keep convolution:128/2 " + 2 * _GROUP_NORMALIZED.format(128) + "upsample convolution:64 concatenate "
            + _GROUP_NORMALIZED.format(64) + "upsample convolution:32 concatenate " + _GROUP_NORMALIZED.format(32)
            + "groupnorm silu convolution:3",
            regresses=True,
        ),
        image_network(
            "segmentation", "Dilated convolutions of 32, 64 x 64, batch 4", (4, 3, 64, 64),
            "convolution:32 norm relu " + "".join(f"dilated:32/{rate} norm relu " for rate in (1, 2, 4, 8, 1))
            + "pointwise:5",
            regresses=True,
        ),
        stacked_lstm(),
        convnext(),
        wavenet(),
    )
}  # fmt: skip
#: What a CPU is measured with, by name.
ALL = WORKLOADS | MORE
#: Too large for a CPU's table: benchmarks of GPUs have them, too.
LARGE = {workload.name: workload for workload in (resnet20(128, "resnet20_128"), resnet50(), gpt2())}
MODES: dict[str, str] = {
    "train": "training step",
    "split": "forward, gradient, update one by one",
    "infer": "inference",
}
