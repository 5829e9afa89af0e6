"""A headless Chromium, driven over WebDriver with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
#: Why the tests in a browser cannot run; empty when they can.
MISSING = "" if CHROMIUM and DRIVER else "Chromium and chromedriver are not installed"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
KEYS = {"right": "\ue014", "left": "\ue012", "down": "\ue015", "end": "\ue010", "escape": "\ue00c", "tab": "\ue004"}


class Browser:
    """One window."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        assert DRIVER is not None
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={self._port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        arguments = [*_ARGUMENTS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        options: dict[str, Any] = {"binary": CHROMIUM, "args": arguments}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        try:
            self._wait_for_driver()
            answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{answer['sessionId']}"
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._send("DELETE", self._session)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(timeout=20)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _wait_for_driver(self) -> None:
        for _ in range(200):
            try:
                if self._send("GET", "/status")["ready"]:
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise RuntimeError("chromedriver did not start")

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(json.load(error)["value"]["message"]) from None

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._send("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self._send("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._send("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector: str) -> str:
        wanted = {"using": "css selector", "value": selector}
        return str(self._send("POST", f"{self._session}/element", wanted)[_ELEMENT])

    def _shown(self, selector: str) -> str:
        """An element, scrolled to the middle: nothing that sticks to the top lies over it."""
        found = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", {_ELEMENT: found})
        return found

    def prefer(self, scheme: str) -> None:
        """Light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def click(self, selector: str) -> None:
        self._send("POST", f"{self._session}/element/{self._shown(selector)}/click", {})

    def text(self, selector: str) -> str:
        return str(self._send("GET", f"{self._session}/element/{self.find(selector)}/text"))

    def type(self, selector: str, *keys: str) -> None:
        text = "".join(KEYS.get(key, key) for key in keys)
        self._send("POST", f"{self._session}/element/{self.find(selector)}/value", {"text": text})

    def hover(self, selector: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": {_ELEMENT: self._shown(selector)}}
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._send("POST", f"{self._session}/actions", {"actions": [mouse]})

    def log(self, kind: str = "browser") -> list[dict[str, Any]]:
        return list(self._send("POST", f"{self._session}/se/log", {"type": kind}))

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", f"{self._session}/screenshot")))
