"""Weights of an imported model: which of the stored tensors they are, what they are called, what cannot be trained."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.errors import warn
from mlcompute.onnx.names import operator_sets
from mlcompute.onnx.operands import Derived, Known, Operand, Use, Weight
from mlcompute.onnx.reach import INTEGER, WAY_OUT, quantized_weights, unreached
from mlcompute.onnx.rows import ROWS
from mlcompute.onnx.ties import find_ties, transposes
from mlcompute.onnx.types import INEXACT, carried, descriptor_of, folded_shape, is_floating
from mlcompute.onnx.uniform import CopiedTensor, UniformTensor
from mlcompute.onnx.weights import Judgement, is_anonymous, judge_all, states_weights
from mlcompute.ops.op import Array
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.onnx.importer import Importer


def find_weights(importer: Importer, found: dict[str, Operand]) -> None:
    """Make weights of the tensors that are judged to be some, and copies where an exporter merged several."""
    known = {name: operand.array for name, operand in found.items() if isinstance(operand, Known)}
    floats = {name: array for name, array in known.items() if is_floating(array)}
    stated = states_weights(importer.model)
    judged = judge_all(floats, importer.uses, importer.said, stated)
    importer.ties = find_ties(floats, judged, importer.uses, importer.model.producer_name, stated)
    shared = set(importer.ties.copies.values())
    for name, judgement in judged.items():
        importer.graph.judgements[name] = judgement
        if judgement.trained:
            found[name] = weight(importer, floats[name], name, deferred=name in shared)
    for copy, name in importer.ties.copies.items():
        trained = judged[name].trained and copy not in importer.ties.statistics
        role = "running statistics, " if copy in importer.ties.statistics else ""
        importer.graph.judgements[copy] = Judgement(trained, f"{role}equal to '{name}' when the model was exported")
        found[copy] = weight(importer, floats[name], copy, deferred=True) if trained else Known(floats[name], copy)
    told = {} if stated else {name: array for name, array in floats.items() if judged[name].trained}
    for name, table in transposes(told).items():
        if is_anonymous(name) and not is_anonymous(table) and name not in shared:
            _tie_transposed(importer, found, name, table)
        else:
            importer.graph.notes.append(f"'{name}' is '{table}' transposed: here they are trained apart")
    importer.graph.copies, importer.graph.tied = dict(importer.ties.copies), dict(importer.ties.tied)


def find_inner_weights(importer: Importer, found: dict[str, Operand]) -> None:
    """The same for what the body of a loop or a branch stores: one weight, however often it runs."""
    known = {name: operand.array for name, operand in found.items() if isinstance(operand, Known)}
    floats = {name: array for name, array in known.items() if is_floating(array)}
    judgements = importer.graph.judgements
    for name, judgement in judge_all(floats, importer.uses, importer.said).items():
        unique = next(one for k in count(1) if (one := name if k == 1 else f"{name}_{k}") not in judgements)
        judgements[unique] = judgement
        if judgement.trained:
            found[name] = weight(importer, floats[name], unique)


def _tie_transposed(importer: Importer, found: dict[str, Operand], name: str, table: str) -> None:
    """Make a matrix an exporter has made of a parameter that parameter, transposed."""
    stored = found[table]
    assert isinstance(stored, Weight)
    use = Use(ROWS["", "Transpose"], operator_sets(importer.model).get("", 1), {}, [stored], [table], 1)
    found[name] = Derived(use, 0, stored.shape[::-1], stored.dtype)
    importer.history.append((use, [table], [name]))
    importer.graph.judgements[name] = Judgement(True, f"'{table}' transposed: one weight")
    sites = [site.node.label for both in (table, name) for site in importer.uses.sites(both)]
    importer.ties.tied[table] = list(dict.fromkeys(sites))


def weight(importer: Importer, array: Array, name: str, deferred: bool = False) -> Weight:
    """A tensor to train, or one of running statistics.

    deferred   others are made of the same numbers: its own memory is made when it is first used
    """
    to = carried(array.dtype)
    if array.dtype != to:
        importer.note(INEXACT.get(array.dtype.name, ""), name)
        with np.errstate(all="ignore"):
            array = array.astype(to) if any(array.strides) else np.broadcast_to(array.flat[0].astype(to), array.shape)
    if not any(array.strides):  # one number, repeated
        if not importer.budget.grows:
            importer.budget.check(array.nbytes)
            importer.budget.bytes -= array.nbytes
        tensor: Tensor = UniformTensor(descriptor_of(array.shape, to), array.reshape(-1)[0])
    elif deferred:
        tensor = CopiedTensor(descriptor_of(array.shape, to), array.reshape(folded_shape(array.shape)))
    else:
        data = np.ascontiguousarray(array).reshape(folded_shape(array.shape))
        tensor = Tensor(descriptor_of(array.shape, to), shared_data=data)
    tensor.label = name
    return Weight(tensor, array.shape, name)


def name_weights(importer: Importer) -> None:
    """List what the layers train, and the running statistics they read."""
    trained: dict[str, Tensor] = {}
    read: dict[str, Tensor] = {}
    for node in importer.graph.nodes:
        trained.update({slot.tensor.label: slot.tensor for slot in node.layer.parameters.values()})
        read.update({tensor.label: tensor for tensor in node.layer.statistics.values()})
    importer.graph.weights = trained
    importer.graph.statistics = {name: tensor for name, tensor in read.items() if name not in trained}


def note_training(importer: Importer) -> None:
    """Say what cannot be trained although a user may expect it."""
    graph = importer.graph
    arrays = {name: o.array for name, o in importer.names.operands.items() if isinstance(o, Known)}
    if not importer.choices.dequantize:
        graph.quantized = quantized_weights(arrays, importer.uses)
    graph.unreached = unreached(graph)
    count, lost = len(graph.weights), len(graph.unreached)
    if lost:
        reason = next(iter(graph.unreached.values()))
        graph.notes.append(f"{lost} of {count} weights cannot be trained: {reason}")
    if graph.quantized:
        quantized = f"{len(graph.quantized)} tensors of weights are quantized and are not trained"
        advice = "load(..., dequantize=True) makes floating weights of them"
        if any(node.operator in INTEGER for node in importer.uses.nodes):
            advice = WAY_OUT
        graph.notes.append(f"{quantized}; {advice}")
        if lost == count:
            warn(f"onnx.load: no weight of this model can be trained: {quantized}; {advice}")
