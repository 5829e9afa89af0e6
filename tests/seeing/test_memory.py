"""The memory timeline: what the plan says, told in words, and bytes in use recounted one by one."""

from __future__ import annotations

from mlcompute.compiler.program import Program
from mlcompute.seeing.memory import MemoryTimeline, memory_timeline
from mlcompute.seeing.memory_map import MOST_ALLOCATIONS, memory_map
from mlcompute.seeing.summary import main_program
from tests.nets import Regression, sgd
from tests.seeing.nets import Classifier


def of(net: Classifier) -> tuple[Program, MemoryTimeline]:
    program = main_program(net.training)
    assert program is not None
    return program, memory_timeline(net.training, program)


def test_every_placement_is_told_once() -> None:
    program, timeline = of(Classifier())
    plan = sorted((p.offset, p.nbytes, p.first) for p in program.plan.placements.values())
    assert sorted((t.offset, t.nbytes, t.first) for t in timeline.allocations) == plan
    assert timeline.nbytes == program.plan.nbytes
    assert len(timeline.phases) == len(timeline.live) == len(timeline.layers) == len(program.steps)
    assert all(0 <= t.first <= t.last < len(program.steps) for t in timeline.allocations)


def test_bytes_in_use_are_those_some_allocation_covers() -> None:
    program, timeline = of(Classifier())
    for step in range(len(program.steps)):
        covered = set()
        for allocation in timeline.allocations:
            if allocation.first <= step <= allocation.last:
                covered.update(range(allocation.offset, allocation.offset + allocation.nbytes))
        assert timeline.live[step] == len(covered), f"step {step}"
    assert max(timeline.live) == timeline.live[timeline.peak] <= timeline.nbytes


def test_tensors_have_names() -> None:
    _, timeline = of(Classifier())
    what = {allocation.what for allocation in timeline.allocations}
    assert {"gradient of fc's weights", "gradient of conv's weights", "result of loss"} <= what
    assert [allocation.what for allocation in timeline.allocations if allocation.kept] == ["result of loss"]
    assert {allocation.phase for allocation in timeline.allocations} <= {"forward", "gradient", "update", "workspace"}
    assert all(allocation.layer for allocation in timeline.allocations)


def test_the_map_draws_the_largest_and_says_how_many_are_missing() -> None:
    _, timeline = of(Classifier())
    picture = memory_map(timeline)
    assert picture.hidden == 0
    assert picture.svg.count("data-tensor=") == len(picture.data) == len(timeline.allocations)
    many = MemoryTimeline(
        timeline.allocations * 60, timeline.phases, timeline.layers, timeline.ops, timeline.live, timeline.nbytes
    )
    large = memory_map(many)
    assert len(large.data) == MOST_ALLOCATIONS
    assert large.hidden == len(many.allocations) - MOST_ALLOCATIONS


def test_there_is_none_before_compile() -> None:
    net = Regression(sgd())
    assert main_program(net.graph) is None
    assert main_program(net.training) is not None
