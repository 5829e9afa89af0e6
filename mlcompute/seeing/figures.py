"""The figures at the top of a report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from mlcompute.seeing.units import duration, number, percent, size

if TYPE_CHECKING:
    from mlcompute.runs import Evaluation, Run
    from mlcompute.seeing.history import Curve, Curves
    from mlcompute.seeing.profile import GraphProfile
    from mlcompute.seeing.summary import Summary


@dataclass(frozen=True)
class Figure:
    """A number: what it is, how it is written, and a remark below it."""

    what: str
    value: str
    remark: str = ""


def headline(curves: Curves, evaluation: Evaluation | None = None) -> Figure | None:
    """The accuracy, of validation where there is one; None where nothing is classified."""
    names = sorted((name for name in curves.epochs if name.endswith("accuracy")), key=lambda name: "val_" not in name)
    if names:
        curve, what = curves.epochs[names[0]], names[0].replace("val_", "validation ").replace("_", " ")
        finite = [(value, -step) for value, step in zip(curve.values, curve.steps, strict=True) if math.isfinite(value)]
        if finite:
            best, place = max(finite)
            remark = f"best {percent(best)} in epoch {-place:.0f}"
            if evaluation is not None and evaluation.remark and what == "validation accuracy":
                remark += f"; {evaluation.remark}"
            return Figure(what, percent(curve.values[-1]), remark)
    return None if evaluation is None else Figure("accuracy", percent(evaluation.accuracy), evaluation.remark)


def loss_figure(curves: Curves) -> Figure | None:
    """The last loss, and the least."""
    for name, what in (("val_loss", "validation loss"), ("loss", "loss")):
        curve = curves.epochs.get(name) or (curves.steps.get(name) if name == "loss" else None)
        if curve is not None:
            return Figure(what, number(curve.values[-1]), _least(curve))
    return None


def _least(curve: Curve) -> str:
    finite = list(filter(math.isfinite, curve.values))
    return f"best {number(min(finite))}" if finite else ""


def model_figures(summary: Summary, profile: GraphProfile | None, run: Run | None = None) -> list[Figure]:
    """The size of the network, and what a step takes; memory as the run that trained it has recorded it."""
    figures = [Figure("parameters", f"{summary.parameters:,}", f"{size(summary.parameter_bytes)}, {_layers(summary)}")]
    if profile is not None:
        rate = profile.batch_size / profile.step_time if profile.step_time else 0.0
        here = f"{rate:,.0f} samples/s"
        if trained_elsewhere(run, summary):
            here += f" on this {kind_of(summary)}"
        figures.append(Figure("time per step", duration(profile.step_time), here))
    if trained_elsewhere(run, summary) and (recorded := device_memory_of(run)):
        figures.append(Figure("device memory", size(recorded), f"a step on the {run.facts['device'].upper()}"))
    elif summary.device_memory is not None:
        passes = f"; {size(summary.passes_memory)} with separate passes" if summary.passes_memory else ""
        remark = f"a step at batch {summary.batch_size}{passes}"
        figures.append(Figure("device memory", size(summary.device_memory), remark))
    return figures


def trained_elsewhere(run: Run | None, summary: Summary) -> TypeGuard[Run]:
    """Did the run train on another kind of device than the one the graph is compiled for now?"""
    kind = run.facts.get("device") if run is not None else None
    return bool(kind and summary.device) and kind != kind_of(summary).lower()


def kind_of(summary: Summary) -> str:
    """CPU or GPU: what the graph is compiled for."""
    return summary.device.partition(",")[0]


def device_memory_of(run: Run) -> int:
    """Bytes a step took on the device, as the run has recorded them; 0 where it has not."""
    return int((run.facts.get("memory") or {}).get("device") or 0)


def _layers(summary: Summary) -> str:
    count = len(summary.layers)
    return f"{count:,} layer{'' if count == 1 else 's'}"


def run_figures(run: Run) -> list[Figure]:
    """What the whole run took: time, and the memory of the process as the system counted it."""
    figures, facts = [], run.facts
    if facts.get("seconds"):
        epochs = facts.get("epochs", 0)
        figures.append(
            Figure("training time", clock(facts["seconds"]), f"{epochs:,} epoch{'' if epochs == 1 else 's'}")
        )
    peak = (facts.get("memory") or {}).get("process_peak")
    if peak:
        figures.append(Figure("process memory", size(peak), "peak, with the data"))
    return figures


def clock(seconds: float) -> str:
    """75 -> '1:15 min'; below a minute as `duration`."""
    if seconds < 60:
        return duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02} h" if minutes >= 60 else f"{minutes}:{rest:02} min"
