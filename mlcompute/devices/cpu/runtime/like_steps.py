"""Steps that are alike, as in the layers of a deep network, share their kernels: only the memory is another.

Alike are steps of one op with equal attributes, on operands of the same types, shapes, strides and offsets, of which
the same ones are one value or lie in one memory. Entries are made for the first of them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from mlcompute.devices.cpu.runtime.calls import numbers_of
from mlcompute.devices.cpu.runtime.entry import Entry, Maker
from mlcompute.devices.loop_nest import Operands
from mlcompute.ops.op import Array, Op, Step, Value

#: Attributes of these types say all about themselves when they are printed.
_PLAIN = frozenset({int, float, bool, str, type(None), np.dtype, *map(type, map(np.dtype, "?bBhHiIlLqQefd"))})
#: What a fused step says about the steps inside it.
_INSIDE = frozenset({"steps", "stored", "inputs", "targets"})
_SHAPE_AND_TYPE = attrgetter("shape", "dtype")


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

    forms       what an operand is apart from its memory -> a number for it
    attributes  those of a step as a key -> a number for them; 0: there are none
    patterns    which operands are one value or lie in one memory -> a number; 0: none do
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Kind] = {}
        self.forms: dict[Hashable, int] = {}
        self.attributes: dict[Hashable, int] = {}
        self.patterns: dict[Hashable, int] = {}


class LikeSteps:
    """What the steps of one program have in common with each other, and with those of others."""

    def __init__(self, operands: Operands, workspaces: Mapping[Step, Value], kinds: Kinds) -> None:
        self._operands, self._workspaces = operands, workspaces
        self._kinds = kinds

    def kinds(self, steps: Sequence[Step], make: Maker) -> tuple[list[Kind], Array, Array, Array]:
        """The kinds there are, the number of each step's kind, where its memory begins, and all memory.

        The last two are `Calls.first` and `Calls.memory`.
        """
        values: list[Value] = []
        ends = [0]
        attributes, sorts = list[int](), list[int]()  # of each step: numbers of its attributes, and of them and its op
        workspaces, numbered, known = self._workspaces, self._kinds.attributes, dict[tuple[Op, int], int]()
        #: Attributes that steps share (`share_updates`, `differentiate`). They live as long as the program.
        shared: dict[int, int] = {}
        for step in steps:
            values += step.inputs
            values += step.results
            if workspaces and step in workspaces:
                values.append(workspaces[step])
            ends.append(len(values))
            own, number = step.attributes, 0
            if own:
                number = shared.get(id(own), 0)
                if number == 0:
                    key = self._attributes(step)
                    number = -len(ends) if key is None else numbered.setdefault(key, len(numbered) + 1)
                    if number > 0 and own.get("inputs") is not step.inputs:
                        shared[id(own)] = number
            attributes.append(number)
            sorts.append(known.setdefault((step.op, number), len(known)))
        numbers = numbers_of(values)
        forms, memory = self._looked_at(values, numbers)
        like, firsts = self._alike(np.array(ends), np.array(sorts, np.int64), forms, numbers, memory)
        begins = np.array(ends[:-1], np.int64)
        kinds: list[Kind] = []
        others: list[Value] = []
        for row in firsts:
            part = slice(ends[row], ends[row + 1])
            pattern = self._pattern(numbers[part].tolist(), memory[part].tolist())
            key = (steps[row].op, attributes[row], forms[part].astype(np.int32).tobytes(), pattern)
            kind = self._kinds.known.get(key)
            if kind is None:
                kind = self._new(steps[row], make, memory[part].tolist())
                if attributes[row] >= 0 and kind.bases is None:
                    self._kinds.known[key] = kind
            kinds.append(kind)
        for number in range(len(firsts)):
            for row in np.flatnonzero(like == number).tolist() if kinds[number].bases is not None else ():
                kind = kinds[number]
                if row != firsts[number]:  # like the first, and yet not to be shared
                    kind = self._new(steps[row], make, memory[ends[row] : ends[row + 1]].tolist())
                    like[row] = len(kinds)
                    kinds.append(kind)
                begins[row] = len(values) + len(others)
                others += kind.bases or ()
        return kinds, like, begins, np.concatenate([memory, numbers_of(others)])

    def _alike(self, ends: Array, sorts: Array, forms: Array, numbers: Array, memory: Array) -> tuple[Array, list[int]]:
        """A number for each step, the same for those that are alike; and the first step of each number, in order."""
        counts, like, firsts = np.diff(ends), np.zeros(len(sorts), np.int64), list[int]()
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            at = ends[rows][:, None] + np.arange(count)
            lies = np.sort(memory[at], axis=1)
            patterns = np.zeros(len(rows), np.int64)
            for row in np.flatnonzero((lies[:, 1:] == lies[:, :-1]).any(axis=1)).tolist():
                patterns[row] = self._pattern(numbers[at[row]].tolist(), memory[at[row]].tolist())
            _, first, own = np.unique(
                _row_numbers([sorts[rows], patterns, *forms[at].T]), return_index=True, return_inverse=True
            )
            like[rows] = own.reshape(-1) + len(firsts)
            firsts += rows[first].tolist()
        order = np.argsort(firsts)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return place[like] if len(order) else like, [firsts[number] for number in order.tolist()]

    def _pattern(self, numbers: list[int], memory: list[int]) -> int:
        """A number for which of some values are the same, or lie in one memory."""
        if len(set(memory)) == len(memory):
            return 0
        patterns = self._kinds.patterns
        return patterns.setdefault((_numbered(numbers), _numbered(memory)), len(patterns) + 1)

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
        forms, memory, known = np.zeros(size, np.int64), np.arange(size), self._kinds.forms
        memory[memory > numbers.max(initial=0)] -= size
        views = self._operands.views
        if views:
            shown = numbers_of(list(views))
            inside = shown <= numbers.max(initial=0)
            inside[inside] = last[shown[inside]] >= 0
            used = [view for view, is_used in zip(views.values(), inside.tolist(), strict=True) if is_used]
            seen: dict[int, int] = {}  # views that are alike share their forms
            for _, form in used:
                if id(form) not in seen:
                    seen[id(form)] = known.setdefault(form, len(known))
            shown = shown[inside]
            forms[shown] = [seen[id(form)] for _, form in used]
            memory[shown] = [base.index for base, _ in used]
            last[shown] = -1
        own = np.flatnonzero(last >= 0)
        looks = map(_SHAPE_AND_TYPE, [values[place] for place in last[own].tolist()])
        forms[own] = [known.setdefault(look, len(known)) for look in looks]
        return forms[numbers], memory[numbers]

    def _attributes(self, step: Step) -> Hashable:
        """A step's attributes as a key; None where they cannot be compared."""
        return _inside(step.attributes) if "steps" in step.attributes else _printed(step.attributes)


def _numbered(values: Sequence[int]) -> tuple[int, ...]:
    """Which of some values are the same."""
    numbers: dict[int, int] = {}
    return tuple([numbers.setdefault(value, len(numbers)) for value in values])


def _row_numbers(columns: Sequence[Array]) -> Array:
    """Numbers for the rows of a table, the same for rows that are equal."""
    rows, size = columns[0], 1 + int(columns[0].max(initial=0))
    for column in columns[1:]:
        width = 1 + int(column.max(initial=0))
        if size * width >= 1 << 62:
            rows = np.unique(rows, return_inverse=True)[1].reshape(-1)
            size = len(rows)
        rows, size = rows * width + column, size * width
    return rows


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
        numbers[value] = len(numbers)
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
    add("stored")
    for value in attributes["stored"]:
        add(numbers[value])
    return tuple(found)
