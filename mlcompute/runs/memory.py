"""Memory use of the process as the system counts it."""

from __future__ import annotations

import sys
from pathlib import Path


def resident_memory() -> int | None:
    """Bytes in memory now; None where the system does not tell."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ImportError, ValueError, IndexError):
        return None


def peak_memory() -> int | None:
    """The most bytes there were at once, since the process began; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux brings the count of its peak up to date now and then only: it can lie below what is in memory now.
    return max(peak if sys.platform == "darwin" else peak * 1024, resident_memory() or 0)
