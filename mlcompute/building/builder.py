"""What every builder needs: choices by name, fresh parameters, and adding a layer to the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args

import numpy as np

from mlcompute.building.choices import ActivationName
from mlcompute.building.contents import contents_of
from mlcompute.devices.foreign_array import host_array
from mlcompute.enums import DataType, RandomInitializerType
from mlcompute.errors import DataError, GraphError, ShapeError
from mlcompute.foreign_names import advice_for_choice
from mlcompute.layers.activation import ActivationDescriptor, ActivationLayer
from mlcompute.layers.arguments import whole_list
from mlcompute.layers.layer import Layer
from mlcompute.layers.parameter import ParameterLayer
from mlcompute.ops.bfloat16 import is_numeric
from mlcompute.runtime.tensor_state import state_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import Array, ArrayLike

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.initializers import Initializer

Choice = TypeVar("Choice")

#: What users may write for an activation: its name, a descriptor with constants, or nothing.
Activation = ActivationName | ActivationDescriptor | None

#: What arithmetic takes: a tensor, a number that goes with every element, or an array of constants.
Operand = Tensor | float | Array

#: The graphs of the `with graph:` blocks around, the innermost last.
_BUILDING: ContextVar[tuple[Any, ...]] = ContextVar("mlcompute graphs", default=())

#: What users may write for what weights start from: its name, one of ML Compute's, or any of `mlc.initializers`.
Initial: TypeAlias = "str | RandomInitializerType | Initializer"

GLOROT = RandomInitializerType.GLOROT_UNIFORM

#: The activations that need no constants, or have the usual ones.
ACTIVATIONS: dict[str, Callable[[], ActivationLayer]] = {
    name: getattr(ActivationLayer, name) for name in get_args(ActivationName)
}


def chosen(who: str, name: str, choices: dict[str, Choice], given: object, fix: str = "") -> Choice:
    """What a word stands for; an error that lists the words otherwise."""
    if isinstance(given, str) and given in choices:
        return choices[given]
    fix = advice_for_choice(given, choices) or fix
    raise GraphError(f"{who}: {name} is {given!r}", expected=", ".join(choices), fix=fix)


def building() -> tuple[Graph, ...]:
    """The graphs of the `with graph:` blocks around, the innermost last."""
    return _BUILDING.get()


def enter(self: Graph) -> Graph:
    """`with graph:` expressions of tensors, whatever they belong to, are added to this graph."""
    _BUILDING.set((*_BUILDING.get(), self))
    return self


def leave(self: Graph, *error: object) -> None:
    """The end of a `with graph:` block."""
    _BUILDING.set(_BUILDING.get()[:-1])


def input(
    self: Graph,
    shape: Iterable[int],
    name: str = "",
    *,
    data_type: DataType = DataType.FLOAT32,
    varies: Iterable[int] = (),
) -> Tensor:
    """A tensor to be fed, labelled with its name; the first extent is the batch.

    varies  axes, negative from the end, whose extents may be others in every run: lengths of sequences, sizes of
            images. The shape has the usual ones. A size is compiled when it first comes; weights and optimizer state
            are shared

    >>> import numpy as np, mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> words = graph.input((4, 10, 8), "words", varies=[1])
    >>> y = graph.dense(words, 3)
    >>> inference = mlc.InferenceGraph([graph])
    >>> inference.add_inputs({"words": words})
    True
    >>> inference.compile(device=mlc.Device.cpu())
    True
    >>> inference.execute({"words": np.ones((4, 25, 8), np.float32)}).result.data.shape
    (4, 25, 3)
    """
    who = f"{type(self).__name__}.input"
    extents = list(shape) if isinstance(shape, Iterable) else list(whole_list(who, "shape", shape))
    if None in extents:
        open_axes = [axis for axis, extent in enumerate(extents) if extent is None and axis > 0]
        usual = tuple(32 if axis == 0 and extent is None else extent for axis, extent in enumerate(extents))
        fix = f"give the usual extents, and say which may differ: varies={open_axes}; the batch may be of any size"
        if not open_axes:
            fix = f"give the usual number of samples, {usual}: a graph runs with any other, too"
        raise ShapeError(f"{who}: shape {tuple(extents)} leaves extents open", fix=fix)
    tensor = Tensor(shape=extents, data_type=data_type)
    rank, axes = len(extents), [axis + len(extents) * (axis < 0) for axis in whole_list(who, "varies", varies, -8)]
    if any(not 0 < axis < rank for axis in axes):
        wrong = "the batch, which may be of any size as it is" if 0 in axes else f"not one of {rank} axes"
        raise ShapeError(f"{who}: varies is {list(varies)}: {wrong}", expected=f"1 to {rank - 1}, or negative")
    state_of(tensor).varies = tuple(sorted(set(axes)))
    contents = contents_of(self)
    tensor.label = contents.names.take(type(self).__name__, name, "input")
    contents.inputs.append(tensor)
    state_of(tensor).join(self)
    return tensor


def parameter(
    self: Graph,
    shape: Iterable[int] | None = None,
    initializer: Initial | float = GLOROT,
    *,
    data: ArrayLike = None,
    data_type: DataType = DataType.FLOAT32,
    updates: bool = True,
    name: str = "",
) -> Tensor:
    """A tensor that is trained and belongs to no other layer: a prompt, a temperature, a table, a matrix to share.

    initializer  how its values begin: random ones, or a number that all of them are
    data         or the values themselves
    updates      False: training leaves it alone, until `graph.layer(name).updates = True`

    Any layer reads it, as a source or as its weights. It does not grow with the batch.

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> scale = graph.parameter((3,), 1.0, name="scale")
    >>> y = graph.input((8, 3), "x") * scale
    >>> scale.data
    array([1., 1., 1.], dtype=float32)
    """
    who = f"{type(self).__name__}.parameter"
    if shape is None and data is not None:
        shape = np.shape(host_array(data)) or (1,)
    if shape is None:
        raise ShapeError(f"{who}: neither shape nor data is given", fix="give the shape, or the values themselves")
    if isinstance(shape, np.ndarray):
        raise TypeError(f"{who}: shape is an array; values are parameter(data=...)")
    shape = whole_list(who, "shape", shape, 1)
    if data is not None:
        tensor = Tensor(shape=shape, data=data, data_type=data_type)
    elif isinstance(initializer, (int, float)) and not isinstance(initializer, RandomInitializerType):
        tensor = Tensor(shape=shape, fill_with_data=initializer, data_type=data_type)
    else:
        tensor = fresh(*shape, like=Tensor(shape=(1,), data_type=data_type), initializer=initializer)
    layer = ParameterLayer(tensor)
    tensor.label = build(self, layer, [], name, "parameter", updates=updates).label
    state_of(tensor).join(self)
    contents_of(self).put_first(layer)
    return tensor


def layer(self: Graph, name: str) -> Any:
    """The layer with that label; the first where several share it. Typed as Any, so that its own members can be used.

    >>> import mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.input((8, 4), "x"), 3, name="head")
    >>> graph.layer("head").weights.descriptor.shape
    (3, 4)
    """
    for layer in self.layers:
        if layer.label == name:
            return layer
    labels = list(dict.fromkeys(layer.label for layer in self.layers))
    shown = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
    raise GraphError(f"{type(self).__name__}.layer: no layer is named {name!r}", layers=shown or "none")


def build(
    graph: Graph,
    layer: Layer,
    sources: Sequence[Tensor],
    name: str,
    kind: str,
    *,
    activation: Activation = None,
    followed_by: str = "",
    updates: bool = True,
    labels: Sequence[Tensor] | None = None,
) -> Tensor:
    """Add a layer under a name, and the activation that goes with it; `followed_by` is of what the caller adds."""
    who = type(graph).__name__
    followed = None if activation is None else _activation(f"{who}.{kind}", activation)
    given = name
    name = contents_of(graph).names.take(who, given, kind, followed_by if followed is None else followed[0])
    layer.label = name
    try:
        result = graph.node(layer, sources=list(sources), disable_update=not updates, loss_labels=labels)
    except Exception:
        contents_of(graph).names.give_back(name, given, kind)
        raise
    for slot, parameter in layer.parameters.items():
        if parameter.tensor.keeps_data and parameter.tensor.label.startswith("data"):
            parameter.tensor.label = f"{name}.{slot}"
    for slot, tensor in layer.statistics.items():
        if tensor.label.startswith("data"):  # else it is another layer's too
            tensor.label = f"{name}.{slot}"
    result.label = name
    for number, other in enumerate(graph.result_tensors(layer)[1:], 1):
        other.label = f"{name}_{number}"
    if followed is not None:
        word, activated = followed
        return build(graph, activated, [result], f"{name}_{word}", "activation")
    return result


def expect_channels_second(who: str, x: Tensor, instead: str = "") -> None:
    """Refuse a sequence (n, length, features) where axis 1 is read as channels.

    instead  what else could be meant
    """
    shape = x.descriptor.shape
    if len(shape) == 3 and state_of(x).feature_axis == 2:
        raise ShapeError(
            f"{who}: the source has its features on the last axis",
            source=f"{shape} '{x.label}'",
            expected="(n, channels, length)",
            fix=f"{instead}put them first: graph.transpose([0, 2, 1], source=x)",
        )


def expect_rank(graph: Graph, kind: str, x: object, ranks: Iterable[int], meaning: str) -> Tensor:
    """`x`, if it is a tensor with one of these numbers of axes."""
    who = f"{type(graph).__name__}.{kind}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: the source must be a Tensor, not {type(x).__name__}")
    if len(x.descriptor.shape) not in ranks:
        raise ShapeError(f"{who}: the source has shape {x.descriptor.shape}", expected=meaning, source=f"'{x.label}'")
    return x


def _activation(who: str, given: Activation) -> tuple[str, ActivationLayer]:
    """(word for its name, layer)"""
    if isinstance(given, ActivationDescriptor):
        return given.activation_type.name.lower(), ActivationLayer(given)
    return str(given), chosen(who, "activation", ACTIVATIONS, given, own_layer(given))()


def own_layer(activation: object) -> str:
    """What to do instead, where an activation is a layer of its own."""
    layers = {"softmax": "graph.softmax(x)", "prelu": "graph.prelu(x), because its slopes are trained"}
    found = layers.get(activation) if isinstance(activation, str) else None
    return f"{activation} is a layer of its own: {found}" if found else ""


def is_operand(given: object) -> bool:
    """Can it take part in arithmetic? Tensors, numbers and arrays can; lists and strings cannot."""
    is_number = isinstance(given, (int, float)) or (isinstance(given, np.generic) and is_numeric(given.dtype))
    return (is_number and not isinstance(given, (bool, np.bool_))) or isinstance(given, Tensor) or _is_array(given)


def _is_array(given: object) -> bool:
    return hasattr(given, "__array__") and not isinstance(given, (np.generic, Tensor))


def number_or_tensor(who: str, given: Any, other: Any) -> Tensor | float:
    """An operand as a tensor, or as a Python number that a layer can keep; `other` is the operand beside it."""
    if isinstance(given, Tensor):
        return given
    if _is_array(given) and np.ndim(given) > 0:
        return constant_like(who, given, other)
    if not is_operand(given):
        raise TypeError(f"{who}: an operand must be a Tensor, a number or an array, not {type(given).__name__}")
    number = np.asarray(given).item()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{who}: an operand must be a Tensor, a number or an array, not {number!r}")
    if float(number) != number and number == number:
        raise DataError(f"{who}: {number} has more digits than a constant of a layer", fix="give it as an array")
    return float(number)


def constant_like(who: str, given: Any, other: Any) -> Tensor:
    """A tensor as it is; an array or number as constants of the type the other operand has."""
    if isinstance(given, Tensor):
        return given
    array = host_array(given)
    kind = other.descriptor.data_type if isinstance(other, Tensor) else DataType.FLOAT32
    whole = "b" if kind == DataType.BOOLEAN else "iu"
    if not (is_numeric(array.dtype) if kind.is_floating else array.dtype.kind in whole):
        raise DataError(
            f"{who}: an array of {array.dtype} beside a tensor of {kind.name}",
            fix=f"give an array of {kind.numpy}, or make the tensor another type first",
        )
    shape = array.shape or (1,)
    return Tensor(shape=shape, data_type=kind, data=array.astype(kind.numpy).reshape(shape))


def label_constants(result: Tensor, tensors: Iterable[object], given: Iterable[object]) -> Tensor:
    """Call the constants that became tensors after the layer that reads them."""
    made = [t for t in tensors if isinstance(t, Tensor) and not any(t is one for one in given)]
    for number, tensor in enumerate(made):
        tensor.label = f"{result.label}.constant" + (f"_{number}" if number else "")
    return result


def fresh(*shape: int, like: Tensor, initializer: Initial = GLOROT) -> Tensor:
    """New random weights; layers bring them to their true fans. Of the source's type if that is floating."""
    if isinstance(initializer, str):
        from mlcompute.initializers import BY_NAME  # not with the package: few write a name, and it takes long

        fix = "or an object of mlc.initializers, or a function of (shape, fans, random)"
        initializer = chosen("Graph", "initializer", BY_NAME, initializer, fix)
    return Tensor(shape=shape, random_initializer_type=initializer, data_type=_floating(like))


def filled(value: float, *shape: int, like: Tensor) -> Tensor:
    """A new parameter, all elements the same."""
    return Tensor(shape=shape, fill_with_data=value, data_type=_floating(like))


def biases_of(who: str, biases: Tensor | bool | None, count: int, like: Tensor) -> Tensor | None:
    """True: zeros to start with; False: none; or the caller's own tensor."""
    if isinstance(biases, Tensor):
        return biases
    if biases is not None and not isinstance(biases, bool):
        raise TypeError(f"{who}: biases must be True, False or a Tensor, not {type(biases).__name__}")
    return filled(0.0, count, like=like) if biases else None


def _floating(like: Tensor) -> DataType:
    kind = like.descriptor.data_type
    return kind if kind.is_floating else DataType.FLOAT32
