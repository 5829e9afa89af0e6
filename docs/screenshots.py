"""Make the pictures of the documentation from a real run: `python docs/screenshots.py` (needs Chromium)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).parent / "_static"


def train(folder: Path) -> Path:
    """A short run of the digits with its report; the page's path."""
    command = [sys.executable, "-m", "mlcompute", "train", "cnn", "--epochs", "12", "--seed", "0", "--report"]
    subprocess.run([*command, "--out", str(folder / "run")], cwd=folder, check=True)
    return folder / "run" / "report.html"


def picture(page: Path, path: Path, *, width: int, height: int) -> None:
    """What a browser window of this size shows of the page."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here: apt-get install chromium, or the like")
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1"]
    command += [f"--window-size={width},{height}", f"--screenshot={path}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        picture(train(Path(folder)), PICTURES / "report.png", width=1100, height=890)
    print(PICTURES / "report.png")
