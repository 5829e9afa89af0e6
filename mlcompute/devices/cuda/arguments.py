"""Arguments of kernels: their values in memory, and the array of addresses the driver reads them through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from mlcompute.devices.cuda.completion import Statuses
from mlcompute.devices.cuda.kernels.launch import Launch, Status
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Value

#: Bytes of a slot; larger arguments take several.
_SLOT = 16


class ArgumentBlock:
    """Arguments of all launches of a program, which stay where they are: only addresses of bound memory change."""

    def __init__(
        self, launches: Sequence[Launch], address: Callable[[Operand], int | None], statuses: Statuses
    ) -> None:
        slots: list[bytes] = []
        pointers: list[int] = []
        self._starts: dict[Launch, int] = {}
        self._patches: dict[Value, list[tuple[int, int]]] = {}
        for launch in launches:
            self._starts[launch] = len(pointers)
            values: list[bytes] = [_word(statuses.failed)] if launch.guarded else []
            for argument in launch.arguments:
                if isinstance(argument, Operand):
                    known = address(argument)
                    if known is None:
                        # Memory of values that are bound later, and perhaps again.
                        place = sum(map(_slots, values)) + len(slots)
                        self._patches.setdefault(argument.base, []).append((place, argument.byte_offset))
                    values.append(_word(known or 0))
                elif isinstance(argument, Status):
                    values.append(_word(statuses.address(launch, argument)))
                else:
                    values.append(argument.tobytes())
            for value in values:
                pointers.append(_SLOT * len(slots))
                count = _slots(value)
                padded = value.ljust(_SLOT * count, b"\0")
                slots += [padded[_SLOT * part : _SLOT * (part + 1)] for part in range(count)]
        self._memory = np.frombuffer(bytearray(b"".join(slots) or bytes(_SLOT)), np.uint8)
        self._words = self._memory.view(np.uint64).reshape(-1, _SLOT // 8)
        self._pointers = np.array(pointers or [0], np.uint64) + np.uint64(self._memory.ctypes.data)
        self._first = int(self._pointers.ctypes.data)

    def bind(self, value: Value, address: int) -> None:
        """A value lies elsewhere now."""
        for place, offset in self._patches.get(value, ()):
            self._words[place, 0] = address + offset

    def address(self, launch: Launch) -> int:
        """Where the addresses of a launch's arguments are."""
        return self._first + 8 * self._starts[launch]


def _word(address: int) -> bytes:
    return address.to_bytes(8, sys.byteorder)


def _slots(value: bytes) -> int:
    return max(1, -(-len(value) // _SLOT))
