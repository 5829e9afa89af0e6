"""Live(): the page tells what training does, its buttons work, and training is not changed by being looked at."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.trainer.signals import Interrupted
from tests.live.test_server import ask
from tests.seeing.browser import MISSING, Browser

X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer() -> mlc.Trainer:
    mlc.Platform.set_rng_seed_to(3)
    graph = mlc.Graph()
    graph.dense(graph.dense(graph.input((8, 6), "x"), 12, activation="tanh", name="<hidden>"), 3, name="scores")
    return mlc.Trainer(graph, loss="softmax_cross_entropy", metrics=["accuracy"], learning_rate=0.02)


class Slow(mlc.callbacks.Callback):
    """Training that somebody can look at."""

    def __init__(self, seconds: float = 0.005) -> None:
        self.seconds = seconds

    def on_train_batch_begin(self, batch: int, logs: mlc.callbacks.Logs) -> None:
        time.sleep(self.seconds)


class Fit(threading.Thread):
    """A run on a thread of its own."""

    def __init__(self, trainer: mlc.Trainer, live: mlc.callbacks.Live, epochs: int, *others: Any) -> None:
        super().__init__(daemon=True)
        self.trainer, self.live, self.epochs, self.others = trainer, live, epochs, others
        self.error: BaseException | None = None
        self.start()
        for _ in range(1000):
            if live.address:
                return
            time.sleep(0.01)
        raise AssertionError("training did not begin")

    def run(self) -> None:
        try:
            callbacks = [self.live, *self.others]
            self.trainer.fit(X, Y, epochs=self.epochs, validation=(X, Y), callbacks=callbacks, verbose=0)
        except BaseException as error:
            self.error = error


def messages(live: mlc.callbacks.Live) -> list[dict[str, Any]]:
    """Everything the page is sent until the end."""
    with urllib.request.urlopen(f"{live.address}events", timeout=30) as stream:
        return [json.loads(line[6:]) for line in stream if line.startswith(b"data: ")]


def test_the_page_is_told_how_it_goes() -> None:
    live = mlc.callbacks.Live(every=4)
    run = Fit(trainer(), live, 30, Slow())
    with urllib.request.urlopen(live.address, timeout=10) as answer:
        first = answer.read().decode()
    assert "connect-src 'self'" in first
    assert "&lt;hidden&gt;" in first
    assert "<hidden>" not in first
    told = messages(live)
    run.join(30)
    assert run.error is None
    assert len(told) >= 2
    assert [one["over"] for one in told] == [False] * (len(told) - 1) + [True]
    assert told[0]["state"].startswith("epoch ")
    last = told[-1]
    assert last["state"] == "finished after 240 steps"
    assert (last["done"], last["kind"]) == (1.0, "over")
    accuracy = run.trainer.history["val_accuracy"][-1]
    assert f"<b>{100 * accuracy:.1f} %</b> validation accuracy" in last["heading"]
    assert set(last["parts"]) == {"learning", "gradients"}
    assert last["charts"][0]["lines"][0]["points"][-1][1] == 30
    assert "<svg" in last["parts"]["gradients"]
    # It can be loaded again when training is over, and then says so.
    assert messages(live)[-1]["over"]
    live.close()


def test_being_looked_at_changes_nothing() -> None:
    plain = trainer()
    plain.fit(X, Y, epochs=6, callbacks=[mlc.callbacks.GradientWatch(5)], verbose=0)
    live = mlc.callbacks.Live(every=5)
    watched = trainer()
    reader = threading.Thread(target=lambda: messages(live), daemon=True)

    class Reads(mlc.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: mlc.callbacks.Logs) -> None:
            if epoch == 0:
                reader.start()

    watched.fit(X, Y, epochs=6, callbacks=[live, mlc.callbacks.GradientWatch(5), Reads()], verbose=0)
    live.close()
    assert not reader.is_alive()
    assert watched.history == plain.history, "and two that watch gradients write them down once"


def press(live: mlc.callbacks.Live, button: str) -> str:
    server = live._server
    assert server is not None
    return ask(server, f"/{server.token}/{button}", "POST", X_Requested_With="mlcompute")[1].decode()


def test_stop_does_what_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    live = mlc.callbacks.Live()
    net = trainer()
    run = Fit(net, live, 10_000, Slow(0.001))
    while net.step < 5:
        time.sleep(0.001)
    assert press(live, "stop") == "stopping: the step is finished and saved"
    assert press(live, "stop") in ("stopping: the step is finished and saved", "training has ended")
    run.join(30)
    assert isinstance(run.error, Interrupted)
    assert run.error.path is not None
    assert messages(live)[-1]["state"] == f"stopped after {net.step:,} steps"
    assert press(live, "save") == "training has ended"
    live.close()
    steps = net.step
    # What was saved goes on, bit for bit, to where a run that never stopped arrives.
    epochs = -(-steps // 8) + 1
    again, whole = trainer(), trainer()
    live = mlc.callbacks.Live()
    again.fit(X, Y, epochs=epochs, validation=(X, Y), callbacks=[live], resume=run.error.path, verbose=0)
    whole.fit(X, Y, epochs=epochs, validation=(X, Y), callbacks=[live], verbose=0)
    live.close()
    for one, two in zip(again.copy_weights(), whole.copy_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert "stopped by the program: finishing the step, then saving ..." in capsys.readouterr().err


def test_save(tmp_path: Path) -> None:
    live = mlc.callbacks.Live(save=tmp_path / "now.safetensors")
    net = trainer()
    run = Fit(net, live, 10_000, Slow(0.001))
    assert press(live, "save") == f"saving after this step, to {tmp_path / 'now.safetensors'}"
    for _ in range(1000):
        if (tmp_path / "now.safetensors").exists():
            break
        time.sleep(0.01)
    assert net.is_training
    net.interrupt()
    run.join(30)
    live.close()
    with mlc.Checkpoint(tmp_path / "now.safetensors") as checkpoint:
        assert 0 <= checkpoint.progress["trainer"]["step"] < net.step


def test_nothing_is_interrupted_where_nothing_runs() -> None:
    net = trainer()
    net.interrupt()
    net.fit(X, Y, verbose=0)
    net.interrupt()
    assert len(net.fit(X, Y, epochs=2, verbose=0).epochs) == 2
    assert not net.is_training


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_in_a_browser(tmp_path: Path) -> None:
    live = mlc.callbacks.Live(every=4, save=tmp_path / "now.safetensors", title="net")
    net = trainer()
    run = Fit(net, live, 100_000, Slow(0.002))
    with Browser() as browser:
        address = live.address
        browser.open(address)

        def until(condition: str) -> Any:
            end = time.monotonic() + 30.0
            while time.monotonic() < end:
                found = browser.run(f"return {condition}")
                if found:
                    return found
                time.sleep(0.05)
            raise AssertionError(f"{condition} never was; the page says {browser.text('#state')!r}")

        def tells_an_epoch() -> None:
            until("document.querySelector(\"figure.plot[data-chart='0'] .readout\").textContent.startsWith('epoch ')")

        until("document.querySelectorAll('figure.plot').length >= 3")
        until("!document.getElementById('stop').disabled")
        # Numbers under the pointer stay there while new curves come.
        browser.hover("figure.plot[data-chart='0']")
        before = browser.text("#state")
        until(f"document.getElementById('state').textContent !== {json.dumps(before)}")
        tells_an_epoch()
        assert browser.run("return document.querySelector('.cross').getAttribute('visibility')") == "visible"
        assert browser.run("return document.querySelectorAll('#gradients rect').length") > 3
        browser.click("#save")
        for _ in range(2000):
            if (tmp_path / "now.safetensors").exists():
                break
            time.sleep(0.01)
        assert (tmp_path / "now.safetensors").exists()
        assert net.is_training
        browser.click("#stop")
        until("document.getElementById('lamp').className === 'lamp over'")
        run.join(30)
        assert isinstance(run.error, Interrupted)
        until(f"document.getElementById('state').textContent === 'stopped after {net.step:,} steps'")
        assert browser.run("return document.querySelectorAll('.buttons :enabled').length") == 0
        assert browser.run("return document.title").endswith(" % · net")
        live.close()
        # Nobody serves it any more: what was there still works.
        browser.type("figure.plot[data-chart='0']", "end", "left")
        tells_an_epoch()
        errors = [line["message"] for line in browser.log() if line["level"] == "SEVERE"]
        assert errors == []
        events = [json.loads(line["message"])["message"] for line in browser.log("performance")]
        asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
        elsewhere = [url for url in asked if not url.startswith(("data:", "chrome:", "about:", address))]
        assert elsewhere == []
        assert address in asked


def test_a_closed_one_serves_no_more() -> None:
    live = mlc.callbacks.Live()
    trainer().fit(X, Y, callbacks=[live], verbose=0)
    address = live.address
    live.close()
    assert live.address == ""
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=1)
