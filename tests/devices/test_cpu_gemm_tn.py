"""Weight gradients by gemm_tn, alone and with the update that follows them a few rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.fuse_elementwise import fused
from mlcompute.compiler.fuse_update_into_matmul import fuse_update_into_matmul
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_program
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.gemm import gemm_tn, matmul
from mlcompute.devices.cpu.runtime import schedule
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import FLOAT32, Array, Trace, Value, run_meaning
from mlcompute.ops.views import transpose
from tests.compiler.programs import apply
from tests.devices.kernels import Bench
from tests.harness import assert_close

#: depth, rows, columns
SIZES = [(1, 8, 16), (32, 128, 784), (7, 9, 17), (64, 37, 53), (100, 24, 48), (127, 8, 100), (128, 65, 47), (3, 90, 16)]
#: The same with long sums, or a b that is read in blocks of columns.
LARGE = [(129, 64, 64), (200, 70, 1500), (512, 130, 700), (100, 200, 3001), (300, 97, 1024)]


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples at once: slices of them have tests of their own."""
    for module in (matmul, gemm_tn):
        monkeypatch.setattr(module, "suits_slices", lambda step: False)


def turned(a: Value, b: Value) -> list[Value]:
    return [transpose(a), b]


def arrays(depth: int, rows: int, columns: int) -> list[Array]:
    rng = np.random.default_rng([depth, rows, columns])
    return [rng.standard_normal((depth, extent)).astype("f") for extent in (rows, columns)]


@pytest.mark.parametrize(("depth", "rows", "columns"), [*SIZES, *LARGE])
def test_products(depth: int, rows: int, columns: int) -> None:
    a, b = arrays(depth, rows, columns)
    bench = Bench(matmul.KERNELS, "matmul", [a, b], views=turned)
    assert bench.entries is not None
    assert bench.entries[0].kernel == "gemm_tn"
    exact = a.T.astype(np.float64) @ b
    size = np.abs(a.T).astype(np.float64) @ np.abs(b)
    for threads in (1, 2, 5):
        (y,) = bench.run(threads)
        assert (np.abs(y - exact) <= 2 * np.finfo(np.float32).eps * np.sqrt(depth + 1) * size).all()
        assert y.tobytes() == bench.run(1)[0].tobytes(), "the number of threads changes the sums"


def test_a_product_of_what_is_not_a_number() -> None:
    a, b = arrays(5, 16, 33)
    a[2, 3], b[1, 7], b[4, 32] = np.nan, np.inf, -np.inf
    Bench(matmul.KERNELS, "matmul", [a, b], views=turned).check(assert_close)


def test_other_layouts_and_sizes_go_elsewhere() -> None:
    a, b = arrays(8, 16, 32)
    for operands, views in (
        ([a, b[:, :8].copy()], turned),  # too few columns
        ([a[:, :4].copy(), b], turned),  # too few rows
        ([a.T.copy(), b], None),  # a is not turned
        ([a, b.T.copy()], lambda a, b: [transpose(a), transpose(b)]),
        ([np.zeros((100, 16), "f"), np.zeros((100, 4096), "f")], turned),  # b would not stay in the cache
        ([np.zeros((129, 16), "f"), np.zeros((129, 64), "f")], turned),  # long sums of few rows
        ([np.zeros((513, 64), "f"), np.zeros((513, 64), "f")], turned),  # longer sums
    ):
        bench = Bench(matmul.KERNELS, "matmul", operands, views=views)
        assert bench.entries is not None
        assert bench.entries[0].kernel != "gemm_tn"


# With an update --------------------------------------------------------------------------------------------------


class Updated:
    """Momentum after aᵀ b: one step, or a product and an update."""

    def __init__(self, depth: int, rows: int, columns: int, joined: bool) -> None:
        self.trace = trace = Trace()
        self.a, self.b = (trace.value((depth, extent), FLOAT32, "input") for extent in (rows, columns))
        self.rate = trace.value((), FLOAT32, "scalar", "rate")
        self.weight = trace.value((rows, columns), FLOAT32, "parameter", "w")
        self.state = trace.value((rows, columns), FLOAT32, "state", "m")
        trace.phase = "gradient"
        g = ops.matmul(ops.transpose(self.a), self.b)
        trace.phase = "update"
        m = self.state * 0.9 + g
        new = self.weight - m * self.rate
        ops.assign(self.state, m)
        ops.assign(self.weight, new)
        trace.steps = fused(trace.steps, [])
        if joined:
            apply(fuse_update_into_matmul, trace)
        self.steps = trace.steps

    def run(self, engine: Cpu, data: Sequence[Array]) -> list[Array]:
        plan = planned(self.steps, [], workspace=engine.workspace)
        program = Program("test", 1, self.steps, plan, dict(self.trace.constants))
        verify_program(program)
        executable = engine.build(program, engine.allocate(plan.nbytes))
        memory = {value: array.copy() for value, array in zip(self.values, data, strict=True)}
        for _ in range(3):
            executable.run_once(engine, ("gradient", "update"), memory)
        return [memory[self.weight], memory[self.state]]

    @property
    def values(self) -> list[Value]:
        return [self.a, self.b, self.rate, self.weight, self.state]


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize(("depth", "rows", "columns"), [*SIZES, *LARGE])
def test_an_update_that_follows(
    depth: int, rows: int, columns: int, fetches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what it reads is fetched from main memory while its gradient is summed."""
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    monkeypatch.setattr(gemm_tn, "_UNCACHED", 0 if fetches else gemm_tn._UNCACHED)
    rng = np.random.default_rng(0)
    weight, state = (rng.standard_normal((rows, columns)).astype("f") for _ in range(2))
    data = [*arrays(depth, rows, columns), np.array(0.1, "f"), weight, state]
    expected = Updated(depth, rows, columns, joined=False).run(Cpu(1), data)
    updated = Updated(depth, rows, columns, joined=True)
    assert [step.op.name for step in updated.steps] == ["transpose", "matmul_update"]
    for threads in (1, 2, 5):
        for found, same in zip(updated.run(Cpu(threads), data), expected, strict=True):
            assert found.tobytes() == same.tobytes()
    # And as NumPy means it.
    memory: dict[Value, Array] = {**updated.trace.constants, **dict(zip(updated.values, data, strict=True))}
    for _ in range(3):
        for step in updated.steps:
            memory.update(zip(step.results, run_meaning(step, [memory[v] for v in step.inputs]), strict=True))
    assert_close(memory[updated.weight], expected[0])


def test_no_memory_for_the_gradient() -> None:
    updated, apart = (Updated(32, 128, 784, joined) for joined in (True, False))
    engine = Cpu(2)
    sizes = [planned(each.steps, [], workspace=engine.workspace).nbytes for each in (updated, apart)]
    assert sizes[1] == 128 * 784 * 4
    assert sizes[0] == gemm_tn.matmul_update_workspace(updated.steps[-1])


def described(**settings: Any) -> mlc.TrainingGraph:
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    x = graph.input((16, 300), "x")
    graph.dense(graph.dense(x, 64, activation="relu"), 4)
    adam = mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.01, **settings))
    training = mlc.TrainingGraph([graph], mlc.LossLayer.softmax_cross_entropy(mlc.ReductionType.MEAN), adam)
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(16, 4))})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Cpu(2)))
    training.execute({"x": np.ones((16, 300))}, {"t": np.eye(4)[np.arange(16) % 4]})
    return training


def names(training: mlc.TrainingGraph) -> list[str]:
    return [step.op.name for step in training.programs["fused 16"].steps]


def test_what_a_program_shows() -> None:
    training = described()
    assert names(training).count("matmul_update") == 1  # the last layer has too few rows
    program = training.programs["fused 16"]
    assert "gemm_tn + fused elementwise (" in str(program)
    assert "rows at a time" in str(program)


def test_a_gradient_others_need_is_made_whole() -> None:
    clips = {"applies_gradient_clipping": True, "gradient_clipping_type": mlc.GradientClippingType.BY_GLOBAL_NORM}
    assert "matmul_update" not in names(described(**clips, maximum_clipping_norm=1.0))


def test_a_product_of_two_parameters() -> None:
    """Each gradient reads the other parameter as it was before the step."""

    def trained(engine: Engine) -> list[Array]:
        graph = mlc.Graph()
        pair = [graph.parameter(shape) for shape in ((64, 256), (256, 256))]
        for number, each in enumerate(pair):
            each.data = np.random.default_rng(number).standard_normal(each.shape).astype("f")
        graph.minimize((pair[0] @ pair[1]) ** 2)
        training = mlc.TrainingGraph([graph], optimizer=mlc.SGDOptimizer(learning_rate=1.0))
        training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=engine))
        training.execute({}).wait()
        return [each.data for each in pair]

    for found, expected in zip(trained(Cpu(2)), trained(Reference()), strict=True):
        assert_close(found, expected)
