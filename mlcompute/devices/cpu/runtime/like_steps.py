"""Steps that are alike, as in the layers of a deep network, share their kernels: only the memory is another.

Alike are steps of one op with equal attributes, on operands of the same types, shapes, strides and offsets, of which
the same ones are one value or lie in one memory. Entries are made for the first of them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlcompute.devices.cpu.runtime.entry import Entry, KernelCall, Maker
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import Array, Step, Value

#: Attributes of these types say all about themselves when they are printed.
_PLAIN = frozenset({int, float, bool, str, type(None), np.dtype, *map(type, map(np.dtype, "?bBhHiIlLqQefd"))})
#: What a fused step says about the steps inside it.
_INSIDE = frozenset({"steps", "stored", "inputs", "targets"})


@dataclass(eq=False)
class Kind:
    """What steps that are alike have in common.

    entries   their kernels; None where there are none
    bound     each of these, and which values of a step are its bases
    """

    entries: Sequence[Entry] | None
    bound: list[tuple[Entry, list[int]]] = field(default_factory=list)

    @functools.cached_property
    def texts(self) -> tuple[str, str]:
        """What the printed plan says: by which kernels steps are run, and how threads share them."""
        if not self.entries:
            return "NumPy (no native kernel)" if self.entries is None else "no elements", "one thread"
        shares = dict.fromkeys(f"rows {entry.rows}" if entry.rows else "shared" for entry in self.entries)
        return ", ".join(dict.fromkeys(entry.kernel for entry in self.entries)), ", ".join(shares)


#: By what steps that are alike have in common.
Kinds = dict[Hashable, Kind]


class LikeSteps:
    """Makes the calls of one program's steps.

    kinds   of steps seen before, in this program or others of the same graph for as many threads
    """

    def __init__(self, operands: Operands, workspaces: Mapping[Step, Value], kinds: Kinds) -> None:
        self._operands, self._workspaces = operands, workspaces
        self._kinds = kinds
        #: Attributes that steps share (`share_updates`, `differentiate`) as keys. They live as long as the program.
        self._known: dict[int, Hashable] = {}
        #: Words for the statuses of calls, and how many of them are taken.
        self._statuses, self._taken = np.zeros(0, np.int64), 0

    def calls(self, step: Step, make: Maker) -> tuple[Kind, list[KernelCall]]:
        """What a step has in common with others, and the calls it comes to."""
        views, values = self._operands.views, step.inputs + step.results
        bases = list(values)
        forms: list[Hashable] = [value.shape for value in values]
        forms += [value.dtype for value in values]
        if not views.keys().isdisjoint(values):
            for place, value in enumerate(values):
                if value in views:
                    view = views[value]
                    bases[place] = view.base
                    forms += (place, view.offset, view.strides)
        workspace = self._workspaces.get(step)
        if workspace is not None:
            bases.append(workspace)
            forms.append(workspace.nbytes)
        attributes = self._attributes(step) if step.attributes else ""
        same = () if len(set(bases)) == len(bases) else (_numbered(values), _numbered(bases))
        key = (step.op, attributes, same, *forms)
        kind = self._kinds.get(key)
        if kind is None:
            kind = Kind(make(step, self._operands))
            entries = kind.entries or ()
            if attributes is not None and all(
                one.is_shareable and set(one.layout.bases) <= set(bases) for one in entries
            ):
                self._kinds[key] = kind
                kind.bound = [(entry, [bases.index(base) for base in entry.layout.bases]) for entry in entries]
            return kind, [KernelCall(entry, step, entry.layout.bases, entry.status) for entry in entries]
        calls = []
        for entry, places in kind.bound:
            status = None if entry.status is None else self._status()
            calls.append(KernelCall(entry, step, [bases[place] for place in places], status))
        return kind, calls

    def _status(self) -> Array:
        """A word of its own."""
        if self._taken == len(self._statuses):
            self._statuses, self._taken = np.zeros(1024, np.int64), 0
        self._taken += 1
        return self._statuses[self._taken - 1 : self._taken]

    def _attributes(self, step: Step) -> Hashable:
        """A step's attributes as a key; None where they cannot be compared."""
        attributes = step.attributes
        if "steps" in attributes and attributes["inputs"] is step.inputs:
            return _inside(attributes)
        known = self._known.get(id(attributes))
        if known is None:
            known = _inside(attributes) if "steps" in attributes else _printed(attributes)
            self._known[id(attributes)] = known
        return known


def _numbered(values: Sequence[Value]) -> tuple[int, ...]:
    """Which of some values are the same."""
    numbers: dict[Value, int] = {}
    return tuple([numbers.setdefault(value, len(numbers)) for value in values])


def _printed(attributes: dict[str, Any]) -> str | None:
    for value in attributes.values():
        if not (type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))):
            return None
    return repr(attributes)


def _inside(attributes: dict[str, Any]) -> Hashable:
    """The steps inside a fused one, with numbers for their values."""
    others: str | None = ""
    if not attributes.keys() <= _INSIDE:
        others = _printed({name: value for name, value in attributes.items() if name not in _INSIDE})
    if others is None:
        return None
    numbers = {value: number for number, value in enumerate(dict.fromkeys(attributes["inputs"]))}
    found: list[Hashable] = [others]
    for step in attributes["steps"]:
        printed = _printed(step.attributes) if step.attributes else ""
        if printed is None:
            return None
        found += (step.op, printed)
        found += [numbers[value] for value in step.inputs]
        for value in step.results:
            numbers[value] = len(numbers)
            found += (value.shape, value.dtype)
    return tuple(found), tuple([numbers[value] for value in attributes["stored"]])
