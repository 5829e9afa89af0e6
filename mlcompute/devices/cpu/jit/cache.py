"""From LLVM IR to machine code, once: compiled kernels are kept in memory and on disk."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mlcompute.devices import kernel_files
from mlcompute.devices.cpu.codegen.code import Code, generator, is_stale
from mlcompute.devices.cpu.jit.linker import ExecutableMemory, LinkedCode, link
from mlcompute.devices.cpu.runtime.machine import identity
from mlcompute.devices.interrupts import held

#: What a cached kernel is: linked code that only has to be copied, or a function's name and an object file for LLVM to
#: load. Files that begin otherwise are of other versions.
_LINKED, _OBJECT = b"linked ", b"named object "


class KernelCache:
    """Compiled kernels of this process, by what determines their code."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._addresses: dict[str, int] = {}
        self._loaded: list[object] = []

    def addresses(self, kernels: Iterable[Code]) -> list[int]:
        """Addresses of the kernels, compiling those not seen before together."""
        kernels = list(kernels)
        with self.lock:
            missing = {_key(code): code for code in kernels if _key(code) not in self._addresses}
            if missing:
                # Memory changes hands inside: an interruption at the wrong moment would free it twice.
                with held:
                    self._load(_compiled(missing))
            return [self._addresses[_key(code)] for code in kernels]

    def _load(self, kernels: Mapping[str, bytes]) -> None:
        # Kernels with the same code are loaded once.
        linked = list(dict.fromkeys(kept for kept in kernels.values() if kept.startswith(_LINKED)))
        objects = list(dict.fromkeys(kept for kept in kernels.values() if not kept.startswith(_LINKED)))
        addresses: dict[bytes, int] = {}
        if linked:
            loaded = ExecutableMemory([LinkedCode.from_bytes(kept.removeprefix(_LINKED)) for kept in linked])
            # First: no address may outlive the memory it points to, whatever interrupts this.
            self._loaded.append(loaded)
            addresses.update(zip(linked, loaded.addresses, strict=True))
        if objects:
            parts = [_split_object(kept) for kept in objects]
            engine = _engine(compiled for _, compiled in parts)
            self._loaded.append(engine)
            for kept, (name, _) in zip(objects, parts, strict=True):
                addresses[kept] = engine.get_function_address(name)
        self._addresses.update({key: addresses[kept] for key, kept in kernels.items()})


kernel_cache = KernelCache()


if hasattr(os, "register_at_fork"):
    # LLVM has locks of its own: a child of a process that was compiling on another thread could wait for them forever.
    os.register_at_fork(
        before=kernel_cache.lock.acquire,
        after_in_parent=kernel_cache.lock.release,
        after_in_child=kernel_cache.lock.release,
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
    if "ir" in os.environ.get("MLC_DEBUG", "").split(","):
        print("\n".join(_module(code)[1] for code in kernels.values()), file=sys.stderr)
    found = {key: kernel_files.read(_digest(key)) for key in kernels}
    known = {key: kept for key, kept in found.items() if kept is not None and kept.startswith((_LINKED, _OBJECT))}
    missing = [key for key in kernels if key not in known]
    if missing:
        from mlcompute.devices.cpu.jit.emit import emit

        places: dict[str, int] = {}  # name of a function -> its place among the modules
        names: dict[str, str] = {}  # by key: several keys may lead to the same text, which is compiled once

        def modules() -> Iterator[tuple[str, int]]:
            for key in missing:
                names[key], text = _module(kernels[key])
                if names[key] not in places:
                    places[names[key]] = len(places)
                    yield text, kernels[key].level

        objects = emit(modules(), len(missing))
        kept = {name: _kept(objects[place], name) for name, place in places.items()}
        stays_here = is_stale()
        for key in missing:
            known[key] = kept[names[key]]
            if not stays_here:
                kernel_files.write(_digest(key), known[key])
    return known


def _kept(compiled: bytes, name: str) -> bytes:
    linked = link(compiled, name)
    return _OBJECT + name.encode() + b" " + compiled if linked is None else _LINKED + linked.to_bytes()


def _split_object(kept: bytes) -> tuple[str, bytes]:
    """The name of the function in an object file, and the file."""
    name, _, compiled = kept.removeprefix(_OBJECT).partition(b" ")
    return name.decode(), compiled


def _key(code: Code) -> str:
    """A key of everything that determines a kernel. Compiled code never changes, so it is computed once."""
    if code.key is None:
        code.key = hashlib.sha256(code.cache_key().encode()).hexdigest()[:24]
    return code.key


def _digest(key: str) -> str:
    """A key of a kernel's machine code: it depends on the machine, on LLVM, and on this package's code, too."""
    return hashlib.sha256(f"{identity()}\n{generator()}\n{key}".encode()).hexdigest()


def _module(code: Code) -> tuple[str, str]:
    """A kernel as a module of LLVM IR, and the name of its function there, which follows from the text."""
    text = code.text()
    declared = [f"declare {signature}" for _, signature in sorted(code.declarations.items())]
    name = "k" + hashlib.sha256("\n".join([str(code.level), *declared, text]).encode()).hexdigest()[:24]
    return name, "\n".join([*declared, text.replace(f"@{code.name}(", f"@{name}(", 1)])
