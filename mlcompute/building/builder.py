"""What every builder needs: names, fresh parameters, and adding a layer to the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mlcompute.enums import DataType, RandomInitializerType
from mlcompute.errors import GraphError, ShapeError
from mlcompute.layers.activation import ActivationDescriptor, ActivationLayer
from mlcompute.layers.layer import Layer
from mlcompute.tensor import Tensor

Choice = TypeVar("Choice")

#: What users may write for an activation: its name, a descriptor with constants, or nothing.
Activation = str | ActivationDescriptor | None

GLOROT = RandomInitializerType.GLOROT_UNIFORM

#: The activations that need no constants, or have the usual ones.
ACTIVATIONS = {
    "absolute": ActivationLayer.absolute,
    "celu": ActivationLayer.celu,
    "elu": ActivationLayer.elu,
    "gelu": ActivationLayer.gelu,
    "hard_shrink": ActivationLayer.hard_shrink,
    "hard_sigmoid": ActivationLayer.hard_sigmoid,
    "hard_swish": ActivationLayer.hard_swish,
    "leaky_relu": ActivationLayer.leaky_relu,
    "log_sigmoid": ActivationLayer.log_sigmoid,
    "relu": ActivationLayer.relu,
    "relu6": ActivationLayer.relu6,
    "selu": ActivationLayer.selu,
    "sigmoid": ActivationLayer.sigmoid,
    "soft_plus": ActivationLayer.soft_plus,
    "soft_shrink": ActivationLayer.soft_shrink,
    "soft_sign": ActivationLayer.soft_sign,
    "tanh": ActivationLayer.tanh,
    "tanh_shrink": ActivationLayer.tanh_shrink,
}


def chosen(who: str, name: str, choices: dict[str, Choice], given: object, fix: str = "") -> Choice:
    """What a word stands for; an error that lists the words otherwise."""
    if isinstance(given, str) and given in choices:
        return choices[given]
    raise GraphError(f"{who}: {name} is {given!r}", expected=", ".join(choices), fix=fix)


class Builder:
    """Base of the builders; `Graph` is what they are mixed into."""

    if TYPE_CHECKING:

        @property
        def layers(self) -> list[Layer]: ...

        def node(
            self,
            layer: Layer,
            source: Tensor | None = None,
            sources: Sequence[Tensor] | None = None,
            *,
            disable_update: bool = False,
            loss_labels: Sequence[Tensor] | None = None,
        ) -> Tensor: ...

    def input(self, shape: Iterable[int], name: str = "", *, data_type: DataType = DataType.FLOAT32) -> Tensor:
        """A tensor to be fed, labelled with its name; the first extent is the batch. Same as `Tensor(shape=...)`."""
        tensor = Tensor(shape=shape, data_type=data_type)
        tensor.label = self._name(name, "input")
        return tensor

    def layer(self, name: str) -> Layer:
        """The layer with that label; the first where several share it.

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

    # Names --------------------------------------------------------------------------------------------------------

    def _name(self, given: str, kind: str, followed_by: str = "") -> str:
        """The given name, which nothing else built here may have, or the kind with the next free number.

        followed_by  `name_<this>` must be free too: a second layer gets it
        """
        taken: set[str] = vars(self).setdefault("_built_names", set())

        def used(name: str) -> str:
            both = (name, f"{name}_{followed_by}") if followed_by else (name,)
            return next((one for one in both if one in taken), "")

        if given:
            if not isinstance(given, str):
                raise TypeError(f"{type(self).__name__}.{kind}: name must be a string, not {type(given).__name__}")
            if used(given):
                raise GraphError(
                    f"{type(self).__name__}.{kind}: something in this graph is already named {used(given)!r}",
                    fix="give every layer its own name, or leave the name out",
                )
            name = given
        else:
            numbers: dict[str, int] = vars(self).setdefault("_built_numbers", {})
            while True:
                numbers[kind] = numbers.get(kind, 0) + 1
                name = f"{kind}{numbers[kind]}"
                if not used(name):
                    break
        taken.add(name)
        return name

    # Adding ---------------------------------------------------------------------------------------------------------

    def _build(
        self,
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
        followed = None if activation is None else _activation(f"{type(self).__name__}.{kind}", activation)
        unnamed = not name
        name = self._name(name, kind, followed_by if followed is None else followed[0])
        layer.label = name
        try:
            result = self.node(layer, sources=list(sources), disable_update=not updates, loss_labels=labels)
        except Exception:
            vars(self)["_built_names"].discard(name)  # a call that failed leaves the name free
            if unnamed:
                vars(self)["_built_numbers"][kind] -= 1
            raise
        for slot, parameter in layer.parameters.items():
            if parameter.tensor.keeps_data and parameter.tensor.label.startswith("data"):
                parameter.tensor.label = f"{name}.{slot}"
        for slot, tensor in layer.statistics.items():
            tensor.label = f"{name}.{slot}"
        result.label = name
        if followed is not None:
            word, activated = followed
            return self._build(activated, [result], f"{name}_{word}", "activation")
        return result

    def _rank(self, kind: str, x: object, ranks: Iterable[int], meaning: str) -> Tensor:
        """`x`, if it is a tensor with one of these numbers of axes."""
        who = f"{type(self).__name__}.{kind}"
        if not isinstance(x, Tensor):
            raise TypeError(f"{who}: the source must be a Tensor, not {type(x).__name__}")
        if len(x.descriptor.shape) not in ranks:
            raise ShapeError(
                f"{who}: the source has shape {x.descriptor.shape}", expected=meaning, source=f"'{x.label}'"
            )
        return x


def _activation(who: str, given: Activation) -> tuple[str, ActivationLayer]:
    """(word for its name, layer)"""
    if isinstance(given, ActivationDescriptor):
        return given.activation_type.name.lower(), ActivationLayer(given)
    fix = "softmax is a layer of its own: graph.softmax(x)" if given == "softmax" else ""
    return str(given), chosen(who, "activation", ACTIVATIONS, given, fix)()


def fresh(*shape: int, like: Tensor, initializer: RandomInitializerType = GLOROT) -> Tensor:
    """New random weights; layers rescale them to their true fans. Of the source's type if that is floating."""
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
