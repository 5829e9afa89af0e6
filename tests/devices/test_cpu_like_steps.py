"""Steps that are alike share their kernels: the numbers are the same, and errors name the step that failed."""

from __future__ import annotations

import pkgutil

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu import gemm, kernels
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.executable import CpuExecutable
from mlcompute.devices.cpu.kernels import table
from mlcompute.devices.cpu.runtime import like_steps
from mlcompute.devices.cpu.runtime.like_steps import LikeSteps
from mlcompute.ops.op import Array, Value
from tests.devices.kernels import run_on_engine

SYNC = mlc.ExecutionOptions.SYNCHRONOUS


def train(blocks: int) -> tuple[list[float], CpuExecutable]:
    """Three losses of a deep network, and what it was built into."""
    mlc.Platform.set_rng_seed_to(5)
    graph = mlc.Graph()
    x = y = graph.input((4, 6), "x")
    for _ in range(blocks):
        y = graph.add(y, graph.dense(graph.softmax(graph.dense(y, 5, activation="tanh")), 6))
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
    training = mlc.TrainingGraph([graph], loss, mlc.AdamOptimizer(learning_rate=0.01))
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=(4, 6))})
    training.compile(device=mlc.Device(engine=Cpu(2)))
    data = np.random.default_rng(0).standard_normal((4, 6)).astype("f")
    losses = [float(training.execute({"x": data}, {"t": data[::-1]}, options=SYNC).result.data[0]) for _ in range(3)]
    assert training._session.compiled is not None
    (executable,) = training._session.compiled._executables.values()
    assert isinstance(executable, CpuExecutable)
    return losses, executable


def test_a_deep_network_has_the_kernels_of_a_shallow_one() -> None:
    def counts(blocks: int) -> tuple[int, int]:
        calls = train(blocks)[1]._calls
        return len(calls), len(calls.by_entry())

    (few_calls, few_entries), (many_calls, many_entries) = counts(20), counts(40)
    assert many_calls > 1.9 * few_calls
    assert many_entries == few_entries


def test_the_same_numbers_as_with_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, executable = train(20)
    monkeypatch.setattr(LikeSteps, "_attributes", lambda self, step: None)
    apart, alone = train(20)
    assert shared == apart
    assert list(executable.kernels.values()) == list(alone.kernels.values())
    assert list(executable.notes.values()) == list(alone.notes.values())


def test_operands_that_are_one_value_are_another_kind() -> None:
    def describe(x: Value, y: Value) -> list[Value]:
        return [x - y, x - x, y - x, y - y]

    x, y = (np.arange(6, dtype=np.float32) ** power for power in (1, 2))
    for found, expected in zip(run_on_engine(describe, [x, y], 2), (x - y, x - x, y - x, y - y), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, 1.0), (1, True), ((1, 0.0), (1, -0.0)), ("1", 1)])
def test_attributes_that_only_compare_equal_are_others(one: object, other: object) -> None:
    assert like_steps._printed({"a": one}) != like_steps._printed({"a": other})
    assert like_steps._printed({"a": one}) is not None


def test_attributes_that_cannot_be_compared_are_nobodys() -> None:
    assert like_steps._printed({"a": np.zeros(2)}) is None
    assert like_steps._printed({"a": ((1, 2), 3)}) is None


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_shared_kernel_that_fails_says_for_which_layer(bad: int) -> None:
    graph, inputs, rows = mlc.Graph(), {}, []
    for number in range(3):
        inputs[f"i{number}"] = graph.input((3,), f"i{number}", data_type=mlc.DataType.INT32)
        rows.append(graph.embedding(inputs[f"i{number}"], 4, 2, name=f"table{number}"))
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs(inputs)
    inference.add_outputs({f"y{number}": row for number, row in enumerate(rows)})
    inference.compile(device=mlc.Device(engine=Cpu(2)))
    good: dict[str, Array] = {name: np.array([0, 3, 1], np.int32) for name in inputs}
    with pytest.raises(mlc.ExecutionError, match=f"layer 'table{bad}'.*index 4"):
        inference.execute(good | {f"i{bad}": np.array([0, 4, 1], np.int32)}, options=SYNC)
    inference.execute(good, options=SYNC)
    assert all(np.isfinite(row.data).all() for row in rows)


def test_the_table_knows_the_ops_of_every_file() -> None:
    files = [(module.name, module.name) for module in pkgutil.iter_modules(kernels.__path__)]
    files += [(f"gemm.{module.name}", module.name) for module in pkgutil.iter_modules(gemm.__path__)]
    found = {file: getattr(table.module_of(file), "KERNELS", None) for file, name in files if name != "table"}
    assert {file: set(ops) for file, ops in found.items() if ops is not None} == {
        file: set(ops) for file, ops in table.FILES.items()
    }
    tables = {"KERNELS": table.KERNELS, "SUPPORTS": table.SUPPORTS, "READS": table.READS}
    for name, rows in tables.items():
        for file, ops in table.FILES.items():
            assert all(rows[op] is getattr(table.module_of(file), name, {}).get(op) for op in ops), (file, name)


def test_kernels_that_fail_have_words_of_their_own() -> None:
    graph = mlc.Graph()
    inputs = {f"i{number}": graph.input((3,), f"i{number}", data_type=mlc.DataType.INT32) for number in range(3)}
    rows = {f"y{name}": graph.embedding(tensor, 4, 2) for name, tensor in inputs.items()}
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs(inputs)
    inference.add_outputs(rows)
    inference.compile(device=mlc.Device(engine=Cpu(2)))
    assert inference._session.compiled is not None
    (executable,) = inference._session.compiled._executables.values()
    assert isinstance(executable, CpuExecutable)
    assert (np.diff(np.sort(executable._status_of)) >= 16).all(), "that it failed, and the index"
