"""Histories of every kind give the same curves."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.seeing.charts import MOST_POINTS, Line, condensed, line_chart, nice_ticks, norm_map
from mlcompute.seeing.history import Curve, read_history
from mlcompute.seeing.sections import learning_section
from mlcompute.seeing.svg import text_width

EPOCHS = {"loss": [2.0, 1.0], "val_loss": [2.5, 1.5]}
STEPS = [3.0, 2.0, 1.5, 1.0]
NORMS = {"fc": [1.0, 0.5], "conv": [0.1, 0.2]}


@dataclass
class AsFields:
    epochs: list[dict[str, float]] = field(
        default_factory=lambda: [
            {"epoch": 1, "loss": 2.0, "val_loss": 2.5},
            {"epoch": 2, "loss": 1.0, "val_loss": 1.5},
        ]
    )
    step_losses: list[float] = field(default_factory=lambda: list(STEPS))
    gradient_norms: dict[str, list[float]] = field(default_factory=lambda: dict(NORMS))
    note: str = "not a curve"


def like_ours() -> Any:
    from mlcompute.trainer.history import History

    history = History()
    history.epochs = [{"loss": 2.0, "val_loss": 2.5}, {"loss": 1.0, "val_loss": 1.5}]
    history.seconds = [1.0, 1.1]
    for step, loss in enumerate(STEPS, start=1):
        history.loss.add(step, loss)
    for name, norms in NORMS.items():
        from mlcompute.trainer.history import Curve as Norms

        history.gradient_norms[name] = Norms()
        for step, norm in enumerate(norms, start=1):
            history.gradient_norms[name].add(step, norm)
    return history


def like_keras() -> Any:
    everything = {**EPOCHS, "step_losses": STEPS, "gradient_norms": NORMS}
    return SimpleNamespace(history=everything, params={"verbose": 1}, epoch=[0, 1], model=None)


HISTORIES = {
    "mapping": lambda: {**EPOCHS, "batch_loss": np.array(STEPS), "gradient_norms": NORMS},
    "object": AsFields,
    "keras": like_keras,
    "ours": like_ours,
    "rows": lambda: {"rows": [dict(zip(EPOCHS, row, strict=True)) for row in zip(*EPOCHS.values(), strict=True)],
                     "steps": [{"loss": loss} for loss in STEPS],
                     "grad_norms": [dict(zip(NORMS, row, strict=True)) for row in zip(*NORMS.values(), strict=True)]},
}  # fmt: skip


@pytest.mark.parametrize("kind", HISTORIES)
def test_every_kind_gives_the_same_curves(kind: str) -> None:
    curves = read_history(HISTORIES[kind]())
    assert {name: curve.values for name, curve in curves.epochs.items()} == EPOCHS
    assert {name: curve.values for name, curve in curves.steps.items()} == {"loss": STEPS}
    assert {name: curve.values for name, curve in curves.gradient_norms.items()} == NORMS
    assert curves.steps["loss"].steps == [1.0, 2.0, 3.0, 4.0]


def test_none_and_empty_ones() -> None:
    assert not read_history(None)
    assert not read_history({})
    assert not read_history({"loss": []})


@pytest.mark.parametrize("wrong", [[1.0, 2.0], "loss", 3, np.zeros(3), dict])
def test_what_holds_no_curves_is_refused(wrong: object) -> None:
    with pytest.raises(mlc.DataError, match="report: history is a"):
        read_history(wrong)


def test_numbers_that_were_not_taken_leave_no_trace() -> None:
    curves = read_history({"epochs": [{"loss": 1.0}, {"loss": 2.0, "accuracy": 0.5}, {"loss": None}]})
    assert curves.epochs["accuracy"] == Curve([0.5], [2.0])
    assert curves.epochs["loss"] == Curve([1.0, 2.0], [1.0, 2.0])
    every_other = read_history({"loss": [3.0, 2.0, 1.0, 0.5], "val_loss": [None, 2.5, None, 1.5]})
    section = learning_section(every_other)
    assert "not finite" not in section.html
    assert '<tr><th scope="row">1</th><td class="n">3</td><td class="n"></td></tr>' in section.html
    assert [point[1] for point in section.data["charts"][0]["lines"][1]["points"]] == [2.0, 4.0]


def test_long_curves_keep_their_ends_means_and_extremes() -> None:
    numbers = [float(index % 7) for index in range(100_000)]
    numbers[50_000] = 1000.0
    points = condensed(Curve(numbers))
    assert len(points) <= MOST_POINTS
    assert max(point.high for point in points) == 1000.0
    assert min(point.low for point in points) == 0.0
    assert points[0].x < 500
    assert points[-1].x > 99_500
    assert all(point.low <= point.y <= point.high for point in points)


def test_numbers_that_are_not_finite_break_a_curve() -> None:
    points = condensed(Curve([1.0, math.nan, math.inf, 2.0, 3.0]))
    chart = line_chart("loss", [Line("loss", points, "c0")], "step")
    assert "not finite" in chart.svg
    assert "nan" not in chart.svg.lower()
    assert [point[2] for point in chart.data["lines"][0]["points"]] == [1.0, None, None, 2.0, 3.0]
    assert chart.svg.count(">not finite<") == 1
    both = line_chart("loss", [Line(name, points, "c0") for name in ("loss", "validation loss")], "step")
    assert both.svg.count(">not finite<") == 1, "one remark does not cover another"
    one_of_many = line_chart(
        "loss", [Line("loss", condensed(Curve([1.0] * 900 + [math.nan] + [1.0] * 900)), "c0")], "s"
    )
    assert ">not finite<" in one_of_many.svg
    only = line_chart("loss", [Line("loss", condensed(Curve([math.nan])), "c0")], "step")
    assert "nan" not in only.svg.lower()


@pytest.mark.parametrize(
    ("least", "most"), [(0.0, 1.0), (-3.0, 17.0), (1e-9, 3e-9), (5.0, 5.0), (0.0, 0.0), (1e30, 2e30)]
)
def test_ticks_are_round_and_enclose(least: float, most: float) -> None:
    ticks = nice_ticks(least, most)
    assert ticks[0] <= least
    assert ticks[-1] >= most
    assert 2 <= len(ticks) <= 8


def test_a_map_of_norms_shows_zero_and_what_is_not_finite() -> None:
    svg = norm_map({"a": Curve([1.0, 0.0, math.inf]), "b": Curve([1e-8, 1.0, 1e8]), "c": Curve([math.nan])})
    assert 'class="hz" x="170' not in svg
    assert svg.count("<title>") >= 6
    assert 'class="hx"' in svg
    long = norm_map({"W" * 99: Curve([1e-40]), "b": Curve([1.0])})
    label = re.search(r'class="label" x="(\d+)"[^>]*>(W+…)<title>(W+)<', long)
    assert label is not None
    assert text_width(label[2], 12.0) < int(label[1]) <= 240, "a name does not begin outside the picture"
    assert len(label[3]) == 99
    many = norm_map({f"layer {index}": Curve([1.0] * 500) for index in range(1000)})
    assert len(many) < 70_000
