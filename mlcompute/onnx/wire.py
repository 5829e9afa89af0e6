"""Where the large numbers lie in a model file, so that each is read once, straight into the array it becomes.

A parser would hold all of them a second time until the whole model is thrown away. So the bytes of a model are walked
over by their lengths, `raw_data` of the graph's initializers is cut out, and only what remains is parsed: names,
shapes, nodes. A model is a message of fields, each a key (number * 8 + kind), then a number or a length and that many
bytes; see the encoding of Protocol Buffers.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

Buffer = bytes | mmap.mmap

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # ModelProto.graph, GraphProto.initializer, TensorProto.raw_data
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
#: Smaller tensors stay where they are.
_LARGE = 4096


class _OddError(Exception):
    """The bytes are not what a writer of models makes; the ordinary parser shall judge them."""


@dataclass(frozen=True)
class _Field:
    """One field: where its key begins, and where its content begins and ends."""

    number: int
    kind: int
    start: int
    content: int
    end: int


def without_large_data(data: Buffer) -> tuple[bytes, dict[int, tuple[int, int]]]:
    """The model without the raw data of large initializers, and where that lies: initializer number -> (start, size).

    A file that is damaged, or written in a way nobody writes models, comes back whole.
    """
    try:
        graphs = [field for field in _fields(data, 0, len(data)) if field.number == _GRAPH]
        if len(graphs) != 1 or graphs[0].kind != _BYTES:
            raise _OddError
        (graph,) = graphs
        inside, places = _thin_graph(data, graph)
    except _OddError:
        return bytes(data[:]), {}
    if not places:
        return bytes(data[:]), {}
    head, tail = data[: graph.start], data[graph.end :]
    return b"".join([head, field_key(_GRAPH), varint(len(inside)), inside, tail]), places


def _thin_graph(data: Buffer, graph: _Field) -> tuple[bytes, dict[int, tuple[int, int]]]:
    pieces: list[bytes] = []
    places: dict[int, tuple[int, int]] = {}
    number, copied = 0, graph.content
    for field in _fields(data, graph.content, graph.end):
        if field.number != _INITIALIZER:
            continue
        if field.kind != _BYTES:
            raise _OddError
        if field.end - field.content > _LARGE:
            raw = [one for one in _fields(data, field.content, field.end) if one.number == _RAW_DATA]
            if len(raw) == 1 and raw[0].kind == _BYTES and raw[0].end - raw[0].content > _LARGE:
                thin = data[field.content : raw[0].start] + data[raw[0].end : field.end]
                pieces += [data[copied : field.start], field_key(_INITIALIZER), varint(len(thin)), thin]
                places[number] = (raw[0].content, raw[0].end - raw[0].content)
                copied = field.end
        number += 1
    pieces.append(data[copied : graph.end])
    return b"".join(pieces), places


def _fields(data: Buffer, start: int, end: int) -> Iterator[_Field]:
    at = start
    while at < end:
        key, content = _number(data, at, end)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, after = _number(data, content, end)
        elif kind == _BYTES:
            size, content = _number(data, content, end)
            after = content + size
        elif kind in (_FIXED64, _FIXED32):
            after = content + (8 if kind == _FIXED64 else 4)
        else:
            raise _OddError
        if after > end or not number:
            raise _OddError
        yield _Field(number, kind, at, content, after)
        at = after


def _number(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """A number of seven bits per byte, and where it ends."""
    found = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise _OddError
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
    raise _OddError


def varint(number: int) -> bytes:
    """A number as files store it, seven bits per byte."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def field_key(number: int) -> bytes:
    """The key of a field that holds bytes: a text, numbers or another message."""
    return varint(number << 3 | _BYTES)
