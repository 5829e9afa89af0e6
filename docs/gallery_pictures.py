"""Run every program of the gallery, and put its picture and its time into docs/gallery.md; or some: `... gan mlp`.

Each program runs in a process of its own. Times are processor time on one core, from the import of the program to its
end, with no kernel compiled before. The picture of a program in `examples/programs/` is its loss or what it made, that
of another example the end of what it prints.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlcompute.seeing.png import picture_of

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PROGRAMS = EXAMPLES / "programs"
#: Parts of other examples.
SHARED = ("blocks", "images")
PICTURES = DOCS / "_static" / "gallery"
WIDTH, HEIGHT = 240, 100
_MAIN = 'if __name__ == "__main__":\n'


def run(name: str) -> tuple[dict[str, Any], list[float], str, float]:
    """A program's names after its run, the losses `train` returned, what it printed last, and seconds."""
    definitions, main = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8").split(_MAIN)
    names: dict[str, Any] = {"__name__": name}
    losses: list[float] = []
    printed = io.StringIO()
    start = time.process_time()
    exec(compile(definitions, name, "exec"), names)
    train: Callable[..., list[float]] = names["train"]

    def watched(*arguments: Any, **settings: Any) -> list[float]:
        returned = train(*arguments, **settings)
        losses.extend(float(one) for one in returned)
        return returned

    names["train"] = watched
    with contextlib.redirect_stdout(printed):
        exec(compile(textwrap.dedent(main), name, "exec"), names)
    return names, losses, printed.getvalue().strip().splitlines()[-1], time.process_time() - start


def demonstrate(name: str) -> tuple[str, float]:
    """What an example prints, and seconds of its process and of those it starts."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    before = os.times()
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=True)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return ended.stdout.rstrip(), seconds


def svg(parts: list[str], label: str) -> str:
    """A picture that is light or dark as the reader prefers."""
    style = ".c{fill:none;stroke:#2f6fd0;stroke-width:1.5}.d{fill:#2f6fd0}.a{stroke:#999;fill:none;stroke-width:.7}"
    style += "text{font:10px sans-serif;fill:#777}.t{font:7.5px monospace;white-space:pre}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return f"{head}<style>{style}</style>{''.join(parts)}</svg>\n"


def lines(printed: str) -> list[str]:
    """The end of what was printed; a line that is too long ends in an ellipsis."""
    most, columns = 10, 51
    shown = [line if len(line) <= columns else line[: columns - 1] + "…" for line in printed.splitlines()[-most:]]
    return [
        f'<text class="t" x="6" y="{9 + 9.5 * number:g}">{html.escape(line)}</text>'
        for number, line in enumerate(shown)
    ]


def curve(losses: list[float]) -> list[str]:
    """The loss over the steps, means of neighbours, at most 80 points."""
    values = np.array([part.mean() for part in np.array_split(np.array(losses), min(80, len(losses)))])
    low, high = float(values.min()), float(values.max())
    x = np.linspace(4, WIDTH - 4, len(values))
    y = 14 + (HEIGHT - 30) * (high - values) / ((high - low) or 1.0)
    points = " ".join(f"{a:.0f},{b:.1f}" for a, b in zip(x, y, strict=True))
    text = f'<text x="4" y="{HEIGHT - 3}">loss {high:.3g} to {low:.3g}, {len(losses):,} steps or epochs</text>'
    return [f'<polyline class="c" points="{points}"/>', text]


def points(made: np.ndarray, radius: float) -> list[str]:
    """What a generator made, beside the circle it was shown."""
    scale, x, y = HEIGHT / 2 / 3, WIDTH / 2, HEIGHT / 2
    circle = f'<circle class="a" cx="{x}" cy="{y}" r="{radius * scale:.1f}"/>'
    dots = [f'<circle class="d" cx="{x + a * scale:.1f}" cy="{y + b * scale:.1f}" r="1.7"/>' for a, b in made]
    return [circle, *dots]


def panels(images: list[np.ndarray], words: list[str]) -> list[str]:
    """Grey images beside each other."""
    side, parts = 70, []
    for place, (image, word) in enumerate(zip(images, words, strict=True)):
        left = 6 + place * (side + 9)
        address = picture_of((image - image.min()) / np.ptp(image))
        box = f'x="{left}" y="4" width="{side}" height="{side}"'
        parts.append(f'<image {box} style="image-rendering:pixelated" href="{address}"/>')
        parts.append(f'<text x="{left}" y="{side + 18}">{word}</text>')
    return parts


#: Programs that have something better to show than a curve.
SHOWN: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "gan": lambda names: points(names["generator"].predict(names["noise"]), 2.0),
    "unet": lambda names: panels(
        [names["images"][0, 0], np.minimum(names["labels"][0], 2), names["found"][0]], ["image", "labels", "found"]
    ),
    "super_resolution": lambda names: panels(
        [names["small"][0, 0], names["mlc"].Trainer(names["graph"], loss="mse").predict(names["small"])[0, 0],
         names["large"][0, 0]], ["given", "made", "true"]
    ),
}  # fmt: skip


def machine() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def make(name: str) -> None:
    """Write a program's picture, and rewrite its row of gallery.md."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    if (PROGRAMS / f"{name}.py").exists():
        made, losses, line, seconds = run(name)
        parts = SHOWN[name](made) if name in SHOWN else curve(losses)
    else:
        printed, seconds = demonstrate(name)
        parts, line = lines(printed), printed.splitlines()[-1]
    (PICTURES / f"{name}.svg").write_text(svg(parts, html.escape(f"{name}: {line}")), encoding="utf-8")
    print(f"{name:18} {seconds:5.1f} s  {line}", flush=True)
    page = DOCS / "gallery.md"
    row = re.compile(rf"^(\| !\[{name}\]\S* \| .*\| ).*? s \|$", re.MULTILINE)
    text, count = row.subn(rf"\g<1>{seconds:.1f} s |", page.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"docs/gallery.md has {count} rows for {name}: expected one, | ![{name}](...) | ... | 0 s |")
    page.write_text(re.sub(r"one core of an? .*? \(", f"one core of an {machine()} (", text), encoding="utf-8")


if __name__ == "__main__":
    if os.environ.get("MLCOMPUTE_GALLERY"):
        make(sys.argv[1])
        sys.exit()
    everything = [path.stem for path in sorted(PROGRAMS.glob("*.py")) + sorted(EXAMPLES.glob("*.py"))]
    for program in sys.argv[1:] or (name for name in everything if name not in SHARED):
        with tempfile.TemporaryDirectory() as cache:
            settings = {"OMP_NUM_THREADS": "1", "MLCOMPUTE_NUM_THREADS": "1", "MLCOMPUTE_CACHE": cache}
            settings["MLCOMPUTE_GALLERY"] = "1"  # the process that runs one of them
            subprocess.run([sys.executable, __file__, program], env=os.environ | settings, check=True)
