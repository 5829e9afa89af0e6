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

from mlcompute.devices.cpu.runtime.calls import numbers_of
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
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
    places    of each entry: which values of a step are its bases
    bases     memory of a step that nobody is like, where its values are not all that its entries use
    """

    entries: Sequence[Entry] | None
    places: list[list[int]] = field(default_factory=list)
    bases: list[Value] | None = None

    @functools.cached_property
    def texts(self) -> tuple[str, str]:
        """What the printed plan says: by which kernels steps are run, and how threads share them."""
        if not self.entries:
            return "NumPy (no native kernel)" if self.entries is None else "no elements", "one thread"
        shares = dict.fromkeys(f"rows {entry.rows}" if entry.rows else "shared" for entry in self.entries)
        return ", ".join(dict.fromkeys(entry.kernel for entry in self.entries)), ", ".join(shares)


class Kinds:
    """Kinds of steps seen so far, in one program or several of the same graph for as many threads.

    forms   what an operand is apart from its memory -> a number for it
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Kind] = {}
        self.forms: dict[Hashable, int] = {}


class LikeSteps:
    """What the steps of one program have in common with each other, and with those of others."""

    def __init__(self, operands: Operands, workspaces: Mapping[Step, Value], kinds: Kinds) -> None:
        self._operands, self._workspaces = operands, workspaces
        self._kinds = kinds
        #: Attributes that steps share (`share_updates`, `differentiate`) as keys. They live as long as the program.
        self._known: dict[int, Hashable] = {}

    def kinds(self, steps: Sequence[Step], make: Maker) -> tuple[list[Kind], Array, Array]:
        """The kind of each step, where its memory begins in an array of numbers, and that array (`Calls.memory`)."""
        values: list[Value] = []
        ends: list[int] = []
        workspaces = self._workspaces
        for step in steps:
            values += step.inputs
            values += step.results
            if workspaces and step in workspaces:
                values.append(workspaces[step])
            ends.append(len(values))
        numbers = numbers_of(values)
        forms, memory = self._looked_at(values, numbers)
        looks, own, bases = forms.astype(np.int32).tobytes(), numbers.tolist(), memory.tolist()
        found: list[Kind] = []
        firsts = [0, *ends[:-1]]
        begin, known, others = 0, self._kinds.known, list[Value]()
        for step, end in zip(steps, ends, strict=True):
            attributes = self._attributes(step) if step.attributes else ""
            key: Hashable = (step.op, attributes, looks[4 * begin : 4 * end])
            if len(set(bases[begin:end])) < end - begin:
                key = (key, _numbered(own[begin:end]), _numbered(bases[begin:end]))
            kind = known.get(key)
            if kind is None:
                kind = self._new(step, make, bases[begin:end])
                if attributes is not None and kind.bases is None:
                    known[key] = kind
                elif kind.bases is not None:
                    firsts[len(found)] = len(values) + len(others)
                    others += kind.bases
            found.append(kind)
            begin = end
        return found, np.array(firsts, np.int64), np.concatenate([memory, numbers_of(others)])

    def _new(self, step: Step, make: Maker, bases: list[int]) -> Kind:
        kind = Kind(make(step, self._operands))
        entries = kind.entries or ()
        used = [[base.index for base in entry.layout.bases] for entry in entries]
        if all(one.is_shareable and set(own) <= set(bases) for one, own in zip(entries, used, strict=True)):
            kind.places = [[bases.index(base) for base in own] for own in used]
        else:
            kind.bases = []
            for entry in entries:
                count, own = len(kind.bases), entry.layout.bases
                kind.places.append(list(range(count, count + len(own))))
                kind.bases += own
        return kind

    def _looked_at(self, values: list[Value], numbers: Array) -> tuple[Array, Array]:
        """The form of each value, and the number of the memory it lies in; each value is looked at once."""
        size = 1 + int(numbers.max(initial=0)) - int(numbers.min(initial=0))
        last = np.full(size, -1, np.int64)
        last[numbers] = np.arange(len(values))
        own = np.flatnonzero(last >= 0)
        forms, memory, known = np.zeros(size, np.int64), np.arange(size), self._kinds.forms
        memory[memory > numbers.max(initial=0)] -= size
        first = [values[place] for place in last[own].tolist()]
        forms[own] = [known.setdefault((one.shape, one.dtype), len(known)) for one in first]
        views = self._operands.views
        if views:
            shown = numbers_of(list(views))
            inside = shown <= numbers.max(initial=0)
            inside[inside] = last[shown[inside]] >= 0
            used = [view for view, is_used in zip(views.values(), inside.tolist(), strict=True) if is_used]
            forms[shown[inside]] = [known.setdefault(view[1:], len(known)) for view in used]
            memory[shown[inside]] = [view.base.index for view in used]
        return forms[numbers], memory[numbers]

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


def _numbered(values: Sequence[int]) -> tuple[int, ...]:
    """Which of some values are the same."""
    numbers: dict[int, int] = {}
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
    numbers: dict[Value, int] = {}
    for value in attributes["inputs"]:
        numbers.setdefault(value, len(numbers))
    found: list[Hashable] = [others]
    add = found.append
    for step in attributes["steps"]:
        add(step.op)
        if step.attributes:
            printed = _printed(step.attributes)
            if printed is None:
                return None
            add(printed)
        for value in step.inputs:
            add(numbers[value])
        for value in step.results:
            numbers[value] = len(numbers)
            add(value.shape)
            add(value.dtype)
    return tuple(found), tuple([numbers[value] for value in attributes["stored"]])
