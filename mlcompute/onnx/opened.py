"""A model for any number of samples, and for any size along axes that vary: see `symbolic.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlcompute.compiler import Request
from mlcompute.errors import Error
from mlcompute.inference import InferenceGraph
from mlcompute.onnx.exporter import GraphWriter
from mlcompute.onnx.symbolic import SYMBOL, Rewriter, Sizes, StaticError
from mlcompute.tensor import Tensor
from mlcompute.training import TrainingGraph

#: Extents of inputs and outputs by name, with symbols.
Extents = dict[str, list[int | str]]


@dataclass(frozen=True)
class _Axis:
    """An axis of one input, or of several of the same extent, that varies."""

    symbol: str
    places: tuple[tuple[Tensor, int], ...]

    @property
    def extent(self) -> int:
        tensor, axis = self.places[0]
        return tensor.descriptor.shape[axis]


def opened(
    graph: TrainingGraph | InferenceGraph, request: Request, any_batch: bool
) -> tuple[GraphWriter, Extents, dict[str, str]]:
    """The model, written; its extents; and of every symbol why it is not there, empty where it is."""
    told = {SYMBOL: "" if any_batch else f"{request.batch_size}: as asked"}
    axes: list[_Axis] = []
    try:
        found = _written(graph, request, [], any_batch)
    except StaticError as error:
        told[SYMBOL] = f"{request.batch_size}: {error}"
        found = _written(graph, request, [], False)
    with_batch = not told[SYMBOL]
    for axis in _varying(request):
        tensor, number = axis.places[0]
        same = [place for one in _varying(request) for place in one.places if _extent(place) == axis.extent]
        # Alone, or together with all others of its extent: a mask is as long as its sentence.
        for candidate in (axis, _Axis(axis.symbol, tuple(same))):
            if any(place in one.places for one in axes for place in candidate.places):
                continue
            try:
                found = _written(graph, request, [*axes, candidate], with_batch)
            except StaticError as error:
                told.setdefault(axis.symbol, f"{tensor.descriptor.shape[number]}: {error}")
            else:
                axes.append(candidate)
                told[axis.symbol] = ""
                break
    return found[0], found[1] if with_batch or axes else {}, told


def _extent(place: tuple[Tensor, int]) -> int:
    tensor, axis = place
    return tensor.descriptor.shape[axis]


def _varying(request: Request) -> list[_Axis]:
    return [_Axis(f"{tensor.label}_{axis}", ((tensor, axis),)) for tensor in request.inputs for axis in tensor.varies]


def _written(
    graph: TrainingGraph | InferenceGraph,
    request: Request,
    axes: Sequence[_Axis],
    with_batch: bool,
    more: Sequence[tuple[_Axis, int]] = (),
    batch: int = 0,
) -> tuple[GraphWriter, Extents]:
    """The model with some axes opened, one after the other; `more`: with other extents of these."""
    if axes:
        *others, last = axes
        found = []
        for extent in _compared(last.extent):
            out, mine = _written(graph, request, others, with_batch, more, batch)
            there, theirs = _written(graph, request, others, with_batch, [*more, (last, extent)], batch)
            name = next(given for given, tensor in out.inputs.items() if tensor is last.places[0][0])
            sizes = Sizes(last.extent, extent, last.symbol)
            found.append(_opened(out, there, sizes, (name, last.places[0][1], 1), mine, theirs))
        return _agreed(found, "it")
    if with_batch and not batch:
        size = request.batch_size
        if size > 1 and any(array.shape[:1] == (size,) for array in request.constants.values()):
            raise StaticError("a tensor of the graph has numbers for each sample")
        found = []
        for count in _compared(size):
            out, mine = _written(graph, request, [], False, more)
            scaled = [(given, 0, rows) for given, rows in zip(out.inputs, request.inputs.values(), strict=True) if rows]
            if not scaled:
                raise StaticError("no input has an axis of samples")
            there, theirs = _written(graph, request, [], False, more, count)
            found.append(_opened(out, there, Sizes(size, count), scaled[0], mine, theirs))
        if size > 1:  # rows picked by their numbers are there in a larger batch, but not in the smallest
            _, theirs = _written(graph, request, [], False, more, 1)
            for name in mine:
                Sizes(size, 1).extents(mine[name], theirs[name])
        return _agreed(found, "the batch")
    shapes: dict[Tensor, list[int]] = {}
    for axis, extent in more:
        for tensor, number in axis.places:
            shapes.setdefault(tensor, list(tensor.descriptor.shape))[number] = extent
    try:
        sizes_now = tuple((tensor, tuple(shape)) for tensor, shape in shapes.items())
        writer = GraphWriter(graph, request, training=False, batch=batch, sizes=sizes_now)
        writer.write()
    except Error as error:
        if not batch and not more:
            raise
        raise StaticError(f"for another batch: {error.message}" if batch else f"other sizes: {error.message}") from None
    return writer, {given: list(border[0]) for part in writer.borders() for given, border in part.items()}


def _compared(size: int) -> tuple[int, int]:
    """Two sizes to compare with: by one alone, what is rounded (half of an odd extent) may seem to stay the same."""
    return size + 1, 2 * size + 1


def _agreed(found: Sequence[tuple[GraphWriter, Extents]], what: str) -> tuple[GraphWriter, Extents]:
    """The model that comparisons with two sizes led to."""
    (one, extents), (other, _) = found
    first, second = ([node.SerializeToString() for node in out.writer.nodes] for out in (one, other))
    if first != second:
        raise StaticError(f"an extent is no multiple of {what}")
    return one, extents


def _opened(
    out: GraphWriter, there: GraphWriter, sizes: Sizes, given: tuple[str, int, int], mine: Extents, theirs: Extents
) -> tuple[GraphWriter, Extents]:
    extents = {name: sizes.extents(mine[name], theirs[name]) for name in mine}
    out.writer.nodes = Rewriter(out.writer, there.writer, sizes, given).rewritten()
    return out, extents
