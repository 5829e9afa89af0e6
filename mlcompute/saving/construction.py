"""Layers, descriptors and optimizers as plain data: the class, and for every constructor argument its value.

One mechanism serves all of them: an argument's value is the attribute of the same name. The tables below hold the
few arguments for which that is not so.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mlcompute import enums
from mlcompute.errors import Error, GraphError
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import CLASS_SUMMED
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.saving.plain import JSON, plain, restored
from mlcompute.tensor import Tensor

#: Arguments that only spell others in another way, or that belong to the state of a run: left out.
_LEFT_OUT = {
    "ConvolutionDescriptor": {"kernel_width", "kernel_height"},
    "ReductionLayer": {"dimension"},
    "AdamOptimizer": {"time_step"},
    "AdamWOptimizer": {"time_step"},
}

#: Arguments whose value is not the attribute of the same name.
_ELSEWHERE: dict[tuple[str, str], Callable[[Any], object]] = {
    ("PaddingLayer", "padding"): lambda p: [p.padding_top, p.padding_bottom, p.padding_left, p.padding_right],
    ("SplitLayer", "split_count"): lambda s: None if s.split_section_lengths else s.split_count,
    ("YOLOLossLayer", "descriptor"): lambda y: y.yolo_loss_descriptor,
    ("YOLOLossDescriptor", "anchor_boxes"): lambda d: d.anchor_boxes_array.tolist(),
    ("SGDOptimizer", "descriptor"): lambda o: o.descriptor,
    ("AdamOptimizer", "descriptor"): lambda o: o.descriptor,
    ("AdamWOptimizer", "descriptor"): lambda o: o.descriptor,
    ("RMSPropOptimizer", "descriptor"): lambda o: o.descriptor,
}

#: Arguments that files of earlier versions lack, and what graphs were built with then.
_BEFORE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "LossDescriptor": lambda values: {"class_axis": 1} if values.get("loss_type") in CLASS_SUMMED else {},
}

#: Attributes that are set after construction.
_SET_LATER = {
    "YOLOLossDescriptor": (
        "should_rescore",
        "scale_spatial_position_loss",
        "scale_spatial_size_loss",
        "scale_no_object_confidence_loss",
        "scale_object_confidence_loss",
        "scale_class_loss",
        "minimum_iou_for_object_presence",
        "maximum_iou_for_object_absence",
    ),
}


@functools.cache
def kinds() -> dict[str, type]:
    """The classes a file may name: the library's own layers, descriptors and optimizers, and nothing else."""
    import mlcompute

    # Not getattr, which would import everything that is imported at its first use.
    found = (vars(mlcompute).get(name) for name in mlcompute.__all__)
    classes = (kind for kind in found if isinstance(kind, type) and not inspect.isabstract(kind))
    return {
        kind.__name__: kind
        for kind in classes
        if issubclass(kind, (Layer, Optimizer)) or kind.__name__.endswith("Descriptor")
    }


@functools.cache
def _enumerations() -> dict[str, type[enum.IntEnum]]:
    found = (value for value in vars(enums).values() if isinstance(value, type) and issubclass(value, enum.IntEnum))
    return {kind.__name__: kind for kind in found if not kind.__name__.startswith("_")}


@functools.cache
def _arguments(kind: str) -> tuple[str, ...]:
    names = inspect.signature(kinds()[kind]).parameters
    return tuple(name for name in names if name not in _LEFT_OUT.get(kind, ()))


def described(made: Any, who: str, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    """{"$kind": class, argument: value, ...} of a layer, descriptor or optimizer; GraphError if a file cannot say it.

    names  what its tensors are called
    """
    kind = type(made)
    if kind.__module__ == "mlcompute.onnx.layer":  # asked by name: whoever saves no such layer needs no onnx
        from mlcompute.onnx.described import describe_operator

        return {"$operator": describe_operator(made, names)}
    if kinds().get(kind.__name__) is not kind:
        raise GraphError(
            f"{who}: {kind.__module__}.{kind.__qualname__} cannot be described in a file",
            expected="layers, descriptors and optimizers of this library",
            fix="save the weights alone through `arrays`, or build the graph from the library's own layers",
        )
    values = {name: _value_of(made, name) for name in (*_arguments(kind.__name__), *_SET_LATER.get(kind.__name__, ()))}

    def special(value: Any) -> JSON:
        if isinstance(value, enum.Enum):
            return {"$enum": f"{type(value).__name__}.{value.name}"}
        if isinstance(value, Tensor):
            return {"$tensor": names[value]}
        return described(value, who, names)

    described_values = {name: plain(value, f"{who}: {name}", special) for name, value in values.items()}
    return {"$kind": kind.__name__, **described_values}


def _value_of(made: object, name: str) -> object:
    elsewhere = _ELSEWHERE.get((type(made).__name__, name))
    return getattr(made, name) if elsewhere is None else elsewhere(made)


def constructed(description: JSON, tensors: Mapping[str, Tensor], base: type) -> Any:
    """The object a description stands for; ValueError when there is none, or when it is no `base`."""

    def special(mark: str, value: JSON, others: dict[str, JSON]) -> Any:
        if mark == "$kind":
            return _made(value, {name: restored(entry, special) for name, entry in others.items()})
        if others:
            raise ValueError(f"{mark} stands beside {', '.join(others)}")
        if mark == "$enum":
            return _member(value)
        if mark == "$tensor":
            return _found(tensors, value, "tensor")
        if mark == "$operator":
            from mlcompute.onnx.described import operator_from

            return operator_from(value, lambda name: _found(tensors, name, "tensor"))
        raise ValueError(f"{mark} is not a known mark")

    made = restored(description, special)
    if not isinstance(made, base):
        raise ValueError(f"a {base.__name__} is needed, not {type(made).__name__}")
    return made


def _made(name: JSON, values: dict[str, Any]) -> Any:
    kind = _found(kinds(), name, "class")
    later = {key: values.pop(key) for key in _SET_LATER.get(name, ()) if key in values}
    unknown = [key for key in values if key not in _arguments(name)]
    if unknown:
        raise ValueError(f"{name} takes no {', '.join(unknown)[:200]}")
    if name in _BEFORE:
        values = {**_BEFORE[name](values), **values}
    try:
        made = kind(**values)
        for key, value in later.items():
            setattr(made, key, value)
    except (Error, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        # Wrong values in a file are the file's mistake, whatever the constructor makes of them.
        raise ValueError(f"{name} cannot be made: {error}") from error
    return made


def _member(value: JSON) -> enum.IntEnum:
    kind, _, member = value.partition(".") if isinstance(value, str) else ("", "", "")
    found: enum.IntEnum = _found(_found(_enumerations(), kind, "enumeration").__members__, member, kind)
    return found


def _found(table: Mapping[str, Any], name: JSON, what: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"there is no {what} {str(name)[:100]!r}")
    return table[name]
