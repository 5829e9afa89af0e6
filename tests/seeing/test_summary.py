"""graph.summary(): numbers counted by hand, before and after compile."""

from __future__ import annotations

import pytest

import mlcompute as mlc
from mlcompute.devices import engine_of
from mlcompute.seeing.units import duration, number, places, shape, size
from tests.nets import Regression, cpu, dense, sgd
from tests.seeing.nets import HOSTILE, Classifier, chain


def test_layers_shapes_parameters_and_bytes() -> None:
    summary = Classifier().graph.summary()
    assert [layer.name for layer in summary.layers] == ["conv", "norm", "relu", "pool", "reshape", "dropout", "fc"]
    convolution, norm, *_, fc = summary.layers
    assert convolution.results == ((4, 4, 8, 8),)
    assert convolution.result_bytes == 4 * 4 * 8 * 8 * 4
    assert (convolution.parameters, convolution.parameter_bytes) == (4 * 9 + 4, 160)
    assert (norm.parameters, norm.trainable, norm.statistics, norm.parameter_bytes) == (8, 8, 8, 64)
    assert (fc.parameters, fc.parameter_bytes) == (64 * 3 + 3, 780)
    assert summary.parameters == 40 + 8 + 195
    assert summary.statistics == 8
    assert summary.device_memory is None
    assert not any(layer.kernels or layer.device for layer in summary.layers)
    text = str(summary).splitlines()
    assert text[0].split() == ["layer", "kind", "result", "size", "parameters", "size"]
    assert text[1].split() == ["conv", "Convolution", "4x4x8x8", "4.10", "kB", "40", "160", "B"]
    assert text[-1] == "parameters  243 trainable, 8 statistics"


def test_after_compile_kernels_device_and_memory() -> None:
    net = Classifier()
    summary = net.training.summary()
    assert [layer.name for layer in summary.layers][-1] == "loss"
    assert all(layer.device == "CPU" and layer.kernels for layer in summary.layers)
    assert summary.device_memory == net.training.device_memory_size
    assert summary.state_memory == 2 * 243 * 4, "two moments of Adam"
    text = str(summary)
    assert text.splitlines()[0].split()[-2:] == ["device", "kernel"]
    assert "on the device at batch 4, of which 1.94 kB optimizer state" in text
    assert f"engine '{engine_of(net.training.device).name}'" in text
    if engine_of(net.training.device).name == "cpu":
        assert summary.layers[2].kernels == ("in norm",), "merged into the loop of the layer before it"


def test_inference_graphs_tell_theirs() -> None:
    net = Classifier()
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    assert inference.summary().device_memory is None
    inference.compile(device=cpu())
    summary = inference.summary()
    assert summary.device_memory == inference.device_memory_size
    assert summary.state_memory == 0
    assert [layer.name for layer in summary.layers][-1] == "fc"


def test_a_summary_compiles_nothing() -> None:
    net = Regression(sgd())
    net.graph.node(mlc.ActivationLayer.relu(), source=net.y)
    before = net.training._session.compiled
    summary = net.training.summary()
    assert net.training._session.compiled is before
    assert summary.device_memory is None
    assert "note  the graph has changed since it was compiled: kernels and memory are not known yet" in str(summary)
    waiting = mlc.TrainingGraph([], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd())
    waiting.node(dense(3, 2), source=mlc.Tensor(shape=(4, 3)))
    waiting.compile(device=cpu())
    assert "the loss still waits for its labels" in str(waiting.summary())


def test_frozen_parameters_are_told_apart() -> None:
    graph, x = mlc.Graph(), mlc.Tensor(shape=(2, 3))
    y = graph.node(dense(3, 3), source=x, disable_update=True)
    graph.node(dense(3, 2), source=y)
    summary = graph.summary()
    assert (summary.parameters, summary.trainable) == (12 + 8, 8)
    assert "8 trainable, 12 frozen" in str(summary)


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    Regression(sgd()).training.summary()
    assert capsys.readouterr() == ("", "")


def test_notebooks_get_a_table_without_scripts() -> None:
    net = Classifier(label=HOSTILE)
    html = net.training.summary()._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;/script&gt;" in html
    assert repr(net.graph.summary()) == str(net.graph.summary())
    assert "\x00" not in str(net.graph.summary())


def test_long_graphs_are_summed_up_in_html() -> None:
    summary = chain(1000).summary()
    html = summary._repr_html_()
    assert len(html) < 100_000
    assert html.count("<tr>") == 250 - 1 + 1 + 2, "the first 166, one for the middle, the last 83, head and foot"
    assert len(str(summary).splitlines()) == 1002
    kinds = {kind: (count, parameters) for kind, count, parameters in summary.kinds()}
    assert kinds["FullyConnected"] == (500, 500 * 20)


def test_an_empty_graph() -> None:
    assert str(mlc.Graph().summary()).splitlines()[-1].split() == ["total", "0", "B", "0", "0", "B"]


def test_units() -> None:
    assert [size(n) for n in (0, 999, 1000, 12_345, 999_960, 3.2e9)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "12.3 kB",
        "1.00 MB",
        "3.20 GB",
    ]
    assert [duration(s) for s in (0.0, 3e-9, 1.5e-5, 0.1234, 12.0)] == ["0", "3.00 ns", "15.0 µs", "123 ms", "12.0 s"]
    assert [number(n) for n in (0.00123456, 1.0, 9999.0, 40_000.0, -1_234_567.0, 3e9, float("nan"))] == [
        "0.001235",
        "1",
        "9999",
        "40,000",
        "-1,234,567",
        "3e+09",
        "nan",
    ]
    assert shape(()) == "1"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_narrow_summary_has_whole_columns(width: int) -> None:
    summary = Classifier().training.summary()
    whole, narrow = str(summary).split("\n\n"), summary.text(width).split("\n\n")
    assert narrow[1:] == whole[1:], "what stands below the table stays"
    wide, fitting = whole[0].splitlines(), narrow[0].splitlines()
    assert [line[: len(short)] for line, short in zip(wide, fitting, strict=True)] == fitting
    head = summary.table().head
    shown = fitting[0].split()
    assert shown == list(head[: len(shown)])
    assert len(shown) == {20: 1, 40: 3, 60: 5, 80: 7, 120: 8}[width]
    if "kernel" not in shown:
        assert max(map(len, fitting)) <= width


def test_columns_stand_below_each_other_whatever_the_letters() -> None:
    graph = mlc.Graph()
    x = graph.input((2, 4), "x")
    for name in ("plain", "層の名前", "e\u0301te\u0301", "🚀"):
        x = graph.dense(x, 4, name=name)
    lines = str(graph.summary()).splitlines()[1:5]
    assert {places(line.partition("FullyConnected")[0]) for line in lines} == {len("層の名前") * 2 + 2}
