"""Random networks with a second meaning: every layer is added to a graph and to a list of PyTorch functions.

Unlike the graphs of `tests/fuzz.py`, nothing here is tried and refused: each step chooses among what fits, so networks
are deep. They reuse tensors, cut and join along the batch axis, transpose, broadcast, and have several outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import mlcompute as mlc
from mlcompute.ops.op import Array

#: Tensors with more elements than this are not built upon.
LARGEST, LARGEST_WIDE = 6000, 200_000
#: What every element of every output is trained towards.
TARGET = 0.25
Meaning = Callable[..., Any]


@dataclass(eq=False)
class Step:
    """One layer: the function that says the same in PyTorch, what it reads, what it gives."""

    meaning: Meaning
    sources: list[mlc.Tensor]
    results: list[mlc.Tensor]


@dataclass(eq=False)
class Network:
    """A graph and its meaning in PyTorch.

    mixes   does any layer compute across samples, or hold numbers for each of them?
    """

    rng: np.random.Generator
    graph: mlc.Graph = field(default_factory=mlc.Graph)
    steps: list[Step] = field(default_factory=list)
    pool: list[mlc.Tensor] = field(default_factory=list)
    inputs: dict[str, mlc.Tensor] = field(default_factory=dict)
    outputs: dict[str, mlc.Tensor] = field(default_factory=dict)
    weights: list[mlc.Tensor] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    numbers: dict[mlc.Tensor, Array] = field(default_factory=dict)
    batch: int = 1
    mixes: bool = False
    largest: int = LARGEST

    # Choosing -------------------------------------------------------------------------------------------------

    def number(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.number(0, len(options) - 1)]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def tensor(self, *ranks: int) -> mlc.Tensor | None:
        """A tensor of one of these ranks (of any if none is given): half the time a recent one, else any."""
        fitting = [t for t in self.pool if not ranks or len(t.descriptor.shape) in ranks]
        if not fitting:
            return None
        return self.pick(fitting[-3:] if self.chance(0.5) else fitting)

    # Growing --------------------------------------------------------------------------------------------------

    def values(self, *shape: int, around: float = 0.0, scale: float = 0.4) -> Array:
        return (around + scale * self.rng.standard_normal(shape)).astype(np.float32)

    def weight(self, *shape: int, around: float = 0.0, scale: float = 0.4) -> mlc.Tensor:
        """A trained tensor; now and then one that another layer has already."""
        same = [t for t in self.weights if t.descriptor.shape == shape and around == 0.0]
        if same and self.chance(0.3):
            return self.pick(same)
        return self._kept(self.values(*shape, around=around, scale=scale), self.weights)

    def constant(self, array: Array) -> mlc.Tensor:
        return self._kept(array, [])

    def _kept(self, array: Array, into: list[mlc.Tensor]) -> mlc.Tensor:
        kind = mlc.DataType.FLOAT32 if array.dtype == np.float32 else mlc.DataType.INT32
        tensor = mlc.Tensor(shape=array.shape, data_type=kind, data=array.copy())
        tensor.label = f"w{len(self.numbers)}"
        self.numbers[tensor] = array
        into.append(tensor)
        return tensor

    def add(
        self, layer: mlc.Layer, sources: Sequence[mlc.Tensor], read: Sequence[mlc.Tensor], meaning: Meaning
    ) -> None:
        """A layer with its sources; `read`: the weights that `meaning` takes after them."""
        self.graph.node(layer, sources=list(sources))
        results = self.graph.result_tensors(layer)
        self.steps.append(Step(meaning, [*sources, *read], results))
        self.pool += [t for t in results if t.descriptor.element_count <= self.largest]

    # The second meaning ---------------------------------------------------------------------------------------

    def evaluate(self, dtype: torch.dtype, off: float = 0.0, seed: int = 0) -> tuple[dict[str, Array], list[Array]]:
        """Outputs by name, and the gradient of their mean squared distances from TARGET, by weight.

        off   every number fed and every weight is changed by so much, relatively
        """
        rng = np.random.default_rng(seed)
        memory: dict[mlc.Tensor, torch.Tensor] = {}
        given = {**self.numbers, **{tensor: self.feeds[name] for name, tensor in self.inputs.items()}}
        for tensor, array in given.items():
            if array.dtype != np.float32:
                memory[tensor] = torch.from_numpy(array.astype(np.int64))
                continue
            wide = array.astype(np.float64) * (1.0 + off * rng.standard_normal(array.shape))
            memory[tensor] = torch.from_numpy(wide).to(dtype)
        for tensor in self.weights:
            memory[tensor].requires_grad_(True)
        for step in self.steps:
            results = step.meaning(*(memory[t] for t in step.sources))
            results = results if isinstance(results, (tuple, list)) else [results]
            for tensor, value in zip(step.results, results, strict=True):
                assert tuple(value.shape) == tensor.descriptor.shape, f"{step.meaning}: {value.shape} in PyTorch"
                memory[tensor] = value
        total = sum(((memory[t] - TARGET).square().mean() for t in self.outputs.values()), torch.zeros((), dtype=dtype))
        slopes = [np.zeros(memory[t].shape) for t in self.weights]
        if total.requires_grad:
            found = torch.autograd.grad(total, [memory[t] for t in self.weights], allow_unused=True)
            slopes = [zero if g is None else g.numpy() for zero, g in zip(slopes, found, strict=True)]
        return {name: memory[t].detach().numpy() for name, t in self.outputs.items()}, slopes


Grow = Callable[[Network], None]


def _axis_over_samples(net: Network, axis: int) -> None:
    net.mixes = net.mixes or axis == 0


def split(net: Network) -> None:
    """Pieces of any axis, the batch axis included, by number or by lengths."""
    x = net.tensor()
    assert x is not None
    axis = net.number(0, len(x.descriptor.shape) - 1)
    extent = x.descriptor.shape[axis]
    _axis_over_samples(net, axis)
    if extent > 1 and net.chance(0.5):
        first = net.number(1, extent - 1)
        lengths = [first, extent - first]
        layer = mlc.SplitLayer(split_section_lengths=lengths, dimension=axis)
    else:
        chunk = -(-extent // net.number(1, min(4, extent)))
        lengths = [min(chunk, extent - start) for start in range(0, extent, chunk)]
        layer = mlc.SplitLayer(split_count=-(-extent // chunk), dimension=axis)
        if [p.shape[axis] for p in layer.results([x.descriptor])] != lengths:
            return
    net.add(layer, [x], [], lambda a: torch.split(a, lengths, axis))


def join(net: Network) -> None:
    """Any tensors that fit, along any axis; the same one may come twice."""
    x = net.tensor()
    assert x is not None
    axis = net.number(0, len(x.descriptor.shape) - 1)

    def rest(t: mlc.Tensor) -> tuple[int, ...]:
        shape = t.descriptor.shape
        return (len(shape), *shape[:axis], *shape[axis + 1 :])

    fitting = [t for t in net.pool if len(t.descriptor.shape) > axis and rest(t) == rest(x)]
    parts = [net.pick(fitting) for _ in range(net.number(2, 4))]
    _axis_over_samples(net, axis)
    net.add(mlc.ConcatenationLayer(dimension=axis), parts, [], lambda *a: torch.cat(a, axis))


def cut_and_join(net: Network) -> None:
    """A chain: cut along an axis, change some pieces, join them in another order, some twice."""
    x = net.tensor()
    assert x is not None
    axes = [axis for axis, extent in enumerate(x.descriptor.shape) if extent > 1]
    if not axes:
        return
    axis = axes[0] if net.chance(0.5) else net.pick(axes)
    extent = x.descriptor.shape[axis]
    first = net.number(1, extent - 1)
    _axis_over_samples(net, axis)
    layer = mlc.SplitLayer(split_section_lengths=[first, extent - first], dimension=axis)
    net.add(layer, [x], [], lambda a: torch.split(a, [first, extent - first], axis))
    pieces = net.graph.result_tensors(layer)
    for index, piece in enumerate(pieces):
        if net.chance(0.4):
            pieces[index] = _mapped(net, piece)
    order = [net.pick(pieces) for _ in range(net.number(0, 1))] + pieces[:: net.pick([1, -1])]
    net.add(mlc.ConcatenationLayer(dimension=axis), order, [], lambda *a: torch.cat(a, axis))


def transpose(net: Network) -> None:
    x = net.tensor()
    assert x is not None
    rank = len(x.descriptor.shape)
    order = [int(axis) for axis in net.rng.permutation(rank)]
    if net.chance(0.5):
        order = [0, *(axis for axis in order if axis)]
    net.mixes = net.mixes or order[0] != 0
    net.add(mlc.TransposeLayer(order), [x], [], lambda a: a.permute(order))


def reshape(net: Network) -> None:
    """Axes merged, also the batch axis with the next one; or one axis taken apart."""
    x = net.tensor()
    assert x is not None
    shape = list(x.descriptor.shape)
    kind = net.number(0, 3)
    if kind == 0 and len(shape) > 1:
        axis = net.number(0, len(shape) - 2)
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        _axis_over_samples(net, axis)
    elif kind == 1 and len(shape) < 4:
        axis = net.number(0, len(shape) - 1)
        factors = [f for f in range(1, shape[axis] + 1) if shape[axis] % f == 0]
        factor = net.pick(factors)
        shape[axis : axis + 1] = [shape[axis] // factor, factor]
        _axis_over_samples(net, axis)
    elif kind == 2:
        shape = [shape[0], math.prod(shape[1:])]
    else:
        shape = shape[::-1]
        net.mixes = True
    net.add(mlc.ReshapeLayer(shape), [x], [], lambda a: a.reshape(shape))


def cut(net: Network) -> None:
    x = net.tensor()
    assert x is not None
    picked = []
    for axis, extent in enumerate(x.descriptor.shape):
        start = net.number(0, extent - 1) if net.chance(0.3) else 0
        end = net.number(start + 1, extent) if net.chance(0.3) else extent
        stride = net.pick([1, 1, 1, 2, 3])
        picked.append((start, end, stride))
        if axis == 0 and (start, end, stride) != (0, extent, 1):
            net.mixes = True
    slices = tuple(slice(*one) for one in picked)
    starts, ends, strides = (list(column) for column in zip(*picked, strict=True))
    net.add(mlc.SliceLayer(starts, ends, strides), [x], [], lambda a: a[slices])


_BINARY: dict[str, Meaning] = {
    "ADD": torch.add, "SUBTRACT": torch.sub, "MULTIPLY": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
}  # fmt: skip


def broadcast(net: Network) -> None:
    """Two tensors that broadcast: of the pool, a constant with extents of 1, or a reduced one against itself."""
    x = net.tensor()
    assert x is not None
    shape = x.descriptor.shape
    name = net.pick(list(_BINARY))
    layer = mlc.ArithmeticLayer(mlc.ArithmeticOperation[name])
    form = net.number(0, 2)
    if form == 0:
        fitting = [t for t in net.pool if _fits(shape, t.descriptor.shape)]
        y = net.pick(fitting)
        # A tensor whose samples meet another's features would be something else for a smaller batch.
        net.mixes = net.mixes or len(y.descriptor.shape) != len(shape) or y.descriptor.shape[0] != shape[0]
    elif form == 1:
        small = [extent if net.chance(0.5) else 1 for extent in shape]
        small[0] = 1
        y = net.constant(net.values(*small[net.number(0, len(small) - 1) :]))
    else:
        axis = net.number(0, len(shape) - 1)
        kind = net.pick(["SUM", "MEAN", "MAX"])
        y = _reduced(net, x, axis, kind)
    pair = [x, y] if net.chance(0.5) else [y, x]
    net.add(layer, pair, [], _BINARY[name])


def _fits(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def _reduced(net: Network, x: mlc.Tensor, axis: int, kind: str) -> mlc.Tensor:
    meaning: dict[str, Meaning] = {
        "SUM": lambda a: a.sum(axis, keepdim=True),
        "MEAN": lambda a: a.mean(axis, keepdim=True),
        "MAX": lambda a: a.amax(axis, keepdim=True),
    }
    _axis_over_samples(net, axis)
    layer = mlc.ReductionLayer(mlc.ReductionType[kind], axis)
    net.add(layer, [x], [], meaning[kind])
    return net.graph.result_tensors(layer)[0]


def reduce(net: Network) -> None:
    x = net.tensor()
    assert x is not None
    _reduced(net, x, net.number(0, len(x.descriptor.shape) - 1), net.pick(["SUM", "MEAN", "MAX"]))


_MAPS: dict[str, tuple[Callable[[], mlc.Layer], Meaning]] = {
    "relu": (mlc.ActivationLayer.relu, torch.relu),
    "tanh": (mlc.ActivationLayer.tanh, torch.tanh),
    "sigmoid": (mlc.ActivationLayer.sigmoid, torch.sigmoid),
    "sin": (lambda: mlc.ArithmeticLayer(mlc.ArithmeticOperation.SIN), torch.sin),
    "gelu": (mlc.ActivationLayer.gelu, lambda a: functional.gelu(a, approximate="tanh")),
    "absolute": (mlc.ActivationLayer.absolute, torch.abs),
}


def _mapped(net: Network, x: mlc.Tensor) -> mlc.Tensor:
    make, meaning = _MAPS[net.pick(list(_MAPS))]
    layer = make()
    net.add(layer, [x], [], meaning)
    return net.graph.result_tensors(layer)[0]


def mapped(net: Network) -> None:
    x = net.tensor()
    assert x is not None
    _mapped(net, x)


def dense(net: Network) -> None:
    x = net.tensor(2, 3)
    if x is None:
        return
    width, outputs = x.descriptor.shape[-1], net.pick([1, 3, 8, 17])
    about = mlc.ConvolutionDescriptor(input_feature_channel_count=width, output_feature_channel_count=outputs)
    w = net.weight(outputs, width, scale=1.0 / math.sqrt(width))
    b = net.weight(outputs) if net.chance(0.6) else None
    layer = mlc.FullyConnectedLayer(w, b, about)
    net.add(layer, [x], [w] if b is None else [w, b], functional.linear)


def convolution(net: Network) -> None:
    x = net.tensor(4)
    if x is None:
        return
    channels = x.descriptor.shape[1]
    groups = net.pick([g for g in (1, 1, 2, channels) if channels % g == 0])
    outputs = groups * net.number(1, max(1, 8 // groups))
    kernel = (net.pick([1, 3]), net.pick([1, 2, 3]))
    if x.descriptor.shape[2] < kernel[0] or x.descriptor.shape[3] < kernel[1]:
        return
    strides = (net.pick([1, 1, 2]), net.pick([1, 1, 2]))
    about = mlc.ConvolutionDescriptor(
        kernel_sizes=kernel, input_feature_channel_count=channels, output_feature_channel_count=outputs,
        group_count=groups, strides=strides, padding_policy=mlc.PaddingPolicy.VALID,
    )  # fmt: skip
    w = net.weight(outputs, channels // groups, *kernel, scale=1.0 / math.sqrt(channels // groups * math.prod(kernel)))
    b = net.weight(outputs)
    layer = mlc.ConvolutionLayer(w, b, about)
    net.add(layer, [x], [w, b], lambda a, w, b: functional.conv2d(a, w, b, stride=strides, groups=groups))


def pooling(net: Network) -> None:
    x = net.tensor(4)
    if x is None or min(x.descriptor.shape[2:]) < 2:
        return
    highest = net.chance(0.5)
    kind = mlc.PoolingType.MAX if highest else mlc.PoolingType.AVERAGE
    stride = net.pick([1, 2])
    about = mlc.PoolingDescriptor(
        kind, kernel_sizes=(2, 2), strides=(stride, stride), padding_policy=mlc.PaddingPolicy.VALID
    )
    meaning: Meaning = functional.max_pool2d if highest else functional.avg_pool2d
    net.add(mlc.PoolingLayer(about), [x], [], lambda a: meaning(a, 2, stride))


def normalization(net: Network) -> None:
    """By the formula: PyTorch's own group normalization reads wild memory for some transposed sources."""
    x = net.tensor(2, 3, 4)
    if x is None:
        return
    shape = x.descriptor.shape

    def normalized(a: Any) -> Any:
        centred = a - a.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()

    if len(shape) > 2 and net.chance(0.5):
        groups = net.pick([g for g in (1, 2, 3, shape[1]) if shape[1] % g == 0])
        gamma, beta = net.weight(shape[1], around=1.0), net.weight(shape[1])

        def meaning(a: Any, g: Any, b: Any) -> Any:
            channels = (-1, *(1 for _ in a.shape[2:]))
            rows = normalized(a.reshape(a.shape[0], groups, -1)).reshape(a.shape)
            return rows * g.reshape(channels) + b.reshape(channels)

        net.add(mlc.GroupNormalizationLayer(shape[1], groups, beta, gamma, 0.1), [x], [gamma, beta], meaning)
        return
    width = shape[-1]
    gamma, beta = net.weight(width, around=1.0), net.weight(width)
    layer = mlc.LayerNormalizationLayer((width,), beta, gamma, 0.1)
    net.add(layer, [x], [gamma, beta], lambda a, g, b: normalized(a) * g + b)


def softmax(net: Network) -> None:
    x = net.tensor(2, 3, 4)
    if x is None:
        return
    axis = net.number(0, len(x.descriptor.shape) - 1)
    _axis_over_samples(net, axis)
    net.add(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX, axis), [x], [], lambda a: a.softmax(axis))


def matmul(net: Network) -> None:
    """A tensor by itself transposed, or by one that fits."""
    x = net.tensor(3, 4)
    if x is None:
        return
    shape = x.descriptor.shape
    fitting = [t for t in net.pool if t.descriptor.shape[:-2] == shape[:-2] and t.descriptor.shape[-1:] == shape[-1:]]
    fitting = [t for t in fitting if len(t.descriptor.shape) == len(shape)]
    y, alpha = net.pick(fitting), 1.0 / math.sqrt(shape[-1])
    layer = mlc.MatMulLayer(mlc.MatMulDescriptor(alpha, False, True))
    net.add(layer, [x, y], [], lambda a, b: alpha * (a @ b.transpose(-1, -2)))


def gather(net: Network) -> None:
    x = net.tensor()
    assert x is not None
    shape = list(x.descriptor.shape)
    axis = net.number(0, len(shape) - 1)
    picked = [*shape]
    picked[axis] = net.number(1, 5)
    indices = net.constant(net.rng.integers(0, shape[axis], picked).astype(np.int32))
    net.mixes = True  # an index for each sample
    net.add(mlc.GatherLayer(axis), [x, indices], [], lambda a, i: torch.gather(a, axis, i))


def select(net: Network) -> None:
    x = net.tensor()
    assert x is not None
    same = [t for t in net.pool if t.descriptor.shape == x.descriptor.shape]
    y, c = net.pick(same), net.pick(same)
    compare = mlc.ComparisonLayer(mlc.ComparisonOperation.LESS)
    net.graph.node(compare, sources=[c, x])
    (condition,) = net.graph.result_tensors(compare)
    net.steps.append(Step(torch.lt, [c, x], [condition]))
    net.add(mlc.SelectionLayer(), [condition, x, y], [], torch.where)


def attention(net: Network) -> None:
    x = net.tensor(3)
    if x is None:
        return
    n, _, width = x.descriptor.shape
    heads = net.pick([h for h in (1, 2, 4) if width % h == 0])
    fitting = [t for t in net.pool if len(t.descriptor.shape) == 3 and t.descriptor.shape[::2] == (n, width)]
    key = net.pick(fitting)
    weights = [net.weight(width, width, scale=1.0 / math.sqrt(width)) for _ in range(4)]
    biases = [net.weight(width) for _ in range(4)]
    layer = mlc.MultiheadAttentionLayer(mlc.MultiheadAttentionDescriptor(width, heads), weights, biases)

    def meaning(q: Any, k: Any, v: Any, *w: Any) -> Any:
        def parts(a: Any, number: int) -> Any:
            projected = functional.linear(a, w[number], w[4 + number])
            return projected.unflatten(-1, (heads, width // heads)).transpose(1, 2)

        scores = parts(q, 0) @ parts(k, 1).transpose(-1, -2) / math.sqrt(width // heads)
        mixed = (scores.softmax(-1) @ parts(v, 2)).transpose(1, 2).flatten(2)
        return functional.linear(mixed, w[3], w[7])

    net.add(layer, [x, key, key], [*weights, *biases], meaning)


def lstm(net: Network) -> None:
    x = net.tensor(3)
    if x is None:
        return
    width, hidden = x.descriptor.shape[2], net.pick([1, 4, 9])
    scale = 1.0 / math.sqrt(width + hidden)
    into = [net.weight(hidden, width, scale=scale) for _ in range(4)]
    back = [net.weight(hidden, hidden, scale=scale) for _ in range(4)]
    biases = [net.weight(hidden) for _ in range(4)]
    layer = mlc.LSTMLayer(mlc.LSTMDescriptor(width, hidden, 1), into, back, biases)

    def meaning(a: Any, *w: Any) -> Any:
        h = c = a.new_zeros((a.shape[0], hidden))
        rows = []
        for t in range(a.shape[1]):
            i, f, g, o = (functional.linear(a[:, t], w[k], w[8 + k]) + functional.linear(h, w[4 + k]) for k in range(4))
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            rows.append(h)
        return torch.stack(rows, 1)

    net.add(layer, [x], [*into, *back, *biases], meaning)


def pad(net: Network) -> None:
    x = net.tensor(4)
    if x is None:
        return
    top, bottom, left, right = (net.number(0, 2) for _ in range(4))
    layer = mlc.PaddingLayer.constant_padding([top, bottom, left, right], 0.5)
    net.add(layer, [x], [], lambda a: functional.pad(a, (left, right, top, bottom), value=0.5))


LAYERS: list[Grow] = [
    split, join, join, cut_and_join, cut_and_join, cut_and_join, transpose, transpose, reshape, reshape, cut, cut,
    broadcast, broadcast, broadcast, reduce, mapped, mapped, dense, dense, convolution, pooling, normalization,
    softmax, matmul, gather, select, attention, lstm, pad,
]  # fmt: skip

SHAPES = [(3,), (8,), (33,), (4, 5), (5, 16), (1, 6), (2, 4, 4), (3, 7, 5), (8, 6, 6), (4, 1, 9)]
#: Large enough that several threads share the work.
WIDE_SHAPES = [(64,), (130,), (20, 32), (12, 48), (8, 12, 12), (16, 9, 9), (3, 16, 20)]


def network(seed: int, wide: bool = False) -> Network:
    """One of endlessly many networks, always the same for the same seed.

    wide   with so many numbers that threads share the work
    """
    net = Network(np.random.default_rng((seed, 9)))
    net.largest = LARGEST_WIDE if wide else LARGEST
    net.batch = net.pick([48, 64, 96, 130] if wide else [1, 2, 3, 4, 6, 8, 12, 32])
    for index in range(net.number(1, 3)):
        shape = (net.batch, *net.pick(WIDE_SHAPES if wide else SHAPES))
        tensor = mlc.Tensor(shape=shape)
        net.inputs[f"x{index}"] = tensor
        net.feeds[f"x{index}"] = net.values(*shape, scale=1.0)
        net.pool.append(tensor)
    for _ in range(net.number(3, 14)):
        net.pick(LAYERS)(net)
    made = [t for step in net.steps for t in step.results if t.descriptor.data_type == mlc.DataType.FLOAT32]
    if not made:
        mapped(net)
        made = [net.steps[-1].results[0]]
    chosen = [made[-1], *(net.pick(made) for _ in range(net.number(0, 3)))]
    net.outputs = {f"y{index}": tensor for index, tensor in enumerate(dict.fromkeys(chosen))}
    # What nothing reads is not part of a program: inputs that no layer uses are left out.
    used = {t for step in net.steps for t in step.sources}
    net.inputs = {name: tensor for name, tensor in net.inputs.items() if tensor in used}
    net.feeds = {name: net.feeds[name] for name in net.inputs}
    return net
