"""Normalisations fused with elementwise ops, on the CPU and on the CUDA engine in emulation: the same bits as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler import Context, Request
from mlcompute.compiler.fuse_elementwise import fused
from mlcompute.compiler.fuse_normalization import fuse_normalization
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_plan, verify_steps
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.kernels import normalization_columns
from mlcompute.devices.cuda.codegen import lanes
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import FLOAT32, TABLE, Array, Trace, Value, emit_all
from tests.devices.cuda_emulator import bench
from tests.devices.cuda_emulator.bench import needs_engine
from tests.devices.thread_after_thread import thread_after_thread
from tests.harness import assert_close, interpret
from tests.test_bfloat16 import Trained, maximal

#: Batch norm of channels-last and channels-first images, layer norm (short, long, over two axes), group norm.
SHAPES = [
    ((4, 5, 6, 8), (0, 1, 2)), ((4, 3, 5, 6), (0, 2, 3)), ((6, 40), (1,)), ((2, 5000), (1,)), ((3, 7, 12), (1, 2)),
    ((300, 12), (0,)), ((7, 5, 3), (0, 1)),
]  # fmt: skip


@pytest.fixture(params=["one kernel", "blocks of rows"])
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks of rows":
        monkeypatch.setattr(normalization_columns, "WORTH_BLOCKS", 64)
        monkeypatch.setattr(lanes, "WORTH_SPLITS", 64)
        monkeypatch.setattr(lanes, "LEAST_ITERATIONS", 1)


@pytest.fixture(params=[1, 5, pytest.param(0, marks=needs_engine)], ids=["cpu", "cpu, 5 threads", "cuda"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Cpu(request.param) if request.param else bench.engine()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def statistics_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis in axes else extent for axis, extent in enumerate(shape))


def outcome(
    engine: Engine, describe: Callable[..., Sequence[Value]], arrays: Sequence[Array], *, fuses: bool
) -> tuple[list[Array], list[Array], list[str]]:
    """What the engine gives, what NumPy gives, and the steps' ops."""
    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    results = list(describe(*inputs))
    steps = list(trace.steps)
    if fuses:
        context = Context(Request(), engine, Program("fused", 1), trace=trace, kept=frozenset(results))
        steps = fused(fuse_normalization(steps, context), results)
        verify_steps(steps)
    plan = planned(steps, results, workspace=engine.workspace)
    verify_plan(steps, plan, results)
    program = Program("test", 1, steps, plan, dict(trace.constants), kept=set(results))
    executable = engine.build(program, engine.allocate(plan.nbytes))
    for value, array in zip(inputs, arrays, strict=True):
        buffer = engine.allocate(array.nbytes)
        buffer.write(array)
        executable.bind(value, buffer)
    for _ in range(2):
        completion = executable.run(("forward",))
        if completion is not None:
            completion.wait()
    memory = interpret(trace, dict(zip(inputs, arrays, strict=True)))
    names = [step.op.name for step in steps if not step.op.is_view]
    return [executable.read(value) for value in results], [memory[value] for value in results], names


def check(engine: Engine, describe: Callable[..., Sequence[Value]], *arrays: Array, scale: float = 16.0) -> list[str]:
    """The fused steps give the bits of single ones, and what NumPy gives; their ops."""
    alone, expected, _ = outcome(engine, describe, arrays, fuses=False)
    together, _, names = outcome(engine, describe, arrays, fuses=True)
    for number, (a, b, c) in enumerate(zip(alone, together, expected, strict=True)):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes(), f"result {number}"
        assert_close(b, c, scale, f"result {number}")
    return names


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("shape", "axes"), SHAPES, ids=str)
def test_forward_and_gradient(engine: Engine, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """y = relu(n scale + shift + r), from a sum of two; then its gradient, which reads x and not n."""
    small = statistics_shape(shape, axes)

    def forward(a: Value, b: Value, r: Value, scale: Value, shift: Value) -> list[Value]:
        x = a + b
        n, m, v = emit_all("normalize", x, axes=axes, epsilon=1e-5)
        return [x, m, v, ops.relu(n * scale + shift + r)]

    arrays = [normal(*shape, seed=seed) for seed in range(3)]
    arrays[0] += 3
    names = check(engine, forward, *arrays, normal(*small, seed=4), normal(*small, seed=5))
    assert names == ["fused_normalization"]

    def gradient(dy: Value, other: Value, x: Value, m: Value, v: Value, scale: Value, shift: Value) -> list[Value]:
        n = (x - m) * ops.rsqrt(v + 1e-5)
        dz = ops.select(n * scale + shift <= 0.0, 0.0, dy + other)
        dx, sums, slopes = emit_all("normalize_gradient", dz, n, v, scale, axes=axes, epsilon=1e-5)
        return [dz, dx + other, sums, slopes]

    x = arrays[0].astype(np.float64)
    m, v = x.mean(axes, keepdims=True).astype(np.float32), x.var(axes, keepdims=True).astype(np.float32)
    names = check(
        engine, gradient, arrays[1], arrays[2], arrays[0], m, v, normal(*small, seed=4), normal(*small, seed=5)
    )
    assert names == ["fused_normalization"]


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(
    ("shape", "axes", "last"),
    [((6, 40), (1,), 40), ((3, 7, 12), (1, 2), 12), ((9, 6), (0,), 6), ((1, 40), (1,), 40), ((40,), (0,), 40)],
)
def test_scales_along_the_elements(engine: Engine, shape: tuple[int, ...], axes: tuple[int, ...], last: int) -> None:
    """Layer norm: scale and shift have one number per element of a row, or of a part of it."""

    def forward(x: Value, scale: Value, shift: Value, weights: Value) -> list[Value]:
        n, _, _ = emit_all("normalize", x * weights, axes=axes, epsilon=1e-5)
        return [n * scale + shift]

    weights = normal(shape[0], *(1,) * (len(shape) - 1), seed=3)
    names = check(engine, forward, normal(*shape) + 2, normal(last, seed=1), normal(last, seed=2), weights)
    assert names == ["fused_normalization"]


@pytest.mark.usefixtures("plans")
def test_bfloat16(engine: Engine) -> None:
    """Rounded where the steps say so, and nowhere else."""

    def forward(x: Value, r: Value, scale: Value) -> list[Value]:
        narrow = ops.convert(x, bfloat16())
        n, _, _ = emit_all("normalize", narrow, axes=(0, 1), epsilon=1e-5)
        y = ops.convert(ops.relu(ops.convert(n, FLOAT32) * scale + r), bfloat16())
        return [ops.convert(y, FLOAT32), y]

    names = check(engine, forward, normal(8, 40, 16) + 3, normal(8, 40, 16, seed=1), normal(1, 1, 16, seed=2), scale=64)
    assert names == ["fused_normalization", "convert"]  # what others read in float32 is converted there


def test_what_others_read_first_stays_apart(engine: Engine) -> None:
    """A value read by another step before the normalisation is made before that one."""

    def forward(a: Value, w: Value, scale: Value) -> list[Value]:
        x = ops.relu(a)
        y = ops.matmul(x, w)
        n, _, _ = emit_all("normalize", x + y, axes=(1,), epsilon=1e-5)
        return [n * scale]

    names = check(engine, forward, normal(6, 16), normal(16, 16, seed=1), normal(16, seed=2))
    assert names == ["relu", "matmul", "fused_normalization"]


def test_views_of_other_orders_stay_apart(engine: Engine) -> None:
    def forward(a: Value, b: Value) -> list[Value]:
        n, _, _ = emit_all("normalize", a + ops.transpose(b), axes=(1,), epsilon=1e-5)
        return [n * 2.0 + ops.transpose(b)]

    names = check(engine, forward, normal(6, 16), normal(16, 6, seed=1))
    assert names == ["add", "fused_normalization", "add"]


#: Shape, reduced axes, axis of channels, channels of a group: channels-last (short and long groups, of one channel, of
#: all, of more than a vector and than 512), channels-first, sequences, volumes.
GROUPS = [
    ((3, 5, 6, 8), (1, 2), 3, 4), ((2, 4, 5, 12), (1, 2), 3, 3), ((2, 17, 96), (1,), 2, 32), ((3, 20, 7), (1,), 2, 1),
    ((2, 18, 600), (1,), 2, 600), ((9, 16, 16, 10), (1, 2), 3, 2), ((3, 6, 4, 5), (2, 3), 1, 3),
    ((9, 4, 33), (2,), 1, 2), ((2, 6, 3, 4, 5), (2, 3, 4), 1, 6), ((2, 3, 4, 5, 6), (1, 2, 3), 4, 2),
    ((1, 4, 4, 6), (1, 2), 3, 3),
]  # fmt: skip


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize(("shape", "axes", "axis", "size"), GROUPS, ids=str)
def test_groups_of_channels(threads: int, shape: tuple[int, ...], axes: tuple[int, ...], axis: int, size: int) -> None:
    """Group norm and SiLU, with one scale per channel for all samples; then the gradient, which reads x and not n."""
    engine = Cpu(threads)
    group = {"axes": axes, "axis": axis, "size": size, "epsilon": 1e-5}
    channels = tuple(extent if number == axis else 1 for number, extent in enumerate(shape))

    def forward(a: Value, b: Value, scale: Value, shift: Value) -> list[Value]:
        x = a + b
        n, m, v = emit_all("normalize_groups", x, **group)
        y = n * scale + shift
        return [x, m, v, y * ops.sigmoid(y)]

    arrays = [normal(*shape, seed=seed) for seed in range(2)]
    arrays[0] += 3
    scale, shift = normal(*channels, seed=4), normal(*channels, seed=5)
    assert check(engine, forward, *arrays, scale, shift) == ["fused_normalization"]

    def gradient(dy: Value, other: Value, x: Value, m: Value, v: Value, scale: Value, shift: Value) -> list[Value]:
        n = (x - m) * ops.rsqrt(v + 1e-5)
        y = n * scale + shift
        s = ops.sigmoid(y)
        dz = dy * (s + y * s * (1.0 - s))
        dx, sums, slopes = emit_all("normalize_groups_gradient", dz, n, v, scale, **group)
        return [y * s, dx + other, sums, slopes]

    x = arrays[0] + arrays[1]
    _, m, v = TABLE["normalize_groups"].meaning(x.astype(np.float64), **group)
    names = check(engine, gradient, *arrays[::-1], x, m.astype(np.float32), v.astype(np.float32), scale, shift)
    assert names == ["fused_normalization"]


@pytest.mark.usefixtures("plans")
def test_groups_without_a_scale() -> None:
    def gradient(dy: Value, y: Value, v: Value) -> list[Value]:
        return list(emit_all("normalize_groups_gradient", dy, y, v, axes=(1,), axis=2, size=4, epsilon=1e-5))

    v = np.repeat(normal(3, 1, 2) ** 2, 4, axis=2)
    check(Cpu(1), gradient, normal(3, 20, 8), normal(3, 20, 8, seed=1), v)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("shape", "axes", "axis"), [((3, 40, 32), (1,), 2), ((3, 8, 40), (2,), 1)], ids=str)
def test_groups_in_bfloat16(shape: tuple[int, ...], axes: tuple[int, ...], axis: int) -> None:
    group = {"axes": axes, "axis": axis, "size": 4, "epsilon": 1e-5}

    def forward(x: Value, scale: Value) -> list[Value]:
        n, m, v = emit_all("normalize_groups", ops.convert(x, bfloat16()), **group)
        y = ops.convert(ops.tanh(ops.convert(n, FLOAT32) * scale), bfloat16())
        dx, sums, slopes = emit_all("normalize_groups_gradient", y, n, v, scale, **group)
        return [m, v, sums, slopes, ops.convert(dx, FLOAT32)]

    channels = tuple(extent if number == axis else 1 for number, extent in enumerate(shape))
    check(Cpu(1), forward, normal(*shape) + 3, normal(*channels, seed=2), scale=64)


@pytest.mark.usefixtures("plans")
def test_groups_do_not_depend_on_threads() -> None:
    def forward(x: Value, scale: Value) -> list[Value]:
        n, _, v = emit_all("normalize_groups", x, axes=(1, 2), axis=3, size=4, epsilon=1e-5)
        return [ops.tanh(n * scale), *emit_all("normalize_groups_gradient", x, n, v, scale,
                                               axes=(1, 2), axis=3, size=4, epsilon=1e-5)]  # fmt: skip

    arrays = [normal(9, 8, 8, 12), normal(1, 1, 1, 12, seed=1)]
    found = [outcome(Cpu(threads), forward, arrays, fuses=True)[0] for threads in (1, 3, 8)]
    for others in found[1:]:
        assert [a.tobytes() for a in others] == [a.tobytes() for a in found[0]]


def test_normalized_values_follow_exactly_from_the_statistics_of_groups() -> None:
    """`Traits.exact_statistics`: what the gradient pass computes again is the same to the bit."""

    def forward(x: Value) -> list[Value]:
        n, m, v = emit_all("normalize_groups", x, axes=(1,), axis=2, size=8, epsilon=1e-5)
        return [n, (x - m) * ops.rsqrt(v + 1e-5)]

    (n, again), _, _ = outcome(Cpu(1), forward, [normal(3, 40, 32) + 5], fuses=False)
    assert n.tobytes() == again.tobytes()


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("shape", "axes", "axis"), [((3, 5, 6, 8), (1, 2), 3), ((3, 4, 5, 6), (2, 3), 1)], ids=str)
def test_a_scale_that_samples_share(engine: Engine, shape: tuple[int, ...], axes: tuple[int, ...], axis: int) -> None:
    """Instance norm: every sample has statistics of its own, and all have the same scale."""
    channels = tuple(extent if number == axis else 1 for number, extent in enumerate(shape))

    def gradient(dy: Value, x: Value, v: Value, scale: Value) -> list[Value]:
        return list(emit_all("normalize_gradient", dy * 2.0, x, v, scale, axes=axes, epsilon=1e-5))

    v = normal(*statistics_shape(shape, axes), seed=2) ** 2
    names = check(engine, gradient, normal(*shape), normal(*shape, seed=1), v, normal(*channels, seed=3))
    assert names == ["fused_normalization"]


@pytest.mark.usefixtures("plans")
def test_functions_before_a_normalization(engine: Engine) -> None:
    """What takes long to compute is computed once: the value that is normalised waits where the result will be."""

    def forward(a: Value, scale: Value) -> list[Value]:
        n, _, _ = emit_all("normalize", a * ops.sigmoid(a), axes=(0, 1), epsilon=1e-5)
        return [ops.exp(a) + 1.0, n * scale]

    names = check(engine, forward, normal(8, 40, 16), normal(1, 1, 16, seed=1))
    assert "fused_normalization" in names


@needs_engine
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types(dtype: Any) -> None:
    def forward(x: Value, scale: Value) -> list[Value]:
        n, m, v = emit_all("normalize", x + x, axes=(0,), epsilon=1e-3)
        return [ops.relu(n * scale), ops.convert(n > 0.5, np.dtype(np.int32)), m, v]

    scale = normal(1, 20, seed=1).astype(dtype)
    check(bench.engine(), forward, normal(50, 20).astype(dtype), scale)


@pytest.mark.usefixtures("plans")
def test_masks_and_whole_numbers(engine: Engine) -> None:
    """Booleans and integers beside the normalised value, some of them broadcast along columns or rows."""

    def forward(x: Value, mask: Value, rows: Value, number: Value) -> list[Value]:
        n, _, _ = emit_all("normalize", ops.select(mask, x, 0.0), axes=(0,), epsilon=1e-5)
        positive = n > 0.0
        return [positive, ops.convert(positive, np.dtype(np.int64)) + number, n * rows]

    mask = normal(70, 20) > 0
    number = np.arange(20, dtype=np.int64)
    names = check(engine, forward, normal(70, 20, seed=1), mask, normal(70, 1, seed=2), number)
    assert names == ["fused_normalization"]


@pytest.mark.parametrize("last_first", [False, True])
def test_threads_wait_for_what_is_no_row_of_their_own(last_first: bool) -> None:
    """A scale has as many elements as there are rows, and every thread reads all of it."""

    def forward(x: Value, s: Value) -> list[Value]:
        scale = ops.relu(s)
        n, _, _ = emit_all("normalize", x, axes=(1,), epsilon=1e-5)
        return [n * scale]

    arrays = [normal(40, 40), normal(40, seed=1)]
    with thread_after_thread(last_first=last_first):
        (found,), (expected,), names = outcome(Cpu(5), forward, arrays, fuses=True)
    assert names == ["relu", "fused_normalization"]
    assert_close(found, expected, 16)


@pytest.mark.parametrize("last_first", [False, True])
def test_threads_own_no_rows_of_values_that_lie_in_another_order(last_first: bool) -> None:
    """Of a transposed value, threads normalise the rows of its source; others read those of the result."""

    def forward(x: Value) -> list[Value]:
        n, _, _ = emit_all("normalize", ops.transpose(x, (1, 0, 2)), axes=(2,), epsilon=1e-5)
        return [ops.relu(n)]

    with thread_after_thread(last_first=last_first):
        (found,), (expected,), _ = outcome(Cpu(5), forward, [normal(40, 30, 20)], fuses=False)
    assert_close(found, expected, 16)


def test_a_maximum_of_normalized_values_is_found_again(engine: Engine) -> None:
    """Its gradient compares with numbers of the forward pass: what is computed again may differ in the last bit."""
    expected, found = (Trained(maximal, mlc.Device(engine=one)) for one in (Reference(), engine))
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    for one, other in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
