"""graph.profile(): what it measures, and that nothing notices it was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.device import cpu_engine
from tests.nets import Regression, assert_same, cpu, normal, sgd, values_of
from tests.seeing.nets import HOSTILE, Classifier


def test_time_per_layer_and_pass() -> None:
    net = Classifier()
    profile = net.training.profile(net.inputs, net.labels, steps=3)
    names = [layer.name for layer in net.training.summary().layers]
    passes = {(row.layer, row.phase) for row in profile.rows}
    assert {("conv", "forward"), ("conv", "gradient"), ("conv", "update"), ("fc", "update")} <= passes
    assert {layer for layer, _ in passes} <= {*names, "(graph)"}
    assert ("norm", "update") in passes, "updates belong to the layer whose parameters they change"
    assert profile.phases == ("forward", "gradient", "update")
    assert sum(row.share for row in profile.rows) == pytest.approx(1.0)
    assert all(row.seconds >= 0 for row in profile.rows)
    assert len(profile.step_times) == len(profile.runs) == 3
    assert 0 < profile.step_time < 5
    assert profile.total == pytest.approx(sum(row.seconds for row in profile.rows))
    assert list(profile.by_layer())[:2] == ["conv", "norm"], "in the order of the graph"
    assert all(row.kernels for row in profile.rows if row.seconds > 1e-3)
    lines = str(profile).splitlines()
    assert lines[0] == "TrainingGraph on CPU ('cpu'), batch 4"
    assert "per run (median of 3)" in lines[1]
    assert lines[3].split() == ["layer", "pass", "time", "share", "kernel"]
    assert lines[-1].startswith("total, update")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_kernels_are_timed_within_the_step(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other without gaps, waits included: together they are the run as it always is."""
    monkeypatch.setattr(cpu_engine(), "threads", threads)
    net = Classifier()
    profile = net.training.profile(net.inputs, net.labels, steps=3)
    for run in profile.runs:
        for event, following in itertools.pairwise(run):
            assert event.start + event.seconds == pytest.approx(following.start, abs=1e-7)
        assert run[-1].start + run[-1].seconds - run[0].start == pytest.approx(sum(event.seconds for event in run))


def test_nothing_notices_it() -> None:
    """Parameters, statistics, optimizer state, time step, random numbers and readable results stay as they are."""
    watched, plain = Classifier(dropout=0.5), Classifier(dropout=0.5)
    outputs = []
    for net in (watched, plain):
        mlc.Platform.set_rng_seed_to(11)
        first = net.step()
        before, loss = values_of(net.training), net.training.execute(net.inputs, net.labels)
        before = values_of(net.training)
        if net is watched:
            net.training.profile(net.inputs, net.labels, steps=2)
            assert_same(values_of(net.training), before)
        outputs.append([first, loss.result.data.item(), *(net.step() for _ in range(3))])
    assert outputs[0] == outputs[1]
    assert_same(values_of(watched.training), values_of(plain.training))


def test_inference_with_and_without_labels_and_a_smaller_batch() -> None:
    net = Classifier()
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.compile(device=cpu())
    profile = inference.profile(net.inputs, steps=1, batch_size=2)
    assert profile.phases == ("forward",)
    assert profile.batch_size == 2
    assert profile.program == "inference"


def test_it_needs_what_execute_needs() -> None:
    net = Regression(sgd())
    with pytest.raises(mlc.DataError, match=r"TrainingGraph.profile: 't'"):
        net.training.profile({"x": normal(4, 3)})
    for wrong in (0, True, 1.5):
        with pytest.raises(mlc.DataError, match=r"TrainingGraph\.profile: steps is"):
            net.training.profile({"x": normal(4, 3)}, {"t": normal(4, 2)}, steps=wrong)  # type: ignore[arg-type]
    with pytest.raises(mlc.ExecutionError, match="the graph is not compiled"):
        mlc.InferenceGraph([net.graph]).profile({"x": normal(4, 3)})


def test_without_an_optimizer_nothing_is_updated() -> None:
    net = Regression(None)
    net.training.add_outputs({"dw": net.training.gradient_tensor(net.first.weights)})
    profile = net.training.profile({"x": normal(4, 3)}, {"t": normal(4, 2)}, steps=1)
    assert profile.phases == ("forward", "gradient")


def events_of(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_a_trace_file_by_the_trace_event_format(tmp_path: Path) -> None:
    net = Classifier(label=HOSTILE)
    profile = net.training.profile(net.inputs, net.labels, steps=2)
    path = profile.save_trace(tmp_path / "step.json")
    assert path == tmp_path / "step.json"
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"], "no temporary file is left"
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= event.keys()
        assert isinstance(event["name"], str)
        assert event["ph"] in "XMC"
        assert event["ts"] >= 0
    named = {e["tid"]: e["args"]["name"] for e in events_of(path, "M") if e["name"] == "thread_name"}
    assert [*named.values()] == ["runs", "forward pass", "gradient pass", "update pass"]
    complete = events_of(path, "X")
    assert all(event["dur"] >= 0 for event in complete)
    assert [event["name"] for event in complete if event["cat"] == "run"] == ["run 1", "run 2"]
    kernels = [event for event in complete if event["cat"] == "kernel"]
    assert len(kernels) == sum(map(len, profile.runs))
    # On one track events lie inside one another or apart: what a viewer can show as nested bars.
    for track in named:
        spans = sorted(
            ((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == track), key=lambda span: (span[0], -span[1])
        )
        open_ends: list[float] = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin + 0.01:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.01
            open_ends.append(end)
    memory = [event["args"]["bytes"] for event in events_of(path, "C")]
    assert max(memory) <= next(iter(net.training.programs.values())).plan.nbytes
    assert HOSTILE in {event["name"] for event in complete}


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    net = Regression(sgd())
    profile = net.training.profile({"x": normal(4, 3)}, {"t": normal(4, 2)}, steps=1)
    with pytest.raises(mlc.FileError, match=r"save_trace: .*step\.json could not be written: No such file"):
        profile.save_trace(tmp_path / "nowhere" / "step.json")
    (tmp_path / "taken").mkdir()
    with pytest.raises(mlc.FileError, match="taken could not be written: it is a folder"):
        profile.save_trace(tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_notebooks_get_a_table() -> None:
    net = Classifier(label=HOSTILE)
    html = net.training.profile(net.inputs, net.labels, steps=1)._repr_html_()
    assert "<table>" in html
    assert "<script" not in html
