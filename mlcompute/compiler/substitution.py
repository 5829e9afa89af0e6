"""Substitution: which values a pass has replaced by others."""

from __future__ import annotations

from mlcompute.ops.op import Value


class Substitution:
    """Value -> the value that stands for it now; itself when it was not replaced."""

    def __init__(self) -> None:
        self.replaced: dict[Value, Value] = {}

    def copied(self) -> Substitution:
        """The same so far."""
        found = Substitution()
        found.replaced = dict(self.replaced)
        return found

    def __setitem__(self, value: Value, by: Value) -> None:
        self.replaced[value] = self[by]

    def __getitem__(self, value: Value) -> Value:
        # A substitute may have been substituted since.
        while (by := self.replaced.get(value)) is not None:
            value = by
        return value
