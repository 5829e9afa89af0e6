"""The constants of a program: one after the other in one buffer, sent at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlcompute.devices.cuda.driver import Driver
from mlcompute.devices.cuda.memory import CudaBuffer, Staging
from mlcompute.devices.loop_nest import Operand
from mlcompute.ops.op import Array, Value

#: They begin at multiples of so many bytes, as buffers do.
_ALIGNMENT = 256


class PlacedConstants(CudaBuffer):
    """The buffer they lie in."""

    def __init__(self, driver: Driver, staging: Staging, constants: Mapping[Value, Array]) -> None:
        self._places: dict[Value, int] = {}
        size = 0
        for value in constants:
            self._places[value] = size
            size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        super().__init__(driver, staging, size)
        memory = np.zeros(size, np.uint8)
        for value, array in constants.items():
            data = np.ascontiguousarray(array, value.dtype).reshape(-1).view(np.uint8)
            memory[self._places[value] : self._places[value] + value.nbytes] = data
        self.write(memory)

    def address_of(self, operand: Operand) -> int | None:
        """Where an operand begins; None for what is no constant."""
        place = self._places.get(operand.base)
        return None if place is None else self.address + place + operand.byte_offset
