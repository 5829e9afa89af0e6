"""Optimizers tell what they were made with."""

from __future__ import annotations

import copy

import pytest

import mlcompute as mlc
from tests.samples import OPTIMIZERS, Sample, check
from tests.samples.descriptors import optimizer_values


def optimizer_sample(name: str) -> Sample:
    sample = OPTIMIZERS[name]()
    sample.values |= optimizer_values()
    return sample


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_give_back_what_was_given(name: str) -> None:
    sample = optimizer_sample(name)
    for attribute, expected in sample.values.items():
        check(getattr(sample.made, attribute), expected, f"{name}.{attribute}")
        if attribute not in ("learning_rate", "applies_gradient_clipping"):
            with pytest.raises(AttributeError):
                setattr(sample.made, attribute, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_settings_of_optimizers_can_be_changed_and_copies_are_independent(name: str) -> None:
    made = optimizer_sample(name).made
    copied = copy.copy(made)
    assert copied == made
    made.learning_rate = 0.75
    made.applies_gradient_clipping = False
    assert (made.learning_rate, made.applies_gradient_clipping) == (0.75, False)
    assert (copied.learning_rate, copied.applies_gradient_clipping) == (0.5, True)
    assert copied != made
    assert repr(made).startswith(f"{name}(learning_rate=0.75")


def test_the_base_class_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        mlc.Optimizer(mlc.OptimizerDescriptor(learning_rate=1))  # type: ignore[abstract]
