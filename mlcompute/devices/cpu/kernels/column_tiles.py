"""How columns are shared: ranges wide enough to be worth a unit of their own."""

from __future__ import annotations

from mlcompute.devices.cpu.codegen.arguments import KernelArguments

#: Columns a unit takes at least, so that no two threads write to one cache line for long.
MIN_COLUMNS = 64
#: Units there should be, for threads to share them evenly.
UNITS = 32


class ColumnTiles:
    """Ranges of columns that units take: as wide as possible while there are enough units to share."""

    def __init__(self, args: KernelArguments, columns: int, others: int, most: int = 2048) -> None:
        pieces = max(1, min(-(-UNITS // max(others, 1)), columns // MIN_COLUMNS))
        width = -(-columns // pieces)
        width = min(-(-width // 16) * 16, most)
        self.count = -(-columns // width)
        self._code = args.code
        self._columns, self._width, self._count = args.numbers([columns, width, self.count])

    def split(self, unit: str) -> tuple[str, tuple[str, str]]:
        """What a unit means: (the rest of its number, first and last column)."""
        code = self._code
        begin = code.mul(code.rem(unit, self._count), self._width)
        return code.div(unit, self._count), (begin, code.minimum(code.add(begin, self._width), self._columns))
