"""Convolutions by Winograd's form: as accurate as the sum of products, for every border, whoever computes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mlcompute.devices.cpu.codegen.code import vector_lanes
from mlcompute.devices.cpu.kernels import convolution
from mlcompute.devices.cpu.kernels.winograd_transforms import Form, forms, transposed
from mlcompute.ops.op import TABLE, Array
from tests.devices.kernels import Bench

#: Channels are counted in vectors of this machine, or in two of 4 elements: filters in one direction need so many.
CHANNELS = max(8, vector_lanes())
# samples, C, O, height, width, kernel, padding (top, bottom, left, right)
CASES = [
    (8, 1, 1, 16, 16, 3, (1, 1, 1, 1)),
    (5, 2, 1, 15, 17, 3, (1, 0, 0, 2)),  # the last tiles reach beyond the image
    (5, 1, 3, 13, 14, 3, (0, 0, 0, 0)),
    (3, 1, 2, 9, 70, 3, (2, 2, 2, 2)),  # a row of tiles is more than a block
    (16, 4, 4, 4, 4, 3, (1, 1, 1, 1)),  # a block is more than a sample
    (64, 1, 5, 1, 2, 3, (1, 1, 1, 1)),
    (1, 2, 2, 40, 20, 3, (2, 0, 1, 2)),
    (8, 2, 4, 14, 14, 5, (2, 2, 2, 2)),
    (3, 1, 2, 23, 17, 5, (4, 0, 1, 3)),
    (5, 8, 8, 1, 70, (1, 3), (0, 0, 1, 1)),
    (2, 8, 4, 1, 501, (1, 5), (0, 0, 2, 2)),  # sections of a long row
    (3, 8, 8, 2, 401, (1, 5), (0, 0, 0, 4)),
    (3, 4, 8, 45, 3, (5, 1), (4, 1, 0, 0)),
]


EXTENTS = [(2, 2), (3, 3), (4, 4), (5, 5), (1, 2), (1, 3), (1, 4), (1, 5), (1, 1)]


@pytest.mark.parametrize("form", [across for taps in EXTENTS for _, across in forms(*taps)])
def test_forms_are_convolutions(form: Form) -> None:
    """In exact enough arithmetic, one dimension: y = Aᵀ ((G w) * (Bᵀ x)), and its gradient of w."""
    rng = np.random.default_rng(0)
    to_y, from_w, from_x = (np.array(matrix, np.float64) for matrix in (form.to_y, form.from_w, form.from_x))
    x, w, dy = (rng.standard_normal(extent) for extent in (form.inputs, form.taps, form.outputs))
    np.testing.assert_allclose(to_y @ ((from_w @ w) * (from_x @ x)), np.correlate(x, w, "valid"), rtol=1e-12)
    np.testing.assert_allclose(
        from_w.T @ ((to_y.T @ dy) * (from_x @ x)), np.correlate(x, dy, "valid"), rtol=1e-12, atol=1e-12
    )
    assert transposed(transposed(form.to_y)) == form.to_y


def arrays_of(case: tuple[Any, ...]) -> dict[str, tuple[list[Array], dict[str, Any]]]:
    """The op and its two gradients for one case: arrays and attributes, channels-last."""
    samples, c, o, height, width, kernel, padding, *others = case
    dilations, groups, stride = [*others, *[(1, 1), 1, 1][len(others) :]]
    c, o = c * CHANNELS, o * CHANNELS
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    rng = np.random.default_rng(height)
    x = rng.standard_normal((samples, height, width, c)).astype("f")
    w = (rng.standard_normal((o, c // groups, *kernel)) / kernel[1]).astype("f")
    reach = [dilation * (taps - 1) for dilation, taps in zip(dilations, kernel, strict=True)]
    extents = height + padding[0] + padding[1] - reach[0], width + padding[2] + padding[3] - reach[1]
    extents = tuple(-(-extent // (stride if taps > 1 else 1)) for extent, taps in zip(extents, kernel, strict=True))
    dy = rng.standard_normal((samples, *extents, o)).astype("f")
    strides = {"strides": tuple(stride if taps > 1 else 1 for taps in kernel), "dilations": dilations}
    common = {**strides, "padding": padding, "groups": groups, "channels_last": True}
    return {
        "convolution": ([x, w], common),
        "convolution_input_gradient": ([dy, w], {**common, "shape": (samples, c, height, width)}),
        "convolution_weight_gradient": ([x, dy], {**common, "shape": w.shape}),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
def test_winograd_means_what_the_op_means(name: str, case: tuple[Any, ...]) -> None:
    compare(name, *arrays_of(case)[name])


def compare(name: str, arrays: list[Array], attributes: dict[str, Any]) -> None:
    """With the op's meaning in float64."""
    bench = Bench(convolution.KERNELS, name, arrays, attributes, workspaces=convolution.WORKSPACES)
    assert bench.entries is not None
    assert any(entry.kernel.startswith("winograd") for entry in bench.entries)
    with np.errstate(all="ignore"):  # NumPy's own matmul warns on an emulated aarch64
        exact = TABLE[name].meaning(*(array.astype(np.float64) for array in arrays), **attributes)
        plain = TABLE[name].meaning(*arrays, **attributes)
    scale = np.abs(exact).max()
    (found,) = bench.check(lambda found, expected: None)
    assert np.abs(found - exact).max() < 6e-6 * scale
    # No worse than a handful of times the plain sum of products in float32.
    assert np.abs(found - exact).max() < 30 * max(np.abs(plain - exact).max(), 1e-7 * scale)


#: The same, and the dilation.
DILATED = [
    (5, 2, 1, 15, 17, 3, (2, 2, 2, 2), (2, 2)),  # grids of different sizes
    (3, 1, 2, 13, 14, 3, (0, 0, 0, 0), (3, 2)),
    (8, 1, 2, 3, 20, 3, (4, 4, 4, 4), (4, 4)),  # fewer rows than grids
    (2, 1, 1, 9, 6, 3, (9, 7, 9, 9), (9, 9)),  # a tap lies beside every pixel but its own
    (1, 2, 2, 40, 20, 3, (8, 3, 1, 6), (4, 3)),
    (3, 1, 2, 9, 140, 3, (2, 2, 2, 2), (1, 2)),
    (3, 1, 2, 23, 26, 5, (4, 0, 8, 3), (2, 2)),
    (2, 8, 4, 1, 501, (1, 5), (0, 0, 8, 0), (1, 2)),
    (2, 8, 4, 1, 400, (1, 3), (0, 0, 256, 0), (1, 128)),
    (3, 4, 8, 45, 3, (5, 1), (4, 1, 0, 0), (3, 7)),
]


@pytest.mark.parametrize("case", DILATED)
@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
def test_dilated(name: str, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One convolution per grid of pixels that lie as far apart as taps."""
    for gain in ("_GAIN", "_GAIN_DILATED"):
        monkeypatch.setattr(f"mlcompute.devices.cpu.kernels.winograd_sizes.{gain}", math.inf)
    test_winograd_means_what_the_op_means(name, case)


#: As the first ones; their stride is two.
STRIDED = [
    (8, 1, 1, 16, 16, 4, (1, 1, 1, 1)),
    (5, 2, 3, 15, 18, 4, (0, 1, 2, 0)),  # rows and columns that no filter reaches
    (64, 1, 5, 3, 4, 4, (1, 1, 1, 1)),
    (2, 1, 2, 40, 133, 4, (2, 2, 2, 2)),  # a row of tiles is more than a block
    (8, 2, 4, 14, 14, 5, (2, 2, 2, 2)),  # the last taps of some phases do not exist
    (3, 1, 2, 23, 17, 5, (3, 0, 1, 3)),
    (5, 3, 2, 16, 13, 6, (2, 2, 2, 2)),
    (16, 1, 1, 9, 16, 3, (1, 1, 0, 1)),
    (16, 6, 8, 8, 8, 4, (1, 1, 1, 1)),
    (2, 2, 3, 1, 201, (1, 8), (0, 0, 3, 3)),
    (3, 3, 1, 33, 2, (5, 1), (1, 0, 0, 0)),
]


#: As the first ones; there are no forms for so many taps.
LARGE = [
    (4, 1, 2, 20, 23, 7, (3, 3, 3, 3)),
    (5, 2, 1, 15, 17, 7, (0, 6, 2, 1)),
    (2, 3, 2, 40, 31, 9, (4, 4, 4, 4)),  # three times three taps
    (3, 1, 1, 30, 34, 11, (5, 5, 5, 5)),
    (3, 2, 3, 12, 19, 4, (1, 2, 0, 3)),
    (3, 2, 3, 12, 19, 2, (0, 1, 1, 0)),
    (2, 6, 8, 24, 24, 6, (2, 3, 2, 3)),
    (2, 2, 3, 1, 200, (1, 7), (0, 0, 3, 3)),
    (2, 1, 2, 3, 77, (1, 8), (0, 0, 7, 0)),
    (3, 3, 1, 50, 2, (11, 1), (5, 2, 0, 0)),
]


@pytest.fixture(params=[2, 16], ids=["2 cores", "16 cores"])
def always(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Winograd's algorithm wherever it can be; threads of a machine with many cores share parts of images."""
    for name, value in (("_LONGER", 0.0), ("_PER_FILTER", 1e-9), ("_LEAST_TILES", 1), ("_GAIN", math.inf)):
        monkeypatch.setattr(f"mlcompute.devices.cpu.kernels.winograd_sizes.{name}", value)
    monkeypatch.setattr("mlcompute.devices.cpu.kernels.winograd_sizes.machine_slices", lambda: request.param)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("case", "stride"), [*((case, 2) for case in STRIDED), *((case, 1) for case in LARGE)])
@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
def test_as_several_small_filters(name: str, case: tuple[Any, ...], stride: int) -> None:
    """Even and odd rows and columns as images of their own, or a large filter in parts."""
    test_winograd_means_what_the_op_means(name, (*case, (1, 1), 1, stride))


# samples, C, O, depth, height, width, kernel, padding (front, back, top, bottom, left, right), dilation along the depth
VOLUMES = [
    (2, 1, 2, 5, 12, 12, (3, 3, 3), (1, 1, 1, 1, 1, 1), 1),
    (1, 2, 1, 4, 13, 10, (2, 3, 3), (2, 1, 0, 2, 1, 0), 1),  # planes that no tap of the filter lies in
    (3, 3, 2, 6, 9, 17, (3, 5, 5), (0, 0, 2, 2, 4, 0), 2),
    (2, 2, 4, 3, 14, 14, (1, 3, 3), (0, 0, 1, 1, 1, 1), 1),
    (1, 6, 8, 4, 8, 8, (3, 3, 3), (1, 1, 1, 1, 1, 1), 1),
    (2, 8, 8, 3, 1, 40, (3, 1, 3), (1, 1, 0, 0, 1, 1), 1),
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("case", VOLUMES)
@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
def test_volumes(name: str, case: tuple[Any, ...]) -> None:
    """The planes under the taps along the depth as channels of an image."""
    samples, c, o, *extents, kernel, padding, dilation = case
    c, o, rng = c * vector_lanes(), o * vector_lanes(), np.random.default_rng(0)
    x = rng.standard_normal((samples, *extents, c)).astype("f")
    w = (rng.standard_normal((o, c, *kernel)) / kernel[2]).astype("f")
    reach = [dilation * (kernel[0] - 1), kernel[1] - 1, kernel[2] - 1]
    results = [
        extent + before + after - taps
        for extent, before, after, taps in zip(extents, padding[::2], padding[1::2], reach, strict=True)
    ]
    dy = rng.standard_normal((samples, *results, o)).astype("f")
    attributes: dict[str, Any] = {
        "strides": (1, 1, 1), "dilations": (dilation, 1, 1), "padding": padding, "groups": 1, "channels_last": True,
    }  # fmt: skip
    arrays = [x, w]
    if name == "convolution_input_gradient":
        arrays, attributes["shape"] = [dy, w], (samples, c, *extents)
    elif name == "convolution_weight_gradient":
        arrays, attributes["shape"] = [x, dy], w.shape
    compare(name, arrays, attributes)


def test_stride_two_pays_for_filters_of_four_taps_and_large_images() -> None:
    """And at stride one filters of any extent, as long as there are tiles enough."""
    for stride, kernel, extent, is_winograd in (
        (2, 4, 32, True), (2, 5, 32, True), (2, 3, 32, False), (2, 4, 6, False), (2, 2, 32, False),
        (1, 7, 32, True), (1, 9, 32, True), (1, 7, 8, False),
    ):  # fmt: skip
        vectors = 64 // CHANNELS
        case = (4, vectors, vectors, extent, extent, kernel, (1, 1, 1, 1), (1, 1), 1, stride)
        arrays, attributes = arrays_of(case)["convolution"]
        bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
        assert any(entry.kernel.startswith("winograd") for entry in bench.entries or ()) == is_winograd


def test_tiles_that_reach_far_beyond_their_grid_do_not_pay() -> None:
    """With a dilation of 12, grids of an image of 32x32 have three pixels in a row, and many taps lie beside it."""
    for dilation, is_winograd in ((2, True), (12, False)):
        padding, dilations = (dilation,) * 4, (dilation, dilation)
        arrays, attributes = arrays_of((4, 4, 4, 32, 32, 3, padding, dilations))["convolution"]
        bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
        assert any(entry.kernel.startswith("winograd") for entry in bench.entries or ()) == is_winograd


#: The same, and the number of groups; c and o are those of all groups.
GROUPED = [
    (5, 2, 2, 15, 17, 3, (1, 0, 0, 2), (1, 1), 2),
    (3, 6, 3, 13, 14, 3, (0, 0, 0, 0), (1, 1), 3),  # more inputs than outputs
    (16, 2, 8, 4, 4, 3, (1, 1, 1, 1), (1, 1), 2),
    (3, 4, 4, 15, 17, 3, (2, 2, 2, 2), (2, 2), 2),
    (3, 4, 8, 45, 3, (5, 1), (4, 1, 0, 0), (1, 1), 4),
    (5, 2, 2, 15, 17, 3, (1, 1, 1, 1), (1, 1), 4),  # two groups in a product
    (5, 1, 1, 15, 17, 3, (0, 1, 1, 1), (1, 1), 2),
    (3, 1, 1, 15, 17, 5, (2, 2, 2, 2), (1, 1), 2),
]


@pytest.mark.skipif(vector_lanes() < 8, reason="vectors are as wide as the smallest groups")
@pytest.mark.parametrize("case", GROUPED)
@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
def test_grouped(name: str, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A product per group, or per vector of smaller ones."""
    monkeypatch.setattr("mlcompute.devices.cpu.kernels.winograd_sizes._GAIN", math.inf)
    test_winograd_means_what_the_op_means(name, case)


@pytest.mark.skipif(vector_lanes() < 16, reason="with short vectors, none of these groups pay")
@pytest.mark.parametrize(("inputs", "is_winograd"), [(2, False), (4, True)])
def test_very_small_groups_do_not_pay_for_the_zeros(inputs: int, is_winograd: bool) -> None:
    groups = 4 * CHANNELS // inputs
    arrays, attributes = arrays_of((8, 4, 4, 16, 16, 3, (1, 1, 1, 1), (1, 1), groups))["convolution"]
    bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
    assert any(entry.kernel == "winograd 4x4" for entry in bench.entries or ()) == is_winograd


#: The same with channels as they are: vectors are filled up with zeros.
UNFILLED = [
    (4, 24, 24, 16, 16, 3, (1, 1, 1, 1)),
    (5, 30, 50, 14, 13, 5, (0, 0, 0, 0)),
    (3, 17, 33, 15, 17, 3, (1, 0, 0, 2)),
    (2, 7, 16, 23, 21, 3, (2, 2, 2, 2)),
    (1, 48, 9, 40, 20, 3, (2, 0, 1, 2)),
    (3, 75, 100, 2, 150, (1, 5), (0, 0, 0, 4)),
    (64, 20, 70, 1, 2, 3, (1, 1, 1, 1)),
    (3, 17, 33, 15, 17, 3, (2, 2, 3, 3), (2, 3)),
]


@pytest.mark.parametrize("case", UNFILLED)
@pytest.mark.parametrize("name", ["convolution", "convolution_input_gradient", "convolution_weight_gradient"])
def test_channels_that_do_not_fill_vectors(name: str, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for gain in ("_GAIN", "_GAIN_UNFILLED"):
        monkeypatch.setattr(f"mlcompute.devices.cpu.kernels.winograd_sizes.{gain}", math.inf)
    monkeypatch.setattr(convolution, "_OWN", ())
    monkeypatch.setattr("tests.devices.test_cpu_winograd.CHANNELS", 1)
    test_winograd_means_what_the_op_means(name, case)


@pytest.mark.parametrize(("channels", "is_winograd"), [(2, False), (2 * vector_lanes() - 1, True)])
def test_few_channels_do_not_pay_for_the_zeros(
    channels: int, is_winograd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.devices.test_cpu_winograd.CHANNELS", 1)
    arrays, attributes = arrays_of((8, channels, channels, 16, 16, 3, (1, 1, 1, 1)))["convolution"]
    bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
    assert any(entry.kernel == "winograd 4x4" for entry in bench.entries or ()) == is_winograd


@pytest.mark.parametrize(
    "change",
    [{"strides": (2, 2), "padding": (1, 1, 1, 1)}, {"dilations": (2, 2), "padding": (5, 2, 2, 2)}, {"groups": 3}],
)
def test_other_convolutions_stay_with_the_library(change: dict[str, Any]) -> None:
    lanes = vector_lanes()
    channels = 2 * lanes + (-2 * lanes) % change.get("groups", 1)  # for three groups not a number of vectors each
    x, w = np.zeros((4, 16, 16, channels), "f"), np.zeros((channels, channels // change.get("groups", 1), 3, 3), "f")
    attributes = {"strides": (1, 1), "dilations": (1, 1), "padding": (1, 1, 1, 1), "groups": 1, "channels_last": True}
    bench = Bench(
        convolution.KERNELS, "convolution", [x, w], {**attributes, **change}, workspaces=convolution.WORKSPACES
    )
    assert not any(entry.kernel.startswith("winograd") for entry in bench.entries or ())


def test_plain_sums_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, attributes = arrays_of(CASES[0])["convolution"]
    monkeypatch.setenv("MLCOMPUTE_WINOGRAD", "0")
    bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
    assert not any(entry.kernel.startswith("winograd") for entry in bench.entries or ())


def test_the_form_follows_from_what_it_wastes() -> None:
    """Images of 16x16 are whole tiles of four; of 6x6, more than half of such tiles would be empty."""
    for extent, form in ((16, "winograd 4x4"), (6, "winograd 2x2")):
        arrays, attributes = arrays_of((64, 1, 1, extent, extent, 3, (1, 1, 1, 1)))["convolution"]
        bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
        assert [entry.kernel for entry in bench.entries or ()] == ["winograd filter transform", form]


def test_filters_of_one_direction_need_channels() -> None:
    """Transforms take their time per channel, products per pair of channels."""
    for channels, is_winograd in ((1, False), (8, True)):
        arrays, attributes = arrays_of((8, channels, channels, 1, 64, (1, 3), (0, 0, 1, 1)))["convolution"]
        bench = Bench(convolution.KERNELS, "convolution", arrays, attributes, workspaces=convolution.WORKSPACES)
        assert any(entry.kernel == "winograd 1x4" for entry in bench.entries or ()) == is_winograd
