"""Group normalization as ops: against PyTorch, finite differences, and what it expands into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.ops.op import TABLE, Value, emit_all
from tests.harness import check_expansion
from tests.ops.oracle import Sample, ask, inputs, normal, uncovered

#: Shape, reduced axes, axis of channels, channels of a group.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], int, int]] = [
    ((2, 6, 4, 3), (2, 3), 1, 2),
    ((2, 4, 3, 6), (1, 2), 3, 3),
    ((3, 4, 5), (2,), 1, 4),
    ((2, 3, 2), (2,), 1, 1),
    ((3, 6), (), 1, 3),
    ((2, 4, 2, 3, 2), (2, 3, 4), 1, 2),
]


def _attributes(axes: tuple[int, ...], axis: int, size: int) -> dict[str, Any]:
    return {"axes": axes, "axis": axis, "size": size, "epsilon": 1e-3}


def _of_groups(t: torch.Tensor, axes: tuple[int, ...], axis: int, size: int) -> tuple[torch.Tensor, ...]:
    """y, m and v by the formula, on an axis of its own for the members of a group."""
    parts = t.unflatten(axis, (-1, size))
    over = (*(each + (each > axis) for each in axes), axis + 1)
    m, v = parts.mean(over, keepdim=True), parts.var(over, keepdim=True, correction=0)
    y = (parts - m) / torch.sqrt(v + 1e-3)
    channels = [each.expand(*each.shape[: axis + 1], size, *each.shape[axis + 2 :]) for each in (m, v)]
    return y.flatten(axis, axis + 1), *(each.flatten(axis, axis + 1) for each in channels)


SAMPLES = [
    Sample(
        "normalize_groups",
        lambda x, a=axes, c=axis, s=size: emit_all("normalize_groups", x, **_attributes(a, c, s)),
        lambda t, a=axes, c=axis, s=size: _of_groups(t, a, c, s),
        [normal(*shape)],
    )
    for shape, axes, axis, size in SHAPES
]


def test_every_op_has_a_sample() -> None:
    assert not uncovered("group_normalization", SAMPLES, elsewhere=("normalize_groups_gradient",))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_normalize_groups(sample: Sample) -> None:
    ask(sample)


def _scales(shape: tuple[int, ...], axes: tuple[int, ...], axis: int) -> list[tuple[int, ...]]:
    """One number per channel of every sample, or of all samples."""
    statistics = tuple(1 if number in axes else extent for number, extent in enumerate(shape))
    return [statistics, tuple(extent if number == axis else 1 for number, extent in enumerate(shape))]


@pytest.mark.parametrize(("shape", "axes", "axis", "size"), SHAPES, ids=str)
def test_gradient(shape: tuple[int, ...], axes: tuple[int, ...], axis: int, size: int) -> None:
    """All three gradients of y = scale n + shift after a normalization n, as PyTorch takes them."""
    x, dy = normal(*shape), normal(*shape, seed=1)
    for scale_shape in _scales(shape, axes, axis):
        scale = normal(*scale_shape)
        statistics = np.zeros(_scales(shape, axes, axis)[0])
        leaves = [torch.tensor(array).requires_grad_() for array in (x, statistics, statistics + scale)]
        n, _, v = _of_groups(leaves[0], axes, axis, size)
        (n * leaves[2] + leaves[1]).backward(torch.from_numpy(dy))
        known = [n.detach().numpy(), v.detach().numpy()]
        attributes = _attributes(axes, axis, size)
        found = TABLE["normalize_groups_gradient"].meaning(dy, *known, scale, **attributes)
        for mine, leaf in zip(found, leaves, strict=True):
            assert leaf.grad is not None
            np.testing.assert_allclose(mine, leaf.grad.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("shape", "axes", "axis", "size"), SHAPES, ids=str)
def test_expansions(shape: tuple[int, ...], axes: tuple[int, ...], axis: int, size: int) -> None:
    attributes = _attributes(axes, axis, size)
    x = normal(*shape)
    check_expansion("normalize_groups", [x], **attributes)
    _, _, v = TABLE["normalize_groups"].meaning(x, **attributes)
    for more in ([], *([normal(*scale)] for scale in _scales(shape, axes, axis))):
        check_expansion("normalize_groups_gradient", [normal(*shape), x, v, *more], **attributes)


def test_groups_of_one_channel_are_instances() -> None:
    x = normal(2, 3, 4, 5)
    found = TABLE["normalize_groups"].meaning(x, **_attributes((2, 3), 1, 1))
    expected = TABLE["normalize"].meaning(x, axes=(2, 3), epsilon=1e-3)
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize(("axes", "axis", "size"), [((2,), 1, 4), ((1,), 1, 2), ((2,), 1, 0)])
def test_groups_that_do_not_fit_are_refused(axes: tuple[int, ...], axis: int, size: int) -> None:
    x: Value
    (x,) = inputs(((2, 6, 5), "f4"))
    with pytest.raises(ShapeError, match=r"normalize_groups: axis 1 of .* has no groups"):
        ops.normalize_groups(x, axes, axis, size, 1e-5)


def test_a_gradient_refuses_other_shapes() -> None:
    dy, y, v = inputs(((2, 4, 3), "f4"), ((2, 4, 3), "f4"), ((2, 2, 1), "f4"))
    with pytest.raises(ShapeError, match=r"normalize_groups_gradient: y, v and scale are .* dy needs"):
        emit_all("normalize_groups_gradient", dy, y, v, axes=(2,), axis=1, size=2, epsilon=1e-5)
