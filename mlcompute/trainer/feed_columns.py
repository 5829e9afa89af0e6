"""Arrays that a user gave as columns of what a graph is fed: by name, checked, with weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcompute.errors import DataError
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import expect_no_booleans
from mlcompute.trainer.class_weights import class_numbers, places_of, weighed
from mlcompute.trainer.columns import Column, as_array, column
from mlcompute.trainer.data import Feed

#: By how much probabilities may miss 0 and 1.
_ROUNDING = 1e-3


def columns_of(who: str, feed: Feed, x: Any, y: Any, weights: Any) -> tuple[list[Column], list[Column], list[Column]]:
    """Inputs, labels and weights: one column for each tensor that is fed."""
    x, y, weights = by_kind(feed, x, y, weights)
    if feed.compared and not feed.labels and y is not None:
        _expect_the_input(who, feed, x, y)
        y = None
    found: list[list[Column]] = []
    for kind, tensors, given in (
        ("input", feed.inputs, x),
        ("label", feed.labels, y),
        ("weight", feed.weights, weights),
    ):
        if kind == "weight" and feed.weighs_alike:
            given = weights = _weights(who, feed, found[1], given)
        named = by_name(who, kind, tensors, given, feed.labels if kind == "input" and y is None else {})
        if kind == "label":
            tensors = {name: feed.label_tensor(name, data, f"{who}: '{name}'") for name, data in named.items()}
        for name, data in named.items():
            if tensors[name] in feed.added:
                expect_no_booleans(data, f"{who}: '{name}'")
        # Only loss layers know what classes are: what an expression makes of labels is its own affair.
        axes = feed.class_axes if kind == "label" else {}
        found.append(
            [
                column(
                    name,
                    tensors[name],
                    data,
                    who,
                    batch=feed.batch if feed.counts_samples(tensors[name]) else 0,
                    class_axis=0 if name in feed.functions else axes.get(name, 0),
                    is_over_classes=name in feed.over_classes,
                    is_weight=kind == "weight",
                    follows=feed.varies and kind != "input",
                    classes=feed.classes.get(name) if kind == "label" else None,
                )
                for name, data in named.items()
            ]
        )
    for one in found[1]:
        is_dense = not one.class_axis and (one.name not in feed.classes or one.tensor is not feed.labels[one.name])
        if one.name in feed.probabilities and is_dense:
            _expect_probabilities(who, one)
    if feed.weighs_alike:
        count = next(one.count for one in found[0] if not one.shared)
        for name, tensor in feed.weights.items():
            if any(one.name == name for one in found[2]):
                continue
            rows, *extents = tensor.descriptor.shape
            labels = [one for one in found[1] if feed.weighed.get(one.name) == name]
            if feed.varies and extents and labels:  # a weight for every step: as many as there are labels
                extents = list(places_of(labels[0], feed.class_axes.get(labels[0].name, 1)))
            ones = np.broadcast_to(np.float32(1), (count * (rows // feed.batch), *extents))
            found[2].append(column(name, tensor, ones, who, batch=feed.batch, follows=feed.varies))
    return found[0], found[1], found[2]


def by_kind(feed: Feed, x: Any, y: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Inputs, labels and weights, where one dict may have them all."""
    if isinstance(x, Mapping) and y is None:
        y = {name: part for name, part in x.items() if name in feed.labels and name not in feed.inputs} or None
        if weights is None:
            weights = {name: part for name, part in x.items() if name in feed.weights} or None
        x = {name: part for name, part in x.items() if name not in {*(y or ()), *(weights or ())}}
    return x, y, weights


def _weights(who: str, feed: Feed, labels: list[Column], given: Any) -> dict[str, Any] | None:
    """The weights of samples by name, times those of their classes: one array is for every loss."""
    if given is not None and not isinstance(given, Mapping):
        is_listed = isinstance(given, (tuple, list)) and any(np.ndim(part) for part in given)
        if is_listed and len(given) == len(feed.weights):
            given = dict(zip(feed.weights, given, strict=True))
        else:
            given = dict.fromkeys(feed.weights, given)
    found = dict(given or {})
    unknown = [name for name in found if name not in feed.weights]
    if unknown:
        raise DataError(f"{who}: there is no weight named {unknown[0]!r}", expected=", ".join(feed.weights))
    for label in labels:
        if label.name in feed.class_weights:
            numbers = class_numbers(who, label, feed)
            name = feed.weighed[label.name]
            found[name] = weighed(who, numbers, feed.class_weights[label.name], found.get(name))
    return found or None


def _expect_probabilities(who: str, labels: Column) -> None:
    """Labels outside of 0 to 1 give cross entropies without a least value, and hinge losses of another margin."""
    low, high = float(labels.array.min()), float(labels.array.max())
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        raise DataError(
            f"{who}: '{labels.name}' goes from {low:g} to {high:g}, the loss compares with numbers from 0 to 1",
            fix="give 0 for no and 1 for yes, or integer class labels; for numbers to be predicted, use the loss 'mse'",
        )


def _expect_the_input(who: str, feed: Feed, x: Any, y: Any) -> None:
    """Labels for a loss that compares with an input: only that input itself can be meant."""
    data = by_name(who, "input", feed.inputs, x)[feed.compared]
    if isinstance(y, Mapping):
        y = y.get(feed.compared)
    if y is not data and (y is None or not np.array_equal(np.asarray(y), np.asarray(data))):
        raise DataError(
            f"{who}: labels were given, but the loss compares with the input '{feed.compared}' itself",
            fix="leave y out; for a target that differs from the input, make it a tensor of its own: "
            "graph.loss(prediction, graph.input(shape, 'target'), ...)",
        )


def by_name(
    who: str, kind: str, tensors: Mapping[str, Tensor], given: Any, others: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Data by name: from a mapping, from a list in order, or for the only one.

    others  what a mapping could have had besides
    """
    if given is not None and not tensors:
        raise DataError(
            f"{who}: {kind}s were given, the graph takes none",
            fix="give sample_weight, or a list of batches; or declare them: TrainingGraph.add_inputs(inputs, labels, "
            "label weights)"
            if kind == "weight"
            else "leave y out: the loss compares tensors of the graph with each other"
            if kind == "label"
            else "",
        )
    wanted = {**tensors, **(others or {})}
    expected = ", ".join(f"'{name}' {tensor.descriptor.shape}" for name, tensor in wanted.items()) or "none"
    if given is None:
        named: dict[str, Any] = {}
    elif isinstance(given, Mapping):
        named = dict(given)
    elif len(tensors) == 1:
        ((name, tensor),) = tensors.items()
        if isinstance(given, (tuple, list)) and len(given) == 1 and _are_samples(given[0], tensor):
            (given,) = given  # a list of the only one
        named = {name: given}
    elif isinstance(given, (tuple, list)) and len(given) == len(tensors):
        named = dict(zip(tensors, given, strict=True))
    else:
        raise DataError(
            f"{who}: the graph has {len(tensors)} {kind}s", expected=expected, fix="give a dict: name -> array"
        )
    unknown = [name for name in named if name not in tensors]
    if unknown:
        absent = [name for name in wanted if name not in named]
        meant = absent if len(absent) == 1 else difflib.get_close_matches(unknown[0], absent or list(wanted), n=1)
        fix = f"call it {meant[0]!r}" if meant else ""
        raise DataError(f"{who}: there is no {kind} named {unknown[0]!r}", expected=expected, fix=fix)
    missing = [name for name in tensors if name not in named]
    if missing and (kind == "input" or (named and kind == "label")):
        raise DataError(f"{who}: no data for {kind} {missing[0]!r}", expected=expected)
    return named


def _are_samples(array: Any, tensor: Tensor) -> bool:
    """Could this be the samples for a tensor, or integer class labels for it, rather than one sample?"""
    shape = tensor.descriptor.shape
    axes = getattr(array, "ndim", None)
    if axes is None:
        return isinstance(array, (list, tuple)) and as_array(array, f"'{tensor.label}'").ndim >= len(shape)
    if len(array.shape) + 1 == len(shape) and tensor.varies:  # one sample, of any size
        pairs = enumerate(zip(array.shape, shape[1:], strict=True), 1)
        return not all(one == other or axis in tensor.varies for axis, (one, other) in pairs)
    given, sample = (tuple(extent for extent in extents if extent != 1) for extents in (array.shape, shape[1:]))
    return bool(axes >= len(shape) or (axes and given != sample))
