"""Random graphs: any layer, any settings, any tensors. What fits becomes a node, what does not must be refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

import mlcompute as mlc
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.lower import Lowering
from mlcompute.graph import Node
from mlcompute.ops import full
from mlcompute.ops.op import Array, Step, run_meaning

F64 = np.dtype(np.float64)
#: What an operation in float32 may be off by, generously.
ROUNDING = 3e-7
#: Results with more elements than this are not built upon: chains of upsampling and padding grow without end.
LARGEST = 2000


@dataclass(eq=False)
class Fuzzed:
    """A graph under construction: the tensors there are, the weights there are, what was refused."""

    rng: np.random.Generator
    batch: int = 1
    graph: mlc.Graph = field(default_factory=mlc.Graph)
    inputs: dict[str, mlc.Tensor] = field(default_factory=dict)
    labels: dict[str, mlc.Tensor] = field(default_factory=dict)
    pool: list[mlc.Tensor] = field(default_factory=list)
    weights: dict[tuple[int, ...], list[mlc.Tensor]] = field(default_factory=dict)
    refused: list[mlc.Error] = field(default_factory=list)
    feeds: dict[mlc.Tensor, Array] = field(default_factory=dict)

    def number(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, most + 1))

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.number(0, len(options) - 1)]

    def chance(self) -> bool:
        return self.number(0, 3) == 0

    def tensor(self) -> mlc.Tensor:
        """Mostly the newest tensor, so that chains form; sometimes any, so that they branch."""
        return self.pick(self.pool) if self.chance() else self.pool[-1]

    def input(self, shape: tuple[int, ...]) -> None:
        tensor = mlc.Tensor(shape=shape)
        self.inputs[f"x{len(self.inputs)}"] = tensor
        self.feeds[tensor] = self.rng.standard_normal(shape).astype(np.float32)
        self.pool.append(tensor)

    def weight(self, shape: tuple[int, ...], around: float = 0.0) -> mlc.Tensor:
        """A fresh weight tensor or one that is in use already."""
        known = self.weights.setdefault(shape, [])
        if known and self.chance():
            return self.pick(known)
        data = around + self.rng.standard_normal(shape) * (0.5 if around == 0.0 else 0.1)
        known.append(mlc.Tensor(shape=shape, data=data.astype(np.float32)))
        return known[-1]

    def slightly_off(self, right: int) -> int:
        """The right number, or now and then one beside it."""
        return max(1, right + self.pick([-1, 1])) if self.number(0, 7) == 0 else right

    def axis(self, tensor: mlc.Tensor) -> int:
        return self.number(-1, len(tensor.descriptor.shape))

    def attempt(self, layers: Sequence[Callable[[Fuzzed], Made]] | None = None) -> None:
        """One more layer, of those given or of all. A refusal leaves the graph as it was."""
        before = list(self.graph.layers)
        try:
            layer, sources = self.pick(layers or LAYERS)(self)
            self.graph.node(layer, sources=sources)
        except mlc.Error as error:
            self.refused.append(error)
            assert self.graph.layers == before, "a refused layer must leave the graph as it was"
            return
        results = self.graph.result_tensors(layer)
        assert self.graph.layers == [*before, layer]
        self.pool.extend(result for result in results if result.descriptor.element_count <= LARGEST)

    def lose(self) -> None:
        """A loss on the newest floating-point result, or an identity layer to have one."""
        floating = [tensor for tensor in self.pool if tensor.descriptor.data_type == mlc.DataType.FLOAT32]
        source = floating[-1]
        label = mlc.Tensor(source.descriptor)
        loss = mlc.LossLayer.mean_squared_error(self.pick([mlc.ReductionType.MEAN, mlc.ReductionType.SUM]))
        self.graph.node(loss, source=source, loss_labels=[label])
        self.labels["t"] = label
        self.feeds[label] = self.rng.standard_normal(source.descriptor.shape).astype(np.float32)

    @property
    def nodes(self) -> list[Node]:
        return self.graph.nodes

    @property
    def parameters(self) -> list[mlc.Tensor]:
        slots = (slot.tensor for node in self.nodes for slot in node.layer.parameters.values())
        return list(dict.fromkeys(slots))

    @property
    def kept(self) -> list[mlc.Tensor]:
        """Everything a run may change."""
        statistics = (tensor for node in self.nodes for tensor in node.layer.statistics.values())
        return list(dict.fromkeys([*self.parameters, *statistics]))


Made = tuple[mlc.Layer, list[mlc.Tensor]]
Numbers = dict[mlc.Tensor, Array]


def _activation(f: Fuzzed) -> Made:
    kinds = [kind for kind in mlc.ActivationType if kind is not mlc.ActivationType.COUNT]
    return mlc.ActivationLayer(mlc.ActivationDescriptor(f.pick(kinds))), [f.tensor()]


def _arithmetic(f: Fuzzed) -> Made:
    unary = ["SIN", "COS", "TANH", "ATAN", "ASINH", "FLOOR"]
    binary = ["ADD", "SUBTRACT", "MULTIPLY", "MIN", "MAX", "MULTIPLY_NO_NAN"]
    name = f.pick([*unary, *binary, *binary])
    count = f.slightly_off(2 if name in binary else 1)
    return mlc.ArithmeticLayer(mlc.ArithmeticOperation[name]), [f.tensor() for _ in range(count)]


def _fully_connected(f: Fuzzed) -> Made:
    x = f.tensor()
    inputs, outputs = f.slightly_off(x.descriptor.shape[-1]), f.number(1, 4)
    descriptor = mlc.ConvolutionDescriptor(input_feature_channel_count=inputs, output_feature_channel_count=outputs)
    biases = f.weight((outputs,)) if f.chance() else None
    return mlc.FullyConnectedLayer(f.weight((outputs, inputs)), biases, descriptor), [x]


def _convolution(f: Fuzzed) -> Made:
    x = f.tensor()
    shape = x.descriptor.shape
    channels, outputs = f.slightly_off(shape[1] if len(shape) > 1 else 1), f.number(1, 4)
    kernel = (f.number(1, 3), f.number(1, 3))
    descriptor = mlc.ConvolutionDescriptor(
        kernel_sizes=kernel,
        input_feature_channel_count=channels,
        output_feature_channel_count=outputs,
        group_count=f.pick([1, 1, 1, 2]),
        strides=(f.number(1, 2), f.number(1, 2)),
        dilation_rates=(f.pick([1, 1, 2]), 1),
        padding_policy=f.pick([mlc.PaddingPolicy.SAME, mlc.PaddingPolicy.VALID]),
    )
    biases = f.weight((outputs,)) if f.chance() else None
    return mlc.ConvolutionLayer(f.weight((outputs, channels, *kernel)), biases, descriptor), [x]


def _pooling(f: Fuzzed) -> Made:
    kinds = [mlc.PoolingType.MAX, mlc.PoolingType.AVERAGE]
    descriptor = mlc.PoolingDescriptor(
        f.pick(kinds),
        kernel_sizes=(f.number(1, 3), f.number(1, 3)),
        strides=(f.number(1, 3), f.number(1, 3)),
        padding_policy=f.pick([mlc.PaddingPolicy.SAME, mlc.PaddingPolicy.VALID]),
        count_includes_padding=f.chance(),
    )
    return mlc.PoolingLayer(descriptor), [f.tensor()]


def _reshape(f: Fuzzed) -> Made:
    x = f.tensor()
    shape = list(x.descriptor.shape)
    form = f.number(0, 4)
    if form == 0:
        shape = [shape[0], -1]
    elif form == 1:
        shape = [*shape, 1]
    elif form == 2:
        shape = shape[::-1]
    elif form == 3:
        shape = [f.slightly_off(x.descriptor.element_count)]
    else:
        shape = [shape[0], 1, 1, -1]
    return mlc.ReshapeLayer(shape), [x]


def _transpose(f: Fuzzed) -> Made:
    x = f.tensor()
    rank = f.slightly_off(len(x.descriptor.shape))
    order = list(range(rank))
    a, b = f.number(0, rank - 1), f.number(0, rank - 1)
    order[a], order[b] = order[b], order[a]
    return mlc.TransposeLayer(order), [x]


def _slice(f: Fuzzed) -> Made:
    x = f.tensor()
    shape = x.descriptor.shape
    start = [f.number(0, extent - 1) if f.chance() else 0 for extent in shape]
    end = [f.slightly_off(extent) for extent in shape]
    stride = [f.pick([1, 1, 2]) for _ in shape] if f.chance() else None
    return mlc.SliceLayer(start, end, stride), [x]


def _split(f: Fuzzed) -> Made:
    return mlc.SplitLayer(split_count=f.number(1, 3), dimension=f.number(0, 3)), [f.tensor()]


def _concatenation(f: Fuzzed) -> Made:
    x = f.tensor()
    others = [f.pick([x, x, f.tensor()]) for _ in range(f.number(0, 2))]
    return mlc.ConcatenationLayer(dimension=f.number(0, 3)), [x, *others]


def _normalization(f: Fuzzed) -> Made:
    x = f.tensor()
    shape = x.descriptor.shape
    channels = f.slightly_off(shape[1] if len(shape) > 1 else shape[0])
    beta, gamma = (f.weight((channels,)), f.weight((channels,), 1.0)) if f.chance() else (None, None)
    # Divided by the root of next to nothing, rounding errors would grow beyond any bound.
    kind, epsilon = f.number(0, 3), 0.1
    if kind == 0:
        mean = mlc.Tensor(shape=(channels,), fill_with_data=0.0)
        variance = mlc.Tensor(shape=(channels,), fill_with_data=1.0)
        return mlc.BatchNormalizationLayer(channels, mean, variance, beta, gamma, epsilon), [x]
    if kind == 1:
        return mlc.InstanceNormalizationLayer(channels, None, None, beta, gamma, epsilon), [x]
    if kind == 2:
        return mlc.GroupNormalizationLayer(channels, f.number(1, 3), beta, gamma, epsilon), [x]
    last = f.slightly_off(shape[-1])
    return mlc.LayerNormalizationLayer((last,), variance_epsilon=epsilon), [x]


def _softmax(f: Fuzzed) -> Made:
    x = f.tensor()
    kinds = [mlc.SoftmaxOperation.SOFTMAX, mlc.SoftmaxOperation.LOG_SOFTMAX]
    return mlc.SoftmaxLayer(f.pick(kinds), f.axis(x)), [x]


def _reduction(f: Fuzzed) -> Made:
    x = f.tensor()
    names = ["SUM", "MEAN", "MAX", "MIN", "L1_NORM", "ARG_MAX", "ANY"]
    return mlc.ReductionLayer(mlc.ReductionType[f.pick(names)], f.axis(x)), [x]


def _padding(f: Fuzzed) -> Made:
    kind = f.pick([kind for kind in mlc.PaddingType if kind.name != "COUNT"])
    return mlc.PaddingLayer(kind, [f.number(0, 2) for _ in range(4)], 0.5 if f.chance() else 0.0), [f.tensor()]


def _upsample(f: Fuzzed) -> Made:
    mode = f.pick([mlc.SampleMode.NEAREST, mlc.SampleMode.LINEAR])
    return mlc.UpsampleLayer((f.number(1, 6), f.number(1, 6)), mode, f.chance()), [f.tensor()]


def _matmul(f: Fuzzed) -> Made:
    x = f.tensor()
    descriptor = mlc.MatMulDescriptor(0.5, f.chance(), not f.chance())
    return mlc.MatMulLayer(descriptor), [x, f.pick([x, f.tensor()])]


def _gram_matrix(f: Fuzzed) -> Made:
    return mlc.GramMatrixLayer(0.25), [f.tensor()]


def _comparison(f: Fuzzed) -> Made:
    name = f.pick(["LESS", "GREATER_OR_EQUAL", "LOGICAL_NOT"])
    count = f.slightly_off(1 if name == "LOGICAL_NOT" else 2)
    return mlc.ComparisonLayer(mlc.ComparisonOperation[name]), [f.tensor() for _ in range(count)]


def _selection(f: Fuzzed) -> Made:
    return mlc.SelectionLayer(), [f.pick(f.pool), f.tensor(), f.tensor()]


def _again(f: Fuzzed) -> Made:
    """A layer that is part of the graph already."""
    layers = f.graph.layers
    return (f.pick(layers) if layers else mlc.ActivationLayer.relu()), [f.tensor()]


LAYERS: list[Callable[[Fuzzed], Made]] = [
    _activation, _arithmetic, _arithmetic, _fully_connected, _fully_connected, _convolution, _convolution, _pooling,
    _reshape, _transpose, _slice, _split, _concatenation, _normalization, _softmax, _reduction, _padding, _upsample,
    _matmul, _gram_matrix, _comparison, _selection, _again,
]  # fmt: skip

SHAPES = [(3,), (4, 5), (2, 3, 4), (3, 5, 4), (1, 1, 1), (2, 4, 4), (2, 5, 3), (7,), (1,), ()]


def build(seeds: Sequence[int]) -> Fuzzed:
    """One or two inputs that share a batch, a layer per further seed, a loss. Each seed decides for itself."""
    f = Fuzzed(np.random.default_rng(seeds[0]))
    f.batch = f.number(1, 3)
    for _ in range(f.number(1, 2)):
        f.input((f.batch, *f.pick(SHAPES)))
    for seed in seeds[1:]:
        f.rng = np.random.default_rng(seed)
        f.attempt()
    f.lose()
    return f


def numbered(number: int, most: int = 12) -> Fuzzed:
    """One of endlessly many graphs, always the same for the same number."""
    rng = np.random.default_rng(number)
    return build([int(seed) for seed in rng.integers(0, 1 << 30, rng.integers(2, most + 2))])


def graphs(most: int = 8) -> st.SearchStrategy[Fuzzed]:
    """Any graph of so many layers at most. Failing ones shrink to few layers."""
    return st.lists(st.integers(0, 1 << 30), min_size=2, max_size=most + 1).map(build)


class Evaluation:
    """A graph's tensors and gradients in float64, from the numbers its weights hold when this is made."""

    def __init__(self, f: Fuzzed) -> None:
        run = Lowering(training=True, float_type=F64)
        self._feeds = {run.input(tensor): widened(array) for tensor, array in f.feeds.items()}
        for node in f.nodes:
            run.add(node.layer, [*node.sources, *node.labels], node.results)
        for tensor, value in run.persistent.items():
            assert tensor.data is not None
            self._feeds[value] = widened(tensor.data).copy()
        loss = run.values[f.nodes[-1].results[0]]
        fed = (*f.parameters, *f.inputs.values())
        wanted = [run.values[tensor] for tensor in fed]
        gradients = differentiate(run.trace, {loss: full(loss, loss.shape, 1.0)}, wanted)
        self._steps, self._constants = run.trace.steps, run.trace.constants
        self._values = {tensor: run.values[tensor] for node in f.nodes for tensor in node.results}
        self._gradients = {t: gradients[run.values[t]] for t in fed if run.values[t] in gradients}

    def run(self, noise: np.random.Generator | None = None) -> tuple[Numbers, Numbers]:
        """Every tensor and every gradient. With noise, every number computed on the way is rounded anyhow."""
        memory = {**self._constants, **self._feeds}
        with np.errstate(all="ignore"):  # as on every engine
            for step in self._steps:
                arrays = run_meaning(step, [memory[value] for value in step.inputs])
                for value, array in zip(step.results, arrays, strict=True):
                    assert array.shape == value.shape
                    memory[value] = array
                    if noise is not None and array.dtype == F64 and rounds(step):
                        # Composite ops cancel inside: what they round is as large as what they read.
                        read = [np.abs(memory[v]).max(initial=0.0) for v in step.inputs if memory[v].dtype == F64]
                        scale = np.maximum(np.abs(array), max(read, default=0.0))
                        rounded = array + ROUNDING * scale * noise.integers(-1, 2, array.shape)
                        # What is no larger than its rounding may also come out as nothing at all.
                        vanishes = (np.abs(array) <= ROUNDING * scale) & (noise.integers(0, 2, array.shape) == 0)
                        memory[value] = np.where(vanishes, 0.0, rounded)
        values = {tensor: memory[value] for tensor, value in self._values.items()}
        return values, {tensor: memory[value] for tensor, value in self._gradients.items()}


#: Ops whose results are some of their operands' own elements, or whole numbers.
EXACT = frozenset(
    {"max", "min", "maximum", "minimum", "select", "relu", "negate", "abs", "sign", "floor", "round", "ceil"}
    | {"convert", "copy", "stop_gradient", "max_pool"}
)


def rounds(step: Step) -> bool:
    return step.op.family not in ("view", "indexing") and step.op.name not in EXACT


def widened(array: Array) -> Array:
    return array.astype(F64) if array.dtype == np.float32 else array
