"""CTC loss: against torch.nn.CTCLoss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mlcompute.enums import ReductionType
from mlcompute.layers.ctc_loss import CTCLossLayer
from tests.cases.case import Case, Refusal, numbers

MEAN, SUM, NONE = ReductionType.MEAN, ReductionType.SUM, ReductionType.NONE
TARGETS = np.array([[1, 1, 2], [3, 9, 9], [2, 1, 2]], np.int32)  # beyond a length anything may stand
LENGTHS = [np.array([6, 4, 5], np.int32), np.array([3, 1, 3], np.int32)]


def oracle(blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> Callable[..., Any]:
    def run(p: dict[str, Any], x: Any, targets: Any, *lengths: Any) -> Any:
        n, steps, _ = x.shape
        full = (torch.full((n,), steps), torch.full((n,), targets.shape[1]))
        given = [one.long() for one in lengths] or list(full)
        y = torch.nn.functional.ctc_loss(
            x.log_softmax(2).transpose(0, 1), targets.long(), given[0], given[1], blank, reduction, zero_infinity
        )
        return y.reshape(-1)

    return run


def case(
    name: str, sources: list[Any], kind: ReductionType = MEAN, blank: int = 0, zero_infinity: bool = False
) -> Case:
    made = lambda: CTCLossLayer(blank, kind, zero_infinity)  # noqa: E731
    judge = oracle(blank, kind.name.lower(), zero_infinity)
    # Exponents of sums of many logarithms: relative errors of the probabilities grow with these.
    return Case(name, made, sources, judge, scale=4.0, batches=kind == NONE, note="sums of many logarithms")


CASES = [
    case("mean, lengths", [(3, 6, 4), TARGETS, *LENGTHS]),
    case("sum", [(3, 6, 4), TARGETS, *LENGTHS], SUM),
    case("every sample", [(3, 6, 4), TARGETS, *LENGTHS], NONE),
    case("no lengths, another blank", [(2, 7, 4), np.array([[0, 1], [2, 2]], np.int64)], blank=3),
    case("what does not fit counts nothing", [(2, 3, 4), np.array([[1, 1, 1], [1, 2, 3]], np.int32)], SUM, 0, True),
    case("one of everything", [(1, 1, 2), np.array([[1]], np.int32)]),
    case("longer", [numbers(2, 40, 5), np.tile(np.array([1, 2, 2, 3, 4], np.int32), (2, 3))], SUM),
]


def make(**options: Any) -> Callable[[], CTCLossLayer]:
    return lambda: CTCLossLayer(**options)


X, T = (2, 5, 4), np.ones((2, 3), np.int32)
REFUSALS = [
    Refusal("blank below zero", make(blank=-1), "blank is -1"),
    Refusal("blank that is no class", make(blank=4), "blank is 4, there are 4 classes", [X, T]),
    Refusal("a reduction", make(reduction_type=ReductionType.MAX), "reduction_type is MAX"),
    Refusal("no time", make(), "(n, time, classes)", [(2, 4), T]),
    Refusal("one-hot targets", make(), "targets must be INT32 or INT64, (2, labels)", [X, (2, 3, 4)]),
    Refusal("targets of others", make(), "not INT32 (3, 3)", [X, np.ones((3, 3), np.int32)]),
    Refusal("one kind of lengths", make(), "input lengths without target lengths", [X, T, np.ones(2, np.int32)]),
    Refusal("floating lengths", make(), "input lengths must be INT32 or INT64", [X, T, (2,), np.ones(2, np.int32)]),
    Refusal("a single source", make(), "takes 2 to 4 source(s)", [X]),
]
