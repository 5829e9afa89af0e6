"""A linker for kernels: from an object file to machine code that runs wherever it is copied to.

A kernel reaches its constants relative to itself and calls at most a few functions of the C library. So its sections
are laid one after the other, the distances between them filled in, and calls to imported functions go through a word
each that is set when the code is loaded. Loading many kernels is then one copy, and needs neither LLVM nor its linker.

Kept because it pays: with LLVM's own linker instead (llvmlite's `create_mcjit_compiler` and `add_object_file`) the 34
kernels of LeNet's training step, all cached on disk, take 43 ms of processor time to load instead of 3.4, most of it
for loading LLVM and describing the machine to it, and 50 MB more memory. Compiling LeNet from the cache, first step
included, then takes 0.18 s of processor time instead of 0.12. Compiling without a cache takes the same either way.
Object files this linker does not know, as on other processors and on macOS, go to LLVM's.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mlcompute.devices.cpu.runtime.memory import address_of
from mlcompute.devices.cpu.runtime.system import address_of_function, function

#: ELF: 64 bits, little-endian, version 1; then "relocatable" for x86-64.
_MAGIC, _KIND = b"\x7fELF\x02\x01\x01", (1, 62)
_ALLOCATED, _PROGRAM, _ZEROS, _RELOCATIONS, _SYMBOLS, _UNDEFINED = 2, 1, 8, 4, 2, 0
#: Relocations that mean "distance to S + A, in 32 bits": to data, and to a function.
_DISTANCES = (2, 4)
#: jmp to the address in the word after this; two bytes of padding that never run.
_JUMP = b"\xff\x25\x02\x00\x00\x00\x0f\x0b"
ALIGNMENT = 64


class LinkedCode(NamedTuple):
    """Machine code and its constants, linked: it runs wherever it is copied to.

    start     where its function begins
    imports   where the addresses of functions of the C library go
    """

    data: bytes
    start: int
    imports: dict[str, int]

    def to_bytes(self) -> bytes:
        head = json.dumps([self.start, self.imports]).encode()
        return struct.pack("<I", len(head)) + head + self.data

    @classmethod
    def from_bytes(cls, kept: bytes) -> LinkedCode:
        (length,) = struct.unpack_from("<I", kept)
        start, imports = json.loads(kept[4 : 4 + length])
        return cls(kept[4 + length :], start, imports)


def link(compiled: bytes, name: str) -> LinkedCode | None:
    """An object file with the function `name`, linked; None for formats and relocations this linker does not know."""
    if not compiled.startswith(_MAGIC) or struct.unpack_from("<HH", compiled, 16) != _KIND:
        return None
    return _Linker(compiled).linked(name)


class _Section(NamedTuple):
    """The fields of a section header that are used here."""

    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


class _Linker:
    def __init__(self, compiled: bytes) -> None:
        self.compiled = compiled
        (table,) = struct.unpack_from("<Q", compiled, 40)
        (count,) = struct.unpack_from("<H", compiled, 60)
        self.sections = []
        for index in range(count):
            _, kind, flags, _, offset, size, link, info, alignment, _ = struct.unpack_from(
                "<IIQQQQIIQQ", compiled, table + 64 * index
            )
            self.sections.append(_Section(kind, flags, offset, size, link, info, alignment))
        self.data = bytearray()
        self.offsets: dict[int, int] = {}
        self.imports: dict[str, int] = {}

    def linked(self, name: str) -> LinkedCode | None:
        for index, section in enumerate(self.sections):
            # Only code and its constants: unwinding tables have another section type.
            if section.flags & _ALLOCATED and section.kind in (_PROGRAM, _ZEROS) and section.size:
                self._align(section.alignment)
                self.offsets[index] = len(self.data)
                begin, end = section.offset, section.offset + section.size
                self.data += bytes(section.size) if section.kind == _ZEROS else self.compiled[begin:end]
        for section in self.sections:
            if section.kind == _RELOCATIONS and section.info in self.offsets and not self._relocate(section):
                return None
        start = self._start(name)
        return None if start is None else LinkedCode(bytes(self.data), start, self.imports)

    def _align(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % max(alignment, 1))

    def _relocate(self, section: _Section) -> bool:
        symbols = self.sections[section.link]
        for entry in range(section.offset, section.offset + section.size, 24):
            at, what, addend = struct.unpack_from("<QQq", self.compiled, entry)
            target = self._target(symbols, what >> 32)
            if target is None or what & 0xFFFFFFFF not in _DISTANCES:
                return False
            offset = self.offsets[section.info] + at
            struct.pack_into("<i", self.data, offset, target + addend - offset)
        return True

    def _symbol(self, table: _Section, index: int) -> tuple[str, int, int]:
        """Name, section and offset there."""
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", self.compiled, table.offset + 24 * index)
        begin = self.sections[table.link].offset + name
        return self.compiled[begin : self.compiled.index(b"\0", begin)].decode(), section, value

    def _target(self, symbols: _Section, index: int) -> int | None:
        name, section, value = self._symbol(symbols, index)
        if section == _UNDEFINED:
            return self._jump_to(name)
        return self.offsets[section] + value if section in self.offsets else None

    def _jump_to(self, name: str) -> int:
        """Where a jump to an imported function lies: right in front of the word with its address."""
        if name not in self.imports:
            self._align(8)
            self.imports[name] = len(self.data) + len(_JUMP)
            self.data += _JUMP + bytes(8)
        return self.imports[name] - len(_JUMP)

    def _start(self, name: str) -> int | None:
        for table in self.sections:
            if table.kind == _SYMBOLS:
                for index in range(table.size // 24):
                    found, section, value = self._symbol(table, index)
                    if found == name and section in self.offsets:
                        return self.offsets[section] + value
        return None


class ExecutableMemory:
    """Linked code in memory of this process; `addresses` are those of its functions. It must outlive every call."""

    def __init__(self, codes: Sequence[LinkedCode]) -> None:
        offsets, image = [], bytearray()
        for code in codes:
            offset = len(image)
            offsets.append(offset)
            image += code.data + bytes(-len(code.data) % ALIGNMENT)
            for name, word in code.imports.items():
                struct.pack_into("<Q", image, offset + word, address_of_function(name))
        base = _executable_on_windows(image) if sys.platform == "win32" else self._executable(image)
        self.addresses = [base + offset + code.start for code, offset in zip(codes, offsets, strict=True)]

    def _executable(self, image: bytearray) -> int:
        #: Never closed: code is called by address, and callers are not counted.
        self._memory = mmap.mmap(-1, len(image), prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory[:] = image
        base = address_of(np.frombuffer(self._memory, np.uint8))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(image)), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "compiled kernels cannot be made executable: mprotect was refused")
        return base


#: Windows: memory that is there at once and may be written, and memory that may be run.
_COMMIT_AND_RESERVE, _READ_AND_WRITE, _READ_AND_EXECUTE = 0x3000, 0x04, 0x20


def _executable_on_windows(image: bytearray) -> int:
    """The address of a copy that may be run; it lives as long as the process."""
    allocate, protect, size = function("VirtualAlloc"), function("VirtualProtect"), ctypes.c_size_t(len(image))
    allocate.restype = ctypes.c_void_p
    base: int | None = allocate(None, size, _COMMIT_AND_RESERVE, _READ_AND_WRITE)
    if not base:
        raise OSError("there is no memory for compiled kernels: VirtualAlloc was refused")
    ctypes.memmove(base, bytes(image), len(image))
    if not protect(ctypes.c_void_p(base), size, _READ_AND_EXECUTE, ctypes.byref(ctypes.c_ulong())):
        raise OSError("compiled kernels cannot be made executable: VirtualProtect was refused")
    return base
