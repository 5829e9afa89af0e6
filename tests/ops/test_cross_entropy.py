"""Softmax cross entropy with class indices against PyTorch, and its gradient, and the gradient's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (PyTorch's own spelling)

from mlcompute import ops
from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import TABLE, Array, Value
from tests.harness import assert_close, check_expansion, check_gradients, forward, gradients

SHAPES = [((4, 5), 1), ((1, 1), 1), ((3, 7, 2), 1), ((5, 4), 0), ((2, 3, 4, 5), 3), ((2, 3, 4, 5), 1)]
OPTIONS: list[dict[str, Any]] = [{}, {"ignored": -100}, {"smoothing": 0.2}, {"smoothing": 0.1, "ignored": 0}]


def given(shape: tuple[int, ...], axis: int, ignored: int | None = None) -> tuple[Array, Array]:
    rng = np.random.default_rng([axis, *shape])
    labels = rng.integers(0, shape[axis], (*shape[:axis], 1, *shape[axis + 1 :]))
    if ignored is not None and labels.size > 1:
        labels.flat[::3] = ignored
    return rng.standard_normal(shape), labels


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_against_torch(shape: tuple[int, ...], axis: int, options: dict[str, Any]) -> None:
    x, labels = given(shape, axis, options.get("ignored"))

    def described(x: Value, labels: Value) -> Value:
        return ops.softmax_cross_entropy(x, labels, axis, **options)[0]

    y = torch.tensor(x, requires_grad=True)
    expected = F.cross_entropy(
        y.movedim(axis, 1) if axis else y.T,
        torch.tensor(labels).squeeze(axis),
        reduction="none",
        ignore_index=options.get("ignored", -100),
        label_smoothing=options.get("smoothing", 0.0),
    ).unsqueeze(axis)
    (found,) = forward(described, x, labels)
    assert_close(found, expected.detach().numpy())
    dy: Array = np.random.default_rng(1).standard_normal(found.shape)
    (expected_dx,) = torch.autograd.grad(expected, y, torch.tensor(dy))
    dx, d_labels = gradients(described, [x, labels], [dy])
    assert d_labels is None
    assert_close(dx, expected_dx.numpy())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES[:4], ids=str)
def test_derivatives_and_their_derivatives_agree_with_differences(
    shape: tuple[int, ...], axis: int, options: dict[str, Any]
) -> None:
    x, labels = given(shape, axis, options.get("ignored"))

    def both(x: Value) -> Value:
        loss, largest, logarithm = ops.softmax_cross_entropy(x, x.trace.constant(labels), axis, **options)
        return loss * 0.7 + (ops.stop_gradient(largest) + logarithm) * 0.3

    def gradient(x: Value, d_loss: Value, d_softmax: Value) -> Value:
        known = x.trace.constant(labels)
        _, largest, logarithm = ops.softmax_cross_entropy(x, known, axis, ignored=options.get("ignored"))
        operands = (x, largest, logarithm, known, d_loss, d_softmax)
        return ops.emit("softmax_cross_entropy_gradient", *operands, axis=axis, keep=0.9, spread=0.02)

    dy = np.random.default_rng(2).standard_normal((2, *labels.shape))
    check_gradients(gradient, x, dy[0], dy[1])
    if not options.get("ignored"):  # the largest logit is no constant to differences; what its shift undoes is not here
        return
    (dx, *_) = gradients(both, [x], [dy[0]])
    probabilities = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
    hot = np.arange(shape[axis]).reshape((-1,) + (1,) * (x.ndim - 1 - axis)) == labels
    counts = labels != options["ignored"]
    assert_close(dx, dy[0] * (counts * 0.7 * (probabilities - hot) + 0.3 * probabilities))


@pytest.mark.parametrize(("keep", "spread", "ignored"), [(1.0, 0.0, None), (0.9, 0.02, -1), (0.5, 0.3, 0)])
def test_expansions(keep: float, spread: float, ignored: int | None) -> None:
    for shape, axis in SHAPES:
        x, labels = given(shape, axis, ignored)
        check_expansion("softmax_cross_entropy", [x, labels], axis=axis, keep=keep, spread=spread, ignored=ignored)
        _, m, logarithm = TABLE["softmax_cross_entropy"].meaning(x, labels, axis, keep, spread, ignored)
        arrays = [x, m, logarithm, labels, m, logarithm]
        check_expansion("softmax_cross_entropy_gradient", arrays, axis=axis, keep=keep, spread=spread)


def test_large_and_infinite_logits() -> None:
    x = np.array([[1e4, -1e4, 9999.0], [-np.inf, 0.0, 1.0], [3e38, -3e38, 0.0]])
    labels = np.array([[2], [1], [0]])
    loss, _, _ = TABLE["softmax_cross_entropy"].meaning(x, labels, 1, 1.0, 0.0, None)
    expected = F.cross_entropy(torch.tensor(x), torch.tensor(labels[:, 0]), reduction="none")
    assert_close(loss[:, 0], expected.numpy())


@pytest.mark.parametrize(("label", "ignored"), [(-1, None), (5, None), (-2, -1), (5, -1)])
def test_a_label_that_is_no_class(label: int, ignored: int | None) -> None:
    says = "need ignore_index" if ignored is None else "-1, which is ignored"
    with pytest.raises(IndexError, match=f"label {label} at position .* valid are 0 to 4.*{says}"):
        forward(
            lambda x, i: ops.softmax_cross_entropy(x, i, 1, ignored=ignored), np.zeros((2, 5)), np.array([[0], [label]])
        )


def test_refusals() -> None:
    x, labels = np.zeros((2, 5)), np.zeros((2, 1), np.int64)
    with pytest.raises(DataError, match="labels must be integers"):
        forward(lambda x, i: ops.softmax_cross_entropy(x, i, 1), x, labels.astype(float))
    with pytest.raises(ShapeError, match=r"labels have shape \(2, 1\)"):
        forward(lambda x, i: ops.softmax_cross_entropy(x, i, 0), x, labels)
    with pytest.raises(ShapeError, match="has no classes"):
        forward(lambda x, i: ops.softmax_cross_entropy(x, i, 1), np.zeros((2, 0)), labels)
    with pytest.raises(ShapeError, match="d_loss have shape"):
        TABLE["softmax_cross_entropy_gradient"].result(x, labels, labels, labels, x, labels, 1, 1.0, 0.0)
