"""From LLVM IR to machine code, once: compiled kernels are kept in memory and on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlcompute.devices.cpu.code import Code
from mlcompute.interrupts import Held

#: Size the folder of compiled kernels is kept under, oldest files leaving first.
CACHE_BYTES = 256 << 20
#: Seconds after which nobody can still be writing a file.
_ABANDONED = 3600.0


@functools.cache
def _machine() -> tuple[Any, str]:
    """The target machine and what identifies its code."""
    import llvmlite
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    version = ".".join(map(str, llvm.llvm_version_info))
    return machine, f"{llvmlite.__version__} {version} {cpu} {features}"


class Library:
    """Compiled kernels of this process, by the text of their code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[str, int] = {}
        self._engines: list[Any] = []

    def addresses(self, kernels: Iterable[Code]) -> list[int]:
        """Addresses of the kernels, compiling those not seen before together."""
        kernels = list(kernels)
        with self._lock:
            missing = {_key(code): code for code in kernels if _key(code) not in self._addresses}
            if missing:
                # Memory changes hands inside: an interruption at the wrong moment would free it twice.
                with Held():
                    self._compile(missing)
            return [self._addresses[_key(code)] for code in kernels]

    def _compile(self, kernels: dict[str, Code]) -> None:
        import llvmlite.binding as llvm

        machine, identity = _machine()
        text = _module_text(kernels)
        if "ir" in os.environ.get("MLC_DEBUG", "").split(","):
            print(text, file=sys.stderr)
        digest = hashlib.sha256(f"{identity}\n{text}".encode()).hexdigest()
        compiled = _read(digest)
        module = llvm.parse_assembly("" if compiled else text)
        if compiled is None:
            module.verify()
            options = llvm.create_pipeline_tuning_options(speed_level=3)
            # Kernels are written in vectors already; LLVM's own vectoriser would only multiply the code.
            options.loop_vectorization = options.slp_vectorization = False
            options.loop_unrolling = False
            builder = llvm.create_pass_builder(machine, options)
            builder.getModulePassManager().run(module, builder)
            compiled = machine.emit_object(module)
            _write(digest, compiled)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
        engine.finalize_object()
        # First: whatever interrupts this, no address may outlive the memory it points to.
        self._engines.append(engine)
        for key in kernels:
            self._addresses[key] = engine.get_function_address(f"k{key}")


library = Library()


if hasattr(os, "register_at_fork"):
    # LLVM has locks of its own: a child of a process that was compiling on another thread could wait for them forever.
    os.register_at_fork(
        before=library._lock.acquire, after_in_parent=library._lock.release, after_in_child=library._lock.release
    )


def _key(code: Code) -> str:
    """Names a kernel by its text. Code that is compiled is never changed, so it is asked for once."""
    if code.key is None:
        code.key = hashlib.sha256(code.text().encode()).hexdigest()[:24]
    return code.key


def _module_text(kernels: dict[str, Code]) -> str:
    declared: dict[str, str] = {}
    for code in kernels.values():
        declared.update(code.declarations)
    parts = [f"declare {signature}" for _, signature in sorted(declared.items())]
    parts += [code.text().replace(f"@{code.name}(", f"@k{key}(", 1) for key, code in sorted(kernels.items())]
    return "\n".join(parts)


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
    """Keep machine code. Readers see a whole file or none; a folder that cannot be written is not an error."""
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
        _shrink(folder)


def _shrink(folder: Path) -> None:
    for path in folder.glob("*.tmp"):  # of a process that was killed while it wrote
        if time.time() - path.stat().st_mtime > _ABANDONED:
            path.unlink(missing_ok=True)
    files = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
    total = sum(path.stat().st_size for path in files)
    for path in files:
        if total <= CACHE_BYTES:
            break
        total -= path.stat().st_size
        path.unlink(missing_ok=True)
