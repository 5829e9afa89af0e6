"""ReadOnly: what users see is a property."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import mlcompute as mlc
from mlcompute.layers.read_only import ReadOnly


class Line:
    slope = ReadOnly[float]("How steep it is.")
    start = ReadOnly[int | None]("Where it begins.", "_ends", 0)
    name_length = ReadOnly[int]("Letters of its name.", "_name.real")

    def __init__(self) -> None:
        self._slope, self._ends, self._name = 2.0, (1, 5), 4


def test_values_come_from_the_private_attribute() -> None:
    line = Line()
    assert (line.slope, line.start, line.name_length) == (2.0, 1, 4)


def test_nothing_can_be_assigned_or_deleted() -> None:
    line = Line()
    with pytest.raises(AttributeError, match="slope"):
        line.slope = 3.0  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="slope"):
        del line.slope


def test_help_and_inspect_show_a_property_with_its_type() -> None:
    shown = pydoc.plain(pydoc.render_doc(mlc.ConvolutionLayer))
    assert "Elements in (out, in/groups, kernel height, kernel width) order." in shown
    for name, member in (("slope", Line.slope), ("start", Line.start)):
        assert isinstance(member, property)
        assert member.fget is not None
        assert member.fget.__qualname__ == f"Line.{name}"
    assert inspect.signature(Line.start.fget).return_annotation == int | None  # type: ignore[arg-type]
    assert inspect.getdoc(Line.slope) == "How steep it is."
