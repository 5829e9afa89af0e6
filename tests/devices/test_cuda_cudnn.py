"""cuDNN: constants against its header, plans interpreted in NumPy; our own convolutions on the emulated device;
both on a GPU (where there is one)."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from mlcompute import ops
from mlcompute.devices.cuda import cudnn
from mlcompute.devices.cuda.cudnn import ConvolutionProblem, Direction, trial
from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn import problem_of as convolution_problem
from mlcompute.devices.cuda.cudnn.convolution import by_form
from mlcompute.devices.cuda.cudnn.plan import is_allowed
from mlcompute.devices.cuda.kernels import convolution as convolution_kernels
from mlcompute.ops.op import Array, Trace
from tests.devices.cuda_ops import emulated, gpu, multiplied, run_on
from tests.devices.interpreted_libraries import (
    InterpretedCuda,
    InterpretedPlan,
    assert_products,
    enumerators,
    headers_of,
    interpreted,
    memory_at,
    numbers,
    products_by_libraries,
)
from tests.harness import assert_close, forward

__all__ = ["interpreted", "products_by_libraries"]  # fixtures


def test_constants_of_cudnn_are_those_of_its_header() -> None:
    known = enumerators(headers_of("cudnn_graph_v9.h", "cudnn_version_v9.h"))
    prefixes = {
        "CONVOLUTION_": "CUDNN_ATTR_CONVOLUTION_", "ENGINEHEUR_": "CUDNN_ATTR_ENGINEHEUR_",
        "POINTWISE_": "CUDNN_ATTR_POINTWISE_", "MATMUL_": "CUDNN_ATTR_MATMUL_", "REDUCTION_": "CUDNN_ATTR_REDUCTION_",
        "OPERATION_": "CUDNN_ATTR_OPERATION_", "ENGINECFG_": "CUDNN_ATTR_ENGINECFG_",
        "ENGINE_": "CUDNN_ATTR_ENGINE_", "TENSOR_": "CUDNN_ATTR_TENSOR_",
        "OPERATIONGRAPH_": "CUDNN_ATTR_OPERATIONGRAPH_", "VARIANT_PACK_": "CUDNN_ATTR_VARIANT_PACK_",
        "TYPE_": "CUDNN_TYPE_", "NOTE_": "CUDNN_NUMERICAL_NOTE_", "HEUR_": "CUDNN_HEUR_", "DATA_": "CUDNN_DATA_",
    }  # fmt: skip
    for prefix, theirs in prefixes.items():
        ours = {name: value for name, value in vars(dnn).items() if name.startswith(prefix)}
        assert ours, prefix
        for name, value in ours.items():
            assert known[theirs + name.removeprefix(prefix)] == value, name
    for name in ("HANDLE", "ENGINE_CONFIG", "WORKSPACE_SIZE", "JSON_REPRESENTATION"):
        assert known[f"CUDNN_ATTR_EXECUTION_PLAN_{name}"] == getattr(dnn, f"EXECUTION_PLAN_{name}")
    for name in (
        "CONVOLUTION", "ENGINE", "ENGINECFG", "ENGINEHEUR", "EXECUTION_PLAN", "TENSOR", "VARIANT_PACK", "POINTWISE",
        "MATMUL", "REDUCTION", "OPERATION_POINTWISE", "OPERATION_MATMUL", "OPERATION_REDUCTION", "OPERATION_RESHAPE",
    ):  # fmt: skip
        assert known[f"CUDNN_BACKEND_{name}_DESCRIPTOR"] == getattr(dnn, f"KIND_{name}")
    for name in ("FORWARD", "BACKWARD_FILTER", "BACKWARD_DATA"):
        kind = known[f"CUDNN_BACKEND_OPERATION_CONVOLUTION_{name}_DESCRIPTOR"]
        assert kind == getattr(dnn, f"KIND_CONVOLUTION_{name}")
        short = name.replace("BACKWARD", "BWD")
        tensors = {"FORWARD": "wxy", "BWD_DATA": ("w", "dx", "dy"), "BWD_FILTER": ("dw", "x", "dy")}[short]
        alpha, beta, descriptor, sides = getattr(dnn, f"{name}_ATTRIBUTES")
        stem = f"CUDNN_ATTR_OPERATION_CONVOLUTION_{short}_"
        assert [known[stem + end] for end in ("ALPHA", "BETA", "CONV_DESC")] == [alpha, beta, descriptor]
        assert {side[-1]: known[stem + side.upper()] for side in tensors} == sides


_PAIRS = {"strides": (1, 1), "dilations": (1, 1), "padding": (0, 0, 0, 0), "groups": 1}
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 6), (4, 3, 3, 3), {}),
    "padded": ((2, 3, 5, 6), (4, 3, 3, 3), {"padding": (1, 1, 1, 1)}),
    "more after than before": ((2, 3, 5, 6), (4, 3, 2, 4), {"padding": (0, 1, 1, 2)}),
    "more before than after": ((2, 3, 5, 6), (4, 3, 3, 3), {"padding": (2, 0, 1, 0)}),
    "strides": ((2, 3, 8, 7), (4, 3, 3, 3), {"strides": (2, 3), "padding": (1, 1, 1, 1)}),
    "dilations": ((2, 2, 9, 8), (3, 2, 3, 2), {"dilations": (2, 3)}),
    "all at once": ((1, 3, 8, 3), (2, 3, 3, 2), {"strides": (2, 1), "dilations": (2, 3), "padding": (1, 2, 1, 2)}),
    "windows that leave rows out": ((2, 2, 8, 8), (2, 2, 3, 3), {"strides": (3, 3)}),
    "1x1": ((2, 5, 4, 4), (6, 5, 1, 1), {}),
    "groups": ((2, 4, 5, 5), (6, 2, 3, 3), {"groups": 2, "padding": (1, 1, 1, 1)}),
    "depthwise": ((2, 3, 5, 6), (3, 1, 3, 3), {"groups": 3, "padding": (1, 1, 1, 1)}),
    "depthwise, many channels": ((2, 40, 5, 6), (40, 1, 3, 3), {"groups": 40, "padding": (1, 1, 1, 1)}),
    "depthwise, multiplier": ((2, 3, 7, 5), (6, 1, 3, 2), {"groups": 3, "strides": (2, 1), "dilations": (1, 2)}),
    "padding larger than the kernel": ((1, 2, 3, 3), (2, 2, 2, 2), {"padding": (3, 3, 0, 0)}),
}
#: For the libraries only: too much work for the emulator.
LARGER: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "resnet": ((16, 16, 32, 32), (16, 16, 3, 3), {"padding": (1, 1, 1, 1)}),
    "resnet, strides": ((16, 16, 32, 32), (32, 16, 3, 3), {"padding": (0, 1, 0, 1), "strides": (2, 2)}),
    "first layer": ((8, 3, 32, 32), (64, 3, 7, 7), {"padding": (3, 3, 3, 3), "strides": (2, 2)}),
    "one channel": ((64, 1, 28, 28), (6, 1, 5, 5), {"padding": (2, 2, 2, 2)}),
    "many groups": ((4, 64, 14, 14), (64, 4, 3, 3), {"groups": 16, "padding": (1, 1, 1, 1)}),
    "depthwise": ((4, 64, 28, 28), (64, 1, 3, 3), {"groups": 64, "padding": (1, 1, 1, 1), "strides": (2, 2)}),
    "pointwise": ((8, 64, 14, 14), (256, 64, 1, 1), {}),
    "odd": ((3, 17, 13, 11), (29, 17, 3, 5), {"padding": (1, 2, 2, 2), "dilations": (2, 1)}),
}


def _described(direction: str, case: str, last: bool, table: dict[str, Any]) -> tuple[Any, list[tuple[int, ...]]]:
    """A function on values, and the shapes it is called with."""
    x, w, options = table[case]
    attributes = {**_PAIRS, **options}
    (sy, sx), (dy, dx) = attributes["strides"], attributes["dilations"]
    top, bottom, left, right = attributes["padding"]
    y = (
        x[0], w[0],
        (x[2] + top + bottom - dy * (w[2] - 1) - 1) // sy + 1,
        (x[3] + left + right - dx * (w[3] - 1) - 1) // sx + 1,
    )  # fmt: skip
    if last:
        attributes["channels_last"] = True
    name = "convolution" if direction == "forward" else f"convolution_{direction}_gradient"
    if direction != "forward":
        attributes["shape"] = x if direction == "input" else w

    def image(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[3], shape[1]) if last else shape

    shapes = {"forward": [image(x), w], "input": [image(y), w], "weight": [image(x), image(y)]}[direction]
    return lambda *values: [ops.emit(name, *values, **attributes)], shapes


DIRECTIONS = ("forward", "input", "weight")


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("direct", [False, True], ids=["", "direct"])
def test_our_convolutions(direct: bool, direction: str, case: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "problem_of", lambda step: None)
    if direct:
        monkeypatch.setattr(convolution_kernels, "is_depthwise", lambda step: False)
    fn, shapes = _described(direction, case, last, CONVOLUTIONS)
    arrays = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
    found, kernels = run_on(emulated(), fn, arrays, times=1)
    assert ("depthwise convolution" in kernels) == ("depthwise" in case and not direct)
    assert_close(found[0], forward(fn, *arrays)[0])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_direct_convolutions_of_other_types(direction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "problem_of", lambda step: None)
    for case in ("padded", "depthwise"):
        fn, shapes = _described(direction, case, True, CONVOLUTIONS)
        arrays = [(0.3 * numbers(*shape, seed=number)).astype(dtype) for number, shape in enumerate(shapes)]
        found, _ = run_on(emulated(), fn, arrays, times=1)
        assert_close(found[0], forward(fn, *arrays)[0])


def test_depthwise_convolutions_are_ours_and_others_are_the_librarys() -> None:
    for case, name in (("groups", "cuDNN"), ("depthwise", "depthwise convolution")):
        fn, shapes = _described("forward", case, True, CONVOLUTIONS)
        arrays = [numbers(*shape) for shape in shapes]
        found, kernels = run_on(emulated(), fn, arrays)
        assert kernels == name
        assert_close(found[0], forward(fn, *arrays)[0])


@pytest.mark.parametrize("last", [True, False])
def test_a_convolution_problem_in_plain_numbers(last: bool) -> None:
    for direction in DIRECTIONS:
        fn, shapes = _described(direction, "more after than before", last, CONVOLUTIONS)
        trace = Trace()
        fn(*(trace.value(shape, np.dtype(np.float32), "input") for shape in shapes))
        problem = convolution_problem(trace.steps[-1])
        assert problem is not None
        assert (problem.x, problem.w, problem.y) == ((2, 3, 5, 6), (4, 3, 2, 4), (2, 4, 5, 6))
        assert problem.padding == (0, 1, 1, 2)
        assert problem.reorders_weights == last
        assert problem.memory_strides(problem.x) == ((90, 1, 18, 3) if last else (90, 30, 6, 1))


def test_engines_that_are_not_the_same_in_every_run_are_refused() -> None:
    assert is_allowed([], True)
    assert is_allowed([dnn.NOTE_TENSOR_CORE], True)
    assert not is_allowed([dnn.NOTE_TENSOR_CORE], False)
    assert not is_allowed([dnn.NOTE_NONDETERMINISTIC], True)
    assert not is_allowed([dnn.NOTE_TENSOR_CORE, dnn.NOTE_REDUCED_PRECISION_REDUCTION], True)


class Proposal(NamedTuple):
    """A plan as far as the choice without measurements depends on it."""

    engine: int
    workspace_bytes: int


@pytest.mark.parametrize(
    ("proposals", "channels", "size", "chosen"),
    [
        ([(74, 4096), (56, 2048), (71, 131)], 64, 32, 2),  # the first that works on the images as they lie
        ([(74, 4096), (0, 0), (71, 131)], 64, 32, 2),  # not by the engine for any convolution, which is slow
        ([(74, 4096), (0, 0)], 64, 32, 0),
        ([(0, 0), (74, 4096)], 64, 32, 0),
        ([(48, 4096), (28, 0)], 3, 32, 0),  # rows of pixels that do not fill 16 bytes are brought into others anyway
        ([(48, 4096), (71, 0)], 64, 512, 0),  # large: bringing images into another layout matters little
    ],
)
def test_engines_that_are_chosen_without_measuring(
    proposals: list[tuple[int, int]], channels: int, size: int, chosen: int
) -> None:
    shape = (4, channels, size, size)
    problem = ConvolutionProblem(
        Direction.FORWARD, dnn.DATA_FLOAT, shape, (64, channels, 3, 3), (4, 64, size, size),
        (1, 1), (1, 1), (1, 1, 1, 1), 1, True,
    )  # fmt: skip
    plans: list[Any] = [Proposal(*each) for each in proposals]
    assert by_form(problem, iter(plans)) is plans[chosen]


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_calls_of_cudnn(direction: str, case: str, last: bool, interpreted: InterpretedCuda) -> None:
    fn, shapes = _described(direction, case, last, CONVOLUTIONS)
    arrays = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
    found, kernels = run_on(interpreted, fn, arrays)
    assert ("cuDNN engine 7" in kernels) == ("depthwise" not in case and case != "all at once")
    assert_close(found[0], forward(fn, *arrays)[0])


def test_what_cudnn_has_no_engine_for_is_ours(interpreted: InterpretedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "find_plan", lambda problem, gpu, allows_tf32: None)
    fn, shapes = _described("forward", "padded", True, CONVOLUTIONS)
    arrays = [numbers(*shape) for shape in shapes]
    found, kernels = run_on(interpreted, fn, arrays)
    assert kernels == "direct convolution"
    assert_close(found[0], forward(fn, *arrays)[0])


class RoundingPlan(InterpretedPlan):
    """A plan that rounds its factors to TF32 and does not say so."""

    def run(self, x: int, w: int, y: int, workspace: int) -> None:
        p = self.problem
        for address, shape in ((x, p.x), (w, p.w), (y, p.y)):
            words = memory_at(address, int(np.prod(shape))).view(np.uint32)
            words += 0x1000
            words &= ~np.uint32(0x1FFF)
        super().run(x, w, y, workspace)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_plans_that_round_to_tf32_are_found(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def result_of_constants(plan: InterpretedPlan, value: float) -> Array:
        p = plan.problem
        arrays = [np.full(shape, value, np.float32) for shape in (p.x, p.w, p.y)]
        scratch = np.zeros(100 + 256, np.uint8)
        addresses = [int(array.ctypes.data) for array in arrays]
        plan.run(*addresses, -(-int(scratch.ctypes.data) // 256) * 256)
        return {"forward": arrays[2], "input": arrays[0], "weight": arrays[1]}[direction]

    monkeypatch.setattr(trial, "result_of_constants", result_of_constants)
    for case in ("padded", "strides"):
        fn, shapes = _described(direction, case, False, CONVOLUTIONS)
        trace = Trace()
        fn(*(trace.value(shape, np.dtype(np.float32), "input") for shape in shapes))
        problem = convolution_problem(trace.steps[-1])
        assert trial.keeps_float32(InterpretedPlan(problem))
        assert not trial.keeps_float32(RoundingPlan(problem))


_CASES = [(case, table) for table, cases in (("small", CONVOLUTIONS), ("large", LARGER)) for case in cases]


@pytest.mark.parametrize(("case", "size"), _CASES, ids=[f"{size}-{case}" for case, size in _CASES])
def test_convolutions_on_a_gpu(case: str, size: str) -> None:
    engine = gpu()
    for direction, last, precision in itertools.product(DIRECTIONS, (True, False), ("high", "highest")):
        fn, shapes = _described(direction, case, last, CONVOLUTIONS if size == "small" else LARGER)
        arrays = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
        with multiplied(precision):
            found, kernels = run_on(engine, fn, arrays)
        (expected,) = forward(fn, *(array.astype(np.float64) for array in arrays))
        assert_products(found[0], expected, precision, f"{direction}, last {last}, {precision}, {kernels}")
