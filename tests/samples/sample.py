"""What a sample is, where samples are kept, and how their properties are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlcompute as mlc


@dataclass
class Sample:
    """An object, the expected answers of the properties its class lists, and for layers what `node` takes.

    sources, labels   shapes (float32) or arrays (their dtype counts)
    """

    made: Any
    values: dict[str, Any] = field(default_factory=dict)
    sources: Sequence[Any] = ()
    labels: Sequence[Any] = ()


#: Makes a fresh sample every time.
Build = Callable[[], Sample]

LAYERS: dict[str, Build] = {}
#: The same layers made with as little as possible: what is left out must be None or the default.
BARE_LAYERS: dict[str, Build] = {}
DESCRIPTORS: dict[str, Build] = {}
OTHERS: dict[str, Build] = {}


def sample_of(cls: type, table: dict[str, Build]) -> Callable[[Build], Build]:
    """Enter a function into a table of samples."""

    def enter(build: Build) -> Build:
        table[cls.__name__] = build
        return build

    return enter


class Slot:
    """Stands for the TensorParameter of a tensor in expected values."""

    def __init__(self, tensor: mlc.Tensor) -> None:
        self.tensor = tensor


def check(actual: Any, expected: Any, what: str) -> None:
    """Tensors must be the very objects, parameters must hold them and be updatable, the rest must be equal."""
    if isinstance(expected, Slot):
        assert isinstance(actual, mlc.TensorParameter), what
        assert actual.tensor is expected.tensor, what
        assert actual.is_updatable is True, what
    elif isinstance(expected, mlc.Tensor):
        assert actual is expected, what
    elif isinstance(expected, list) and expected and isinstance(expected[0], (mlc.Tensor, Slot)):
        assert len(actual) == len(expected), what
        for one, other in zip(actual, expected, strict=True):
            check(one, other, what)
    else:
        assert actual == expected, f"{what}: {actual!r}, expected {expected!r}"
        assert type(actual) is type(expected), f"{what}: {type(actual)}, expected {type(expected)}"


def constant(*shape: int) -> mlc.Tensor:
    return mlc.Tensor(shape=shape, fill_with_data=0.5)
