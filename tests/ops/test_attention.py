"""attention and attention_gradient: against PyTorch, finite differences and their own expansions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mlcompute import ops
from mlcompute.errors import ShapeError
from mlcompute.ops.op import Value
from tests.harness import assert_close, check_expansion, check_gradients, forward, gradients

# (n, heads, rows, keys, d, dv)
SIZES = [(1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 2, 3), (1, 2, 1, 7, 3, 1), (3, 1, 5, 1, 4, 4), (2, 2, 3, 3, 5, 2)]
# What the mask's shape is, as a function of the sizes; "finite" masks are not -inf anywhere.
MASKS = {
    "none": None,
    "keys": lambda n, h, rows, s: (n, 1, 1, s),
    "pairs": lambda n, h, rows, s: (1, 1, rows, s),
    "all": lambda n, h, rows, s: (n, h, rows, s),
    "heads": lambda n, h, rows, s: (1, h, rows, s),
    "samples": lambda n, h, rows, s: (n, 1, rows, s),
    "plane": lambda n, h, rows, s: (rows, s),
    "row": lambda n, h, rows, s: (s,),
    "finite": lambda n, h, rows, s: (n, h, rows, s),
}
GRID = [(size, mask, keep) for size in SIZES for mask in MASKS for keep in (False, True)]
ALL = pytest.mark.parametrize(("size", "mask", "keep"), GRID)


def case(size: tuple[int, ...], mask: str, keep: bool, dtype: Any = np.float64) -> tuple[list[Any], dict[str, Any]]:
    n, heads, rows, s, d, dv = size
    rng = np.random.default_rng(list(size))
    given = [rng.standard_normal(shape) for shape in ((n, heads, rows, d), (n, heads, s, d), (n, heads, s, dv))]
    shape_of = MASKS[mask]
    if shape_of is not None:
        shape = shape_of(n, heads, rows, s)
        added = rng.standard_normal(shape)
        if mask != "finite":
            forbidden = rng.random(shape) < 0.5
            forbidden[..., 0] = False  # at least one key per row stays
            added = np.where(forbidden, -np.inf, added)
        given.append(added)
    if keep:
        given.append((rng.random((n, heads, rows, s)) < 0.7) / 0.7)
    attributes = {"scale": 1 / math.sqrt(d), "has_mask": shape_of is not None, "has_keep": keep}
    return [array.astype(dtype) for array in given], attributes


def described(attributes: dict[str, Any], constants: list[Any]) -> Any:
    """A function of q, k, v and the mask; keep is a constant, for it gets no gradient."""

    def fn(q: Value, k: Value, v: Value, mask: Value | None = None) -> Value:
        keep = q.trace.constant(constants[0]) if constants else None
        return ops.attention(q, k, v, mask, keep, scale=attributes["scale"])

    return fn


def oracle(q: Any, k: Any, v: Any, *more: Any, scale: float, has_mask: bool, has_keep: bool) -> Any:
    scores = q @ k.transpose(-1, -2) * scale
    p = torch.softmax(scores + more[0] if has_mask else scores, dim=-1)
    return (p * more[-1] if has_keep else p) @ v


@ALL
def test_agrees_with_torch(size: tuple[int, ...], mask: str, keep: bool) -> None:
    given, attributes = case(size, mask, keep)
    count = 3 + attributes["has_mask"]
    tensors: list[Any] = [torch.tensor(array, requires_grad=index < count) for index, array in enumerate(given)]
    expected = oracle(*tensors, **attributes)
    fn = described(attributes, given[count:])
    (actual,) = forward(fn, *given[:count])
    assert_close(actual, expected.detach().numpy())
    dy: Any = np.random.default_rng(1).standard_normal(actual.shape)
    expected.backward(torch.tensor(dy))
    for gradient, tensor in zip(gradients(fn, given[:count], [dy]), tensors, strict=False):
        assert gradient is not None
        assert_close(gradient, tensor.grad.numpy())


@ALL
def test_gradients(size: tuple[int, ...], mask: str, keep: bool) -> None:
    given, attributes = case(size, mask, keep)
    if attributes["has_mask"]:
        given[3] = np.maximum(given[3], -30.0)  # differences of an infinite mask are none
    count = 3 + attributes["has_mask"]
    check_gradients(described(attributes, given[count:]), *given[:count])


@ALL
def test_expansions(size: tuple[int, ...], mask: str, keep: bool) -> None:
    given, attributes = case(size, mask, keep)
    check_expansion("attention", given, **attributes)
    n, heads, rows, _, _, dv = size
    dy = np.random.default_rng(2).standard_normal((n, heads, rows, dv))
    check_expansion("attention_gradient", [dy, *given], **attributes)
    if attributes["has_mask"]:
        check_expansion("attention_mask_gradient", [dy, *given], **attributes)


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])
def test_matches_scaled_dot_product_attention(mask: str) -> None:
    """Values, and the gradients of q, k, v and of a mask that is learned."""
    given, attributes = case((2, 3, 4, 5, 2, 3), mask, False)
    tensors: list[Any] = [torch.tensor(array, requires_grad=True) for array in given]
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3])
    (actual,) = forward(described(attributes, []), *given)
    assert_close(actual, expected.detach().numpy())
    dy: Any = np.random.default_rng(1).standard_normal(actual.shape)
    expected.backward(torch.tensor(dy))
    for gradient, tensor in zip(gradients(described(attributes, []), given, [dy]), tensors, strict=True):
        assert gradient is not None
        assert_close(gradient, tensor.grad.numpy())


def test_float32() -> None:
    for mask in MASKS:
        given, attributes = case((2, 3, 4, 5, 2, 3), mask, True, np.float32)
        count = 3 + attributes["has_mask"]
        (actual,) = forward(described(attributes, given[count:]), *given[:count])
        assert actual.dtype == np.float32
        doubled = [torch.tensor(array.astype(np.float64)) for array in given]
        assert_close(actual, oracle(*doubled, **attributes).numpy())


def test_large_scores_do_not_overflow() -> None:
    given, attributes = case((1, 2, 3, 4, 2, 2), "none", False, np.float32)
    given[0] *= 1e4
    (actual,) = forward(described(attributes, []), *given)
    assert np.isfinite(actual).all()


def test_a_row_without_keys_is_nan_and_leaves_the_others_alone() -> None:
    given, attributes = case((1, 1, 3, 4, 2, 2), "finite", False)
    given[3][0, 0, 1] = -np.inf
    (actual,) = forward(described(attributes, []), *given)
    assert_close(actual, oracle(*map(torch.tensor, given), **attributes).numpy())
    assert np.isnan(actual[0, 0, 1]).all()
    assert np.isfinite(actual[0, 0, [0, 2]]).all()


def test_what_is_kept_gets_no_gradient() -> None:
    given, attributes = case((2, 2, 3, 3, 5, 2), "finite", True)
    found = gradients(lambda *values: ops.attention(*values, scale=attributes["scale"]), given, [np.ones((2, 2, 3, 2))])
    assert found[3] is not None
    assert found[4] is None


@pytest.mark.parametrize("wrong", range(5))
def test_what_does_not_fit_is_refused(wrong: int) -> None:
    """Kernels take the samples of one operand and read as many of the others: beyond their end, if they had fewer."""
    given, attributes = case((3, 2, 3, 4, 2, 2), "finite", True)
    given[wrong] = given[wrong][:2]
    if wrong == 3:
        given[3] = np.zeros((2, 2, 3, 4))
    with pytest.raises(ShapeError, match=r"do not fit|broadcast"):
        forward(lambda *values: ops.attention(*values, scale=attributes["scale"]), *given)
