"""Parameters under PyTorch's names: `to_state_dict` and `from_state_dict`.

    model.load_state_dict({name: torch.from_numpy(array) for name, array in mlc.to_state_dict(graph).items()})
    mlc.from_state_dict(graph, model.state_dict())

Names are a layer's name and PyTorch's own for the parameter: `dense1.weight`, `norm1.running_mean`,
`lstm1.weight_ih_l0`. Layers are called as builders name them, or by their label. Arrays of BFLOAT16 tensors, which
`torch.from_numpy` does not take, are `torch.tensor(array.astype("float32"))` for PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcompute.devices.foreign_array import host_array
from mlcompute.errors import DataError
from mlcompute.foreign_names import instead_of_graph
from mlcompute.graph import Graph
from mlcompute.layers.attention import MultiheadAttentionLayer
from mlcompute.layers.convolution import ConvolutionDescriptor, ConvolutionLayer
from mlcompute.layers.embedding import EmbeddingLayer
from mlcompute.layers.fully_connected import FullyConnectedLayer
from mlcompute.layers.gru import GRULayer, RNNLayer
from mlcompute.layers.layer import Layer
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.lstm import LSTMLayer
from mlcompute.layers.names import slot_name, slots_of
from mlcompute.layers.normalization import Normalization
from mlcompute.layers.parameter import ParameterLayer
from mlcompute.ops.op import Array, Shape
from mlcompute.saving.names import layer_names_of
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import can_convert


def _same(array: Array) -> Array:
    return array


@dataclass
class _Entry:
    """One array of a state dictionary: some tensors, one after the other along the first axis.

    shape   one tensor's shape as PyTorch has it
    turn    from our order of elements to PyTorch's, and `back`
    adds    no tensors of its own: zeros when written, added to those of another entry when read
    """

    tensors: list[Tensor]
    shape: Shape
    turn: Callable[[Array], Array] = _same
    back: Callable[[Array], Array] = _same
    adds: bool = False

    @property
    def whole(self) -> Shape:
        return (len(self.tensors) * self.shape[0], *self.shape[1:])

    def read(self) -> Array:
        if self.adds:
            return np.zeros(self.whole, np.float32)
        return np.concatenate([self.turn(_values(tensor)).reshape(self.shape) for tensor in self.tensors])

    def split(self, array: Array) -> list[tuple[Tensor, Array]]:
        parts = np.split(array, len(self.tensors))
        return [(t, self.back(part).reshape(t.descriptor.shape)) for t, part in zip(self.tensors, parts, strict=True)]


def _values(tensor: Tensor) -> Array:
    data = tensor.data
    if data is None:
        raise DataError(f"Tensor '{tensor.label}' has no data")
    return data


def to_state_dict(graph: Graph) -> dict[str, Array]:
    """Copies of all parameters and running statistics, by PyTorch's names and in its shapes.

    A layer that is used again, as `network(x)` does, is there once, by the name of its first use. A tensor that layers
    of different kinds share (tied weights) is there for each of them, as in PyTorch.
    """
    return {name: entry.read() for name, entry in _entries("to_state_dict", graph)[0].items()}


def from_state_dict(graph: Graph, state: Mapping[str, Any], *, strict: bool = True) -> list[str]:
    """Copy values from a state dictionary of PyTorch tensors or arrays into the graph's tensors, in place.

    strict  every parameter must be there, and nothing else; otherwise what fits by name is taken, something at least

    The names that were taken. When anything is wrong, everything wrong is listed and nothing is changed.
    """
    if not isinstance(state, Mapping):
        advice = "; give model.state_dict()" if hasattr(state, "state_dict") else ""
        if isinstance(state, (str, os.PathLike)):
            advice = "; mlc.restore(graph, path) reads safetensors, torch.load(path) what PyTorch saved"
        raise TypeError(f"from_state_dict: state must be a dictionary by name, not {type(state).__name__}{advice}")
    entries, further_uses = _entries("from_state_dict", graph)
    given = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    for name in [name for name in given if name in further_uses and name not in entries]:
        given.setdefault(further_uses[name], given[name])  # as older versions wrote them
        del given[name]
    missing, unknown = entries.keys() - given.keys(), given.keys() - entries.keys()
    problems = [f"{name} is missing" for name in entries if name in missing] if strict else []
    problems += [f"{name} is no parameter of the graph" for name in given if name in unknown] if strict else []
    arrays: dict[str, Array] = {}
    for name in (name for name in entries if name in given):
        array = _array(given[name])
        wanted, kind = entries[name].whole, entries[name].tensors[0].descriptor.data_type.numpy
        if array.shape != wanted:
            problems.append(f"{name} is {array.shape}, the graph's is {wanted}")
        if not can_convert(array.dtype, kind):
            problems.append(f"{name} holds {array.dtype}, the graph's {kind}")
        arrays[name] = array
    if given and not arrays and not problems:
        problems = [f"{name} is no parameter of the graph" for name in given]
    if problems:
        shown = problems[:10] + ([f"and {len(problems) - 10} more"] if len(problems) > 10 else [])
        raise DataError(
            f"from_state_dict: {len(problems)} misfit(s), the graph has {len(entries)} parameters",
            problems="\n            ".join(shown),
            fix=_dictionary_inside(given) or _without_prefix(given, entries) or _leaving_out(entries, arrays),
        )
    fresh: dict[Tensor, Array] = {}
    for name in sorted(arrays, key=lambda name: entries[name].adds):
        for tensor, part in entries[name].split(arrays[name]):
            if entries[name].adds:
                part = fresh.get(tensor, _values(tensor)).astype(np.float32) + part.astype(np.float32)
            fresh[tensor] = part
    for tensor, part in fresh.items():
        tensor.data = part
    return [name for name in entries if name in arrays]


def _dictionary_inside(given: Mapping[str, Any]) -> str:
    """Where the state dictionary is in what a training script saved: {"epoch": 3, "state_dict": {...}}."""
    name = next((name for name, value in given.items() if isinstance(value, Mapping)), None)
    return "" if name is None else f"the dictionary has others inside: give state[{name!r}], say"


def _leaving_out(entries: Mapping[str, _Entry], arrays: Mapping[str, Array]) -> str:
    """What to write where sizes differ, as those of another head do, or only names."""
    other = [name for name, array in arrays.items() if array.shape != entries[name].whole]
    if not other:
        return "check names and sizes; strict=False takes what fits by name"
    layer = other[0].rpartition(".")[0]
    return (
        f"a layer of another size is not taken: leave its entries out, {{name: array for name, array in state.items() "
        f"if not name.startswith({layer!r})}}, with strict=False"
    )


def _without_prefix(given: Iterable[str], known: Container[str]) -> str:
    """What to write where all names fit without what a wrapper put before them, as DataParallel puts "module."."""
    prefixes = {name.partition(".")[0] + "." for name in given}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    if not prefix or not all(name.removeprefix(prefix) in known for name in given):
        return ""
    return f"take {prefix!r} off: {{name.removeprefix({prefix!r}): array for name, array in state.items()}}"


def _array(value: Any) -> Array:
    return host_array(value.detach().cpu() if hasattr(value, "detach") else value)


# PyTorch's names --------------------------------------------------------------------------------------------------


def _entries(who: str, graph: Graph) -> tuple[dict[str, _Entry], dict[str, str]]:
    """Every array of the graph's state dictionary; and names of further uses of a layer -> those of its first."""
    if not isinstance(graph, Graph):
        raise TypeError(f"{who}: graph must be a Graph, not {instead_of_graph(graph)}")
    found: dict[str, _Entry] = {}
    again: dict[str, str] = {}
    first_uses: dict[tuple[Any, ...], str] = {}
    for layer, name in layer_names_of(graph).items():
        first = first_uses.setdefault((type(layer), *slots_of(layer).values()), name)
        if isinstance(layer, ParameterLayer):  # called as the attribute of a module is
            entries = {name: _Entry([layer.value], layer.value.descriptor.shape)}
        else:
            entries = {slot_name(name, key): entry for key, entry in _of_layer(layer).items()}
        if first == name:
            found |= entries
        else:
            again |= {entry: first + entry.removeprefix(name) for entry in entries}
    return found, again


def _of_layer(layer: Layer) -> dict[str, _Entry]:
    if isinstance(layer, (LSTMLayer, GRULayer, RNNLayer)):
        return _recurrent(layer)
    if isinstance(layer, MultiheadAttentionLayer):
        return _attention(layer)
    slots = slots_of(layer)
    if isinstance(layer, LossLayer):  # weights of labels that are fed or computed are no state
        slots = {slot: tensor for slot, tensor in slots.items() if tensor.keeps_data}
    found = {_NAMES.get(slot, slot): _plain(tensor) for slot, tensor in slots.items()}
    if isinstance(layer, FullyConnectedLayer):
        d = layer.descriptor
        found["weight"].shape = (d.output_feature_channel_count, d.input_feature_channel_count)
    elif isinstance(layer, ConvolutionLayer):
        found["weight"] = _kernels(slots["weights"], layer.descriptor)
    elif isinstance(layer, EmbeddingLayer):
        found["weight"].shape = (layer.descriptor.embedding_count, layer.descriptor.embedding_dimension)
    elif isinstance(layer, Normalization):
        for name, slot in (("running_mean", "mean"), ("running_var", "variance")):
            if slot in found:
                found[name] = found.pop(slot)
    return found


_NAMES = {"weights": "weight", "biases": "bias", "gamma": "weight", "beta": "bias"}


def _plain(tensor: Tensor) -> _Entry:
    """A tensor as it is, without axes of extent 1 around its one long axis: biases, scales, statistics."""
    shape = tensor.descriptor.shape
    long = [extent for extent in shape if extent != 1]
    return _Entry([tensor], (long[0],) if len(long) == 1 else shape if long else (1,))


def _kernels(weights: Tensor, d: ConvolutionDescriptor) -> _Entry:
    inputs, outputs, groups = d.input_feature_channel_count, d.output_feature_channel_count, d.group_count
    if not d.is_convolution_transpose:
        return _Entry([weights], (outputs, inputs // groups, *d.kernel_sizes))
    ours = (groups, outputs // groups, inputs // groups, *d.kernel_sizes)
    theirs = (groups, inputs // groups, outputs // groups, *d.kernel_sizes)
    return _Entry(
        [weights],
        (inputs, outputs // groups, *d.kernel_sizes),
        lambda array: array.reshape(ours).swapaxes(1, 2),
        lambda array: array.reshape(theirs).swapaxes(1, 2),
    )


def _recurrent(layer: LSTMLayer | GRULayer | RNNLayer) -> dict[str, _Entry]:
    """Gates in one array, as PyTorch has them. Of an LSTM it keeps two biases where we keep their sum."""
    d = layer.descriptor
    lists: dict[str, Sequence[Tensor] | None] = {"weight_ih": layer.input_weights, "weight_hh": layer.hidden_weights}
    if isinstance(layer, LSTMLayer):
        gates, rows = 4, d.hidden_size  # a tensor per gate
        lists |= {"bias_ih": layer.biases, "weight_peephole": layer.peephole_weights, "bias_hh": layer.biases}
    else:
        gates, rows = 1, layer.gate_count * d.hidden_size
        lists |= {"bias_ih": layer.input_biases, "bias_hh": layer.hidden_biases}
    found: dict[str, _Entry] = {}
    for index in range(d.layer_count * d.direction_count):
        direction, number = divmod(index, d.layer_count)
        for name, tensors in lists.items():
            if tensors:
                width = layer.input_width(number) if name == "weight_ih" else d.hidden_size
                shape = (rows, width) if name.startswith("weight") else (rows,)
                own = list(tensors[gates * index : gates * (index + 1)])
                adds = name == "bias_hh" and isinstance(layer, LSTMLayer)
                found[f"{name}_l{number}" + ("_reverse" if direction else "")] = _Entry(own, shape, adds=adds)
    return found


def _attention(layer: MultiheadAttentionLayer) -> dict[str, _Entry]:
    """The three projections in one array where they have one shape, as PyTorch has them."""
    d = layer.descriptor
    model, (keys, values) = d.model_dimension, d.key_value_widths
    q, k, v, out = layer.weights
    found: dict[str, _Entry] = {}
    if keys == values == model:
        found["in_proj_weight"] = _Entry([q, k, v], (model, model))
    else:
        for name, tensor, rows in (("q", q, d.key_dimension), ("k", k, keys), ("v", v, values)):
            found[f"{name}_proj_weight"] = _Entry([tensor], (rows, model))
    found["out_proj.weight"] = _Entry([out], (model, d.value_dimension))
    if layer.biases:
        *three, last = layer.biases
        if keys == values == model:
            found["in_proj_bias"] = _Entry(three, (model,))
        else:
            for name, tensor, rows in zip("qkv", three, (d.key_dimension, keys, values), strict=True):
                found[f"{name}_proj_bias"] = _Entry([tensor], (rows,))
        found["out_proj.bias"] = _Entry([last], (model,))
    if layer.attention_biases:
        for name, tensor, rows in zip(("bias_k", "bias_v"), layer.attention_biases, (keys, values), strict=True):
            found[name] = _Entry([tensor], (1, 1, rows))
    return found
