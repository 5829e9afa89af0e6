"""Learning-rate schedules against PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlcompute as mlc
from mlcompute.trainer.schedules import Length, Schedule

LENGTH = Length(epochs=6, steps_per_epoch=7)


def torch_rates(make: Callable[[torch.optim.Optimizer], Any], steps: int = 42, start: float = 0.2) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=start)
    schedule = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def rates(schedule: Schedule, steps: int = 42) -> list[float]:
    return [schedule.rate(step, 0.2, LENGTH) for step in range(steps)]


def test_step() -> None:
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.3), steps=6)
    assert rates(mlc.schedules.Step(2, 0.3))[::7] == pytest.approx(expected)


def test_cosine() -> None:
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 42, eta_min=0.01))
    assert rates(mlc.schedules.Cosine(final=0.01)) == pytest.approx(expected)
    warm = rates(mlc.schedules.Cosine(steps=30, warmup=5), 40)
    assert warm[:5] == pytest.approx([0.04, 0.08, 0.12, 0.16, 0.2])
    assert warm[5:31] == pytest.approx(torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 25), 26))
    assert warm[30:] == pytest.approx([0.0] * 10, abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"rising": 0.5, "divide": 10.0, "final_divide": 100.0}])
def test_one_cycle(options: dict[str, float]) -> None:
    names = {"rising": "pct_start", "divide": "div_factor", "final_divide": "final_div_factor"}
    given = {names[name]: value for name, value in options.items()}
    expected = torch_rates(
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.7, total_steps=43, cycle_momentum=False, **given), 42
    )
    found = [mlc.schedules.OneCycle(0.7, steps=43, **options).rate(step, 0.2, LENGTH) for step in range(42)]
    assert found == pytest.approx(expected, rel=1e-9)
    assert rates(mlc.schedules.OneCycle(0.7))[-1] == pytest.approx(0.7 / 25 / 1e4)


def test_data_without_a_length() -> None:
    unknown = Length(epochs=3, steps_per_epoch=None)
    for schedule in (mlc.schedules.Cosine(), mlc.schedules.OneCycle(1.0), mlc.schedules.Step(1)):
        with pytest.raises(mlc.DataError, match="this data does not tell"):
            schedule.rate(0, 0.1, unknown)
    assert mlc.schedules.Cosine(steps=10).rate(0, 0.1, unknown) == 0.1


@pytest.mark.parametrize("name", ["Step", "Cosine", "OneCycle"])
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    make: Any = getattr(mlc.schedules, name)
    with pytest.raises(TypeError, match=rf"schedules\.{name}: \w+ must be a number, not 'fast'"):
        make("fast")
    with pytest.raises(TypeError, match="ExponentialMovingAverage: decay must be a number"):
        mlc.callbacks.ExponentialMovingAverage("slow")  # type: ignore[arg-type]
