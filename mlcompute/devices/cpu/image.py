"""Object files as blocks of bytes that run wherever they are put: what a linker does, for code that asks little of it.

A kernel reaches its constants relative to itself and calls at most a few functions of the C library. So its sections
are laid one after the other, the distances between them filled in, and calls to the outside sent through a word each
that is set when the image is loaded. Loading many of them is then one copy, and LLVM need not be there for it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlcompute.devices.cpu.operands import address_of
from mlcompute.ops.op import Array

#: ELF: 64 bits, little-endian, version 1; then "relocatable" for x86-64.
_MAGIC, _KIND = b"\x7fELF\x02\x01\x01", (1, 62)
_ALLOCATED, _PROGRAM, _ZEROS, _RELOCATIONS, _SYMBOLS, _UNDEFINED = 2, 1, 8, 4, 2, 0
#: Relocations that mean "distance to S + A, in 32 bits": to data, and to a function.
_DISTANCES = (2, 4)
#: jmp *word after this and two bytes of nothing that would run; the word follows.
_JUMP = b"\xff\x25\x02\x00\x00\x00\x0f\x0b"
ALIGNMENT = 64


@dataclass(frozen=True)
class Image:
    """Code and constants, where its function begins, and the words to fill with addresses of outside functions."""

    data: bytes
    start: int
    outside: dict[str, int]

    def to_bytes(self) -> bytes:
        head = json.dumps([self.start, self.outside]).encode()
        return struct.pack("<I", len(head)) + head + self.data

    @classmethod
    def from_bytes(cls, kept: bytes) -> Image:
        (length,) = struct.unpack_from("<I", kept)
        start, outside = json.loads(kept[4 : 4 + length])
        return cls(kept[4 + length :], start, outside)


def link(compiled: bytes, name: str) -> Image | None:
    """The image of an object file with the function `name`; None for files of other kinds, or that ask for more."""
    if not compiled.startswith(_MAGIC) or struct.unpack_from("<HH", compiled, 16) != _KIND:
        return None
    return _Linker(compiled).image(name)


@dataclass(frozen=True)
class _Section:
    """A section header, without what nobody asks for here."""

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
        self.places: dict[int, int] = {}
        self.outside: dict[str, int] = {}

    def image(self, name: str) -> Image | None:
        for index, section in enumerate(self.sections):
            # Only what runs and what it reads: tables for unwinding are of a kind of their own.
            if section.flags & _ALLOCATED and section.kind in (_PROGRAM, _ZEROS) and section.size:
                self._align(section.alignment)
                self.places[index] = len(self.data)
                begin, end = section.offset, section.offset + section.size
                self.data += bytes(section.size) if section.kind == _ZEROS else self.compiled[begin:end]
        for section in self.sections:
            if section.kind == _RELOCATIONS and section.info in self.places and not self._relocate(section):
                return None
        start = self._start(name)
        return None if start is None else Image(bytes(self.data), start, self.outside)

    def _align(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % max(alignment, 1))

    def _relocate(self, section: _Section) -> bool:
        symbols = self.sections[section.link]
        for offset in range(section.offset, section.offset + section.size, 24):
            at, what, addend = struct.unpack_from("<QQq", self.compiled, offset)
            target = self._target(symbols, what >> 32)
            if target is None or what & 0xFFFFFFFF not in _DISTANCES:
                return False
            place = self.places[section.info] + at
            struct.pack_into("<i", self.data, place, target + addend - place)
        return True

    def _symbol(self, table: _Section, index: int) -> tuple[str, int, int]:
        """Name, section and place there."""
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", self.compiled, table.offset + 24 * index)
        begin = self.sections[table.link].offset + name
        return self.compiled[begin : self.compiled.index(b"\0", begin)].decode(), section, value

    def _target(self, symbols: _Section, index: int) -> int | None:
        name, section, value = self._symbol(symbols, index)
        if section == _UNDEFINED:
            return self._jump_to(name)
        return self.places[section] + value if section in self.places else None

    def _jump_to(self, name: str) -> int:
        """Where a jump to an outside function lies: right in front of the word with its address."""
        if name not in self.outside:
            self._align(8)
            self.outside[name] = len(self.data) + len(_JUMP)
            self.data += _JUMP + bytes(8)
        return self.outside[name] - len(_JUMP)

    def _start(self, name: str) -> int | None:
        for table in self.sections:
            if table.kind == _SYMBOLS:
                for index in range(table.size // 24):
                    found, section, value = self._symbol(table, index)
                    if found == name and section in self.places:
                        return self.places[section] + value
        return None


class Loaded:
    """Images in memory of this process; `addresses` are those of their functions. It must outlive every call."""

    def __init__(self, images: Sequence[Image]) -> None:
        places, size = [], 0
        for image in images:
            places.append(size)
            size += -(-len(image.data) // ALIGNMENT) * ALIGNMENT
        #: Never closed: code is reached by address from places nobody counts.
        self._memory = mmap.mmap(-1, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        base = _begin_of(self._memory)
        for image, place in zip(images, places, strict=True):
            self._memory[place : place + len(image.data)] = image.data
            for name, word in image.outside.items():
                struct.pack_into("<Q", self._memory, place + word, _address_of_function(name))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "compiled kernels cannot be made executable: mprotect was refused")
        self.addresses = [base + place + image.start for image, place in zip(images, places, strict=True)]


def _begin_of(memory: mmap.mmap) -> int:
    import numpy as np

    array: Array = np.frombuffer(memory, np.uint8)
    return address_of(array)


def _address_of_function(name: str) -> int:
    library: Any = ctypes.CDLL(None)
    try:
        function = getattr(library, name)
    except AttributeError:
        function = getattr(ctypes.CDLL("libm.so.6"), name)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
