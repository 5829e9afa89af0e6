"""Class methods made by `factory` look and behave like written ones."""

from __future__ import annotations

import functools
import inspect
import pydoc

import pytest

import mlcompute as mlc
from mlcompute.layers.factories import factory


def _of_size(cls: type[Box], size: int, name: str, *, colour: str = "red") -> str:
    return f"{colour} {name} of {size} in {cls.__name__}"


class Box:
    small = factory(_of_size, 1, "A small one.")


def test_signature_name_and_documentation_are_those_of_a_written_method() -> None:
    assert Box.small("tin", colour="blue") == "blue tin of 1 in Box"
    assert (Box.small.__qualname__, Box.small.__module__) == ("Box.small", __name__)
    assert str(inspect.signature(Box.small)) == "(name: 'str', *, colour: 'str' = 'red') -> 'str'"
    assert inspect.signature(functools.wraps(Box.small)(lambda *given: None)) == inspect.signature(Box.small)
    shown = pydoc.plain(pydoc.render_doc(Box))
    assert "small(name: 'str', *, colour: 'str' = 'red') -> 'str'" in shown
    assert "A small one." in shown


def test_wrong_arguments_name_the_method() -> None:
    with pytest.raises(TypeError, match=r"LossLayer.hinge_loss\(\) missing 1 required positional .* 'reduction_type'"):
        mlc.LossLayer.hinge_loss()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"ActivationLayer.selu\(\) got an unexpected keyword argument 'a'"):
        mlc.ActivationLayer.selu(a=1.0)  # type: ignore[call-arg]


def test_subclasses_make_their_own_kind() -> None:
    class Loud(mlc.ActivationLayer):
        pass

    assert type(Loud.tanh()) is Loud
    assert Loud.tanh().descriptor == mlc.ActivationDescriptor(mlc.ActivationType.TANH, 1.0, 1.0)
