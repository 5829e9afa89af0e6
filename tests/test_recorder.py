"""The stand-ins that note which members tests use change nothing else."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import pickle
from typing import Any, ClassVar

import pytest

import mlcompute as mlc
from tests.recorder import CallableStandIn, ClassValueStandIn, FunctionStandIn, StandIn, Use, ValueStandIn, all_uses


class Base:
    """A class with one of everything."""

    limit: ClassVar[int] = 4

    def __init__(self, size: int, *, name: str = "") -> None:
        self._size, self.name = size, name

    @classmethod
    def small(cls, size: int = 1) -> Base:
        return cls(size)

    @property
    def size(self) -> int:
        """How large."""
        return self._size

    def grow(self, by: int, again: bool = False) -> int:
        return self._size + by * (2 if again else 1)

    async def later(self, by: int) -> int:
        return self._size + by


class Derived(Base):
    def grow(self, by: int, again: bool = False) -> int:
        return super().grow(10 * by, again)


class Other(Base):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    count: int
    weight: float = 1.5


@pytest.fixture
def stand_in() -> Any:
    standing: list[StandIn] = []
    used: set[str] = set()

    def put(kind: type[StandIn], owner: Any, name: str, *uses: Use) -> set[str]:
        made = kind(owner, name, used)
        made.uses.update(uses)
        setattr(owner, name, made)
        standing.append(made)
        return used

    yield put
    for made in standing:
        made.leave()


def test_a_method_is_used_form_by_form_and_then_itself_again(stand_in: Any) -> None:
    original = vars(Base)["grow"]
    used = stand_in(CallableStandIn, Base, "grow", Use("short", Base, ["by"]), Use("long", Base, ["by", "again"]))
    assert list(inspect.signature(Base.grow).parameters) == ["self", "by", "again"]
    assert Base.grow.__name__ == "grow"
    assert used == set()
    assert Other(1).grow(2) == 3
    assert used == {"short"}
    assert Base.grow(Base(1), 2) == 3
    assert used == {"short"}
    assert Derived(1).grow(by=2, again=True) == 41
    assert used == {"short", "long"}
    assert vars(Base)["grow"] is original


def test_use_inside_the_package_does_not_count(stand_in: Any) -> None:
    used = stand_in(CallableStandIn, mlc.Layer, "check_sources", Use("checked", mlc.Layer, ["sources"]))
    layer, x = mlc.ActivationLayer.relu(), mlc.Tensor(shape=(1, 1))
    mlc.Graph().node(layer, x)
    assert used == set()
    layer.check_sources([x.descriptor])
    assert used == {"checked"}


def test_constructors_and_class_methods(stand_in: Any) -> None:
    forms = Use("base", Base, ["size"]), Use("named", Base, ["name"]), Use("other", Other)
    used = stand_in(CallableStandIn, Base, "__init__", *forms)
    stand_in(CallableStandIn, Base, "small", Use("small", Other, ["size"]))
    assert list(inspect.signature(Base).parameters) == ["size", "name"]
    assert Derived(3).size == 3
    assert used == {"base"}
    assert isinstance(Base.small(2), Base)
    assert used == {"base"}
    assert type(Other.small(size=5)) is Other
    assert used == {"base", "small", "other"}
    assert Base(1, name="x").name == "x"
    assert used == {"base", "small", "other", "named"}


def test_coroutines(stand_in: Any) -> None:
    used = stand_in(CallableStandIn, Base, "later", Use("later", Base, ["by"]))
    assert asyncio.run(Base(1).later(by=2)) == 3
    assert used == {"later"}


def test_properties(stand_in: Any) -> None:
    used = stand_in(ValueStandIn, Base, "size", Use("size", Other))
    assert isinstance(Base.size, property)
    with pytest.raises(AttributeError):
        Base(1).size = 2  # type: ignore[misc]
    assert Base(1).size == 1
    assert used == set()
    assert Other(7).size == 7
    assert used == {"size"}
    assert isinstance(vars(Base)["size"], property)


def test_plain_attributes(stand_in: Any) -> None:
    used = stand_in(ValueStandIn, Base, "name", Use("name", Base), Use("name", Base, writes=True))
    made = Base(1, name="first")
    with pytest.raises(AttributeError):
        Base.name  # noqa: B018
    made.name = "second"
    assert made.name == "second"
    assert used == {"name", "name (written)"}
    assert made.name == "second", "what was stored while somebody stood in stays"
    assert not hasattr(Base, "name")


def test_fields_of_frozen_dataclasses(stand_in: Any) -> None:
    used = stand_in(ValueStandIn, Frozen, "count", Use("count", Frozen))
    stand_in(ValueStandIn, Frozen, "weight", Use("weight", Frozen))
    made = Frozen(3)
    assert made == Frozen(count=3, weight=1.5)
    assert repr(made) == "Frozen(count=3, weight=1.5)".replace("Frozen(", f"{Frozen.__qualname__}(")
    assert dataclasses.replace(made, count=4) == Frozen(4)
    assert copy.copy(made) == pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(Frozen(3))
    assert used == set()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.count = 5  # type: ignore[misc]
    assert (made.count, made.weight) == (3, 1.5)
    assert used == {"count", "weight"}
    assert Frozen.weight == 1.5
    assert not hasattr(Frozen, "count")


def test_constants_of_a_class(stand_in: Any) -> None:
    used = stand_in(ClassValueStandIn, Base, "limit", Use("limit", Base))
    assert Base.limit == 4
    assert used == {"limit"}
    assert vars(Base)["limit"] == 4


def test_functions(stand_in: Any) -> None:
    class Module:
        answer = staticmethod(lambda: 42)

    used = stand_in(FunctionStandIn, Module, "answer", Use("answer", object))
    assert Module.answer() == 42
    assert used == {"answer"}


def test_every_member_has_uses() -> None:
    uses = all_uses()
    assert len(uses) == len(set(uses))
    assert len(uses) > 505


class Guarded(Base):
    """A class that looks at every name before it is set."""

    rate = 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def test_a_value_written_through_the_classes_own_setattr_is_used(stand_in: Any) -> None:
    used = stand_in(ValueStandIn, Guarded, "rate", Use("rate", Guarded, writes=True))
    guarded = Guarded(1)
    guarded.rate = 2.0
    assert used == {"rate (written)"}
    assert guarded.rate == 2.0
