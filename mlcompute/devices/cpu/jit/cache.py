"""From LLVM IR to machine code, once: compiled kernels are kept in memory and on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlcompute.devices.cpu.codegen.code import Code, generator
from mlcompute.devices.cpu.jit.linker import ExecutableMemory, LinkedCode, link
from mlcompute.devices.cpu.runtime.machine import identity
from mlcompute.interrupts import held

#: Size limit of the folder of compiled kernels; the oldest files are deleted first.
CACHE_BYTES = 256 << 20
#: Seconds after which a temporary file has been abandoned.
_ABANDONED = 3600.0
#: What a cached kernel is: linked code that only has to be copied, or an object file for LLVM to load.
_LINKED, _OBJECT = b"linked ", b"object "


class KernelCache:
    """Compiled kernels of this process, by what determines their code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[str, int] = {}
        self._loaded: list[object] = []

    def addresses(self, kernels: Iterable[Code]) -> list[int]:
        """Addresses of the kernels, compiling those not seen before together."""
        kernels = list(kernels)
        with self._lock:
            missing = {_key(code): code for code in kernels if _key(code) not in self._addresses}
            if missing:
                # Memory changes hands inside: an interruption at the wrong moment would free it twice.
                with held:
                    self._load(_compiled(missing))
            return [self._addresses[_key(code)] for code in kernels]

    def _load(self, kernels: Mapping[str, bytes]) -> None:
        linked = {key: kept.removeprefix(_LINKED) for key, kept in kernels.items() if kept.startswith(_LINKED)}
        objects = {key: kept.removeprefix(_OBJECT) for key, kept in kernels.items() if key not in linked}
        if linked:
            loaded = ExecutableMemory([LinkedCode.from_bytes(kept) for kept in linked.values()])
            # First: no address may outlive the memory it points to, whatever interrupts this.
            self._loaded.append(loaded)
            self._addresses.update(zip(linked, loaded.addresses, strict=True))
        if objects:
            engine = _engine(objects.values())
            self._loaded.append(engine)
            self._addresses.update({key: engine.get_function_address(f"k{key}") for key in objects})


kernel_cache = KernelCache()


if hasattr(os, "register_at_fork"):
    # LLVM has locks of its own: a child of a process that was compiling on another thread could wait for them forever.
    os.register_at_fork(
        before=kernel_cache._lock.acquire,
        after_in_parent=kernel_cache._lock.release,
        after_in_child=kernel_cache._lock.release,
    )


def _engine(objects: Iterable[bytes]) -> Any:
    """LLVM's own loader, for object files that `linker` does not know."""
    import llvmlite.binding as llvm

    from mlcompute.devices.cpu.jit.emit import target_machine

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    for compiled in objects:
        engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
    engine.finalize_object()
    return engine


def _compiled(kernels: Mapping[str, Code]) -> dict[str, bytes]:
    """Kernels as they are kept: found on disk, or compiled now."""
    prints = "ir" in os.environ.get("MLC_DEBUG", "").split(",")
    known: dict[str, bytes] = {}
    texts: dict[str, str] = {}
    for key, code in kernels.items():
        found = _read(_digest(key))
        if found is not None:
            known[key] = found
        if found is None or prints:
            texts[key] = _module_text(key, code)
    if prints:
        print("\n".join(texts.values()), file=sys.stderr)
    missing = [key for key in kernels if key not in known]
    if missing:
        from mlcompute.devices.cpu.jit.emit import emit

        thorough = {index for index, key in enumerate(missing) if kernels[key].thorough}
        objects = emit([texts[key] for key in missing], thorough)
        made = dict(zip(missing, map(_kept, objects, missing), strict=True))
        for key, kept in made.items():
            _write(_digest(key), kept)
        _shrink()
        known |= made
    return known


def _kept(compiled: bytes, key: str) -> bytes:
    linked = link(compiled, f"k{key}")
    return _OBJECT + compiled if linked is None else _LINKED + linked.to_bytes()


def _key(code: Code) -> str:
    """A key of everything that determines a kernel. Compiled code never changes, so it is computed once."""
    if code.key is None:
        code.key = hashlib.sha256(code.cache_key().encode()).hexdigest()[:24]
    return code.key


def _digest(key: str) -> str:
    """A key of a kernel's machine code: it depends on the machine, on LLVM, and on this package's code, too."""
    return hashlib.sha256(f"{identity()}\n{generator()}\n{key}".encode()).hexdigest()


def _module_text(key: str, code: Code) -> str:
    text = code.text().replace(f"@{code.name}(", f"@k{key}(", 1)
    return "\n".join([*(f"declare {signature}" for _, signature in sorted(code.declarations.items())), text])


# Machine code on disk -----------------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None when MLCOMPUTE_CACHE is set to nothing, or there is no home."""
    configured = os.environ.get("MLCOMPUTE_CACHE")
    if configured is not None:
        return Path(configured) if configured else None
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.path.expanduser("~")
        if home == "~":  # a user without a home folder, as in many containers
            return None
        base = os.path.join(home, ".cache")
    return Path(base) / "mlcompute"


def _read(digest: str) -> bytes | None:
    """Machine code kept under a digest; None when there is none or it is damaged."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        data = (folder / f"{digest}.o").read_bytes()
    except OSError:
        return None
    checksum, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(digest: str, code: bytes) -> None:
    """Keep machine code. Readers see a full file or none; a folder that cannot be written is not an error."""
    folder = cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, folder / f"{digest}.o")
        except OSError:
            os.unlink(name)
            raise


def _shrink() -> None:
    """Sweep up what a killed process left, and keep the folder under its size."""
    folder = cache_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            _sweep(folder)


def _sweep(folder: Path) -> None:
    for path in folder.glob("*.tmp"):
        if time.time() - path.stat().st_mtime > _ABANDONED:
            path.unlink(missing_ok=True)
    files = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in files)
    for path in files:
        if total <= CACHE_BYTES:
            break
        total -= path.stat().st_size
        path.unlink(missing_ok=True)
