"""verify: every kind of broken program is caught, and says what is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.assign_offsets import Placement
from mlcompute.compiler.plan_memory import MemoryPlan, planned
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import debugs, verify_plan, verify_program, verify_steps
from mlcompute.ops.op import FLOAT32, TABLE, Step, Trace, Value
from tests.compiler.programs import feed


def sound() -> tuple[Trace, dict[str, Value]]:
    """x -> a -> view -> b -> c, with b read again in the gradient phase, and one assign."""
    trace = Trace()
    x, w = feed(trace, (4, 4)), feed(trace, (4, 4), "parameter")
    a = ops.matmul(x, w)
    view = ops.transpose(a)
    b = view + 1.0
    c = ops.exp(b)
    trace.phase = "gradient"
    d = ops.matmul(b, c)
    trace.phase = "update"
    ops.assign(w, d)
    return trace, {"x": x, "w": w, "a": a, "view": view, "b": b, "c": c, "d": d}


def changed(trace: Trace, index: int, **fields: object) -> list[Step]:
    steps = list(trace.steps)
    steps[index] = dataclasses.replace(steps[index], **fields)
    return steps


def test_a_sound_program_passes() -> None:
    trace, v = sound()
    verify_steps(trace.steps, split=True)
    plan = planned(trace.steps, [v["d"]], rerunnable=True)
    verify_plan(trace.steps, plan, [v["d"]], rerunnable=True)


BROKEN_STEPS: list[tuple[str, Callable[[Trace, dict[str, Value]], list[Step]], str]] = [
    ("order", lambda t, v: [t.steps[1], t.steps[0], *t.steps[2:]], "is used before it exists"),
    ("missing", lambda t, v: t.steps[1:], "is used before it exists"),
    ("twice", lambda t, v: [*t.steps, t.steps[0]], "is defined twice"),
    ("count", lambda t, v: changed(t, 0, results=(v["a"], v["b"])), "1 results expected"),
    ("shape", lambda t, v: changed(t, 0, results=(t.value((4, 5), FLOAT32),)), "the rule says"),
    ("dtype", lambda t, v: changed(t, 3, results=(t.value((4, 4), np.dtype(np.int32)),)), "the rule says"),
    ("target", lambda t, v: changed(t, 5, inputs=(v["x"], v["d"])), "only parameters and states can be assigned"),
    ("input", lambda t, v: changed(t, 3, results=(v["x"],)), "is not a temporary"),
    ("phase", lambda t, v: changed(t, 3, phase="backward"), "there is no phase 'backward'"),
    ("phases", lambda t, v: changed(t, 0, phase="update"), "comes too late"),
]


@pytest.mark.parametrize(("name", "breaks", "says"), BROKEN_STEPS, ids=[name for name, _, _ in BROKEN_STEPS])
def test_broken_steps(name: str, breaks: Callable[..., list[Step]], says: str) -> None:
    trace, values = sound()
    with pytest.raises(AssertionError, match=says):
        verify_steps(breaks(trace, values), split=True)


def test_phases_may_mix_in_fused_programs() -> None:
    trace, _ = sound()
    verify_steps(changed(trace, 0, phase="update"))


def test_old_views_of_overwritten_memory() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3)), feed(trace, (2, 3), "parameter")
    flat = ops.reshape(w, (6,))
    turned = ops.reshape(flat, (3, 2))
    ops.assign(w, x)
    ops.exp(w)
    verify_steps(trace.steps)
    ops.exp(turned)
    with pytest.raises(AssertionError, match=f"%{turned.index} shows what was overwritten since"):
        verify_steps(trace.steps)


def moved(plan: MemoryPlan, value: Value, **fields: int) -> None:
    plan.placements[value] = dataclasses.replace(plan.placements[value], **fields)


BROKEN_PLANS: list[tuple[str, Callable[[MemoryPlan, dict[str, Value]], object], str]] = [
    ("absent", lambda p, v: p.placements.pop(v["a"]), "has no memory"),
    ("small", lambda p, v: moved(p, v["a"], nbytes=4), "has 4 bytes"),
    ("outside", lambda p, v: moved(p, v["d"], offset=p.nbytes), "lies outside the arena"),
    ("negative", lambda p, v: moved(p, v["d"], offset=-64), "lies outside the arena"),
    ("overlap", lambda p, v: moved(p, v["c"], offset=p.placements[v["b"]].offset), "overlap"),
    ("partial", lambda p, v: moved(p, v["c"], offset=p.placements[v["b"]].offset + 16), "overlap"),
    ("short", lambda p, v: moved(p, v["a"], last=1), "is gone by then"),
    ("early", lambda p, v: moved(p, v["c"], first=0), "exists too early or too late"),
    ("crossing", lambda p, v: moved(p, v["b"], last=4), "does not last to be run again"),
    ("kept", lambda p, v: moved(p, v["d"], last=5), "its memory is given back|does not last"),
    ("view", lambda p, v: p.placements.update({v["view"]: Placement(0, 64, 1, 2)}), "has memory of its own"),
    ("chain", lambda p, v: p.views.update({v["c"]: v["view"]}), "shows the view|memory of its own"),
]


@pytest.mark.parametrize(("name", "breaks", "says"), BROKEN_PLANS, ids=[name for name, _, _ in BROKEN_PLANS])
def test_broken_plans(name: str, breaks: Callable[..., object], says: str) -> None:
    trace, v = sound()
    plan = planned(trace.steps, [v["d"]], rerunnable=True)
    breaks(plan, v)
    with pytest.raises(AssertionError, match=says):
        verify_plan(trace.steps, plan, [v["d"]], rerunnable=True)


def test_in_place_is_for_elementwise_steps_with_matching_elements() -> None:
    trace = Trace()
    x = feed(trace, (4, 4))
    a = ops.exp(x)
    b = a + x
    plan = planned(trace.steps, [b])
    assert plan.placements[a].offset == plan.placements[b].offset
    verify_plan(trace.steps, plan, [b])
    for steps in (
        changed(trace, 1, op=TABLE["matmul"]),
        [trace.steps[0], *turned_too(trace, a, b)],
    ):
        short = MemoryPlan({a: Placement(0, 64, 0, len(steps) - 1), b: Placement(0, 64, len(steps) - 1, len(steps))})
        short.views = {s.results[0]: s.inputs[0] for s in steps if s.op.is_view}
        short.nbytes = 64
        with pytest.raises(AssertionError, match="overlap"):
            verify_plan(steps, short, [b])


def turned_too(trace: Trace, a: Value, b: Value) -> list[Step]:
    """b = a + aᵀ: in place, an element would be overwritten before its mirror image reads it."""
    view = trace.value((4, 4), FLOAT32)
    return [Step(TABLE["transpose"], (a,), (view,), {"axes": (1, 0)}), Step(TABLE["add"], (a, view), (b,), {})]


def test_programs_have_their_constants_and_what_they_keep() -> None:
    trace, v = sound()
    program = Program("split", 4, trace.steps, kept={v["d"]})
    program.plan = planned(trace.steps, program.kept, rerunnable=True)
    with pytest.raises(AssertionError, match="has no data"):
        verify_program(program)
    program.constants = dict(trace.constants)
    verify_program(program)
    nobody = trace.value((2,), FLOAT32)
    program.kept.add(nobody)
    program.plan.placements[nobody] = Placement(0, 8, 0, len(trace.steps))
    program.plan.nbytes = 1 << 20
    program.plan.placements[nobody] = Placement(1 << 16, 8, 0, len(trace.steps))
    with pytest.raises(AssertionError, match="nobody computes it"):
        verify_program(program)


def test_compiling_verifies_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_DEBUG", "")
    assert not debugs("verify")
    monkeypatch.setenv("MLC_DEBUG", "graph,verify")
    assert debugs("verify")
    asked: list[str] = []
    monkeypatch.setattr("mlcompute.compiler.verify_program", lambda program: asked.append(program.name))
    x = mlc.Tensor(shape=(2, 3))
    graph = mlc.InferenceGraph()
    graph.node(mlc.ActivationLayer.relu(), source=x)
    graph.compile(device=mlc.Device.cpu())
    assert asked == ["inference"]
