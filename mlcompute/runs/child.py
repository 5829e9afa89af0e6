"""A training process of a sweep: ends, as SIGTERM ends it, when the sweep is gone.

Standard input is a pipe that the sweep holds open and never writes to: it closes when the sweep dies, however it dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def _watch() -> None:
    while True:
        try:
            if not os.read(0, 4096):
                break
        except OSError:
            break
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run one command of `mlcompute`."""
    from mlcompute.cli import main as command

    threading.Thread(target=_watch, daemon=True).start()
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
