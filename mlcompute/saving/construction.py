"""Layers, descriptors and optimizers as plain data: the class, and for every constructor argument its value.

One mechanism serves all of them: an argument's value is the attribute of the same name. The tables below hold the
few arguments for which that is not so.
"""

from __future__ import annotations

import enum
import functools
import glob
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mlcompute import enums, optimizers
from mlcompute.errors import Error, GraphError
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import CLASS_SUMMED
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup
from mlcompute.saving.custom import Custom, custom_class, custom_name, own_arguments
from mlcompute.saving.plain import JSON, plain, restored
from mlcompute.tensor import Tensor, TensorParameter

#: Arguments that are left out: other forms of arguments that are written anyway.
_LEFT_OUT = {
    "ConvolutionDescriptor": {"kernel_width", "kernel_height"},
    "ReductionLayer": {"dimension"},
    "ParameterGroup": {"layers"},
}

#: Arguments whose value is not in the attribute of the same name -> how to get it.
_ELSEWHERE: dict[tuple[str, str], Callable[[Any], object]] = {
    ("PaddingLayer", "padding"): lambda p: [p.padding_top, p.padding_bottom, p.padding_left, p.padding_right],
    ("SplitLayer", "split_count"): lambda s: None if s.split_section_lengths else s.split_count,
    ("YOLOLossLayer", "descriptor"): lambda y: y.yolo_loss_descriptor,
    ("YOLOLossDescriptor", "anchor_boxes"): lambda d: d.anchor_boxes_array.tolist(),
    ("ParameterGroup", "learning_rate"): lambda g: g.given[0],
    ("ParameterGroup", "weight_decay"): lambda g: g.given[1],
    ("ParameterGroup", "clip_norm"): lambda g: g.given[2],
}

#: Arguments that are written only when they differ from this default: files of earlier versions do not have them.
_ONLY_OTHERS: dict[str, object] = {
    "groups": (), "average_decay": 0.0, "lookahead_steps": 0, "lookahead_scale": 0.5,
}  # fmt: skip

#: Arguments that files of earlier versions do not have -> the values those versions used.
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
    found = [
        *(vars(mlcompute).get(name) for name in mlcompute.__all__),
        *(getattr(optimizers, name) for name in optimizers.__all__),
    ]
    classes = (kind for kind in found if isinstance(kind, type) and not inspect.isabstract(kind))
    return {
        kind.__name__: kind
        for kind in classes
        if issubclass(kind, (Layer, Optimizer, ParameterGroup)) or kind.__name__.endswith("Descriptor")
    }


@functools.cache
def _enumerations() -> dict[str, type[enum.IntEnum]]:
    found = (value for value in vars(enums).values() if isinstance(value, type) and issubclass(value, enum.IntEnum))
    return {kind.__name__: kind for kind in found if not kind.__name__.startswith("_")}


@functools.cache
def _arguments(kind: type) -> tuple[str, ...]:
    names = inspect.signature(kind).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    left_out = {*_LEFT_OUT.get(kind.__name__, ()), *(("time_step",) if issubclass(kind, Optimizer) else ())}
    return tuple(one.name for one in names if one.name not in left_out and one.kind not in variable)


def described(made: Any, who: str, names: Mapping[Tensor, str]) -> dict[str, JSON]:
    """{"$kind": class, argument: value, ...} of a layer, descriptor or optimizer; GraphError if a file cannot say it.

    names  what its tensors are called
    """
    kind = type(made)
    if kind.__module__ == "mlcompute.onnx.layer":  # asked by name: whoever saves no such layer needs no onnx
        from mlcompute.onnx.described import describe_operator

        return {"$operator": describe_operator(made, names)}
    is_own = kinds().get(kind.__name__) is kind
    name = kind.__name__ if is_own else custom_name(kind)
    if name is None:
        raise GraphError(
            f"{who}: {kind.__module__}.{kind.__qualname__} cannot be described in a file",
            expected="layers, descriptors and optimizers of this library, and classes of your own",
            fix="register the class: @mlcompute.register",
        )
    values = _values_of(made, who, kind, is_own)
    values = {name: value for name, value in values.items() if name not in _ONLY_OTHERS or value != _ONLY_OTHERS[name]}
    if isinstance(made, ParameterGroup):
        values["names"] = [*made.names, *_names_of_layers(made, names)]

    def special(value: Any) -> JSON:
        if isinstance(value, enum.Enum):
            return {"$enum": f"{type(value).__name__}.{value.name}"}
        if isinstance(value, Tensor):
            return {"$tensor": names[value]}
        return described(value, who, names)

    described_values = {name: plain(value, f"{who}: {name}", special) for name, value in values.items()}
    return {"$kind" if is_own else "$class": name, **described_values}


def _names_of_layers(group: ParameterGroup, names: Mapping[Tensor, str]) -> list[str]:
    """The parameters of a group's layers as patterns that match nothing else."""
    tensors = [slot.tensor for layer in group.layers for slot in layer.parameters.values()]
    return [glob.escape(names[tensor]) for tensor in dict.fromkeys(tensors) if tensor in names]


def _values_of(made: Any, who: str, kind: type, is_own: bool) -> dict[str, Any]:
    """The arguments an object would be constructed with."""
    if is_own:
        listed = (*_arguments(kind), *_SET_LATER.get(kind.__name__, ()))
        return {name: _value_of(made, name) for name in listed}
    values = own_arguments(made)
    if values is not None:
        return values
    values = {}
    for name in _arguments(kind):
        found = next((each for each in (name, f"_{name}") if hasattr(made, each)), None)
        if found is None:
            raise GraphError(
                f"{who}: the argument '{name}' of {kind.__name__} is no attribute: it cannot be described in a file",
                fix=f"keep it as self.{name}, or give the class a method configuration() that returns all arguments",
            )
        value = getattr(made, found)
        values[name] = value.tensor if isinstance(value, TensorParameter) else value
    return values


def _value_of(made: object, name: str) -> object:
    elsewhere = _ELSEWHERE.get((type(made).__name__, name))
    return getattr(made, name) if elsewhere is None else elsewhere(made)


def constructed(description: JSON, tensors: Mapping[str, Tensor], base: type, custom: Custom = ()) -> Any:
    """The object a description stands for; ValueError when there is none, or when it is no `base`.

    custom  classes of the user's own that a description may name
    """

    def special(mark: str, value: JSON, others: dict[str, JSON]) -> Any:
        if mark == "$kind":
            kind = _found(kinds(), value, "class")
            return _made(kind, {name: restored(entry, special) for name, entry in others.items()})
        if mark == "$class":
            if not isinstance(value, str):
                raise ValueError(f"a class is called {str(value)[:100]!r}")
            kind = custom_class(value, custom)
            return _made(kind, {name: restored(entry, special) for name, entry in others.items()})
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


def _made(kind: type, values: dict[str, Any]) -> Any:
    name = kind.__name__
    later = {key: values.pop(key) for key in _SET_LATER.get(name, ()) if key in values}
    unknown = [key for key in values if key not in _arguments(kind)]
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
