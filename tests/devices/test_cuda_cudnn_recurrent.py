"""Recurrent layers by cuDNN: interpreted in NumPy on the emulated device, and on a GPU, against the ops' meaning."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.compiler.copy_strided_operands import copy_strided_operands
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.recurrent_reserve import recurrent_reserve
from mlcompute.compiler.request import Request
from mlcompute.devices.cuda import cudnn, recurrent_choice, tuning
from mlcompute.devices.cuda.cudnn import RecurrentProblem
from mlcompute.devices.cuda.cudnn import recurrent as descriptors
from mlcompute.devices.cuda.libraries import Gpu, building_for
from mlcompute.devices.reference import Reference
from mlcompute.errors import DeviceError
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import TABLE, Array, Trace, Value
from mlcompute.ops.rnn import CELLS
from tests.devices.cuda_ops import gpu, multiplied
from tests.devices.interpreted_libraries import (
    TF32,
    InterpretedCuda,
    enumerators,
    fastest_of,
    headers_of,
    interpreted,
    memory_at,
)
from tests.devices.models import MODELS, Job, Net, make
from tests.harness import assert_close

__all__ = ["interpreted"]  # fixture

_IS_CHOSEN = recurrent_choice.is_chosen
KINDS = ["lstm", "gru", "tanh", "relu"]


def gates_of(cell: str) -> tuple[int, int]:
    """Gates with weights, and with biases, of ours."""
    return (4, 4) if cell == "lstm" else (CELLS[cell].input_gates, CELLS[cell].gates)


def arrays_of(cell: str, n: int, t: int, inputs: int, hidden: int, dtype: Any = np.float32) -> list[Array]:
    """x, wx, wh, b, first states; then gradients of y and of the last states."""
    rng, (gates, biases) = np.random.default_rng([n, t, inputs, hidden]), gates_of(cell)
    states = [(n, hidden)] * (2 if cell == "lstm" else 1)
    shapes = [(n, t, inputs), (gates * hidden, inputs), (gates * hidden, hidden), (biases * hidden,), *states]
    every = (*shapes, (n, t, hidden), *states)
    arrays: list[Array] = [rng.standard_normal(shape).astype(np.float32) for shape in every]
    arrays[1] /= np.sqrt(np.float32(inputs))
    arrays[2] *= np.float32(0.5) / np.sqrt(np.float32(hidden))
    arrays[len(shapes)] /= np.sqrt(np.float32(t))
    if cell == "relu":  # far from its kink: on which side of it a sum is depends on how it was rounded
        arrays[2] *= np.float32(0.2)
        arrays[3] = np.where(arrays[3] > 0, np.float32(8), np.float32(-8))
    return [array.astype(dtype) for array in arrays]


def described(cell: str, reverse: bool, trains: bool) -> Any:
    """The layer's results, and with `trains` gradients of its inputs."""
    options: dict[str, Any] = {"reverse": reverse, "has_lengths": False}
    name = "lstm" if cell == "lstm" else "rnn"
    if name == "rnn":
        options["cell"] = cell

    def fn(*values: Value) -> list[Value]:
        states = 2 if cell == "lstm" else 1
        inputs, given = values[: 4 + states], values[4 + states :]
        made = ops.emit_all(name, *inputs, **options)
        shown = list(made[: 1 + states])
        if not trains:
            return shown
        derivative: Any = TABLE[name].derivative
        trace = inputs[0].trace
        trace.phase = "gradient"
        return [*shown, *derivative((*given, *[None] * (len(made) - len(given))), made, *inputs, **options)]

    return fn


def run_with(
    engine: Any, fn: Any, arrays: list[Array], times: int = 2, style: str = "fused"
) -> tuple[list[Array], str]:
    """Results, through the passes that concern recurrent layers; and kernels. All runs must give the same bits."""
    trace = Trace()
    inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
    results = list(fn(*inputs))
    program = Program(style, 1)
    context = Context(Request(), engine, program, trace=trace, kept=frozenset(results))
    steps = copy_strided_operands(recurrent_reserve(trace.steps, context), context)
    phases = list(dict.fromkeys(step.phase for step in steps))
    plan = planned(steps, results, workspace=engine.workspace, rerunnable=program.runs_in_phases)
    program = Program(style, 1, steps, plan, dict(trace.constants), kept=set(results))
    executable = engine.build(program, engine.allocate(plan.nbytes))
    runs: list[list[Array]] = []
    for _ in range(times):
        if program.runs_in_phases:
            for phase in (*phases, *phases[1:]):  # the gradient twice
                executable.run_once(engine, (phase,), dict(zip(inputs, arrays, strict=True)))
        else:
            executable.run_once(engine, tuple(phases), dict(zip(inputs, arrays, strict=True)))
        runs.append([executable.read(value) for value in results])
        for a, b in zip(runs[0], runs[-1], strict=True):
            assert a.tobytes() == b.tobytes(), "a second run gives other numbers"
    return runs[0], ", ".join(executable.kernels.values())


def expected_of(cell: str, reverse: bool, trains: bool, arrays: list[Array]) -> list[Array]:
    """The same by the ops' meaning, in float64."""
    options: dict[str, Any] = {"reverse": reverse, "has_lengths": False}
    if cell != "lstm":
        options["cell"] = cell
    name, states = ("lstm", 2) if cell == "lstm" else ("rnn", 1)
    wide = [array.astype(np.float64) for array in arrays]
    inputs, given = wide[: 4 + states], wide[4 + states :]
    x, wx, wh, _, *first = inputs
    y, *made = TABLE[name].meaning(*inputs, **options)
    found = [y, *made[:states]]
    if trains:
        kept = (y, *made[states:])
        found += TABLE[f"{name}_gradient"].meaning(*given, x, wx, wh, *first, *kept, **options)
    return found


class InterpretedRecurrent:
    """Stands for `cudnn.RecurrentPlan`: gaps between the parts of the weights, and a reserve that is used up."""

    driver: Any
    workspace_bytes = 1000

    def __init__(self, problem: RecurrentProblem) -> None:
        p = self.problem = problem
        matrices = (p.gates * p.hidden * p.inputs, p.gates * p.hidden * p.hidden)
        self.places = (5, 5 + matrices[0] + 3, 5 + sum(matrices) + 3 + 2)
        self.biases = (2 if p.cell == "gru" else 1) * p.gates
        self.weight_bytes = 4 * (self.places[2] + self.biases * p.hidden)
        self.reserve_bytes = 64 if p.trains else 0

    def ours(self, weights: Array) -> list[Array]:
        """Views of the weight space in the order of our gates: parts of wx, of wh, and of b."""
        p = self.problem
        sizes = (p.gates * p.hidden * p.inputs, p.gates * p.hidden * p.hidden, self.biases * p.hidden)
        flat = [weights[place : place + size] for place, size in zip(self.places, sizes, strict=True)]
        wx, wh = flat[0].reshape(p.gates, p.hidden, p.inputs), flat[1].reshape(p.gates, p.hidden, p.hidden)
        b = flat[2].reshape(self.biases, p.hidden)
        if p.cell == "gru":  # r, z, n
            assert not b[3:5].any()
            wx, b = wx[[2, 0, 1]], b[[2, 0, 1, 5]]
        return [wx.reshape(-1, p.inputs), wh.reshape(-1, p.hidden), b.reshape(-1)]

    def arrays(self, addresses: Any, *shapes: Any) -> list[Array]:
        found = []
        for address, shape in zip(addresses, shapes, strict=True):
            if address is not None:
                assert address % 16 == 0
                found.append(memory_at(address, int(np.prod(shape))).reshape(shape))
        return found

    def weights(self, address: int) -> Array:
        return memory_at(address, self.weight_bytes // 4)

    def forward(self, stream: int, addresses: Any) -> None:
        self.driver.enqueue(lambda: self.run_forward(addresses), stream)

    def run_forward(self, addresses: Any) -> None:
        p = self.problem
        x, weights, h0, c0, y, h, c, work, reserve = addresses
        memory_at(work, self.workspace_bytes // 4)[:] = np.nan
        state, sequence = (p.samples, p.hidden), (p.samples, p.times, p.hidden)
        given = self.arrays((x, h0, c0), (p.samples, p.times, p.inputs), state, state)
        results = self.arrays((y, h, c), sequence, state, state)
        inputs = [given[0], *self.ours(self.weights(weights)), *given[1:]]
        expected = expected_of(p.cell, False, False, inputs)
        for result, array in zip(results, expected, strict=True):
            result[:] = array
        assert (reserve is None) == (not p.trains)
        if reserve is not None:
            assert reserve % 256 == 0
            memory_at(reserve, 16)[:] = 7.0

    def copy_reserve(self, stream: int, reserve: int, copy: int) -> None:
        assert copy % 256 == 0
        self.driver.enqueue(lambda: memory_at(copy, 16).__setitem__(slice(None), memory_at(reserve, 16)), stream)

    def backward(self, stream: int, addresses: Any) -> None:
        self.driver.enqueue(lambda: self.run_backward(addresses), stream)

    def run_backward(self, addresses: Any) -> None:
        p = self.problem
        dy, dh, dc, x, weights, h0, c0, y, dx, gradients, dh0, dc0, work, reserve = addresses
        memory_at(work, self.workspace_bytes // 4)[:] = np.nan
        state, sequence = (p.samples, p.hidden), (p.samples, p.times, p.hidden)
        given = self.arrays((dy, dh, dc), sequence, state, state)
        of_x = (p.samples, p.times, p.inputs)
        first = self.arrays((x, h0, c0), of_x, state, state)
        kept = memory_at(reserve, 16)
        if not kept.any():  # compile calls libraries once, before there is data
            return
        assert (kept == 7.0).all(), "the reserve is not what the forward pass left"
        inputs = [first[0], *self.ours(self.weights(weights)), *first[1:]]
        kept[:] = np.nan
        expected = expected_of(p.cell, False, True, [*inputs, *given])
        (found_y,) = self.arrays((y,), sequence)
        assert_close(found_y, expected[0])
        new = expected[len(given) :]
        results = self.arrays((dx, dh0, dc0), of_x, state, state)
        for result, array in zip(results, (new[0], *new[4:]), strict=True):
            result[:] = array
        space = self.weights(gradients)
        space[:] = np.nan
        wx, wh, b = new[1:4]
        parts = b.reshape(-1, p.hidden)
        if p.cell == "gru":
            wx = wx.reshape(3, p.hidden, p.inputs)[[1, 2, 0]]
            parts = parts[[1, 2, 0, 1, 2, 3]]
        for place, array in zip(self.places, (wx, wh, parts), strict=True):
            space[place : place + array.size] = array.reshape(-1)


@pytest.fixture
def by_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All recurrent layers are cuDNN's."""
    monkeypatch.setattr(recurrent_choice, "is_chosen", lambda engine, step, problem: True)


@pytest.fixture
def library(interpreted: InterpretedCuda, by_cudnn: None, monkeypatch: pytest.MonkeyPatch) -> InterpretedCuda:
    monkeypatch.setattr(cudnn, "find_recurrent_plan", lambda problem, gpu, tf32: InterpretedRecurrent(problem))
    monkeypatch.setattr(InterpretedRecurrent, "driver", interpreted.driver, raising=False)
    return interpreted


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("cell", KINDS)
def test_what_the_library_is_given(library: InterpretedCuda, cell: str, trains: bool, reverse: bool) -> None:
    arrays = arrays_of(cell, 3, 4, 5, 6)
    if not trains:
        arrays = arrays[: 6 if cell == "lstm" else 5]
    found, kernels = run_with(library, described(cell, reverse, trains), arrays)
    assert f"cuDNN {cell}" in kernels
    assert (f"cuDNN {cell} gradient" in kernels) == trains
    for a, b in zip(found, expected_of(cell, reverse, trains, arrays), strict=True):
        assert_close(a, b, scale=4.0)


@pytest.mark.parametrize("cell", KINDS)
def test_the_gradient_may_run_twice(library: InterpretedCuda, cell: str) -> None:
    arrays = arrays_of(cell, 2, 3, 4, 5)
    found, kernels = run_with(library, described(cell, False, True), arrays, style="split")
    assert "gradient" in kernels
    for a, b in zip(found, expected_of(cell, False, True, arrays), strict=True):
        assert_close(a, b, scale=4.0)


@pytest.mark.parametrize("reverse", [False, True])
def test_views_are_copied(library: InterpretedCuda, reverse: bool) -> None:
    n, t, inputs, hidden = 3, 4, 5, 6
    arrays = arrays_of("lstm", n, t, inputs, hidden)[:6]
    arrays[4:] = [np.full((1, 1), 0.25, np.float32), np.zeros((1, 1), np.float32)]
    stored = [np.ascontiguousarray(arrays[0].transpose(1, 0, 2)), np.ascontiguousarray(arrays[1].T), *arrays[2:]]

    def fn(x: Value, wx: Value, wh: Value, b: Value, h0: Value, c0: Value) -> Any:
        states = (ops.broadcast(h0, (n, hidden)), ops.broadcast(c0, (n, hidden)))
        return described("lstm", reverse, False)(ops.transpose(x, (1, 0, 2)), ops.transpose(wx), wh, b, *states)

    found, kernels = run_with(library, fn, stored)
    assert "cuDNN lstm" in kernels
    whole = [*arrays[:4], *(np.broadcast_to(array, (n, hidden)) for array in arrays[4:])]
    for a, b in zip(found, expected_of("lstm", reverse, False, whole), strict=True):
        assert_close(a, b, scale=4.0)


def test_constants_are_those_of_the_headers() -> None:
    known = enumerators(headers_of("cudnn_adv_v9.h", "cudnn_ops_v9.h", "cudnn_graph_v9.h"))
    for name in (
        "RNN_RELU", "RNN_TANH", "LSTM", "GRU", "RNN_ALGO_STANDARD", "RNN_SINGLE_INP_BIAS", "RNN_DOUBLE_BIAS",
        "UNIDIRECTIONAL", "LINEAR_INPUT", "RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED", "DEFAULT_MATH", "TENSOR_OP_MATH",
        "FMA_MATH", "FWD_MODE_INFERENCE", "FWD_MODE_TRAINING", "WGRAD_MODE_ADD",
    ):  # fmt: skip
        assert known[f"CUDNN_{name}"] == getattr(descriptors, name), name


def tolerance(precision: str, dtype: Any) -> float:
    """Of results whose size is about 1: the largest error of up to a million, on bfloat16 of gates and states, too."""
    return 48 * 2.0**-8 if dtype != np.float32 else 16 * TF32 if precision == "high" else 5e-5


SIZES = [
    (1, 1, 1, 1), (3, 5, 4, 7), (64, 5, 33, 7), (3, 128, 20, 64), (64, 5, 100, 512), (1, 40, 64, 512),
    (3, 5, 64, 1024), (64, 1, 64, 1024),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("precision", ["high", "highest", "bf16"])
@pytest.mark.parametrize("cell", KINDS)
def test_layers_on_a_gpu(by_cudnn: None, cell: str, precision: str, size: tuple[int, int, int, int]) -> None:
    engine = gpu()
    dtype: Any = bfloat16() if precision == "bf16" else np.float32
    arrays = arrays_of(cell, *size, dtype=dtype)
    with multiplied("highest" if precision == "highest" else "high"):
        for reverse in (False, True):
            for trains in (False, True):
                given = arrays if trains else arrays[: 6 if cell == "lstm" else 5]
                found, kernels = run_with(engine, described(cell, reverse, trains), given)
                assert f"cuDNN {cell}" in kernels
                for number, (a, b) in enumerate(zip(found, expected_of(cell, reverse, trains, given), strict=True)):
                    size_ = max(1.0, float(np.sqrt(np.mean(b**2))))
                    error = float(np.abs(a.astype(np.float64) - b).max()) / size_
                    assert error < tolerance(precision, dtype), f"result {number}, {reverse=}, {trains=}: {error}"


@pytest.mark.parametrize("cell", KINDS)
def test_equal_bits_on_a_gpu(by_cudnn: None, cell: str) -> None:
    run_with(gpu(), described(cell, False, True), arrays_of(cell, 64, 20, 96, 512), times=20)


def check_choices(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLCOMPUTE_TUNE=1 both ways run; what was found is used without it."""
    remembered: dict[str, bytes] = {}
    monkeypatch.setattr(tuning, "store_choice", remembered.__setitem__)
    monkeypatch.setattr(tuning, "recall", remembered.get)
    for cell in ("lstm", "gru"):
        for trains in (False, True):
            arrays = arrays_of(cell, 3, 2, 4, 6)
            given = arrays if trains else arrays[: 6 if cell == "lstm" else 5]
            monkeypatch.setenv("MLCOMPUTE_TUNE", "1")
            fn = described(cell, False, trains)
            _, tuned = run_with(engine, fn, given)
            monkeypatch.delenv("MLCOMPUTE_TUNE")
            assert run_with(engine, fn, given)[1] == tuned
            (key,) = (each for each in remembered if "RecurrentProblem" in each)
            assert remembered[key] in (b"cuDNN", b"ours")
            remembered[key] = b"ours" if remembered[key] == b"cuDNN" else b"cuDNN"
            assert run_with(engine, fn, given)[1] != tuned
            remembered.clear()
            assert "cuDNN" not in run_with(engine, fn, given)[1]  # so small a layer, by the rule


@pytest.mark.parametrize("winner", [0, 1])
def test_measured_choices_are_remembered(
    library: InterpretedCuda, monkeypatch: pytest.MonkeyPatch, winner: int
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(recurrent_choice, "is_chosen", _IS_CHOSEN)
    monkeypatch.setattr(tuning, "fastest", fastest_of(library, winner, measured))
    check_choices(library, monkeypatch)
    assert measured == [2, 2, 2, 2]


def test_what_cannot_be_built_is_not_chosen(library: InterpretedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(program: Program, *arena: Any) -> Any:
        if any(step.op.name == "recurrent" for step in program.steps):
            raise DeviceError("no room")
        return InterpretedCuda.build(library, program, *arena)

    def fastest(runs: Sequence[tuning.Run], sizes: Sequence[int]) -> int:
        with pytest.raises(DeviceError, match="no room"):
            runs[1](library.stream, [])
        runs[0](library.stream, [])
        library.synchronize()
        return 0

    remembered: dict[str, bytes] = {}
    monkeypatch.setattr(recurrent_choice, "is_chosen", _IS_CHOSEN)
    monkeypatch.setattr(library, "build", build)
    monkeypatch.setattr(tuning, "fastest", fastest)
    monkeypatch.setattr(tuning, "store_choice", remembered.__setitem__)
    monkeypatch.setattr(tuning, "recall", remembered.get)
    monkeypatch.setenv("MLCOMPUTE_TUNE", "1")
    _, kernels = run_with(library, described("lstm", False, True), arrays_of("lstm", 3, 2, 4, 6))
    assert "cuDNN" not in kernels
    assert b"ours" in remembered.values()


def test_measured_choices_are_remembered_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_choices(gpu(), monkeypatch)


def stack(net: Net, x: mlc.Tensor) -> mlc.Tensor:
    """Two layers in both directions, and the last output of another."""
    mlc.Platform.set_rng_seed_to(7)
    x = net.graph.lstm(x, 6, layers=2, bidirectional=True)
    x = net.graph.gru(x, 7, returns_sequences=False)
    return net.dense(x, 5)


def check_training(engine: Any, monkeypatch: pytest.MonkeyPatch, in_phases: bool) -> Job:
    """Steps in one call, or pass by pass with the gradient twice; parameters then are those of the reference."""
    monkeypatch.setitem(MODELS, "recurrences", ((4, 3, 5), stack))
    jobs = [make("recurrences", each) for each in (Reference(), engine)]
    for job in jobs:
        for _ in range(3):
            if in_phases:
                job.forward()
                job.gradient()
                job.gradient()
                job.update()
            else:
                job.step()
    for found, expected in zip(jobs[1].lasting(), jobs[0].lasting(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-5)
    programs = jobs[1].training.programs.values()
    names = [step.op.name for program in programs for step in program.steps]
    assert {"recurrent", "recurrent_gradient"} <= set(names)
    assert "lstm" not in names
    assert "rnn" not in names
    return jobs[1]


@pytest.mark.parametrize("in_phases", [False, True])
def test_layers_train(library: InterpretedCuda, monkeypatch: pytest.MonkeyPatch, in_phases: bool) -> None:
    check_training(library, monkeypatch, in_phases)


@pytest.mark.parametrize("in_phases", [False, True])
def test_layers_train_on_a_gpu(by_cudnn: None, monkeypatch: pytest.MonkeyPatch, in_phases: bool) -> None:
    with multiplied("highest"):
        check_training(gpu(), monkeypatch, in_phases)


def test_memory_is_accounted_for_on_a_gpu(by_cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: the arena and optimizer state, parameters, what is fed, constants."""
    engine: Any = gpu()
    gc.collect()
    before = engine.memory().buffers
    training = check_training(engine, monkeypatch, False).training
    gc.collect()
    parameters = sum(slot.tensor.data.nbytes for layer in training.layers for slot in layer.parameters.values())
    built: Any = list(training._session.compiled._built.values())  # type: ignore[union-attr]
    rest = sum(one._constants.nbytes + one._statuses._words.nbytes for one in built)
    rest += sum(block.nbytes for one in built for block in one._blocks._blocks)
    assert engine.memory().buffers - before == training.device_memory_size + parameters + rest


@pytest.mark.parametrize(
    ("problem", "is_faster"),
    [
        (RecurrentProblem("lstm", 0, 1, 50, 64, 256, False), True),
        (RecurrentProblem("gru", 0, 1, 50, 64, 768, False), True),
        (RecurrentProblem("gru", 0, 1, 50, 64, 768, True), False),
        (RecurrentProblem("tanh", 0, 1, 50, 64, 2048, True), True),
        (RecurrentProblem("lstm", 0, 1, 10, 64, 256, False), False),
        (RecurrentProblem("lstm", 0, 2, 50, 64, 256, False), False),
        (RecurrentProblem("lstm", 0, 1, 50, 64, 128, False), False),
    ],
    ids=str,
)
def test_the_rule_is_for_the_gpus_it_was_measured_on(problem: RecurrentProblem, is_faster: bool) -> None:
    assert not recurrent_choice.is_faster(problem)  # built for none
    for capability in ((9, 0), (8, 0)):
        with building_for(Gpu(0, "a GPU", capability, 132)):
            assert recurrent_choice.is_faster(problem) == (is_faster and capability == (9, 0))


def test_problems_are_told_apart() -> None:
    one = RecurrentProblem("gru", 0, 8, 5, 32, 256, trains=False)
    assert one != dataclasses.replace(one, trains=True)
    assert [dataclasses.replace(one, cell=cell).gates for cell in KINDS] == [4, 3, 1, 1]
