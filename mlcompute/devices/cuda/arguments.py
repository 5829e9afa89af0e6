"""Arguments of kernels: their values in memory, and the array of addresses the driver reads them through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from mlcompute.devices.cuda.completion import Statuses
from mlcompute.devices.cuda.kernels.launch import Launch, Rows, Status
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Value

#: Every argument begins at a multiple of so many bytes.
_ALIGNMENT = 16


class ArgumentBlock:
    """Arguments of all launches of a program, which stay where they are: only addresses of bound memory change."""

    def __init__(
        self, launches: Sequence[Launch], address: Callable[[Operand], int | None], statuses: Statuses
    ) -> None:
        self._data = bytearray()
        #: Where in the block addresses of values stand that are bound later, and perhaps again: (word, byte offset).
        self._patches: dict[Value, list[tuple[int, int]]] = {}
        self._starts: dict[Launch, int] = {}
        pointers: list[int] = []
        for launch in launches:
            self._starts[launch] = len(pointers)
            if launch.guarded:
                pointers.append(len(self._data))
                self._add(statuses.failed.to_bytes(8, sys.byteorder))
            for argument in launch.arguments:
                pointers.append(len(self._data))
                if isinstance(argument, Operand):
                    self._add(self._word(argument, 0, address))
                elif isinstance(argument, Status):
                    self._add(statuses.address(launch, argument).to_bytes(8, sys.byteorder))
                elif isinstance(argument, Rows):
                    fields = b""
                    for field in (field for row in argument.rows for field in row):
                        fields += self._word(field, len(fields) // 8, address)
                    self._add(fields)
                else:
                    self._add(argument.tobytes())
        self._memory = np.frombuffer(self._data or bytearray(_ALIGNMENT), np.uint8)
        self._words = self._memory.view(np.uint64)
        self._pointers = np.array(pointers or [0], np.uint64) + np.uint64(self._memory.ctypes.data)
        self._first = int(self._pointers.ctypes.data)

    def _add(self, value: bytes) -> None:
        self._data += value.ljust(-(-len(value) // _ALIGNMENT) * _ALIGNMENT, b"\0")

    def _word(self, field: Operand | np.generic, place: int, address: Callable[[Operand], int | None]) -> bytes:
        """A field of whole words; `place` words behind the end of the block."""
        if not isinstance(field, Operand):
            return field.tobytes().ljust(-(-field.nbytes // 8) * 8, b"\0")
        known = address(field)
        if known is None:
            patch = len(self._data) // 8 + place, field.byte_offset
            self._patches.setdefault(field.base, []).append(patch)
        return (known or 0).to_bytes(8, sys.byteorder)

    def bind(self, value: Value, address: int) -> None:
        """A value lies elsewhere now."""
        for place, offset in self._patches.get(value, ()):
            self._words[place] = address + offset

    def address(self, launch: Launch) -> int:
        """Where the addresses of a launch's arguments are."""
        return self._first + 8 * self._starts[launch]
