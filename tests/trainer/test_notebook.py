"""A notebook, run as Jupyter runs it: progress, pictures, interrupting."""

from __future__ import annotations

from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, to run notebooks")
nbformat = pytest.importorskip("nbformat", reason="comes with nbclient")

CELLS = [
    """
import signal
import numpy as np
import mlcompute as mlc
x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
y = x[:, :3].argmax(axis=1)
graph = mlc.Graph()
graph.dense(graph.dense(graph.input((8, 6), "x"), 12, activation="tanh", name="<hidden>"), 3)
trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.02)
class Interrupts(mlc.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs):
        if self.trainer.step == 20:
            signal.raise_signal(signal.SIGINT)
""",
    "history = trainer.fit(x, y, epochs=4, validation=(x, y))",
    "history",
    "trainer",
    "graph.nodes[0].layer",
    "trainer.training.programs['fused 8']",
    "mlc.report('report.html', trainer.training, history)",
    "trainer.fit(x, y, epochs=400, callbacks=[Interrupts()], checkpoint='run.safetensors')",
    "trainer.fit(x, y, epochs=400, callbacks=[Interrupts()], checkpoint='run.safetensors', verbose=1)",
    "trainer.fit(x, y, epochs=3, verbose=2)",
    "trainer.fit(x, y, epochs=3, resume='run.safetensors', verbose=0)",
]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outputs of every cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    folder = str(tmp_path_factory.mktemp("notebook"))
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": folder}}
    ).execute()
    return [cell["outputs"] for cell in notebook.cells]


def shown(outputs: Any) -> str:
    """The HTML of the only thing a cell shows."""
    (output,) = outputs
    assert output["output_type"] in ("execute_result", "display_data"), output
    return str(output["data"]["text/html"])


def test_progress(cells: list[Any]) -> None:
    assert cells[0] == []
    html = shown(cells[1])
    assert '<progress value="1.0000"' in html
    assert "4 epochs in " in html
    assert "epoch 4/4  loss" in html
    assert cells[1][0]["data"]["text/plain"].count("\n") == 3, "as text, a line per epoch"


def test_things_show_themselves(cells: list[Any]) -> None:
    history, trainer, layer, program, report = map(shown, cells[2:7])
    assert history.count("<svg") == 4
    assert "<details><summary>History(4 epochs" in history
    assert "AdamOptimizer, learning rate 0.02" in trainer
    assert trainer.count("<svg") == 4
    assert "&lt;hidden&gt;" in layer
    assert "<hidden>" not in layer + trainer
    assert "12x6" in layer
    assert "output_feature_channel_count</th><td>12<" in layer
    assert "program &#x27;fused&#x27;, batch 8" in program
    assert '<iframe sandbox="allow-scripts"' in report
    assert "Memory over a step" in report


@pytest.mark.parametrize("cell", [7, 8])
def test_interrupting_says_three_things(cells: list[Any], cell: int) -> None:
    """What signal came and where the state is, the progress so far, and one line instead of a traceback."""
    streams = "".join(one["text"] for one in cells[cell] if one["output_type"] == "stream")
    assert streams.count("\n") == 4, streams
    assert "SIGINT: finishing the step, then saving ..." in streams
    assert "go on with: trainer.fit(..., resume='run.safetensors')" in streams
    errors = [one for one in cells[cell] if one["output_type"] == "error"]
    assert [one["ename"] for one in errors] == ["Interrupted"]
    assert len(errors[0]["traceback"]) == 1
    assert errors[0]["traceback"][0] == "Interrupted: stopped after step 21 (epoch 3); saved to run.safetensors"
    pictures = [one for one in cells[cell] if one["output_type"] == "display_data"]
    assert len(pictures) == 1


def test_lines_and_silence(cells: list[Any]) -> None:
    text = "".join(one["text"] for one in cells[9] if one["output_type"] == "stream")
    assert text.count("epoch ") == 3
    assert [one["output_type"] for one in cells[10]] == ["execute_result"], "the history alone"


def test_many_epochs_are_not_sent_again_and_again() -> None:
    from mlcompute.trainer.notebook_progress import NotebookProgress

    progress = NotebookProgress()
    for epoch in range(500):
        progress._add(f"epoch {epoch}")
    for text in (repr(progress), progress._repr_html_()):
        assert "400 earlier lines: history.epochs" in text
        assert "epoch 399\n" not in text
        assert "epoch 499" in text
