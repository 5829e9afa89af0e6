"""The table of names: which Objective-C name stands for which member of `mlcompute`."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, NamedTuple

import mlcompute


class Member(NamedTuple):
    """One Objective-C method or property.

    kind        "init", "classmethod", "method", "property" or "class property"
    selector    as Objective-C writes it: executeForwardWithBatchSize:options:
    python      the member of the Python class; for "init" the class itself
    parameters  Python names of the selector's arguments, in their order
    """

    kind: str
    selector: str
    python: str
    parameters: tuple[str, ...]

    @property
    def name(self) -> str:
        """The selector as PyObjC spells it: executeForwardWithBatchSize_options_."""
        return self.selector.replace(":", "_")


class Class(NamedTuple):
    """The Python class behind an Objective-C class, whether its objects can be copied, and its members."""

    python: type
    copies: bool
    members: list[Member]


_TABLE: dict[str, Any] = json.loads((files("mlcompute.objc") / "names.json").read_text(encoding="utf-8"))

#: Classes by their Objective-C name.
CLASSES: dict[str, Class] = {
    name: Class(
        getattr(mlcompute, entry["python"]),
        entry["copies"],
        [Member(kind, selector, python, tuple(names)) for kind, selector, python, names in entry["members"]],
    )
    for name, entry in _TABLE["classes"].items()
}


def _constant(enumeration: str, member: str, value: int) -> int:
    # Sentinels such as MLCDataTypeCount mark the end of a list; Python's enumerations have none.
    return getattr(getattr(mlcompute, enumeration), member, value)


#: Every enumeration value by its Objective-C name.
CONSTANTS: dict[str, int] = {name: _constant(*entry) for name, entry in _TABLE["constants"].items()}

#: Types by their Objective-C name, for annotations and for numbers that become members: MLCDataType(1).
TYPES: dict[str, Any] = {name: getattr(mlcompute, python) for name, python in _TABLE["types"].items()}

#: The enumeration a ...DebugDescription function describes.
FUNCTIONS: dict[str, type] = {name: getattr(mlcompute, enum) for name, enum in _TABLE["functions"].items()}
