"""mlcompute view: show the runs of a folder in the browser, including running ones."""

from __future__ import annotations

import argparse
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli.answer import Answer
from mlcompute.cli.report import graph_of, title_of
from mlcompute.errors import Error, FileError
from mlcompute.live.news import PAUSE, news
from mlcompute.live.server import Server
from mlcompute.runs.folders import EVALUATION, FACTS, LAST, found_run, is_run, run_folders
from mlcompute.seeing.compare import compare_page
from mlcompute.seeing.page import Page, policy
from mlcompute.seeing.report_page import report_page
from mlcompute.seeing.setup import setup_section

EXAMPLES = ("mlcompute view", "mlcompute view runs/0007-sweep-cnn", "mlcompute view 3 --open")

#: Parts of pages that change while a run goes on; its graph and memory do not.
_CHANGING = ("runs", "learning", "gradients", "mistakes", "setup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which runs, and where they are served."""
    parser.add_argument("folder", nargs="?", default="runs", help="a folder of runs, or one run (runs/)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="of this machine (0: a free one)")
    parser.add_argument("--open", action="store_true", help="show it in a browser")


def run(args: argparse.Namespace) -> Answer:
    """Serve until Ctrl-C."""
    site, start = _site(args.folder)
    server = Server(site, args.port)
    address = server.address + start
    if not args.json:
        print(f"{args.folder}: {address}\nCtrl-C ends it", flush=True)
    if args.open:
        webbrowser.open(address)
    try:
        site.over.wait()
    except KeyboardInterrupt:
        site.over.set()
    server.close()
    return Answer("", {"address": address})


def _site(folder: str) -> tuple[RunsSite, str]:
    """What is served, and the path of its first page."""
    place = Path(folder)
    if place.is_dir() and not is_run(place):
        return RunsSite(place), ""
    if folder == "runs":
        raise FileError("runs: there is no such folder", fix="`mlcompute train` makes it")
    one = found_run(folder)
    return RunsSite(one.parent), f"run/{one.name}/"


class RunsSite:
    """All runs of a folder on one page, and a page for each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.over = threading.Event()
        #: Graphs are loaded and compiled once; browsers ask from threads of their own.
        self._graphs: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def page(self, path: str) -> tuple[str, str] | None:
        """The list, or a run."""
        found = self._found(path)
        if found is None:
            return None
        with self._lock:
            return self._drawn(found)[0].html(), policy("watch")

    def events(self, path: str) -> Iterator[str] | None:
        """News whenever a file has changed."""
        found = self._found(path)
        return None if found is None else self._news(found)

    def act(self, path: str) -> str | None:
        """There is nothing to press."""
        return None

    def _found(self, path: str) -> Path | None:
        """The folder a path is about; names are looked up, never put together."""
        if path == "":
            return self.root
        names = {f"run/{one.name}/": one for one in run_folders(self.root)}
        return names.get(path)

    def _news(self, place: Path) -> Iterator[str]:
        told = None
        while not self.over.is_set():
            state = _state_of_files(self.root if place == self.root else place)
            if state == told:
                yield ""
            else:
                told = state
                with self._lock:
                    page, words = self._drawn(place)
                yield news(page, words, _CHANGING)
                if words["over"]:
                    return
            self.over.wait(PAUSE)

    def _drawn(self, place: Path) -> tuple[Page, dict[str, Any]]:
        page, state = self._all() if place == self.root else self._one(place)
        page.live = "watch"
        return page, state

    def _all(self) -> tuple[Page, dict[str, Any]]:
        runs, damaged = [], 0
        for folder in run_folders(self.root):
            try:
                runs.append(mlc.Run.read(folder))
            except Error:  # `mlcompute runs` tells what is wrong with it
                damaged += 1
        page = compare_page(runs, lambda run: f"run/{run.folder.name}/", self.root.resolve().name)
        training = sum(run.status == "running" for run in runs)
        text = f"{len(runs):,} run{'' if len(runs) == 1 else 's'}" + (f", {training} training" if training else "")
        text += f", {damaged:,} that cannot be read" if damaged else ""
        ended = [run.facts.get("epochs", 0) / max(1, run.parameters.get("epochs", 1)) for run in runs]
        done = sum(ended) / len(ended) if ended else 0.0
        return page, {"state": text, "kind": "on" if training else "over", "done": min(1.0, done), "over": False}

    def _one(self, place: Path) -> tuple[Page, dict[str, Any]]:
        run = mlc.Run.read(place)
        is_running = run.status == "running"
        epochs, wanted = run.facts.get("epochs", 0), run.parameters.get("epochs", 1)
        text = f"{run.status} · epoch {epochs} of {wanted}"
        state = {"state": text, "kind": "on" if is_running else "over", "done": min(1.0, epochs / wanted)}
        return self._report(run), {**state, "over": not is_running}

    def _report(self, run: mlc.Run) -> Page:
        if not run.last.exists():
            return Page(title_of(run), ["before the end of its first epoch"], sections=[setup_section([run])])
        try:
            if run.folder not in self._graphs:
                self._graphs[run.folder] = graph_of(run)
            evaluation = mlc.Evaluation.load(run.evaluation) if run.evaluation.exists() else None
            return report_page(self._graphs[run.folder], run.history(), None, title_of(run), run, evaluation)
        except Error as error:  # a model of another kind, a damaged file: the rest can still be seen
            return Page(title_of(run), [error.message], sections=[setup_section([run])])


def _state_of_files(place: Path) -> tuple[Any, ...]:
    """Changes when a run does."""
    folders = [place] if is_run(place) else list(run_folders(place))
    found = []
    for folder in folders:
        for name in (FACTS, LAST, EVALUATION):
            path = folder / name
            try:
                found.append((folder.name, name, path.stat().st_mtime_ns))
            except OSError:
                continue
    return tuple(found)
