"""Every public member of ML Compute exists, takes its arguments by name, and is as writable as it should be."""

from __future__ import annotations

import ast
import copy
import enum
import inspect
import typing
from typing import Any

import pytest

import mlcompute as mlc
from tests.inventory import CALLBACKS, CLASSES, ENUMS, FUNCTIONS, MEMBERS, Class, Enumeration, Member, Value
from tests.samples import ALL

SIGNATURES = [
    pytest.param(cls, name, text, id=f"{cls.name}.{name}{text}")
    for cls in CLASSES.values()
    for name, texts in cls.signatures.items()
    for text in texts
]

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named(members: list[Any]) -> list[Any]:
    return [pytest.param(one, id=one.id if isinstance(one, Member) else f"{one.owner}.{one.python}") for one in members]


def callable_of(cls: Class, name: str) -> Any:
    return cls.type if name == cls.name else getattr(cls.type, name)


def test_the_inventory_is_whole() -> None:
    assert len(CLASSES) == 56
    assert len(MEMBERS) == 505
    assert len({member.id for member in MEMBERS}) == len(MEMBERS)
    assert sum(len(kind.members) for kind in ENUMS.values()) == 143
    assert len(FUNCTIONS) == 13


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_class(cls: Class) -> None:
    assert cls.name in mlc.__all__
    assert inspect.isclass(cls.type)
    if cls.base:
        assert issubclass(cls.type, CLASSES[cls.base].type)
    if cls.abstract:
        assert inspect.isabstract(cls.type)
    if cls.name != "Platform":
        assert cls.name in ALL, f"tests/samples.py makes no {cls.name}"


@pytest.mark.parametrize("cls", [mlc.Graph, mlc.TrainingGraph, mlc.InferenceGraph])
def test_the_factory_of_empty_graphs(cls: type[mlc.Graph]) -> None:
    assert type(cls.graph()) is cls
    assert cls.graph().layers == []


@pytest.mark.parametrize("cls", [c for c in CLASSES.values() if c.copies], ids=lambda cls: cls.name)
def test_class_can_be_copied(cls: Class) -> None:
    made = ALL[cls.name]().made
    copied = copy.copy(made)
    assert type(copied) is type(made)
    assert copied is not made


@pytest.mark.parametrize("member", named([m for m in MEMBERS if m.kind == "property"]))
def test_property(member: Member) -> None:
    cls = CLASSES[member.owner].type
    if member.class_level:
        getattr(cls, member.python)
    made = ALL[member.owner]().made
    assert isinstance(made, cls)
    value = getattr(made, member.python)
    if member.setter:
        setattr(made, member.python, value)
        assert getattr(made, member.python) == value
    elif (member.owner, member.python) == ("Tensor", "data"):
        setattr(made, member.python, value)  # ours: the original writes through pointers
    else:
        with pytest.raises(AttributeError):
            setattr(made, member.python, value)


@pytest.mark.parametrize("member", named([m for m in MEMBERS if m.kind != "property"]))
def test_callable(member: Member) -> None:
    cls = CLASSES[member.owner]
    found = callable_of(cls, member.python)
    parameters = inspect.signature(found).parameters
    for name in member.params:
        assert name in parameters, f"{member.python} takes no {name}: {inspect.signature(found)}"
        assert parameters[name].kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE and name != "self"
    }
    assert required <= set(member.params), f"this form cannot be called: {required - set(member.params)} missing"
    assert inspect.iscoroutinefunction(found) == member.is_async
    if member.kind == "classmethod":
        assert inspect.ismethod(found), f"{member.id} is no class method"
        assert found.__self__ is cls.type


@pytest.mark.parametrize(("cls", "name", "text"), SIGNATURES)
def test_signature(cls: Class, name: str, text: str) -> None:
    """Order of the positional arguments and defaults; the package may give defaults to more of them."""
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    found = dict(inspect.signature(callable_of(cls, name)).parameters)
    found.pop("self", None)
    positional = [argument.arg for argument in arguments.args]
    named_only = [argument.arg for argument in arguments.kwonlyargs]
    assert set(positional + named_only) <= set(found), f"{set(positional + named_only) - set(found)} missing"
    by_position = [n for n, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(positional)] == positional
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= {n: d for n, d in zip(named_only, arguments.kw_defaults, strict=True) if d is not None}
    for argument, node in defaults.items():
        expected = eval(compile(ast.Expression(node), text, "eval"), vars(mlc))
        actual = found[argument].default
        assert actual == expected, f"{argument} defaults to {actual!r}, not {expected!r}"
        assert type(actual) is type(expected)


@pytest.mark.parametrize("member", named([m for m in MEMBERS if m.defaults]))
def test_defaults_of_short_forms(member: Member) -> None:
    """What a short form leaves out has the documented default."""
    parameters = inspect.signature(CLASSES[member.owner].type).parameters
    for name, expected in member.defaults.items():
        if name not in parameters or (isinstance(expected, str) and "." not in expected):
            continue  # set after construction, or worked out from the other arguments: see the behavioural tests
        if isinstance(expected, str):
            expected = eval(expected, vars(mlc))
        assert parameters[name].default == expected, name


@pytest.mark.parametrize("kind", ENUMS.values(), ids=ENUMS)
def test_enumeration(kind: Enumeration) -> None:
    assert kind.name in mlc.__all__
    assert issubclass(kind.type, enum.IntFlag if kind.options else enum.IntEnum)
    members, originals = list(kind.type), [member.python for member in kind.members]
    assert list(kind.type.__members__)[: len(originals)] == originals
    # What is added here comes behind the original's, its sentinel included.
    assert all(added > max(members[: len(originals)]) for added in members[len(originals) :])
    assert hasattr(kind.type, "debug_description") == bool(kind.debug_function)


@pytest.mark.parametrize("value", named([v for kind in ENUMS.values() for v in kind.members]))
def test_value(value: Value) -> None:
    found = getattr(ENUMS[value.owner].type, value.python)
    assert found == value.value
    assert found.name == value.python
    assert ENUMS[value.owner].type(value.value) is found
    if ENUMS[value.owner].debug_function:
        assert found.debug_description == value.text
        assert mlc.debug_description(found) == value.text


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function["objc"])
def test_function(function: dict[str, str]) -> None:
    assert function["objc"] == ENUMS[function["argument"]].debug_function
    assert callable(getattr(mlc, function["python"]))
    assert isinstance(getattr(mlc, function["argument"]).debug_description, property)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(name: str) -> None:
    arguments, answer = typing.get_args(getattr(mlc, name))
    assert len(arguments) == len(CALLBACKS[name]["params"])
    assert answer in (None, type(None))


@pytest.mark.parametrize("name", mlc.__all__)
def test_public_names_are_documented(name: str) -> None:
    found = getattr(mlc, name)
    if inspect.isclass(found) or inspect.isfunction(found):
        assert (found.__doc__ or "").strip()
