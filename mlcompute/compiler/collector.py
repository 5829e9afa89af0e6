"""Pause Python's cyclic garbage collector where it would only cost time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: Fewer new objects than this are traversed in less time than it takes to find out whether any are frozen.
_MANY = 10_000


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic collector: it would traverse the millions of objects of a large graph's steps in vain."""
    pauses = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if pauses:
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                # What was made meanwhile counts as old, as if the collector had walked it already.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
