"""Device.cpu(precision="bf16"): kernels read and store bfloat16, compute in float32, and agree with NumPy."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.kernels import convolution_columns
from mlcompute.devices.cpu.onednn import bfloat16 as trial
from mlcompute.devices.cpu.runtime.machine import rounds_to_bfloat16
from mlcompute.devices.reference import Reference
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, TABLE, Array, Trace, Value, emit_all
from tests.cases.case import Case
from tests.devices import cuda_cases
from tests.devices.kernels import run_on_engine
from tests.devices.models import make
from tests.devices.native import only_native
from tests.devices.test_cpu_guards import check_guard_bytes
from tests.harness import assert_close, interpret
from tests.nets import sgd
from tests.test_bfloat16 import CLASSES, NETWORKS, ROUNDING, Network, Trained, assert_weights_agree, convolutional
from tests.test_layers import CASES


@functools.cache
def engine(threads: int = 2) -> Cpu:
    """Even the smallest values are stored in bfloat16."""
    found = Cpu(threads)
    found.smallest_bfloat16 = 0
    return found


def narrow(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(bfloat16())


def check(fn: Any, *arrays: Array, scale: float = 1.0) -> list[Array]:
    """The engine agrees with NumPy, bit for bit with any number of threads."""

    def described(*values: Value) -> Sequence[Value]:
        answer = fn(*values)
        return [answer] if isinstance(answer, Value) else list(answer)

    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    results = described(*inputs)
    memory = interpret(trace, dict(zip(inputs, arrays, strict=True)))
    found = run_on_engine(described, arrays, 1, times=1)
    for number, (array, value) in enumerate(zip(found, results, strict=True)):
        assert array.dtype == memory[value].dtype
        assert_close(array, memory[value], scale, f"result {number}")
    for one, other in zip(found, run_on_engine(described, arrays, 4, times=1), strict=True):
        assert one.tobytes() == other.tobytes(), "threads change the numbers"
    return found


def op(name: str, **attributes: Any) -> Any:
    return lambda *values: emit_all(name, *values, **attributes)


@pytest.mark.parametrize("flush", [False, True])
def test_conversions_are_those_of_numpy(flush: bool) -> None:
    """But where that is allowed, AVX512_BF16 rounds subnormal numbers to 0."""
    edges = np.float32([0.0, -0.0, 1.0, 1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 3.4e38, 1e-40, -1e-45])
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    if flush and rounds_to_bfloat16():
        edges[-2:], bits[np.abs(bits) < np.finfo(np.float32).tiny] = 0.0, 0.0
    attributes = {"to": bfloat16(), "flush": True} if flush else {"to": bfloat16()}
    (found,) = check(op("convert", **attributes), np.tile(edges, 3))
    expected = np.tile(edges, 3).astype(bfloat16())
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(found.astype(np.float32)), np.signbit(expected.astype(np.float32)))
    (found,) = check(op("convert", **attributes), bits)
    finite = np.isfinite(bits)
    assert (found[finite].view(np.uint16) == bits[finite].astype(bfloat16()).view(np.uint16)).all()
    for to in (FLOAT32, np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float64)):
        check(op("convert", to=to), narrow(5, 7))
    check(op("convert", to=bfloat16()), np.arange(-4, 9, dtype=np.int32))


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train_as_on_the_reference(network: Network) -> None:
    expected = Trained(network, mlc.Device(engine=Reference(), precision="bf16"))
    with only_native():
        found = [Trained(network, mlc.Device(engine=engine(threads), precision="bf16")) for threads in (1, 2, 4)]
    assert found[0].loss == pytest.approx(expected.loss, rel=8 * ROUNDING)
    assert_weights_agree(found[0], expected)
    for more in found[1:]:
        for one, other in zip(more.weights, found[0].weights, strict=True):
            assert one.tobytes() == other.tobytes(), "threads change the numbers"


def test_small_gradients_behind_pooling_round_alike_in_passes() -> None:
    """`execute` keeps indices of maxima, passes what was pooled, which is larger than its gradient."""
    found = Cpu(2)
    found.smallest_bfloat16 = 1 << 13
    device = mlc.Device(engine=found, precision="bf16")
    whole, split = (Trained(convolutional, device, split=split) for split in (False, True))
    for one, other in zip(whole.weights, split.weights, strict=True):
        assert one.tobytes() == other.tobytes()


def test_layers_nobody_uses_round_nothing_else() -> None:
    """Passes compute them, as somebody may read them; `execute` does not."""

    def branching(graph: mlc.Graph) -> mlc.Tensor:
        x = graph.dense(graph.input((32, 16), "x"), 24)
        y = x.tanh() * 0.5
        for unused in (y, x):
            graph.dense(unused.exp(), 8)
        return graph.dense((y + x).sigmoid(), CLASSES)

    device = mlc.Device(engine=engine(), precision="bf16")
    with pytest.warns(UserWarning, match="will not be trained"):
        whole, split = (Trained(branching, device, split=split) for split in (False, True))
    for one, other in zip(whole.weights, split.weights, strict=True):
        assert one.tobytes() == other.tobytes()


def test_views_nobody_uses_show_what_is_rounded() -> None:
    """Of a depthwise convolution by our own kernel; `execute` does not compute what is split off."""
    graph = mlc.Graph()
    y = graph.depthwise_convolution(graph.input((8, 24, 2, 7, 9), "x"))
    parts = y.chunk(2, 2)
    mlc.concatenate([y, mlc.maximum(y, parts[1])], 4)
    graph.minimize(y[:, :, :, :2].min((1, 2, 3, 4)))
    training = mlc.TrainingGraph([graph], optimizer=sgd())
    training.add_inputs({"x": graph.input_tensors[0]})
    device = mlc.Device(engine=engine(), precision="bf16")
    training.compile(device=device)
    x = np.random.default_rng(0).standard_normal((8, 24, 2, 7, 9)).astype(np.float32)
    training.bind_and_write_data({"x": x}, for_inputs={"x": graph.input_tensors[0]}, to=device)
    training.execute_forward().wait()
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(part.data, y.data[:, :, number : number + 1])


def kernels_of(network: Network) -> tuple[mlc.TrainingGraph, str]:
    graph = mlc.Graph()
    scores = network(graph)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN, class_axis=-1)
    training = mlc.TrainingGraph([graph], loss, sgd())
    x = next(graph.source_tensors(layer)[0] for layer in graph.layers)
    labels = mlc.Tensor(shape=scores.descriptor.shape[:-1], data_type=mlc.DataType.INT32)
    training.add_inputs({"x": x}, {"t": labels})
    training.compile(device=mlc.Device(engine=Cpu(1), precision="bf16"))
    return training, str(next(text for name, text in training.programs.items() if name.startswith("fused")))


def test_weights_are_updated_in_the_matmul_where_no_instructions_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide layers, whose columns are cut into blocks: their gradient need not exist as a whole."""

    def wide(graph: mlc.Graph) -> mlc.Tensor:
        return graph.dense(graph.dense(graph.input((160, 1100), "x"), 1200, activation="relu"), CLASSES)

    monkeypatch.setattr(onednn, "bfloat16_gemm", lambda: 0)
    assert "gemm_tn + fused elementwise" in kernels_of(wide)[1]
    device = mlc.Device(engine=engine(), precision="bf16")
    whole, split = (Trained(wide, device, split=split, steps=2) for split in (False, True))
    for one, other in zip(whole.weights, split.weights, strict=True):
        assert one.tobytes() == other.tobytes()


def test_losses_over_many_classes_read_bfloat16() -> None:
    """The scores of a vocabulary are the largest values of a language model."""
    training, program = kernels_of(lambda graph: graph.dense(graph.input((256, 8), "x"), 1024))
    assert "bfloat16 to float32, cross entropy" not in program
    assert training.device_memory_size < 1.5 * 2 * 256 * 1024, "scores and their gradient share memory"


def test_what_kernels_do_not_store_is_not_rounded() -> None:
    """Normalised values, and what the gradient pass computes again: two conversions at the ends of a kernel."""

    def normalizing(graph: mlc.Graph) -> mlc.Tensor:
        x = graph.convolution(graph.input((8, 16, 16, 16), "x"), 16, biases=False)
        x = graph.convolution(graph.activation(graph.normalize(x, "batch"), "silu"), 16, biases=False)
        return graph.dense(graph.flatten(x), CLASSES)

    def activating(graph: mlc.Graph) -> mlc.Tensor:
        x = graph.input((64, 32), "x")
        for _ in range(2):
            x = graph.dense(x, 512, activation="gelu")
        return graph.dense(x, CLASSES)

    def ops_of(network: Network, *words: str) -> list[str]:
        """The ops of the kernel whose line has these words."""
        (line,) = [line for line in kernels_of(network)[1].splitlines() if all(word in line for word in words)]
        return line.split(" = ")[1].split("(")[0].split(" + ")

    forward = ops_of(normalizing, "batch_norm1", " forward ", "normalize columns")
    assert forward == ["convert", "normalize", "multiply", "add", "sigmoid", "multiply", "convert"]
    _, program = kernels_of(activating)
    assert "float32[64,512]" not in program, "the sigmoid inside GELU is computed again from what was stored"


def check_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reference gives with the same precision, up to a few roundings; a full step gives what passes give."""
    monkeypatch.setattr(mlc.Device, "__init__", partialmethod(mlc.Device.__init__, precision="bf16"))
    expected, found = cuda_cases.split(case, Reference()), cuda_cases.split(case, engine())
    # Gradients may be sums that cancel (of keys' biases, always): as exact as what was added, which others show.
    floats = [array for array in expected.values() if array is not None and array.dtype.kind == "f"]
    size = max([1.0, *(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in floats)])
    for name, array in expected.items():
        other = found[name]
        assert (array is None) == (other is None), name
        if array is not None and other is not None:
            assert (other.dtype, other.shape) == (array.dtype, array.shape), name
            if array.dtype.kind != "f":
                continue
            limit = 4 * ROUNDING * size * case.scale
            np.testing.assert_allclose(other, array, atol=limit, rtol=4 * ROUNDING, err_msg=name)
    if case.training is not False:
        cuda_cases.check_fused(case, engine(), times=1)


@pytest.mark.parametrize("case", CASES[::97])
def test_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, monkeypatch)


@pytest.mark.parametrize("types", ["bbb", "bff", "ffb", "fbf"])
def test_products_of_mixed_types(types: str) -> None:
    first, second, to = ({"b": bfloat16(), "f": FLOAT32}[kind] for kind in types)
    shapes = [((1, 1), (1, 1)), ((60, 200), (200, 37)), ((300, 40), (40, 272)), ((3, 1, 9, 20), (2, 20, 7))]
    arrays = [narrow(*a, seed=1).astype(first) for a, _ in shapes] + [narrow(*b).astype(second) for _, b in shapes]
    arrays += [arrays[2].T.copy(), arrays[6].T.copy()]

    def products(*values: Value) -> list[Value]:
        pairs = [*zip(values[:4], values[4:8], strict=True), tuple(map(ops.transpose, values[8:]))]
        return [emit_all("matmul", a, b, to=to)[0] for a, b in pairs]

    found = check(products, *arrays, scale=4)
    assert found[2].tobytes() == found[4].tobytes(), "how operands lie changes the numbers"


@pytest.mark.parametrize("shape", [(3, 5), (60, 1100)])
def test_rows_and_columns(shape: tuple[int, int]) -> None:
    x = narrow(*shape)
    for axis in (0, 1):
        statistics = tuple(1 if number == axis else extent for number, extent in enumerate(shape))
        variance = np.abs(narrow(*statistics).astype(np.float32)) + np.float32(0.5)
        norm = {"axes": (axis,), "epsilon": 1e-3}

        def all_of(x: Value, dy: Value, variance: Value, axis: int = axis, norm: dict[str, Any] = norm) -> list[Value]:
            reduced = [emit_all(name, x, axes=(axis,))[0] for name in ("sum", "max", "min")]
            reduced += [emit_all(name, x, axis=axis)[0] for name in ("argmax", "argmin", "softmax", "log_softmax")]
            y, mean, spread = emit_all("normalize", x, **norm)
            return [*reduced, y, mean, spread, *emit_all("normalize_gradient", dy, x, variance, **norm)]

        check(all_of, x, narrow(*shape, seed=3), variance, scale=8)


def test_moves_leave_numbers_alone() -> None:
    def moved(x: Value, y: Value) -> list[Value]:
        pads = {"before": (1, 2), "after": (0, 1), "value": 1.5}
        slices = {"shape": (8, 6), "start": (0, 0), "end": (8, 6), "stride": (2, 1)}
        wider, spread = emit_all("pad", x, **pads)[0], emit_all("slice_gradient", x, **slices)[0]
        return [ops.concatenate([x, y], 1), wider, spread, ops.copy(ops.transpose(x))]

    for found in check(moved, narrow(4, 6), narrow(4, 6, seed=2)):
        assert found.dtype == bfloat16()


@pytest.mark.parametrize("channels_last", [False, True])
def test_images(channels_last: bool) -> None:
    """Pooling with and without overlap, and a convolution by Winograd's algorithm; other forms get float32 copies."""
    x = narrow(2, 10, 12, 8) if channels_last else narrow(2, 8, 10, 12)
    w = narrow(16, 8, 3, 3).astype(np.float32)

    def images(x: Value, w: Value) -> list[Value]:
        found = []
        for strides in ((2, 3), (1, 1)):
            windows = {"kernel": (2, 3), "strides": strides, "dilations": (1, 1), "padding": (0, 0, 0, 0)}
            windows["channels_last"] = channels_last
            y = emit_all("max_pool", x, **windows)[0]
            dx = emit_all("max_pool_gradient", y, x, **windows)[0]
            mean = emit_all("sum_pool", x, **windows)[0]
            shape = (2, 8, 10, 12)
            found += [y, dx, mean, emit_all("sum_pool_gradient", mean, shape=shape, **windows)[0]]
        for strides in ((1, 1), (2, 2)):
            taps = {"strides": strides, "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1}
            taps["channels_last"] = channels_last
            y = emit_all("convolution", x, w, to=bfloat16(), **taps)[0]
            dx = emit_all("convolution_input_gradient", y, w, shape=(2, 8, 10, 12), to=bfloat16(), **taps)[0]
            found += [y, dx, emit_all("convolution_weight_gradient", x, y, shape=w.shape, to=FLOAT32, **taps)[0]]
        return found

    # What is rounded once already is rounded again: twice one unit, and sums of many of them.
    check(images, x, w, scale=400)


#: x (channels last), w, strides, groups: few pixels beside the filters, depthwise, pointwise, in groups, for Winograd.
CONVOLUTIONS = [
    ((4, 2, 2, 32), (48, 32, 3, 3), (1, 1), 1),
    ((3, 4, 4, 32), (32, 32, 3, 3), (2, 2), 1),
    ((2, 9, 8, 24), (24, 1, 5, 5), (1, 1), 24),
    ((2, 9, 8, 24), (24, 1, 5, 5), (2, 2), 24),
    ((2, 9, 8, 32), (48, 32, 1, 1), (1, 1), 1),
    ((3, 16, 18, 64), (32, 64, 1, 1), (1, 1), 1),
    ((3, 11, 7, 10), (17, 10, 1, 1), (1, 1), 1),
    ((2, 9, 8, 32), (32, 8, 3, 3), (1, 1), 4),
    ((3, 18, 20, 32), (32, 32, 3, 3), (1, 1), 1),
    ((3, 18, 20, 3), (32, 3, 1, 1), (2, 2), 1),
]
#: x (channels last), w, padding of an axis, dilations, groups: rows longer than oneDNN's registers hold, channels that
#: fill no vectors; images smaller than filters.
AWKWARD = [
    ((2, 9, 41, 24), (8, 24, 3, 3), (0, 0), (2, 2), 1),
    ((2, 8, 40, 17), (17, 17, 3, 5), (0, 0), (2, 1), 1),
    ((1, 8, 44, 16), (16, 8, 2, 2), (0, 0), (3, 3), 2),
    ((2, 9, 41, 32), (8, 32, 3, 3), (0, 0), (2, 2), 1),
    ((3, 64, 1, 64), (96, 64, 3, 3), (1, 1), (1, 1), 1),
    ((3, 2, 8, 30, 64), (8, 64, 3, 3, 3), (1, 1), (1, 1, 1), 1),
    ((2, 1, 4, 4, 16), (16, 16, 3, 3, 3), (1, 1), (1, 1, 1), 1),
]


@pytest.mark.parametrize("has_instructions", [False, True])
@pytest.mark.parametrize(("image", "filters", "strides", "groups"), CONVOLUTIONS)
def test_convolutions(
    image: tuple[int, ...],
    filters: tuple[int, ...],
    strides: tuple[int, int],
    groups: int,
    has_instructions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All three, by whichever kernel suits: each is given bfloat16, or float32 copies."""
    monkeypatch.setattr(convolution_columns, "_LARGE", 1)
    if not has_instructions:
        monkeypatch.setattr(onednn, "has_bfloat16_convolutions", lambda: False)
    x, w, border = narrow(*image), narrow(*filters, seed=1).astype(np.float32), filters[2] // 2
    taps = {"strides": strides, "dilations": (1, 1), "padding": (border,) * 4, "groups": groups, "channels_last": True}
    shape = (image[0], image[3], *image[1:3])
    extents = [(extent - 1) // stride + 1 for extent, stride in zip(image[1:3], strides, strict=True)]
    dy = narrow(image[0], *extents, filters[0], seed=2)

    def convolutions(x: Value, w: Value, dy: Value) -> list[Value]:
        return [
            emit_all("convolution", x, w, to=bfloat16(), **taps)[0],
            emit_all("convolution_input_gradient", dy, w, shape=shape, to=bfloat16(), **taps)[0],
            emit_all("convolution_weight_gradient", x, dy, shape=w.shape, to=FLOAT32, **taps)[0],
        ]

    *images, sums = check(convolutions, x, w, dy, scale=400)
    wide = [array.astype(np.float64) for array in (x, w, dy)]
    exact = [
        TABLE["convolution"].meaning(wide[0], wide[1], **taps),
        TABLE["convolution_input_gradient"].meaning(wide[2], wide[1], shape=shape, **taps),
    ]
    for found, expected in zip(images, exact, strict=True):
        assert np.abs(found.astype(np.float64) - expected).max() < 2.0**-8 * np.abs(expected).max()
    expected = TABLE["convolution_weight_gradient"].meaning(wide[0], wide[2], shape=filters, **taps)
    assert np.abs(sums - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("is_narrow", "of_gradient"), [(True, False), (False, True)])
@pytest.mark.parametrize("channels", [(64, 32), (32, 64), (10, 17), (48, 48)])
def test_gradients_of_pointwise_filters_read_each_image_as_it_lies(
    channels: tuple[int, int], is_narrow: bool, of_gradient: bool
) -> None:
    """One in bfloat16, one in float32, more inputs or more outputs."""
    x, dy = narrow(3, 16, 18, channels[0]), narrow(3, 16, 18, channels[1], seed=1)
    x, dy = x if is_narrow else x.astype(np.float32), dy if of_gradient else dy.astype(np.float32)
    window = {"strides": (1, 1), "dilations": (1, 1), "padding": (0,) * 4, "groups": 1, "channels_last": True}
    shape = (*channels[::-1], 1, 1)
    (found,) = check(op("convolution_weight_gradient", to=FLOAT32, shape=shape, **window), x, dy, scale=400)
    wide = [array.astype(np.float64) for array in (x, dy)]
    expected = TABLE["convolution_weight_gradient"].meaning(*wide, shape=shape, **window)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("has_instructions", [False, True])
@pytest.mark.parametrize(("image", "filters", "border", "dilations", "groups"), AWKWARD)
def test_gradients_of_filters_that_onednn_has_wrong(
    image: tuple[int, ...],
    filters: tuple[int, ...],
    border: tuple[int, int],
    dilations: tuple[int, ...],
    groups: int,
    has_instructions: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(convolution_columns, "_LARGE", 1)
    monkeypatch.setenv("MLCOMPUTE_WINOGRAD", "0")
    if not has_instructions:
        monkeypatch.setattr(onednn, "has_bfloat16_convolutions", lambda: False)
    axes = zip(image[1:-1], dilations, filters[2:], strict=True)
    extents = [extent + sum(border) - dilation * (taps - 1) for extent, dilation, taps in axes]
    x, dy = narrow(*image), narrow(image[0], *extents, filters[0], seed=2)
    window = {"strides": (1,) * len(extents), "dilations": dilations, "padding": border * len(extents)}
    taps = {**window, "groups": groups, "channels_last": True, "shape": filters}
    (found,) = check(op("convolution_weight_gradient", to=FLOAT32, **taps), x, dy, scale=400)
    wide = [array.astype(np.float64) for array in (x, dy)]
    expected = TABLE["convolution_weight_gradient"].meaning(*wide, **taps)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_kernels_that_cannot_read_a_view_get_a_dense_copy() -> None:
    """The gradient of pooling volumes, between convolutions that lie channels last."""
    x, y = narrow(2, 6, 4, 16), narrow(2, 3, 4, 16, seed=1)
    windows = {"kernel": (2, 1), "strides": (2, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0)}

    def pooled(dy: Value, x: Value) -> Value:
        seen = [emit_all("transpose", value, axes=(0, 3, 1, 2))[0] for value in (dy, x)]
        return emit_all("max_pool_gradient", *seen, **windows, channels_last=False)[0]

    with only_native():
        check(pooled, y, x)


def test_views_beside_copies_in_float32_are_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a convolution without a library reads, bfloat16 has copies of its own; float32 must lie densely."""
    monkeypatch.setattr(onednn, "load", lambda: None)
    trace = Trace()
    x, dy = trace.value((2, 8, 6, 6), bfloat16(), "input"), trace.value((1, 1, 1, 8), FLOAT32, "input")
    (image,) = emit_all("transpose", x, axes=(0, 2, 3, 1))
    (wide,) = emit_all("broadcast", dy, shape=(2, 3, 3, 8))
    window = {"strides": (2, 2), "dilations": (1, 1), "padding": (0,) * 4, "groups": 1, "channels_last": True}
    results = emit_all("convolution_weight_gradient", image, wide, shape=(8, 8, 1, 1), to=FLOAT32, **window)
    views = planned(trace.steps, results).views
    assert engine().needs_dense(trace.steps, views) == {trace.steps[-1]: [wide]}


@pytest.mark.parametrize("samples", [3, 32])
def test_gradients_of_weights_are_added_up_in_float32(samples: int) -> None:
    """Nothing on the way is rounded to bfloat16, with instructions for it or without."""
    x, dy = narrow(samples, 9, 9, 16), narrow(samples, 9, 9, 32, seed=1)
    window = {"strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True}
    taps = {**window, "shape": (32, 16, 3, 3)}
    (found,) = run_on_engine(op("convolution_weight_gradient", to=FLOAT32, **taps), [x, dy], 2, times=1)
    wide = [array.astype(np.float64) for array in (x, dy)]
    exact = TABLE["convolution_weight_gradient"].meaning(*wide, **taps)
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.fixture
def library_gemm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A stand-in for oneDNN's gemm of bfloat16, which needs instructions that this machine may lack; notes extents."""
    seen: list[tuple[int, ...]] = []
    i64, i8, f32, pointer = ctypes.c_int64, ctypes.c_char, ctypes.c_float, ctypes.c_void_p

    def matrix(address: int, rows: int, columns: int, pitch: int) -> Array:
        flat = (ctypes.c_uint16 * (pitch * (rows - 1) + columns)).from_address(address)
        strided = np.lib.stride_tricks.as_strided(np.frombuffer(flat, np.uint16), (rows, columns), (2 * pitch, 2))
        return strided.view(bfloat16()).astype(np.float32)

    def gemm(ta: bytes, tb: bytes, m: int, n: int, k: int, _: float, *rest: Any) -> int:
        a, lda, b, ldb, _, y, ldc = rest
        seen.append((m, n, k))
        left = matrix(a, m, k, lda) if ta == b"N" else matrix(a, k, m, lda).T
        right = matrix(b, k, n, ldb) if tb == b"N" else matrix(b, n, k, ldb).T
        target = (ctypes.c_float * (ldc * (m - 1) + n)).from_address(y)
        place = np.lib.stride_tricks.as_strided(np.frombuffer(target, np.float32), (m, n), (4 * ldc, 4))
        place[:] = left @ right
        return 0

    function = ctypes.CFUNCTYPE(
        ctypes.c_int, i8, i8, i64, i64, i64, f32, pointer, i64, pointer, i64, f32, pointer, i64
    )(gemm)
    monkeypatch.setattr(onednn, "bfloat16_gemm", lambda: ctypes.cast(function, pointer).value)
    monkeypatch.setattr(sys.modules[__name__], "_kept", function, raising=False)
    return seen


@pytest.mark.parametrize("types", ["bbb", "bff", "ffb"])
def test_products_by_instructions_of_the_machine(types: str, library_gemm: list[tuple[int, ...]]) -> None:
    """Factors are rounded where they are float32, results where they are bfloat16; small products stay ours."""
    first, second, to = ({"b": bfloat16(), "f": FLOAT32}[kind] for kind in types)
    a, b = narrow(2, 128, 96, seed=1).astype(first), narrow(96, 160, seed=2).astype(second)

    def products(a: Value, b: Value, c: Value, d: Value) -> list[Value]:
        turned = emit_all("matmul", ops.transpose(c), ops.transpose(d), to=to)[0]
        return [emit_all("matmul", a, b, to=to)[0], turned]

    check(products, a, b, a[0].T.copy(), b.T.copy(), scale=4)
    assert {extents[2] for extents in library_gemm} == {96}


def test_gradients_that_execute_updates_with_are_the_same_in_passes(library_gemm: list[tuple[int, ...]]) -> None:
    """By float32 and not by instructions, which would round the input: with an update behind it, and by itself."""

    def wide(graph: mlc.Graph) -> mlc.Tensor:
        return graph.dense(graph.dense(graph.input((64, 384), "x"), 512, activation="relu"), CLASSES)

    assert "gemm_tn + fused elementwise" in kernels_of(wide)[1]
    device = mlc.Device(engine=engine(), precision="bf16")
    whole, split = (Trained(wide, device, split=split, steps=2) for split in (False, True))
    assert library_gemm, "the forward pass is by instructions"
    for one, other in zip(whole.weights, split.weights, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.skipif(not onednn.has_bfloat16_instructions(), reason="the CPU has neither AVX512_BF16 nor AMX")
def test_instructions_are_used() -> None:
    assert onednn.bfloat16_gemm()
    assert onednn.has_bfloat16_convolutions()


def test_instructions_can_be_hidden() -> None:
    """ONEDNN_MAX_CPU_ISA hides them from oneDNN, and from our kernels: no kernel compiled with them is taken."""
    ask = """
from mlcompute.devices.cpu import onednn
from mlcompute.devices.cpu.runtime.machine import identity, rounds_to_bfloat16
print(onednn.bfloat16_gemm(), onednn.has_bfloat16_convolutions(), rounds_to_bfloat16(), "without" in identity())
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["0", "False", "False", "True"]


def test_the_test_of_convolutions_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked in float32 here, which every machine has."""
    monkeypatch.setattr(trial, "has_bfloat16_instructions", lambda: True)
    monkeypatch.setattr(trial, "bfloat16", lambda: FLOAT32)
    assert trial.has_bfloat16_convolutions.__wrapped__()
    monkeypatch.setattr(trial, "_is_close", lambda found, expected: False)
    assert not trial.has_bfloat16_convolutions.__wrapped__()


def test_activations_take_half_the_memory() -> None:
    """Of a network in which they take nearly all of it, on the engine as everybody has it."""

    def size(precision: Any) -> int:
        graph = mlc.Graph()
        x = h = graph.input((32, 16, 48, 48), "x")
        for _ in range(12):
            h = graph.normalize(graph.convolution(h, 16, activation="tanh"), "batch")
        scores = graph.dense(graph.flatten(h), 4)
        loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
        training = mlc.TrainingGraph([graph], loss, sgd())
        training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=scores.descriptor.shape)})
        training.compile(device=mlc.Device.cpu(precision=precision))
        return training.device_memory_size

    assert size("bf16") <= 0.55 * size("float32")


def test_small_values_stay_float32() -> None:
    """Converting them would take longer than they take to move; the printed program says what lies how."""
    graph = mlc.Graph()
    x = graph.input((64, 512), "x")
    graph.dense(graph.dense(graph.dense(x, 512), 64), 4)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(device=mlc.Device.cpu(precision="bf16"))
    (program,) = inference.programs.values()
    kinds = [step.results[0].dtype.name for step in program.steps if step.op.name == "matmul"]
    assert kinds == ["bfloat16", "float32", "float32"]


def test_refusals() -> None:
    with pytest.raises(mlc.DeviceError, match="'fp8' is not a precision") as caught:
        mlc.Device.cpu(precision="fp8")  # type: ignore[arg-type]
    assert "'float32' or 'bf16'" in str(caught.value)
    assert mlc.Device.cpu(precision="bf16").precision == "bf16"
    assert "precision 'bf16'" in repr(mlc.Device.cpu(precision="bf16"))


def digits(precision: Any, steps: int) -> list[float]:
    """The losses of some steps on the digits, in batches of 64 that are the same for everybody."""
    with np.load(Path(mlc.data.__file__).with_name("digits.npz")) as file:
        pixels, classes = (file[name] for name in sorted(file.files, key=lambda name: -file[name].ndim)[:2])
    images = (pixels.reshape(-1, 1, 8, 8) / pixels.max()).astype(np.float32)
    mlc.Platform.set_rng_seed_to(0)
    graph = mlc.Graph()
    x = h = graph.input((64, 1, 8, 8), "image")
    for channels in (16, 32):
        h = graph.pool(graph.convolution(h, channels, activation="relu"))
    scores = graph.dense(graph.dense(graph.flatten(h), 64, activation="relu"), 10)
    t = mlc.Tensor(shape=scores.descriptor.shape)
    loss = mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN)
    rate = mlc.OptimizerDescriptor(learning_rate=2e-3)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(rate))
    training.add_inputs({"x": x}, {"t": t})
    training.compile(device=mlc.Device(engine=engine(), precision=precision))
    found = []
    for step in range(steps):
        rows = np.arange(64 * step, 64 * (step + 1)) % len(images)
        labels = np.eye(10, dtype=np.float32)[classes[rows].astype(int)]
        training.execute({"x": images[rows]}, {"t": labels}).wait()
        found.append(float(np.asarray(training.result_tensors(loss)[0].data).reshape(-1)[0]))
    return found


def check_curves(steps: int) -> None:
    """Averages over 20 steps stay within 8 roundings of the first loss, which all later ones are smaller than."""
    exact, rounded = (np.array(digits(precision, steps)).reshape(-1, 20).mean(1) for precision in ("float32", "bf16"))
    assert exact[-1] < 0.5 * exact[0]
    np.testing.assert_allclose(rounded, exact, atol=8 * ROUNDING * exact[0])


def test_digits_are_learned_as_in_float32() -> None:
    check_curves(80)


@pytest.mark.slow
def test_digits_are_learned_as_in_float32_for_long() -> None:
    check_curves(2000)


@pytest.mark.parametrize("kind", ["convolutions", "transformer"])
def test_guard_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlc.Device, "__init__", partialmethod(mlc.Device.__init__, precision="bf16"))
    check_guard_bytes(make(kind, engine()), engine())
