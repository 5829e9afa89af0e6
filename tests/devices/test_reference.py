"""The reference engine: steps by their NumPy meanings, in planned memory, with errors that name the layer."""

from __future__ import annotations

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.program import Program
from mlcompute.devices.device import Executable, Profile
from mlcompute.devices.reference import Reference
from mlcompute.errors import ExecutionError
from mlcompute.ops.op import TABLE, Array, Step, Trace, Value, emit
from tests.compiler.programs import feed


def built(trace: Trace, kept: set[Value], name: str = "split") -> tuple[Executable, Array]:
    plan = planned(trace.steps, kept, rerunnable=name == "split")
    program = Program(name, 1, trace.steps, plan, dict(trace.constants), kept=kept)
    engine = Reference()
    arena = engine.allocate(plan.nbytes)
    assert arena.nbytes == plan.nbytes
    assert arena.host is not None
    return engine.build(program, arena), arena.host


def test_it_has_every_op() -> None:
    assert all(Reference().supports(Step(op, (), (), {})) for op in TABLE.values())


def test_phases_run_apart() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 2)), feed(trace, (2, 2), "parameter")
    y = x * w
    trace.phase = "gradient"
    dw = y * 2.0
    trace.phase = "update"
    ops.assign(w, w - dw)
    executable, _ = built(trace, {y, dw})
    weights = np.full((2, 2), 3.0, np.float32)
    data = np.ones((2, 2), np.float32)
    executable.run_once(Reference(), ("forward",), {x: data, w: weights})
    np.testing.assert_array_equal(executable.read(y), np.full((2, 2), 3.0))
    executable.run_once(Reference(), ("gradient",), {})
    np.testing.assert_array_equal(executable.read(dw), np.full((2, 2), 6.0))
    np.testing.assert_array_equal(weights, np.full((2, 2), 3.0))
    executable.run_once(Reference(), ("update",), {})
    np.testing.assert_array_equal(weights, np.full((2, 2), -3.0))


def test_what_is_read_is_a_copy() -> None:
    trace = Trace()
    x = feed(trace, (3,))
    y = x + 1.0
    executable, _ = built(trace, {y})
    executable.run_once(Reference(), ("forward",), {x: np.zeros(3, np.float32)})
    first = executable.read(y)
    executable.run_once(Reference(), ("forward",), {x: np.ones(3, np.float32)})
    np.testing.assert_array_equal(first, np.ones(3))
    np.testing.assert_array_equal(executable.read(y), np.full(3, 2.0))


def test_views_show_the_memory_of_their_source() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    y = ops.transpose(x + 1.0)
    z = ops.reshape(y, (6,))
    executable, arena = built(trace, {y, z})
    executable.run_once(Reference(), ("forward",), {x: np.arange(6, dtype=np.float32).reshape(2, 3)})
    np.testing.assert_array_equal(executable.read(y), [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(executable.read(z), [1, 4, 2, 5, 3, 6])
    assert arena.nbytes == 64 + 24, "one value and one dense copy of it; the transpose needs nothing"


def test_infinities_and_nan_are_numbers() -> None:
    trace = Trace()
    x = feed(trace, (3,))
    y = ops.log(x)
    executable, _ = built(trace, {y})
    executable.run_once(Reference(), ("forward",), {x: np.float32([-1, 0, 1])})
    np.testing.assert_array_equal(executable.read(y), [np.nan, -np.inf, 0.0])


def test_errors_name_the_layer_the_op_and_the_phase() -> None:
    trace = Trace()
    table, indices = feed(trace, (3, 2)), trace.value((2,), np.dtype(np.int32), "input")
    trace.layer = "words"
    y = emit("take", table, indices, axis=0)
    executable, _ = built(trace, {y})
    with pytest.raises(ExecutionError, match="layer 'words'") as caught:
        executable.run_once(Reference(), ("forward",), {table: np.ones((3, 2), np.float32), indices: np.int32([0, 3])})
    assert "take" in str(caught.value)
    assert "forward" in str(caught.value)
    executable.run_once(Reference(), ("forward",), {table: np.ones((3, 2), np.float32), indices: np.int32([0, 2])})
    np.testing.assert_array_equal(executable.read(y), np.ones((2, 2)))


def test_time_is_counted_by_layer_and_phase() -> None:
    trace = Trace()
    x = feed(trace, (3,))
    trace.layer = "a"
    y = ops.exp(x)
    trace.layer = ""
    z = ops.exp(y)
    trace.layer, trace.phase = "a", "gradient"
    g = z * y
    executable, _ = built(trace, {g})
    profile = Profile()
    executable.run_once(Reference(), ("forward", "gradient"), {x: np.zeros(3, np.float32)}, profile)
    assert set(profile.seconds) == {("a", "forward"), ("(graph)", "forward"), ("a", "gradient")}
    assert all(seconds >= 0 for seconds in profile.seconds.values())
    lines = str(profile).splitlines()
    assert lines[0].split() == ["layer", "forward", "ms", "gradient", "ms", "total", "ms"]
    assert [line.split()[0] for line in lines[1:]] == ["a", "(graph)", "total"]
