"""Launches that become one: what is merged, what stays apart, and that no bit of the results changes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.compiler.plan_memory import MemoryPlan
from mlcompute.devices.cuda import executable as module
from mlcompute.devices.cuda.codegen.joined_source import Part
from mlcompute.devices.cuda.executable import CudaExecutable, Work
from mlcompute.devices.cuda.jit import cache
from mlcompute.devices.cuda.kernels.launch import Launch
from mlcompute.devices.cuda.merge_launches import merge_launches
from mlcompute.errors import DeviceError
from mlcompute.ops.op import Array, Value, emit
from tests.devices.cuda_emulator import bench
from tests.devices.cuda_emulator.bench import Described
from tests.devices.models import MODELS, make
from tests.harness import assert_close

pytestmark = bench.needs_engine

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def launches(executable: CudaExecutable) -> list[Launch]:
    return [work for work in executable._work if isinstance(work, Launch)]


def check(fn: Described, arrays: Sequence[Array], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Merged launches give the same bits as all of them one by one, and agree with NumPy. Gives the merged ones."""
    found, expected, executable = bench.run(fn, arrays)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_close(a, b, 4, f"result {number}")
    with monkeypatch.context() as patch:
        patch.setattr(module, "merge_launches", lambda work, plan, runs_in_phases: list(work))
        apart, _, alone = bench.run(fn, arrays)
    assert [a.tobytes() for a in found] == [a.tobytes() for a in apart]
    assert sum(len(each.parts) or 1 for each in launches(executable)) == len(launches(alone))
    return launches(executable)


def total(x: Value, *axes: int) -> Value:
    return emit("sum", x, axes=axes)


def loss(x: Value, y: Value) -> list[Value]:
    """Rows and columns, with and without barriers, in blocks of several sizes."""
    z = ops.exp(x - y)
    rows = total(z * y, 1)
    return [total(rows, 0, 1), total(z, 0), emit("softmax", z, axis=1), ops.transpose(z) * ops.transpose(y)]


def uneven(x: Value, y: Value) -> list[Value]:
    """Small launches of 256 and of 1024 threads."""
    return [total(x, 1), ops.exp(y), total(ops.exp(y), 0, 1)]


def mixed(x: Value, y: Value, z: Value) -> list[Value]:
    """Different kernels that do not depend on each other."""
    return [total(x, 0), ops.exp(x), ops.transpose(y) * ops.transpose(y), total(z, 1), emit("softmax", z, axis=1)]


@pytest.mark.parametrize("shape", [(32, 10), (12, 5), (3, 600), (1, 3000), (40, 24)])
def test_small_launches_are_one_block(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    some = check(loss, [normal(*shape), normal(*shape)], monkeypatch)
    assert some[0].grid == (1, 1, 1)
    assert len(some[0].parts) > 2


def test_barriers_of_fewer_threads_than_the_block_has(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = check(uneven, [normal(1, 700), normal(64, 64) * 0.1], monkeypatch)
    assert "barrier_of" in only.source
    assert only.block[0] == 1024


def test_large_launches_of_one_kernel_are_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(*values: Value) -> list[Value]:
        return [ops.transpose(value) * ops.transpose(value) for value in values]

    arrays = [normal(72 + 4 * number, 56 - 4 * number) for number in range(9)]
    (only,) = check(fn, arrays, monkeypatch)
    assert len(only.parts) == 9
    assert only.grid[0] == sum(part.grid[0] for part in only.parts)


def test_different_kernels_are_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of different sizes, with barriers and without; work that could be done earlier waits for it."""

    only, *_ = check(mixed, [normal(600, 40), normal(60, 60), normal(80, 100)], monkeypatch)
    assert len(only.parts) == 5
    assert only.block[0] == 1024
    assert len({part.source for part in only.parts}) == 5


def test_what_depends_on_another_stays_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Value, y: Value) -> list[Value]:
        a = ops.exp(x)
        b = ops.exp(a)  # the same kernel, but it reads the first's result
        c = ops.exp(y)
        return [ops.exp(b), c]

    some = check(fn, [normal(80, 80) * 0.1, normal(80, 80)], monkeypatch)
    assert [len(each.parts) for each in some] == [2, 0, 0]


def test_memory_of_the_arena_that_changes_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(*values: Value) -> list[Value]:
        return [functools.reduce(lambda a, b: a + b, [total(ops.exp(value), 0) for value in values])]

    check(fn, [normal(300, 40) for _ in range(5)], monkeypatch)


def conflict(a: Work, b: Work, plan: MemoryPlan) -> bool:
    """Does either write memory that the other touches?"""

    def places(values: set[Value]) -> set[object]:
        covered: set[object] = {value for value in values if value not in plan.placements}
        for value in values & plan.placements.keys():
            place = plan.placements[value]
            covered |= set(range(place.offset // 4, -(-(place.offset + place.nbytes) // 4)))
        return covered

    (every, written), (others, others_written) = a.touched, b.touched
    return bool(places(written) & places(others) or places(others_written) & places(every))


@pytest.mark.parametrize("kind", MODELS)
def test_what_depends_on_another_runs_in_the_same_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[Work], list[Work], MemoryPlan]] = []

    def spy(work: Sequence[Work], plan: MemoryPlan, *, runs_in_phases: bool) -> list[Work]:
        seen.append((list(work), merge_launches(work, plan, runs_in_phases=runs_in_phases), plan))
        return seen[-1][1]

    monkeypatch.setattr(module, "merge_launches", spy)
    make(kind, bench.engine()).step()
    work, merged, plan = seen[-1]
    times: dict[Work, tuple[int, int]] = {}
    for number, each in enumerate(merged):
        parts = each.parts if isinstance(each, Launch) and each.parts else [each]
        in_order = "in one block" in each.kernel
        times |= {part: (number, place if in_order else 0) for place, part in enumerate(parts)}
    assert times.keys() == set(work)
    for place, late in enumerate(work):
        for early in work[:place]:
            assert times[early] < times[late] or not conflict(early, late, plan), (early.step, late.step)


@pytest.mark.parametrize("source", ["blockDim.x", "gridDim.x", "threadIdx.y", "blockIdx.y", "__syncthreads_or(1)"])
def test_kernels_that_cannot_be_functions(source: str) -> None:
    text = 'extern "C" __global__ void KERNEL(int* x) {{ x[0] = {}; }}'
    assert Part(text.format("1"), 1, 32).fits_one_block()
    assert not Part(text.format(source), 1, 32).can_be_function()


def test_shared_memory_is_counted() -> None:
    text = """constexpr int WIDTH = 4, RESULTS = 8, LANES = 32;
struct Acc { float v; int at; };
extern "C" __global__ void KERNEL(float* x) {
    __shared__ Acc parts[LANES][WIDTH * RESULTS];
    __shared__ float others[LANES / 32], more[2];
    __shared__ int flag;
}"""
    assert Part(text, 1, 256).shared_bytes == 32 * 4 * 8 * 16 + 4 + 8 + 4
    for unknown in (text.replace("LANES / 32", "unknown()"), text.replace("float others", "Pack<float, 4> others")):
        assert Part(unknown, 1, 256).shared_bytes > 1 << 17


def test_a_training_step_has_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Work]] = []

    def spy(work: Sequence[Work], plan: MemoryPlan, *, runs_in_phases: bool) -> list[Work]:
        made.append(merge_launches(work, plan, runs_in_phases=runs_in_phases))
        return made[-1]

    monkeypatch.setattr(module, "merge_launches", spy)
    make("mlp", bench.engine()).step()
    work = made[0]  # that of the whole step; behind it, of the passes one by one
    names = [each.kernel for each in work if isinstance(each, Launch)]
    # Two products, each with what follows it; the loss and its gradient; products of the gradient pass, dropout's
    # gradient with the sum of a bias; all updates. Libraries have a call for every product.
    assert len(work) <= (9 if bench.ON_GPU else 8), names
    assert names[-1].endswith("of 4")


def test_nvrtc_compiles_merged_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvrtc = pytest.importorskip("mlcompute.devices.cuda.jit.nvrtc")
    try:
        nvrtc.version()
    except DeviceError as error:
        pytest.skip(f"NVRTC is missing: {error.message}")
    monkeypatch.setenv("MLCOMPUTE_CACHE", str(tmp_path))
    merged = check(loss, [normal(32, 10), normal(32, 10)], monkeypatch)
    wide = check(lambda *values: [ops.exp(value) for value in values], [normal(90, 90)] * 3, monkeypatch)
    many = check(mixed, [normal(600, 40), normal(60, 60), normal(80, 100)], monkeypatch)
    blocks = check(uneven, [normal(1, 700), normal(64, 64) * 0.1], monkeypatch)
    sources = [each.source for each in [*merged, *wide, *many, *blocks] if each.parts]
    assert len(sources) == 4
    for architecture in ("sm_80", "sm_90", "sm_100"):
        assert all(cache.machine_code(sources, architecture))
