"""What a graph's data is called: inputs, labels and label weights by name, and the outputs a caller wants."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.layers.arguments import named
from mlcompute.layers.names import has_default_label
from mlcompute.runtime.inputs import Named
from mlcompute.tensor import Tensor

#: Under this name the lengths of variable-length sequences are fed, whatever name they were declared with.
SEQUENCE_LENGTHS = "sortedSequenceLength"


def _are_equal(one: Any, other: Any) -> bool:
    return one is other or np.array_equal(np.asarray(one), np.asarray(other))


class Declarations:
    """Names and the tensors they stand for. `who` is how messages name the graph."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.inputs: dict[str, Tensor] = {}
        self.labels: dict[str, Tensor] = {}
        self.label_weights: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        #: What a Trainer of the graph predicts. Unlike outputs, a training step does not keep them.
        self.predictions: dict[str, Tensor] = {}
        #: Inputs that were not declared: their label is their name.
        self.undeclared: dict[str, Tensor] = {}
        self._names: dict[Tensor, str] = {}

    def __copy__(self) -> Declarations:
        copied = Declarations(self.who)
        vars(copied).update({name: copy.copy(value) for name, value in vars(self).items()})
        return copied

    def add_inputs(
        self,
        inputs: Mapping[str, Tensor],
        labels: Mapping[str, Tensor] | None,
        label_weights: Mapping[str, Tensor] | None,
    ) -> None:
        """Declare inputs: all of them, or none when one is no tensor."""
        added = (
            ("inputs", self.inputs, {} if inputs is None else inputs),
            ("loss_labels", self.labels, {} if labels is None else labels),
            ("loss_label_weights", self.label_weights, {} if label_weights is None else label_weights),
        )
        for kind, _, given in added:
            self.check("add_inputs", kind, given)
        given_now = {tensor for _, _, given in added for tensor in given.values()}
        for name in [name for name, tensor in self.undeclared.items() if tensor in given_now]:
            del self.undeclared[name]
        for _, known, given in added:
            known.update(given)
            self._names.update({tensor: name for name, tensor in given.items()})

    def name_undeclared(self, tensors: Iterable[Tensor]) -> None:
        """Inputs that were not declared: they are fed under their labels, unless these are defaults."""
        declared = {*self.inputs, *self.labels, *self.label_weights}
        fed = set(self.fed)
        self.undeclared = {
            tensor.label: tensor
            for tensor in tensors
            if tensor not in fed and tensor.label not in declared and not has_default_label(tensor)
        }

    def add_outputs(self, outputs: Mapping[str, Tensor]) -> None:
        """Declare outputs."""
        self.check("add_outputs", "outputs", outputs)
        self.outputs.update(outputs)

    def output(self, method: str, name: str) -> Tensor:
        """The output with that name; others are refused."""
        if name not in self.outputs:
            raise DataError(
                f"{self.who}.{method}: '{name}' is not a declared output",
                declared=", ".join(self.outputs) or "none",
                fix="declare it with add_outputs",
            )
        return self.outputs[name]

    def check(self, method: str, kind: str, given: Mapping[str, Tensor]) -> None:
        """Refuse anything but names and tensors."""
        who = f"{self.who}.{method}"
        for name, tensor in named(who, kind, given).items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise TypeError(f"{who} ({kind}): needs names and Tensors, not {name!r}: {type(tensor).__name__}")

    @property
    def fed(self) -> list[Tensor]:
        """All tensors that are fed, in the order they were declared: inputs, labels, label weights."""
        return list(dict.fromkeys((*self.inputs.values(), *self.labels.values(), *self.label_weights.values())))

    def name_of(self, tensor: Tensor) -> str:
        """The name a tensor is fed under, else its label."""
        return self._names.get(tensor, tensor.label)

    def _where_it_belongs(self, name: str, declared: Mapping[str, Tensor]) -> str:
        """What to do with data under a name that is not declared for its argument."""
        for argument, others in (
            ("inputs_data, the first argument", self.inputs),
            ("loss_labels_data, the second argument", self.labels),
            ("loss_label_weights_data, the third argument", self.label_weights),
        ):
            if name in others:
                return f"pass it in {argument}"
        if len(declared) == 1:
            return f"call it {next(iter(declared))!r}"
        return "take one of these names, or declare it with add_inputs first"

    def find(
        self,
        method: str,
        inputs: Named | None,
        labels: Named | None,
        label_weights: Named | None,
        lengths: list[Tensor],
    ) -> dict[Tensor, Any]:
        """Data by tensor; unknown names are refused.

        lengths  the tensors recurrent layers read the lengths of their sequences from
        """
        found: dict[Tensor, Any] = {}
        for kind, declared, given in (
            ("inputs_data", self.inputs, inputs),
            ("loss_labels_data", self.labels, labels),
            ("loss_label_weights_data", self.label_weights, label_weights),
        ):
            given = {} if given is None else named(f"{self.who}.{method}", kind, given)
            for name, data in given.items():
                if name in declared or name in self.undeclared:
                    tensor = declared[name] if name in declared else self.undeclared[name]
                    if tensor in found and not _are_equal(found[tensor], data):
                        raise DataError(
                            f"{self.who}.{method}: '{name}' in {kind} is a tensor that was given other data",
                            fix="give its data once; a target that differs from the input needs a tensor of its own",
                        )
                    found[tensor] = data
                elif name == SEQUENCE_LENGTHS and lengths:
                    found.update(dict.fromkeys(lengths, data))
                else:
                    raise DataError(
                        f"{self.who}.{method}: '{name}' is not a declared name in {kind}",
                        declared=", ".join({**declared, **self.undeclared}) or "none",
                        fix=self._where_it_belongs(name, declared),
                    )
        return found
