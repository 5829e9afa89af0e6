"""python -m tests.fuzzing.plainly TARGET FILE: read one file and tell the seconds of processor time.

The fuzzer's instruments make every line of Python two to three times as slow; no user of the readers has them.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Whoever takes longer than this hangs.
_PATIENCE = 60.0


def seconds_of(target: str, file: bytes) -> float:
    """Processor time that reading a file takes in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(file)
        command = [sys.executable, "-m", "tests.fuzzing.plainly", target, str(path)]
        try:
            told = subprocess.run(command, capture_output=True, check=True, text=True, timeout=_PATIENCE)
        except subprocess.SubprocessError:
            return _PATIENCE
        return float(told.stdout)


def _main(target: str, path: Path) -> None:
    import mlcompute as mlc
    from tests.fuzzing.targets import TARGETS

    reader, file = TARGETS[target](), path.read_bytes()
    for data in (b"", file):  # the first only imports what is imported at first use
        begin = time.thread_time()
        with contextlib.suppress(mlc.Error):
            reader.read(data)
    print(time.thread_time() - begin)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
