"""Random graphs trained three steps on an engine and on the reference: the numbers agree up to rounding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import mlcompute as mlc
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests import fuzz
from tests.fuzz import Fuzzed, Made

STEPS = 3
#: Rounding of a few dozen float32 operations, in three steps.
RELATIVE = 1e-4

#: Beyond this, squares leave the range of float32, and there is nothing to compare.
LARGEST = 1e15

#: Extents around the widths of vectors, blocks and slices, besides the small ones of `fuzz`.
SHAPES = [(17,), (33,), (5, 16), (9, 17), (2, 31), (16, 5, 5), (3, 9, 7), (8, 4, 4), (1, 17, 3), (64,), (130,)]


def _lstm(f: Fuzzed) -> Made:
    x = f.tensor()
    inputs, hidden = f.slightly_off(x.descriptor.shape[-1]), f.pick([1, 3, 8, 17])
    descriptor = mlc.LSTMDescriptor(inputs, hidden, 1, returns_sequences=f.chance(), is_bidirectional=f.chance())
    count = 8 if descriptor.is_bidirectional else 4
    shapes = ((hidden, inputs), (hidden, hidden), (hidden,))
    return mlc.LSTMLayer(descriptor, *([f.weight(shape) for _ in range(count)] for shape in shapes)), [x]


def _attention(f: Fuzzed) -> Made:
    x = f.tensor()
    width = f.slightly_off(x.descriptor.shape[-1])
    heads = f.pick([1, 1, 2, 3])
    weights, biases = [f.weight((width, width)) for _ in range(4)], [f.weight((width,)) for _ in range(4)]
    layer = mlc.MultiheadAttentionLayer(mlc.MultiheadAttentionDescriptor(width, heads), weights, biases)
    return layer, [x, f.pick([x, f.tensor()]), x]


def _dropout(f: Fuzzed) -> Made:
    return mlc.DropoutLayer(rate=0.3, seed=f.number(1, 1000)), [f.tensor()]


def _embedding(f: Fuzzed) -> Made:
    """Rows of a table by token numbers, which are an input of their own."""
    count, width = f.number(3, 40), f.pick([1, 4, 17])
    if "tokens" not in f.inputs:
        f.inputs["tokens"] = mlc.Tensor(shape=(f.batch, f.number(1, 9)), data_type=mlc.DataType.INT32)
        f.feeds[f.inputs["tokens"]] = f.rng.integers(0, 3, f.inputs["tokens"].descriptor.shape).astype(np.int32)
    return mlc.EmbeddingLayer(mlc.EmbeddingDescriptor(count, width), f.weight((count, width))), [f.inputs["tokens"]]


LAYERS: list[Callable[[Fuzzed], Made]] = [*fuzz.LAYERS, _lstm, _lstm, _attention, _dropout, _embedding]


def build(seed: int) -> Fuzzed:
    """One or two inputs that share a batch, up to nine layers, a loss; the same graph for the same seed."""
    f = Fuzzed(np.random.default_rng(seed))
    f.batch = f.pick([1, 2, 3, 5, 9])
    for _ in range(f.number(1, 2)):
        f.input((f.batch, *f.pick([*fuzz.SHAPES, *SHAPES])))
    wanted = f.number(2, 9)
    for _ in range(60):  # many are refused: a rank, an extent that does not fit
        if len(f.graph.layers) < wanted:
            f.attempt(LAYERS)
    f.lose()
    return f


def trained(seed: int, engine: Engine, off: float = 0.0) -> list[Array]:
    """Everything lasting, and all results, after a few steps. `off`: disturbed so much."""
    mlc.Platform.set_rng_seed_to(seed)
    f = build(seed)
    noise = np.random.default_rng(int(off * 1e12))
    if off:
        values = [np.array(tensor) for tensor in f.parameters]
        for array in (*f.feeds.values(), *values):
            if array.dtype != np.float32:
                continue
            array *= (1 + off * noise.standard_normal(array.shape)).astype(np.float32)
            array += (off * noise.standard_normal(array.shape)).astype(np.float32)
        for tensor, array in zip(f.parameters, values, strict=True):
            tensor.data = array
    rule = mlc.OptimizerDescriptor(learning_rate=0.01)
    optimizer = mlc.AdamOptimizer(rule, epsilon=1e-2) if seed % 2 else mlc.SGDOptimizer(rule, momentum_scale=0.9)
    training = mlc.TrainingGraph([f.graph], None, optimizer)
    training.add_inputs(f.inputs, f.labels)
    outputs = {f"y{i}": tensor for i, tensor in enumerate(tensor for node in f.nodes for tensor in node.results)}
    training.add_outputs(outputs)
    training.compile(device=mlc.Device(engine.device_type, engine=engine))
    results = {name: np.empty(t.descriptor.shape, t.descriptor.data_type.numpy) for name, t in outputs.items()}
    for _ in range(STEPS):
        training.execute(
            {name: f.feeds[tensor] for name, tensor in f.inputs.items()},
            {name: f.feeds[tensor] for name, tensor in f.labels.items()},
            outputs_data=results,
            options=mlc.ExecutionOptions.SYNCHRONOUS,
        )
    return [*(tensor.data.copy() for tensor in f.kept), *results.values()]


def check(seed: int, *engines: Engine) -> None:
    """The first engine agrees with the reference, and the others give the same bits as the first."""
    reference = Reference()
    expected = trained(seed, reference)
    finite = [np.abs(array[np.isfinite(array)]).max(initial=0.0) for array in expected if array.dtype.kind == "f"]
    if max(finite, default=0.0) > LARGEST or any(not np.isfinite(a).all() for a in expected if a.dtype.kind == "f"):
        return
    first = trained(seed, engines[0])
    for engine in engines[1:]:
        for a, b in zip(first, trained(seed, engine), strict=True):
            assert a.tobytes() == b.tobytes(), f"seed {seed}: {engine.facts()} change the numbers"
    others = []
    for number, (found, wanted) in enumerate(zip(first, expected, strict=True)):
        assert found.shape == wanted.shape
        if _is_close(found, wanted, 0.0):
            continue
        # At kinks and jumps rounding decides: how far apart are runs of the reference itself when slightly disturbed?
        others = others or [trained(seed, reference, off) for off in (1e-6, 2e-6, 3e-6, 4e-6)]
        apart = [_distance(other[number], wanted) for other in others]
        assert _is_close(found, wanted, 10 * max(apart)), f"seed {seed}: array {number}, {_distance(found, wanted)}"


def _distance(a: Array, b: Array) -> float:
    if a.dtype.kind != "f":
        return float((a != b).any())
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0)) if np.isfinite(a).all() else np.inf


def _is_close(found: Array, wanted: Array, apart: float) -> bool:
    size = max(1.0, float(np.abs(wanted).max(initial=0.0))) if wanted.dtype.kind == "f" else 0.0
    return _distance(found, wanted) <= RELATIVE * size + apart
