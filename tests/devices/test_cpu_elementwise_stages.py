"""Elementwise loops that are cut into stages: the same bits as op by op, whatever the shape, and sound plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.fuse_elementwise import fuse_elementwise
from mlcompute.devices.cpu.kernels.elementwise_stages import BLOCK, stages_of
from mlcompute.devices.loop_nest import LoopNest, Operands, elementwise_nest
from mlcompute.ops.bfloat16 import bfloat16
from mlcompute.ops.op import Array, Step, Trace, Value, emit_all, inner_steps
from tests.compiler.programs import apply
from tests.devices.kernels import _engine, run_steps

Formula = Callable[..., list[Value]]


def convert(x: Value, dtype: object) -> Value:
    return emit_all("convert", x, to=dtype)[0]


def chain(x: Value, b: Value) -> list[Value]:
    z = x + b
    return [z * ops.sigmoid(ops.tanh(z) * 1.702)]


def keeps_both(x: Value, b: Value) -> list[Value]:
    """What is stored early is also read late, and the second operand is read last."""
    z = ops.exp(x)
    return [z, ops.tanh(ops.sigmoid(z) * 0.5) * b + ops.log(z)]


def rounds(x: Value, b: Value) -> list[Value]:
    """Stored in bfloat16, read as that, and stored again."""
    z = convert(x + b, bfloat16())
    wide = convert(z, np.dtype(np.float32))
    return [z, convert(wide * ops.sigmoid(wide), bfloat16())]


def masks(x: Value, b: Value) -> list[Value]:
    """A boolean lies between two stages."""
    positive = emit_all("greater", x, b)[0]
    return [emit_all("select", positive, ops.exp(ops.sigmoid(ops.tanh(x))), ops.log(ops.exp(b)))[0]]


FORMULAS = [chain, keeps_both, rounds, masks]


def both(formula: Formula, arrays: list[Array], threads: int, views: Formula | None = None) -> tuple[list[Array], ...]:
    """Results of the fused loop, and of a kernel per op."""
    found = []
    for fuses in (True, False):
        trace = Trace()
        inputs = [trace.value(array.shape, array.dtype, "input") for array in arrays]
        results = formula(*(inputs if views is None else views(*inputs)))
        if fuses:
            apply(fuse_elementwise, trace, results)
            fused = [step for step in trace.steps if step.op.name == "fused_elementwise"]
            assert any(len(stages_of(nest_of(step, trace))) > 1 for step in fused)
        found.append(run_steps(_engine(threads), trace, inputs, results, arrays, 2)[0])
    return tuple(found)


def nest_of(step: Step, trace: Trace) -> LoopNest:
    return elementwise_nest(step, inner_steps(step), Operands(trace.steps, {}))


def assert_same_bits(found: tuple[list[Array], ...]) -> None:
    for fused, apart in zip(*found, strict=True):
        assert fused.tobytes() == apart.tobytes()


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((1000,), (1000,)),
        ((BLOCK + 1,), (1,)),
        ((3, BLOCK), (3, BLOCK)),
        ((2, 2 * BLOCK + 5), (2 * BLOCK + 5,)),
        ((37, 24), (24,)),
        ((37, 24), (37, 1)),
        ((130, 48), (48,)),
        ((5, 4, 33), (4, 1)),
        ((9, 16), (1, 1)),
        ((6, 7), (7,)),
    ],
)
def test_bits_are_those_of_single_ops(formula: Formula, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(each).astype(np.float32) for each in (shape, other)]
    for threads in (1, 3):
        assert_same_bits(both(formula, arrays, threads))


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1)])
def test_operands_that_are_views(formula: Formula, axes: tuple[int, ...]) -> None:
    """Half of the columns of one, and another with its axes exchanged."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(each).astype(np.float32) for each in ((4, 20, 96), (4, 48, 20))]
    arrays[1] = arrays[1] if axes != (0, 1, 2) else np.ascontiguousarray(arrays[1].swapaxes(1, 2))

    def views(x: Value, b: Value) -> list[Value]:
        half = emit_all("slice", x, start=(0, 0, 0), end=(4, 20, 48), stride=(1, 1, 1))[0]
        return [half, b if axes == (0, 1, 2) else ops.transpose(b, axes)]

    assert_same_bits(both(formula, arrays, 2, views))


@pytest.mark.parametrize("formula", FORMULAS)
def test_results_may_lie_where_operands_lay(formula: Formula) -> None:
    """Nothing reads the matmuls' results later, so those of the loop take over their memory."""
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(each).astype(np.float32) for each in ((40, 12), (12, 96), (12, 96))]

    def multiplied(x: Value, v: Value, w: Value) -> list[Value]:
        return [ops.matmul(x, v), ops.matmul(x, w)]

    assert_same_bits(both(formula, arrays, 2, multiplied))


@pytest.mark.parametrize("formula", FORMULAS)
def test_plans_are_sound(formula: Formula) -> None:
    trace = Trace()
    x, b = (trace.value((64, 64), np.dtype(np.float32), "input") for _ in range(2))
    results = formula(x, b)
    apply(fuse_elementwise, trace, results)
    (step,) = trace.steps
    nest = nest_of(step, trace)
    stages = stages_of(nest)
    assert [each for stage in stages for each in stage.ops] == list(nest.ops)
    assert sorted(number for stage in stages for number in stage.stores) == list(
        range(len(nest.loads), len(nest.operands))
    )
    kept: set[Value] = set()
    for stage in stages:
        known = {nest.operands[number].value for number in stage.loads} | set(stage.reads)
        assert kept.issuperset(stage.reads)
        for each in stage.ops:
            assert known.issuperset(each.inputs)
            known.update(each.results)
        assert known.issuperset(stage.keeps)
        assert known.issuperset(nest.operands[number].value for number in stage.stores)
        kept.update(stage.keeps)
    first_store = next(number for number, stage in enumerate(stages) if stage.stores)
    assert not any(stage.loads for stage in stages[first_store + 1 :])


def test_short_chains_stay_one_loop() -> None:
    trace = Trace()
    x, b = (trace.value((64, 64), np.dtype(np.float32), "input") for _ in range(2))
    results = [ops.relu(x * 2.0 + b)]
    apply(fuse_elementwise, trace, results)
    assert len(stages_of(nest_of(trace.steps[0], trace))) == 1
