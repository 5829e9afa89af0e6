"""Tables on standard output, of which a reader may want the first lines only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """`| head` ends a benchmark quietly when it has seen enough, as it ends other programs."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        from mlcompute.cli.streams import stop_showing

        stop_showing()
