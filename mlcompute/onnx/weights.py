"""Which stored tensors of a model are weights: a guess by use, by name and by numbers, with its reason.

A file does not say what was trained. Exporters store causal masks, rotary tables, Fourier bases, anchors and scales
just as they store weights, and training those ruins a model. So every floating tensor is judged:

- numbers no training makes (infinities, masks, sines and cosines, counting) make it a constant;
- else a place where an operator has its weights makes it a weight: `Conv`, `Gemm`, `MatMul`, `LSTM`, the table of
  `Gather`, the scale of a normalization;
- else what is added to or multiplied with data is a weight when it is a bias or a scale per channel;
- names decide between the two where both are possible.

The caller's `trainable=` overrides all of it.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.errors import DataError
from mlcompute.onnx.numbers import (
    is_count,
    is_evenly_spaced,
    is_mask,
    is_mirrored,
    is_monotone,
    is_slopes,
    is_sparse_filter,
    is_uniform,
    is_whole,
    waves,
)
from mlcompute.onnx.uses import MOVING, Site, Uses, frozen_slots, weight_slots
from mlcompute.ops.op import Array

if TYPE_CHECKING:
    from onnx import ModelProto

#: What a caller may say: patterns of names that are trained, alone; or a function, which may leave some to the guess.
Trainable = str | Sequence[str] | Callable[[str], bool | None]

#: Last parts of names: what authors call trained tensors, and what they call constants.
_WEIGHT_WORDS = frozenset(
    {
        "weight", "weights", "bias", "biases", "kernel", "gamma", "beta", "embedding", "embeddings", "embed",
        "emb", "token", "tokens", "query", "queries", "param", "parameter", "params", "w", "b", "wq", "wk",
        "wv", "wo", "alpha", "table"
    }
)  # fmt: skip
_CONSTANT_WORDS = frozenset(
    {
        "mask", "masks", "cos", "cosine", "sin", "sine", "freq", "freqs", "frequencies", "inv", "rotary",
        "rope", "anchor", "anchors", "stride", "strides", "grid", "window", "hann", "hamming", "mel", "fbank",
        "filterbank", "stft", "dft", "fourier", "basis", "bases", "slopes", "alibi", "mean", "std", "running",
        "buffer", "const", "constant", "constants", "eps", "ids"
    }
)  # fmt: skip
#: Names that exporters make up.
_ANONYMOUS = re.compile(
    r"(onnx::|val_|const_fold|ortshared|_val|/|_?\d+$)|.*(output_\d+|__\d+)$|.*[Cc]onst(ant)?(_\d+)?$"
)
#: Names that PyTorch's newer exporter makes up. It leaves parameters their own names, unless it computes with them.
_NUMBERED = re.compile(r"val_\d+")
#: Uses of a tensor that are looked at.
_MOST_SITES = 64
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "DeformConv"})
_NORMALIZATIONS = frozenset(
    {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
)
_BROADCAST = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Where", "Max", "Min"})
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul"})
#: What may stand between a product and the sine and cosine of it.
_BEFORE_WAVES = MOVING | {"Concat", "Mul", "Add", "Einsum", "Gather"}


#: The reason why a Constant node is a constant.
STATED = "a Constant node"


@dataclass(frozen=True)
class Judgement:
    """Whether a stored tensor is trained, and why."""

    trained: bool
    reason: str

    def __str__(self) -> str:
        return f"{'weight' if self.trained else 'constant'}: {self.reason}"


class _Numbers:
    """What the numbers of a tensor look like; each question is asked once, however often the tensor is used."""

    def __init__(self, array: Array) -> None:
        self.array = array

    uniform = functools.cached_property(lambda self: is_uniform(self.array))
    whole = functools.cached_property(lambda self: is_whole(self.array))
    count = functools.cached_property(lambda self: is_count(self.array))
    evenly_spaced = functools.cached_property(lambda self: is_evenly_spaced(self.array))
    monotone = functools.cached_property(lambda self: is_monotone(self.array))
    slopes = functools.cached_property(lambda self: is_slopes(self.array))
    mirrored = functools.cached_property(lambda self: is_mirrored(self.array))
    sparse = functools.cached_property(lambda self: is_sparse_filter(self.array))


def chosen(trainable: Trainable | None, names: Iterable[str]) -> Mapping[str, bool]:
    """What the caller says about tensors by name; a DataError when a pattern fits none of them."""
    if trainable is None:
        return {}
    names = list(names)
    if callable(trainable):
        answers = {name: trainable(name) for name in names}
        return {name: bool(answer) for name, answer in answers.items() if answer is not None}
    patterns = [trainable] if isinstance(trainable, str) else list(trainable)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = ", ".join(names[:10]) + (", .." if len(names) > 10 else "")
            raise DataError(
                f"onnx.load: trainable: no floating tensor of the model is named like {pattern!r}",
                tensors=shown or "none", fix="mlc.onnx.doctor lists them",
            )  # fmt: skip
    return {name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names}


def is_anonymous(name: str) -> bool:
    """Was the name made up by an exporter?"""
    return _ANONYMOUS.match(name) is not None


def states_weights(model: ModelProto) -> bool:
    """Does the model itself say that its initializers are the weights, and nothing else is? Those written here do."""
    return any((entry.key, entry.value) == ("weights", "initializers") for entry in model.metadata_props)


def judge_all(
    arrays: Mapping[str, Array], uses: Uses, said: Mapping[str, bool], stated: bool = False
) -> dict[str, Judgement]:
    """A judgement for every floating tensor.

    said     what the caller has decided
    stated   the model says that all of them are weights
    """
    if stated:
        found = {name: _stated(name, uses) for name in arrays}
        return found | {name: Judgement(said[name], "trainable= says so") for name in said.keys() & found.keys()}
    found = {name: _judge(name, array, uses) for name, array in arrays.items()}
    for name in waves({name: array for name, array in arrays.items() if found[name].trained}):
        found[name] = Judgement(False, "its numbers are sines and cosines")
    for name, trained in said.items():
        if name in found:
            found[name] = Judgement(trained, "trainable= says so")
    return found


def _stated(name: str, uses: Uses) -> Judgement:
    sites = uses.sites(name)
    if sites and all(site.slot in frozen_slots(site.node) for site in sites):
        return Judgement(False, f"{sites[0].node.label} only reads it")
    return Judgement(True, "the model says so")


def _judge(name: str, array: Array, uses: Uses) -> Judgement:
    sites = uses.sites(name, _MOST_SITES)
    if not sites:
        return Judgement(False, "no computation uses it")
    sign = _sign(array)
    if sign:
        return Judgement(False, sign)
    numbers = _Numbers(array)
    answers = [_at(site, name, numbers, uses) for site in sites]
    return next((answer for answer in answers if answer.trained), answers[0])


def _sign(array: Array) -> str:
    """What its numbers say, wherever it is used: a reason why nobody trains it."""
    with np.errstate(all="ignore"):
        low, high = float(array.min()), float(array.max())
    if not np.isfinite(low) or not np.isfinite(high):
        return "it holds infinities"
    if is_mask(array, low, high):
        return "its numbers are those of a mask"
    return ""


def _at(site: Site, name: str, numbers: _Numbers, uses: Uses) -> Judgement:
    """What one use of a tensor says."""
    node, slot = site.node, site.slot
    words = _words(name)
    called_weight, called_constant = bool(words & _WEIGHT_WORDS), bool(words & _CONSTANT_WORDS)
    if {"Cos", "Sin"} & set(site.through):
        return Judgement(False, "only its sine and cosine are used")
    if slot in frozen_slots(node):
        return Judgement(False, f"{node.label} only reads it")
    if node.operator in _QUANTIZED:
        return Judgement(False, f"a scale of {node.label}")
    if slot in weight_slots(node):
        if called_constant and not called_weight:
            return Judgement(False, "its name says so")
        if numbers.count:
            return Judgement(False, "its numbers count 0, 1, 2, ..")
        if node.operator in ("Gather", "GatherND") and not called_weight and numbers.monotone:
            return Judgement(False, "its numbers only rise or only fall: a schedule")
        if numbers.evenly_spaced and not called_weight:
            return Judgement(False, "its numbers go in equal steps: coordinates")
        if node.operator in _PRODUCTS:
            if uses.reaches(node, ("Sin", "Cos"), _BEFORE_WAVES):
                return Judgement(False, f"sine and cosine are taken of {node.label}: it holds frequencies")
            if not called_weight and node.operator in ("MatMul", "Einsum") and numbers.sparse:
                return Judgement(False, "no negative numbers, mostly zeros: a filter bank or interpolation")
        if node.operator in _NORMALIZATIONS and numbers.uniform and _NUMBERED.fullmatch(name):
            return Judgement(False, f"one number that PyTorch's exporter made up: {node.label} has no scale")
        return Judgement(True, f"operand {slot} of {node.label}")
    if called_constant and not called_weight:
        return Judgement(False, "its name says so")
    if node.operator in _BROADCAST:
        return _broadcast(site, name, numbers, uses, called_weight)
    if node.operator == "Concat":
        named = called_weight or (not is_anonymous(name) and (numbers.uniform or not numbers.whole))
        return Judgement(named, f"joined to data by {node.label}" + ("" if named else ", and no name says weight"))
    if called_weight and node.domain == "" and node.operator not in ("LSTM", "GRU", "RNN"):
        return Judgement(True, "its name says so")
    return Judgement(False, f"operand {slot} of {node.label} is no weight")


def _broadcast(site: Site, name: str, numbers: _Numbers, uses: Uses, called_weight: bool) -> Judgement:
    """A tensor combined with data element by element: a bias, a scale, a table of positions, or a constant."""
    node, array = site.node, numbers.array
    what = {"Add": "added to data", "Sum": "added to data", "Mul": "multiplied with data"}.get(node.operator, "")
    what = what or f"operand of {node.operator} on data"
    wide = sum(extent > 1 for extent in array.shape)
    if wide == 0:
        # A bias has an axis, and PyTorch's newer exporter leaves it its name: in `f(x) + 1.5` nobody trains 1.5.
        is_bias = called_weight or (array.ndim > 0 and not _NUMBERED.fullmatch(name))
        if is_bias and node.operator in ("Add", "Sum") and _follows_product(site, uses):
            return Judgement(True, f"the bias of {node.label}")
        return Judgement(called_weight and array.ndim > 0, "its name says so" if called_weight else "one number")
    if not called_weight:
        # Whole numbers and mirrored ones are not what training leaves behind; zeros and ones are what it starts from.
        if numbers.whole and not numbers.uniform:
            return Judgement(False, "whole numbers: a mask, strides or positions")
        others = [other for k, other in enumerate(node.inputs) if k != site.slot and other]
        if any(uses.is_scaled_input(other) for other in others):
            return Judgement(False, f"{node.label} applies it to an input of the model")
        if uses.reaches(node, ("Sin", "Cos"), _BEFORE_WAVES):
            return Judgement(False, f"sine and cosine are taken of {node.label}: it holds frequencies")
        if numbers.evenly_spaced:
            return Judgement(False, "its numbers go in equal steps: coordinates")
    if node.operator in ("Add", "Sum") and wide == 1 and _follows_product(site, uses):
        return Judgement(True, f"the bias of {node.label}")
    if called_weight:
        return Judgement(True, f"{what}, and its name says so")
    if node.operator not in ("Add", "Sum", "Mul"):
        return Judgement(False, what)
    if wide == 1:
        if numbers.mirrored:
            return Judgement(False, "its numbers read the same from both ends: a window")
        if numbers.slopes:
            return Judgement(False, "its numbers are powers of a root of two: slopes of ALiBi")
        return Judgement(True, f"{what}, one number per channel")
    if numbers.uniform:
        return Judgement(True, f"{what} although it changes nothing: a fresh parameter")
    if is_anonymous(name) or node.operator == "Mul":
        return Judgement(False, f"{what} as a whole table, and no name says weight")
    return Judgement(True, f"{what} as a table with a name of its own")


def _follows_product(site: Site, uses: Uses) -> bool:
    others = [uses.origin(other) for k, other in enumerate(site.node.inputs) if k != site.slot and other]
    makers = [uses.makers[other] for other in others if other in uses.makers]
    return any(maker.operator in _PRODUCTS for maker in makers)


def _words(name: str) -> frozenset[str]:
    """The words of the last part of a name, without numbers: 'layers.0.norm1.bias' says 'bias'."""
    parts = [part for part in re.split(r"[./:]+", name) if not part.isdigit()]
    last = re.sub(r"([a-z])([A-Z])", r"\1_\2", parts[-1] if parts else "")
    return frozenset(word for word in re.split(r"[^a-z]+", last.lower()) if word)
