"""ctc_loss and its gradient: against PyTorch and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import DataError, ShapeError
from tests.harness import assert_close, check_gradients, forward

#: targets, input lengths, target lengths: repeats, one label, none, as long as the time allows, not fitting.
TARGETS = np.array([[1, 1, 2, 3], [3, 0, 0, 0], [4, 4, 4, 4], [2, 1, 2, 1], [0, 0, 0, 0]], np.int32)
LENGTHS = np.array([8, 3, 5, 4, 6], np.int32)
TARGET_LENGTHS = np.array([4, 1, 4, 4, 0], np.int32)  # the third needs 7 times and has 5


def arrays(samples: Any = slice(None), dtype: Any = np.float64, blank: int = 0) -> list[Any]:
    x = np.random.default_rng(0).standard_normal((5, 8, 6))
    x = x - np.log(np.exp(x).sum(axis=2, keepdims=True))
    targets = np.where(blank == TARGETS, 5, TARGETS) if blank else TARGETS
    return [x[samples].astype(dtype), targets[samples], LENGTHS[samples], TARGET_LENGTHS[samples]]


def expected(x: Any, targets: Any, lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool) -> Any:
    """Loss, and the gradient with respect to scores whose logarithmic softmax is x."""
    scores = torch.tensor(x, requires_grad=True)
    losses = torch.nn.functional.ctc_loss(
        scores.log_softmax(2).transpose(0, 1), torch.tensor(targets).long(), torch.tensor(lengths).long(),
        torch.tensor(target_lengths).long(), blank, "none", zero_infinity,
    )  # fmt: skip
    losses.sum().backward()
    assert scores.grad is not None
    return losses.detach().numpy(), scores.grad.numpy()


def through_softmax(gradient: Any, x: Any) -> Any:
    return gradient - np.exp(x) * gradient.sum(axis=2, keepdims=True)


@pytest.mark.parametrize("blank", [0, 3])
def test_agrees_with_torch(blank: int) -> None:
    given = arrays(blank=blank)
    attributes = {"blank": blank, "zero_infinity": True}
    loss, gradient = ops.TABLE["ctc_loss"].meaning(*given, **attributes)
    wanted, wanted_gradient = expected(*given, **attributes)
    assert_close(loss, wanted)
    assert_close(through_softmax(gradient, given[0]), wanted_gradient)


def test_what_does_not_fit_is_infinite() -> None:
    loss, gradient = ops.TABLE["ctc_loss"].meaning(*arrays(), blank=0, zero_infinity=False)
    assert np.isinf(loss).tolist() == [False, False, True, False, False]
    assert np.isnan(gradient).any(axis=(1, 2)).tolist() == [False, False, True, False, False]


def test_gradients() -> None:
    x, *integers = arrays([0, 1, 3, 4])

    def fn(x: Any, *more: Any) -> Any:
        return ops.ctc_loss(x, *more, blank=0, zero_infinity=False)

    check_gradients(fn, x, *integers)


@pytest.mark.parametrize(
    ("index", "number", "says"),
    [(2, 9, "input lengths"), (2, 0, "input lengths"), (3, 5, "target lengths"), (3, -1, "target lengths"),
     (1, 6, "target 6 is no class"), (1, -1, "target -1 is no class")],
)  # fmt: skip
def test_out_of_range(index: int, number: int, says: str) -> None:
    given = arrays()
    given[index] = given[index].copy()
    given[index][0] = number
    with pytest.raises(DataError, match=says):
        forward(lambda *values: ops.ctc_loss(*values, blank=0, zero_infinity=False), *given)


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_targets_and_lengths_are_needed_for_each_sample(wrong: int) -> None:
    given = arrays()
    given[wrong] = given[wrong][:4]
    with pytest.raises(ShapeError, match="ctc_loss: targets"):
        forward(lambda *values: ops.ctc_loss(*values, blank=0, zero_infinity=False), *given)
