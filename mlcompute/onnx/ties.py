"""One stored tensor in several places: is it shared by the network, or did an exporter merge tensors that were equal?

Exporters store equal tensors once. In a network nobody has trained yet all biases are zeros and all copies of a layer
are equal, so most of its parameters arrive as one. What names or numbers reveal is separated again:

- a tensor that is one number repeated (zeros, ones) belongs to each module that uses it;
- copies of a layer, 'layers.0.norm.weight' and 'layers.1.norm.weight', are separate whatever their numbers;
- running statistics are never also weights.

What two nodes of one module share stays shared, and so do tables used in two roles: an embedding that is also the head.
Exporters that fold constants store such a head, and the matrix of a module that is used for vectors and for sequences,
a second time and transposed: `transposes` finds those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mlcompute.onnx.numbers import is_uniform, is_whole
from mlcompute.onnx.uses import FlatNode, Uses, frozen_slots
from mlcompute.onnx.weights import Judgement, is_anonymous
from mlcompute.ops.op import Array


@dataclass
class Ties:
    """What was separated and what was not.

    renamed   (first result of a node of the outermost graph, operand number) -> the name of the copy it uses
    copies    name of the copy -> name of the tensor it is a copy of
    tied      name of a weight -> the nodes that share it
    statistics   copies that are running statistics
    """

    renamed: dict[tuple[str, int], str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    statistics: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Place:
    """A direct use of a stored tensor by a node of the outermost graph."""

    node: FlatNode
    slot: int
    #: The node that computes with it, which may stand behind others that only move it.
    user: FlatNode
    user_slot: int
    #: The parameter's own name, where the exporter left it.
    name: str = ""

    @property
    def is_statistic(self) -> bool:
        return self.user_slot in frozen_slots(self.user)


def find_ties(
    arrays: Mapping[str, Array], judged: Mapping[str, Judgement], uses: Uses, producer: str, stated: bool = False
) -> Ties:
    """Which uses of the judged tensors get a copy of their own.

    stated   the model says itself which tensors it has: nothing is separated
    """
    ties = Ties()
    taken = {*uses.inputs, *arrays}
    stored = {name for name, judgement in judged.items() if judgement.trained}
    telling = {name for name in stored if not is_uniform(arrays[name])}
    for name, array in arrays.items():
        direct = uses.consumers.get(name, ())
        places = [_place(node, slot, uses) for node, slot in direct]
        places.sort(key=lambda place: bool(place.name))  # those that use it by its own name come first
        if len(places) < 2 or not all(place.node.outermost for place in places):
            continue
        statistics = any(place.is_statistic for place in places)
        if name not in stored and not statistics:
            continue
        uniform = is_uniform(array)
        keys: dict[object, list[_Place]] = {}
        for place in places:
            key = None if stated else _key(name, place, places[0], uniform, producer, uses, telling)
            keys.setdefault((place.is_statistic, key), []).append(place)
        groups = list(keys.values())
        own = next((group for group in groups if any(not place.name for place in group)), groups[0])
        for group in groups:
            if group is not own:
                copy = _unique(_name_for(name, group), taken)
                ties.copies[copy] = name
                if group[0].is_statistic:
                    ties.statistics.add(copy)
                ties.renamed.update({(place.node.outputs[0], place.slot): copy for place in group})
            users = list(dict.fromkeys(place.user.label for place in group))
            if len(users) > 1 and name in stored:
                ties.tied[name if group is own else copy] = users
    return ties


def _place(node: FlatNode, slot: int, uses: Uses) -> _Place:
    """The use itself; behind an Identity, which is how PyTorch writes a merged parameter, one that knows its name."""
    name = node.outputs[0] if node.operator == "Identity" and node.outermost else ""
    if not name:
        return _Place(node, slot, node, slot)
    behind = uses.sites(name)
    user, user_slot = (behind[0].node, behind[0].slot) if behind else (node, slot)
    return _Place(node, slot, user, user_slot, name)


def _key(name: str, place: _Place, base: _Place, uniform: bool, producer: str, uses: Uses, telling: set[str]) -> object:
    """What uses of one tensor must have in common to share it; None: what the first use has.

    telling   weights that are not one number repeated: nodes that share such a one are the same module, used twice
    """
    if producer == "pytorch" and not place.user.has_scopes:
        # This exporter puts an Identity where it has merged equals, and none where a module is used twice; unless it
        # has transposed the same matrix for each use.
        made_up = bool(place.name) and is_anonymous(place.name) and not uniform
        return None if made_up and _is_called_again(base.user.module, place.user.module) else place.name or None
    if place.name and not is_anonymous(place.name):
        return place.name if uniform or _without_numbers(place.name) == _without_numbers(name) else None
    module, first = place.user.module, base.user.module
    if module:
        apart = module != first and (uniform or _without_numbers(module) == _without_numbers(first))
        return module if apart else None
    if not uniform or place is base:
        return None
    shared = _around(name, place.user, uses, telling)
    if shared:
        return None if shared & _around(name, base.user, uses, telling) else frozenset(shared)
    return place.node.outputs[0], place.slot


def _is_called_again(first: str, again: str) -> bool:
    """Are they one module, whose second and later calls the exporter numbers: 'block.fc' and 'block_1.fc_1'?"""
    pairs = list(zip(first.split("."), again.split("."), strict=False))
    alike = all(b == a or re.fullmatch(re.escape(a) + r"_\d+", b) for a, b in pairs)
    return alike and bool(first) and first.count(".") == again.count(".")


def transposes(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Matrices that are another one, transposed: name -> that other's, which has a name of its own where one has.

    Numbers that are the same either way, and whole ones, as fresh matrices have them, say nothing.
    """
    found: dict[str, str] = {}
    starts: dict[object, str] = {}
    matrices = [name for name, array in arrays.items() if array.ndim == 2 and min(array.shape) > 1]
    for name in sorted(matrices, key=is_anonymous):
        array = arrays[name]
        other = starts.get((array.shape, array.dtype, array[:8, 0].tobytes()))
        if is_uniform(array) or is_whole(array):
            continue
        if other is not None and np.array_equal(array, arrays[other].T) and not np.array_equal(array, arrays[other]):
            found[name] = other
        else:
            starts.setdefault((array.shape[::-1], array.dtype, array[0, :8].tobytes()), name)
    return found


def _around(name: str, node: FlatNode, uses: Uses, telling: set[str]) -> set[str]:
    """Weights that a node, or where it has no others the product before it, uses besides the one in question."""
    inputs = [uses.origin(value) for value in node.inputs[:8]]
    own = set(inputs) & telling - {name}
    if own:
        return own
    before = [uses.makers[value] for value in inputs if value in uses.makers]
    return {uses.origin(value) for maker in before for value in maker.inputs[:8]} & telling - {name}


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _name_for(name: str, group: list[_Place]) -> str:
    """A parameter's own name; else its module and the last part of the shared one."""
    named = [place.name for place in group if place.name]
    module = next((place.user.module for place in group if place.user.module), "")
    if named and not is_anonymous(named[0]):
        return named[0]
    if module and not is_anonymous(name):
        return f"{module}.{name.rsplit('.', 1)[-1]}"
    return named[0] if named else name


def _unique(name: str, taken: set[str]) -> str:
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    taken.add(found)
    return found
