"""Updates of an open page: only changed parts, at a rate that does not slow down training."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mlcompute.seeing.page import shown_data
from mlcompute.seeing.units import visible

if TYPE_CHECKING:
    from mlcompute.seeing.page import Page

#: Seconds between two messages at least.
PAUSE = 1.0
#: Drawing takes Python's lock from training: at most one part in so many of the time.
SHARE = 100


class Pace:
    """How long to wait until the next message, from how long the last one took to draw."""

    def __init__(self) -> None:
        self.pause = PAUSE

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Draw within it."""
        begun = time.thread_time()
        yield
        self.pause = max(PAUSE, SHARE * (time.thread_time() - begun))


def news(page: Page, state: Mapping[str, Any], names: Collection[str]) -> str:
    """A message, JSON on one line: heading, numbers and the named parts of a page, as the page itself has them."""
    parts = {part.name: part.html for part in page.sections if part.name in names}
    charts = page.everything().get("charts", [])
    message = {
        **state,
        "title": visible(page.title),
        "heading": page.heading_html(),
        "figures": page.figures_html(),
        "parts": parts,
        "charts": shown_data(charts),
    }
    return json.dumps(message, allow_nan=False)
