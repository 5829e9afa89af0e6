"""Fully connected layers against torch.nn.functional.linear."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (the name PyTorch's own documentation uses)

from mlcompute.layers.convolution import ConvolutionDescriptor
from mlcompute.layers.fully_connected import FullyConnectedLayer
from mlcompute.tensor import Tensor
from tests.cases.case import Case, Refusal, numbers


def make(
    inputs: int,
    outputs: int,
    weights: tuple[int, ...] | None = None,
    biases: tuple[int, ...] | None = (),
    kernel_sizes: tuple[int, int] = (1, 1),
) -> Callable[[], FullyConnectedLayer]:
    """A layer with seeded parameters; shapes given are other spellings, biases=None leaves them out."""
    w, b = weights or (1, inputs * outputs, 1, 1), biases or (1, outputs, 1, 1)

    def layer() -> FullyConnectedLayer:
        return FullyConnectedLayer(
            Tensor(shape=w, data=numbers(*w, seed=1)),
            None if biases is None else Tensor(shape=b, data=numbers(*b, seed=2)),
            ConvolutionDescriptor(kernel_sizes, inputs, outputs),
        )

    return layer


def linear(inputs: int, outputs: int) -> Callable[..., torch.Tensor]:
    def oracle(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        b = p["biases"].reshape(outputs) if "biases" in p else None
        return F.linear(x, p["weights"].reshape(outputs, inputs), b)

    return oracle


def image(inputs: int, outputs: int) -> Callable[..., torch.Tensor]:
    flat = linear(inputs, outputs)
    return lambda p, x: flat(p, x.flatten(1))[:, :, None, None]


CASES = [
    Case("(n, in)", make(3, 5), [(4, 3)], linear(3, 5)),
    Case("batch of one", make(3, 5), [(1, 3)], linear(3, 5)),
    Case("one in, one out", make(1, 1), [(4, 1)], linear(1, 1)),
    Case("one out", make(7, 1), [(3, 7)], linear(7, 1)),
    Case("rank 3", make(4, 2), [(3, 5, 4)], linear(4, 2)),
    Case("rank 4", make(4, 6), [(2, 3, 5, 4)], linear(4, 6)),
    Case("(n, in, 1, 1)", make(6, 4), [(3, 6, 1, 1)], image(6, 4)),
    Case("(n, 1, 1, 1) is an image", make(1, 4), [(3, 1, 1, 1)], image(1, 4)),
    Case("rank 4 whose last axis fits too", make(5, 2), [(2, 5, 1, 5)], linear(5, 2)),
    Case("no biases", make(3, 5, biases=None), [(4, 3)], linear(3, 5)),
    Case("weights (out, in), biases (out)", make(3, 5, (5, 3), (5,)), [(4, 3)], linear(3, 5)),
    Case("weights (1, out * in), biases (1, out)", make(3, 5, (1, 15), (1, 5)), [(4, 3)], linear(3, 5)),
    Case("weights spelled (in, out) are not transposed", make(3, 5, (3, 5)), [(4, 3)], linear(3, 5)),
    Case("kernel sizes do not count", make(3, 5, kernel_sizes=(3, 5)), [(4, 3)], linear(3, 5)),
    Case("long rows", make(600, 3), [(2, 600)], linear(600, 3), scale=4.0, note="sums of 600 products"),
]


def fc(weights: int, biases: int | None = None) -> FullyConnectedLayer:
    b = None if biases is None else Tensor(shape=(biases,), data=numbers(biases))
    return FullyConnectedLayer(Tensor(shape=(weights,), data=numbers(weights)), b, ConvolutionDescriptor(1, 3, 5))


REFUSALS = [
    Refusal("too few weights", lambda: fc(14), "weights needs 15 elements (5 outputs x 3 inputs), the tensor has 14"),
    Refusal("too many biases", lambda: fc(15, 6), "biases needs 5 elements (5 outputs), the tensor has 6"),
    Refusal(
        "weights that are no tensor",
        lambda: FullyConnectedLayer(numbers(15), None, ConvolutionDescriptor(1, 3, 5)),  # type: ignore[arg-type]
        "weights must be a Tensor",
        error=TypeError,
    ),
    Refusal(
        "no descriptor",
        lambda: FullyConnectedLayer(Tensor(shape=(15,), data=numbers(15)), None, (3, 5)),  # type: ignore[arg-type]
        "descriptor must be a ConvolutionDescriptor",
        error=TypeError,
    ),
    Refusal("other width", make(3, 5), "input_feature_channel_count is 3, the source has 2", [(4, 2)]),
    Refusal("channels of a larger image", make(3, 5), "the source has 2", [(4, 3, 2, 2)]),
    Refusal("rank 1", make(3, 5), "the source has one axis", [(3,)]),
    Refusal("two sources", make(3, 5), "takes 1 source(s), 2 were given", [(4, 3), (4, 3)]),
    Refusal("whole numbers", make(3, 5), "a source of type INT64 is not supported", [np.zeros((4, 3), np.int64)]),
]
