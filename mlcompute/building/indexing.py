"""What `x[:, 1:]`, `x[:, -1]`, `x[..., None]`, `x[:, ::-1]` and `x[:, [0, 2]]` become: slices, joined and reshaped."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.building.builder import build
from mlcompute.building.contents import undone_on_error
from mlcompute.building.expressions import arranged, concatenate, graph_of
from mlcompute.enums import ReductionType
from mlcompute.errors import ShapeError, warn
from mlcompute.layers.reduction import ReductionLayer
from mlcompute.layers.shaping import SliceLayer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.graph import Graph


def index(x: Tensor, key: Any) -> Tensor:
    """x[key]: a slice, and where axes go or come a reshape."""
    who, given = f"Tensor '{x.label}'[...]", key if isinstance(key, tuple) else (key,)
    picking = [place for place, one in enumerate(given) if _picks(one)]
    if picking:
        return _picked(who, x, given, picking)
    cuts, order = _resolved(who, x.shape, given)
    graph, result = graph_of(who, x), x
    if isinstance(key, int) and key in (0, 1):
        _warn_of_pairs(graph, x, key)
    if any(cut != _WHOLE_AXIS for cut in cuts):
        layer = SliceLayer([start for start, _, _ in cuts], [end for _, end, _ in cuts], [step for _, _, step in cuts])
        result = build(graph, layer, [x], "", "slice")
    if order == [[axis] for axis in range(len(x.shape))]:
        return result
    name = "" if result is x else f"{result.label}_reshape"
    return build(graph, arranged(result.shape, order), [result], name, "reshape")


def _warn_of_pairs(graph: Graph, x: Tensor, key: int) -> None:
    """In PyTorch, max(axis)[0] is all the largest values, and not the first of them."""
    layer = next((node.layer for node in reversed(graph.nodes) if x in node.results), None)
    kinds = {ReductionType.MAX: "max", ReductionType.MIN: "min"}
    if not isinstance(layer, ReductionLayer) or layer.reduction_type not in kinds or x.descriptor.element_count == 1:
        return
    name = kinds[layer.reduction_type]
    meant = f"{name}(axis) alone" if key == 0 else "argmax(axis)" if name == "max" else "(-x).argmax(axis)"
    warn(
        f"Tensor '{x.label}'[{key}]: {name}(axis) gives values without their places, and [{key}] picks one of these "
        f"values; what PyTorch calls {name}(axis)[{key}] is {meant}"
    )


#: A list of more indices is refused: each run of equal steps becomes a layer.
_MOST_PIECES = 64


def _picks(one: Any) -> bool:
    """Is it a list of indices, or a slice that goes backwards?"""
    return isinstance(one, (list, np.ndarray)) or (isinstance(one, slice) and (one.step or 1) < 0)


def _picked(who: str, x: Tensor, key: tuple[Any, ...], picking: list[int]) -> Tensor:
    """x[:, [0, 2, 1]] and x[:, ::-1]: slices, one after another."""
    place = picking[0]
    one, before, after = key[place], key[:place], key[place + 1 :]
    others = [operator.index(part) for part in (*before, *after) if hasattr(part, "__index__")]
    if len(picking) > 1 or (others and not isinstance(one, slice)):
        raise ShapeError(
            f"{who}: a list of indices beside other indices",
            expected="slices, ... and None beside it",
            fix="index one after the other: x[:, [0, 2]][:, :, 1]",
        )
    # The axis it is about: counted from the end where ... stands before it.
    axis = sum(part is not None for part in before)
    if any(part is Ellipsis for part in before):
        axis = len(x.shape) - 1 - sum(part is not None for part in after)
    if not 0 <= axis < len(x.shape):
        raise ShapeError(f"{who}: more indices than the tensor has axes", source=x.shape)
    graph = graph_of(who, x)
    with graph, undone_on_error(graph):
        pieces = [index(x, (*before, part, *after)) for part in _pieces(who, graph, x.shape, axis, one)]
        kept = sum(not hasattr(part, "__index__") for part in before)
        if any(part is Ellipsis for part in before):
            kept = len(pieces[0].shape) - 1 - sum(not hasattr(part, "__index__") for part in after)
        return pieces[0] if len(pieces) == 1 else concatenate(pieces, kept)


def _pieces(who: str, graph: Graph, shape: tuple[int, ...], axis: int, one: Any) -> list[slice]:
    """The slices that indices along an axis are made of."""
    extent = shape[axis]
    if isinstance(one, slice):
        if axis == 0 or any(tensor.varies for tensor in graph.input_tensors):
            raise ShapeError(
                f"{who}: the step along axis {axis} is {one.step}, and a run may have another number of elements there",
                expected="1 or more",
            )
        picked = list(range(*one.indices(extent)))
    else:
        array = np.asarray(one)
        if array.dtype == bool and array.shape == (extent,):
            array = np.flatnonzero(array)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(
                f"{who}: an index of shape {array.shape} and type {array.dtype}: lists of whole numbers can be, for "
                "one axis; x.gather(axis, indices) picks for every sample, mlc.where chooses by a condition"
            )
        picked = array.tolist()
    wrong = [place for place in picked if not -extent <= place < extent]
    if wrong or not picked:
        what = f"index {wrong[0]} along axis {axis}, which has {extent}" if wrong else f"nothing is left of axis {axis}"
        raise ShapeError(f"{who}: {what}")
    runs: list[list[int]] = []
    for place in picked:
        last = runs[-1] if runs else []
        step = place - last[-1] if last else 0
        if last and step > 0 and (last[-1] < 0) == (place < 0) and (len(last) == 1 or step == last[1] - last[0]):
            last.append(place)
        else:
            runs.append([place])
    if len(runs) > _MOST_PIECES:
        raise ShapeError(
            f"{who}: {len(runs)} pieces along axis {axis}",
            expected=f"at most {_MOST_PIECES}",
            fix="x.gather(axis, indices), or x @ a matrix of zeros and ones",
        )
    return [
        slice(run[0], None if run[-1] == -1 else run[-1] + 1, run[1] - run[0] if len(run) > 1 else 1) for run in runs
    ]


#: (start, end, step) along one axis, as SliceLayer takes them.
_Cut = tuple[int, int | None, int]
_WHOLE_AXIS: _Cut = (0, None, 1)


def _resolved(who: str, shape: tuple[int, ...], key: tuple[Any, ...]) -> tuple[list[_Cut], list[list[int]]]:
    """(what is cut out of every axis, the axis of the source that each of the result is; [] for new ones)"""
    named = sum(one is not None and one is not Ellipsis for one in key)
    if named > len(shape):
        raise ShapeError(f"{who}: {named} indices, the tensor has {len(shape)} axes", source=shape)
    if sum(one is Ellipsis for one in key) > 1:
        raise ShapeError(f"{who}: ... is there more than once")
    whole_axes = (slice(None),) * (len(shape) - named)
    place = next((place for place, one in enumerate(key) if one is Ellipsis), len(key))
    key = (*key[:place], *whole_axes, *key[place + 1 :])
    cuts: list[_Cut] = []
    order: list[list[int]] = []
    for one in key:
        if one is None:
            order.append([])
            continue
        axis = len(cuts)
        cuts.append(_along(who, axis, shape[axis], one))
        order += [[axis]] if isinstance(one, slice) else []
    return cuts, order


def _along(who: str, axis: int, extent: int, one: Any) -> _Cut:
    """What is cut out of one axis. What counts from its end goes on doing so where other sizes run."""
    if isinstance(one, slice):
        start, end, step = one.indices(extent)
        if start >= end:
            raise ShapeError(f"{who}: nothing is left of axis {axis}, which has {extent}")
        first = 0 if one.start is None else operator.index(one.start)
        last = None if one.stop is None else operator.index(one.stop)
        return max(first, -extent) if first < 0 else first, None if last is None or last > extent else last, step
    if isinstance(one, Tensor):
        raise TypeError(
            f"{who}: a Tensor cannot be an index; x.gather(axis, indices) picks elements along an axis, "
            "graph.embedding rows of a table, mlc.where chooses by a condition"
        )
    try:
        if isinstance(one, (bool, np.bool_)):
            raise TypeError
        place = operator.index(one)
    except TypeError:
        expected = "whole numbers, slices, ... and None can"
        raise TypeError(f"{who}: a {type(one).__name__} cannot be an index: {expected}") from None
    if not -extent <= place < extent:
        raise ShapeError(f"{who}: index {place} along axis {axis}, which has {extent}")
    return place, None if place == -1 else place + 1, 1
