"""What is shown: a moving line on a terminal, plain lines elsewhere, nothing when asked."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.trainer import progress
from tests.trainer.nets import points, trainer


def test_one_plain_line_per_epoch(capsys: Any) -> None:
    model = trainer()
    model.fit(*points(), epochs=2, validation=points())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    number = r"\d+\.\d{4}"
    measured = f"loss {number}  accuracy {number}  val_loss {number}  val_accuracy {number}"
    pattern = rf"epoch 1/2  {measured}  [\d,]+ samples/s  [\d.]+ s"
    assert re.fullmatch(pattern, lines[0])
    model.fit(*points(), epochs=1, verbose=0)
    assert capsys.readouterr().out == ""


def test_no_moving_line_in_a_file(capsys: Any) -> None:
    trainer().fit(*points(), epochs=1, verbose=1)
    assert re.fullmatch(r"epoch 1/1  loss .* samples/s  [\d.]+ s\n", capsys.readouterr().out)


def test_narrow_terminals_lose_metrics_first() -> None:
    logs = {"loss": 1.0, "accuracy": 0.5, "top_5_accuracy": 0.75}
    whole = "loss 1.0000  accuracy 0.5000  top_5_accuracy 0.7500  9 samples/s"
    assert progress._fitting_in(len(whole), logs, "9 samples/s") == whole
    assert progress._fitting_in(len(whole) - 1, logs, "9 samples/s") == "loss 1.0000  accuracy 0.5000  9 samples/s"
    assert progress._fitting_in(24, logs, "9 samples/s") == "loss 1.0000  9 samples/s"
    assert progress._fitting_in(20, logs, "9 samples/s") == "loss 1.0000"


def test_resuming_is_said(tmp_path: Path, capsys: Any) -> None:
    model = trainer()
    model.fit(*points(), epochs=1, verbose=0)
    model.save(tmp_path / "run")
    model.fit(*points(), epochs=2, resume=tmp_path / "run", verbose=2)
    assert capsys.readouterr().out.startswith("resuming at epoch 2, step 1\nepoch 2/2")


SCRIPT = """
    import time
    import mlcompute as mlc
    from tests.trainer.nets import points, trainer

    class Slowly(mlc.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs):
            time.sleep(0.03)

    trainer().fit(*points(160), epochs=2, callbacks=[Slowly()], checkpoint="run")
    print("done")
"""


def test_a_terminal_sees_a_moving_line_and_ctrl_c_saves(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    root = Path(__file__).parents[2]
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
    shown = pexpect.spawn(
        sys.executable, ["script.py"], cwd=str(tmp_path), env=environment, timeout=60, encoding="utf-8",
        dimensions=(24, 120),
    )  # fmt: skip
    shown.expect(r"epoch 1/2.*\d+/10.*loss \d\.\d+  accuracy \d\.\d+  [\d,]+ samples/s")
    shown.expect(r"epoch 1/2  loss .* samples/s")
    shown.expect(r"epoch 2/2")
    shown.sendcontrol("c")
    shown.expect("SIGINT: finishing the step, then saving")
    shown.expect("stopped after step \\d+ \\(epoch 2\\); saved to run")
    shown.expect("resume='run'")
    shown.expect(pexpect.EOF)
    shown.close()
    assert shown.exitstatus != 0
    saved: Any = mlc.Checkpoint(tmp_path / "run").progress
    assert saved["trainer"]["epoch"] == 1
