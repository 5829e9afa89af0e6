"""Before the processes of a group train: they must have the same graph, and begin with the same numbers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler.request import Request
from mlcompute.enums import ReductionType
from mlcompute.errors import CompileError, ProcessError
from mlcompute.group.agreement import difference, packed
from mlcompute.group.exchange import Kind
from mlcompute.layers.names import layer_names, slot_name, slots_of
from mlcompute.platform import RandomPasses
from mlcompute.runtime.definition import Definition
from mlcompute.runtime.reductions import reduction_of_loss, reductions
from mlcompute.runtime.tensor_state import storage_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.group_training import GroupTraining


def averaged_over_samples(definition: Definition, request: Request) -> set[Tensor]:
    """The minimised tensors that are means over samples. CompileError for one that is neither mean nor sum."""
    kinds = reductions(request.nodes, _without_samples(request))
    averaged = set()
    for tensor in request.minimised:
        kind = reduction_of_loss(tensor, kinds)
        if kind is None:
            raise CompileError(
                f"{definition.who}.compile: {tensor!r} is minimised, and is neither a sum nor a mean over the samples",
                fix="a group runs slices of a batch: give the losses the reduction MEAN or SUM, and let layers after "
                "them only add, or multiply by constants",
            )
        if kind == ReductionType.MEAN:
            averaged.add(tensor)
    return averaged


def _without_samples(request: Request) -> set[Tensor]:
    """Results that are computed from parameters and constants alone."""
    known: set[Tensor] = set()
    for node in request.nodes:
        read = [*node.sources, *node.labels]
        if all(t in known or t in request.constants or t.keeps_data for t in read):
            known.update(node.results)
    return known


def begin_together(training: GroupTraining) -> None:
    """Take parameters, statistics, optimizer state and random numbers from rank 0."""
    session, exchange = training.session, training.exchange
    if exchange.size == 1:
        return
    state = session.state
    for tensor in _kept(training):
        values = np.ascontiguousarray(storage_of(tensor).array()).copy()
        exchange.broadcast(Kind.COMPILE, values)
        if exchange.rank:
            storage_of(tensor).write(values)
    random = session.random = session.random.current()
    if exchange.rank == 0:
        random.prepare(training.program.random_keys)
    facts = {"random": random.state(), "time_step": None if state is None else state.time_step}
    first = json.loads(exchange.gather_bytes(Kind.COMPILE, json.dumps(facts).encode())[0])
    session.random = RandomPasses.resumed(first["random"])
    if state is not None:
        state.time_step = first["time_step"]
        state.optimizer.advance_to(state.time_step)


def _kept(training: GroupTraining) -> list[Tensor]:
    """What outlives a step: parameters and statistics, in the order of the graph."""
    nodes = training.request.nodes
    layers = [tensor for node in nodes for tensor in slots_of(node.layer).values()]
    return [t for t in dict.fromkeys([*layers, *training.request.parameters]) if t.keeps_data]


def _description(training: GroupTraining) -> list[tuple[str, str]]:
    """(what, how it is) of everything that must be the same on all processes."""
    from mlcompute import __version__

    request, group = training.request, training.group
    rows = [("version", __version__), ("slices", str(group.slices)), ("batch size", str(request.batch_size))]
    rows.append(("device", training.compiled.engine.traits.__repr__()))
    names = layer_names([node.layer for node in request.nodes])
    for node in request.nodes:
        shapes = ", ".join(str(tensor.descriptor) for tensor in (*node.sources, *node.labels, *node.results))
        rows.append((f"layer '{names[node.layer]}'", f"{type(node.layer).__name__} {shapes}"))
        for slot, tensor in slots_of(node.layer).items():
            updated = "" if tensor in training.program.exchanged else ", not updated"
            rows.append((f"tensor '{slot_name(names[node.layer], slot)}'", f"{tensor.descriptor}{updated}"))
    rows.append(("optimizer", repr(request.optimizer)))
    return rows


def compare(training: GroupTraining) -> None:
    """Refuse graphs that are not the same on all processes."""
    found = difference(training.exchange.gather_bytes(Kind.COMPILE, packed(_description(training))))
    if found is not None:
        rank, how = found
        raise ProcessError(
            f"rank {rank} has another graph than rank 0: {how}",
            fix="let all processes build the same graph, with the same version of mlcompute",
            ranks=(rank,),
            is_told=True,
        )
