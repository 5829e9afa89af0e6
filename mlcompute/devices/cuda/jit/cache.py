"""Machine code of kernels for one architecture: compiled once, kept in memory and on disk."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mlcompute.devices import kernel_files
from mlcompute.devices.cuda.codegen.prelude import PRELUDE
from mlcompute.devices.cuda.jit import nvrtc


def machine_code(sources: Sequence[str], architecture: str) -> list[bytes]:
    """The code of every source, whose kernel is called as `kernel_name` says; new ones are compiled side by side."""
    prints = "ir" in os.environ.get("MLC_DEBUG", "").split(",")
    texts = {source: _text(source) for source in sources}
    if prints:
        print("\n".join(texts[source].removeprefix(PRELUDE) for source in texts), file=sys.stderr)
    digests = {source: _digest(text, architecture) for source, text in texts.items()}
    known = {source: kernel_files.read(digest) for source, digest in digests.items()}
    missing = [source for source, code in known.items() if code is None]
    if missing:
        # Compiling releases the interpreter's lock, so threads help.
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            made = list(pool.map(lambda source: nvrtc.compiled(texts[source], architecture), missing))
        for source, code in zip(missing, made, strict=True):
            kernel_files.write(digests[source], code)
            known[source] = code
    return [known[source] or b"" for source in sources]


def kernel_name(source: str) -> str:
    """What the kernel of a source is called in its code."""
    return f"k{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _text(source: str) -> str:
    return PRELUDE + source.replace("KERNEL", kernel_name(source))


def _digest(text: str, architecture: str) -> str:
    """A key of the code: it depends on the text, the architecture and the compiler."""
    return hashlib.sha256(f"cuda {architecture} NVRTC {nvrtc.version()}\n{text}".encode()).hexdigest()
