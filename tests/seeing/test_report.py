"""The report: complete, escaped, without network, small; and clicked through in a browser."""

from __future__ import annotations

import html.parser
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlcompute as mlc
from mlcompute.seeing.units import size
from tests.nets import Regression, adam, cpu, normal, sgd
from tests.seeing.browser import MISSING, Browser
from tests.seeing.nets import HOSTILE, Classifier, chain
from tests.trainer.nets import points, trainer


def history_of(names: list[str], hostile: bool = False) -> dict[str, Any]:
    """Ten epochs of a training that goes well, 2000 steps, and norms that fade."""
    return {
        "loss": [2.0 * 0.8**epoch for epoch in range(10)],
        "val_loss": [2.0 * 0.85**epoch for epoch in range(10)],
        "accuracy" if not hostile else HOSTILE: [1 - 0.7 * 0.8**epoch for epoch in range(10)],
        "step_losses": [2.0 * 0.999**step + 0.1 * math.sin(step) for step in range(2000)],
        "gradient_norms": {name: [0.5**index * 0.99**step for step in range(200)] for index, name in enumerate(names)},
    }


def write(path: Path, label: str = "conv", title: str = "") -> Classifier:
    net = Classifier(label=label)
    names = [layer.name for layer in net.training.summary().layers if layer.parameters]
    profile = net.training.profile(net.inputs, net.labels, steps=2)
    history = history_of(names, hostile=label == HOSTILE)
    assert mlc.report(path, net.training, history, profile, title=title) == path
    return net


class Page(html.parser.HTMLParser):
    """What a browser would see of the structure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{name} would run a script"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


PARTS = ["Learning", "Gradient norms", "Time", "Memory over a step", "Graph", "Layers"]


def test_everything_is_there_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    net = write(path, title="Ein <b>Versuch</b>")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert page.headings == PARTS
    assert len(page.ids) == len(set(page.ids))
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", text)
    assert " % · Ein &lt;b&gt;Versuch&lt;/b&gt;</title>" in text
    assert page.tags.count("script") == 2
    assert "default-src 'none'" in text
    assert f"{net.training.summary().parameters:,}" in text
    assert len(text) < 300_000
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_labels_can_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, label=HOSTILE, title=HOSTILE)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    labels = [facts[0][1] for facts in json.loads(data[1])["boxes"]]
    assert HOSTILE.replace("\x00\ud800", "  ") in labels, "letters that cannot be shown are gone, all others are there"


def test_it_shows_what_there_is(tmp_path: Path) -> None:
    net = Regression(sgd())
    plain = mlc.report(str(tmp_path / "plain.html"), net.graph).read_text(encoding="utf-8")
    assert Page(plain).headings == ["Graph", "Layers"]
    assert "memory once the graph is compiled" in plain
    compiled = mlc.report(tmp_path / "compiled.html", net.training).read_text(encoding="utf-8")
    assert Page(compiled).headings == ["Memory over a step", "Graph", "Layers"]
    learned = mlc.report(tmp_path / "learned.html", net.training, {"loss": [1.0, math.nan]}).read_text(encoding="utf-8")
    assert Page(learned).headings == ["Learning", "Memory over a step", "Graph", "Layers"]
    empty = mlc.report(tmp_path / "empty.html", mlc.Graph()).read_text(encoding="utf-8")
    assert Page(empty).headings == ["Graph", "Layers"]
    inference = mlc.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.compile(device=cpu())
    profile = inference.profile({"x": normal(4, 3)}, steps=1)
    shown = mlc.report(tmp_path / "inference.html", inference, profile=profile).read_text(encoding="utf-8")
    assert Page(shown).headings == ["Time", "Memory over a step", "Graph", "Layers"]


def test_a_refused_report_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one", encoding="utf-8")
    graph = Regression(sgd()).graph
    with pytest.raises(TypeError, match="report: graph must be a Graph, not str"):
        mlc.report(path, "graph")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"report: profile must be what graph.profile\(\) gives, not dict"):
        mlc.report(path, graph, profile={})  # type: ignore[arg-type]
    with pytest.raises(mlc.DataError, match="report: history is a list"):
        mlc.report(path, graph, [1.0])
    assert path.read_text(encoding="utf-8") == "the old one"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_thousand_layers_stay_below_a_megabyte_and_a_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLC_DEBUG", "")  # other tests verify the compiler
    graph = chain(1000)
    loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
    training = mlc.TrainingGraph([graph], loss, adam())
    x = graph.source_tensors(graph.layers[0])[0]
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=x.descriptor.shape)})
    training.compile(device=mlc.Device(engine=_null()))
    names = [layer.name for layer in training.summary().layers if layer.parameters]
    start = time.process_time()
    path = mlc.report(tmp_path / "large.html", training, history_of(names))
    assert time.process_time() - start < 10.0
    assert path.stat().st_size < 1_000_000
    assert "more" in path.read_text(encoding="utf-8")


def _null() -> Any:
    from mlcompute.devices.null import Null

    return Null()


# In a browser ------------------------------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is a browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write(path, label=HOSTILE, title=HOSTILE)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as window:
        yield window


def requests_of(browser: Browser) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    # The browser's own start page is not ours.
    return [url for url in urls if not url.startswith(("data:", "chrome:", "chrome-untrusted:", "chrome-extension:"))]


@in_browser
def test_clicking_through(page: Path, browser: Browser) -> None:
    browser.open(page)
    assert browser.run("return window.stolen === undefined"), "a label has run a script"
    assert requests_of(browser) == [page.as_uri()]

    browser.click('nav a[href="#memory"]')
    assert "Point at a tensor" in browser.text("#tensor")
    browser.type("#arena", "right", "right")
    first = browser.text("#tensor")
    assert re.search(r"bytes [\d,]+ to [\d,]+", first)
    assert browser.run("return document.querySelectorAll('.memory .chosen').length") == 1
    tensors = browser.run("return JSON.parse(document.getElementById('data').textContent).tensors")
    # Thin tensors lie under others' edges, and which are thin follows from the memory plan.
    wanted = browser.run(
        "const area = each => each.width.baseVal.value * each.height.baseVal.value;"
        "const all = Array.from(document.querySelectorAll('.memory .gradient[data-tensor]'));"
        "return all.sort((a, b) => area(b) - area(a))[0].dataset.tensor"
    )
    browser.hover(f'[data-tensor="{wanted}"]')
    assert browser.text("#tensor") == first, "chosen by key, it stays"
    browser.click(f'[data-tensor="{wanted}"]')
    assert browser.text("#tensor h3") == tensors[int(wanted)][0]
    assert "float32" in browser.text("#tensor")

    browser.click('[data-box="1"]')
    assert browser.run("return document.querySelector('#layer h3').textContent").startswith("</script><script>")
    assert "Convolution" in browser.text("#layer")
    assert "forward" in browser.text("#layer")
    browser.type('[data-box="1"]', "down")
    assert browser.text("#layer h3") == "norm"
    assert browser.run("return document.activeElement.dataset.box") == "2"
    browser.type('[data-box="2"]', "end")
    assert browser.text("#layer h3") == "loss"

    names = "return Array.from(document.querySelectorAll('.times tbody tr')).map(row => Number(row.dataset.time))"
    assert browser.run(names) != sorted(browser.run(names), reverse=True)
    browser.click("#sort")
    assert browser.run(names) == sorted(browser.run(names), reverse=True)
    assert browser.run("return document.getElementById('sort').getAttribute('aria-pressed')") == "true"
    browser.click("#sort")
    assert browser.run("return document.querySelector('.times tbody tr').dataset.order") == "0"

    browser.hover("figure.plot svg")
    assert re.match(r"epoch \d+ · loss [\d.]+ · validation loss [\d.]+", browser.text("figure.plot .readout"))
    browser.type("figure.plot", "end")
    assert browser.text("figure.plot .readout") == "epoch 10 · loss 0.2684 · validation loss 0.4632"

    browser.click("#learning details summary")
    assert "0.2684" in browser.text("#learning details table")
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth"), "no sideways scrolling"
    assert [entry for entry in browser.log() if entry["level"] == "SEVERE"] == []
    assert browser.run("return window.stolen === undefined")


@in_browser
def test_everything_has_a_name_and_enough_contrast(page: Path, browser: Browser) -> None:
    browser.open(page)
    nameless = """
      return Array.from(document.querySelectorAll('[tabindex],button,a,svg[role=img],section')).filter(
        e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.textContent.trim())
      ).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.run(nameless) == []
    assert browser.run("return document.documentElement.lang") == "en"
    for dark in (False, True):
        browser.prefer("dark" if dark else "light")
        for selector in ("body", ".lead", "thead th", "nav a", ".figures dt", "#tensor"):
            colours = browser.run(
                "const e=document.querySelector(arguments[0]);let p=e;"
                "while(getComputedStyle(p).backgroundColor==='rgba(0, 0, 0, 0)'&&p.parentElement)p=p.parentElement;"
                "return [getComputedStyle(e).color,getComputedStyle(p).backgroundColor]",
                selector,
            )
            assert contrast(*colours) >= 4.5, (selector, dark, colours)
        background = luminance(browser.run("return getComputedStyle(document.body).backgroundColor"))
        assert background < 0.1 if dark else background > 0.9
    browser.prefer("light")


def luminance(colour: str) -> float:
    """Relative luminance as the Web Content Accessibility Guidelines define it."""
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@in_browser
def test_it_can_be_read_without_scripts_and_on_a_phone(page: Path, browser: Browser) -> None:
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.devtools("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.devtools("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.open(page)
        assert browser.text("h2#h-learning") == "Learning"
        assert "fc" in browser.text(".times tbody")
        browser.click(".map ~ details summary")
        assert "float32 4x64" in browser.text(".map ~ details table")
        assert browser.text("#sort") == "", "buttons that would do nothing are not shown"
        assert browser.text("#tensor") == ""
        assert browser.run("return document.documentElement.scrollWidth") <= 390, "no sideways scrolling"
        widths = "return ['.heat', '.memory'].map(s => document.querySelector(s).getBoundingClientRect().width)"
        assert min(browser.run(widths)) >= 600, "pictures with small letters are moved, not shrunk"
    finally:
        browser.devtools("Emulation.setScriptExecutionDisabled", {"value": False})
        browser.devtools("Emulation.clearDeviceMetricsOverride", {})


@in_browser
def test_long_names_and_wide_graphs_fit(tmp_path: Path, browser: Browser) -> None:
    name = "a" * 90
    graph = mlc.Graph()
    x = graph.input((2, 4), "x")
    graph.concatenate([graph.dense(x, 4, name=f"{name}{index}") for index in range(20)], dimension=1)
    browser.open(mlc.report(tmp_path / "wide.html", graph, {"gradient_norms": {name: [1e-40, 1.0]}}))
    edges = """
      const inside = (outer, inner) => {
        const a = document.querySelector(outer).getBoundingClientRect();
        const b = document.querySelector(inner).getBoundingClientRect();
        return a.left - 1 <= b.left && b.right <= a.right + 1;
      };
      const box = document.querySelector('#layers table').getBoundingClientRect();
      return [inside('.heat', '.heat .label'), inside('.canvas', '[data-box="0"]'),
              box.width <= document.querySelector('#layers .wide').clientWidth + 1,
              document.querySelector('footer').getBoundingClientRect().left ===
              document.querySelector('main').getBoundingClientRect().left]"""
    found = browser.run(edges)
    assert found == [True] * 4, "norm labels, the first box, the table of layers, the footer"


@in_browser
def test_paper_is_white_and_shows_all(page: Path, browser: Browser) -> None:
    browser.open(page)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.devtools("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    try:
        assert luminance(browser.run("return getComputedStyle(document.body).backgroundColor")) > 0.9
        shown = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        assert browser.run(shown, ".bars i", "printColorAdjust") == "exact", "bars are drawn as backgrounds"
        assert browser.run(shown, ".canvas", "maxHeight") == "none"
        assert [browser.run(shown, one, "display") for one in ("nav", "#sort", "#tensor")] == ["none"] * 3
    finally:
        browser.devtools("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_the_headline_is_the_memory_of_a_step(tmp_path: Path) -> None:
    """A watched step keeps every gradient readable, in a larger program; the steps themselves take what they took."""
    model = trainer()
    before = model.training.device_memory_size
    history = model.fit(*points(), callbacks=[mlc.callbacks.GradientWatch(every=2)], verbose=0)
    most = model.training.device_memory_size
    summary = model.training.summary()
    assert summary.device_memory == before < most == summary.passes_memory
    page = mlc.report(tmp_path / "report.html", model.training, history).read_text()
    assert f"<dt>device memory</dt><dd>{size(before)}</dd>" in page
    assert f"{size(most)} with separate passes" in page
    assert f"{size(most)} since passes were run one by one" in str(summary)
