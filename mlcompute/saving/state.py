"""What changes while a graph learns, besides its tensors: optimizer state, time step, rates, random streams."""

from __future__ import annotations

from collections.abc import Mapping

from mlcompute.errors import DataError, FileError
from mlcompute.graph import Graph
from mlcompute.optimizers.descriptor import checked_number, checked_rate
from mlcompute.optimizers.memory import memory_of
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.optimizers.parameter_group import ParameterGroup
from mlcompute.platform import Platform, check_rng_state
from mlcompute.runtime.group_members import group_members
from mlcompute.runtime.session import session_of
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of
from mlcompute.saving.checkpoint import OPTIMIZER, Checkpoint
from mlcompute.saving.names import names_of
from mlcompute.saving.plain import JSON, shortened
from mlcompute.tensor import Tensor, TensorDescriptor
from mlcompute.tensor_data import Array
from mlcompute.training import TrainingGraph

#: What may change in a parameter group.
_GROUP = ("learning_rate", "weight_decay", "clip_norm")
#: Updates that went by without parameters, by name; most graphs have none.
_COUNTS = ("missed_updates", "left_at")


def optimizer_arrays(graph: Graph, names: Mapping[Tensor, str]) -> dict[str, Array]:
    """The optimizer's buffers by their names in a file."""
    session = session_of(graph)
    if session is None or session.state is None:
        return {}
    optimizer = session.state.optimizer
    session.state.use_groups(group_members(session.definition, session.linked_definitions))
    arrays: dict[str, Array] = {}
    memory = memory_of(optimizer)
    for tensor, name in names.items():
        buffers = memory.buffers.get(tensor)
        if state_of(tensor).has_callers_optimizer_data:
            # Bound by the caller, perhaps for a graph that is yet to be compiled.
            buffers = state_of(tensor).optimizer_storages
        if buffers is not None:
            session.state.check(tensor, buffers)
            if tensor in memory.fresh:
                continue  # it is what it would be in a new graph
            for state, buffer in zip(session.state.layout(tensor), buffers, strict=True):
                arrays[f"{OPTIMIZER}{state}/{name}"] = buffer.array()
    return arrays


def describe_state(graph: Graph) -> dict[str, JSON]:
    """Numbers and random streams as plain data."""
    state: dict[str, JSON] = {"platform": Platform.rng_state()}
    session = session_of(graph)
    if session is not None and session.definition.learning is not None:
        state["random"] = session.random.current().state()
        if session.state is not None:
            optimizer = session.state.optimizer
            state["time_step"] = session.state.time_step
            memory = memory_of(optimizer)
            for kind, known in zip(_COUNTS, (memory.missed, memory.left_at), strict=True):
                found = (
                    {name: known[tensor] for tensor, name in names_of(graph).items() if tensor in known}
                    if known
                    else {}
                )
                state |= {kind: found} if found else {}
            state["learning_rate"] = optimizer.learning_rate
            state["applies_gradient_clipping"] = optimizer.applies_gradient_clipping
            state["weight_decay"] = optimizer.weight_decay
            if optimizer.groups:
                state["groups"] = [[getattr(group, name) for name in _GROUP] for group in optimizer.groups]
    return state


class SavedState:
    """The state in a file, read and checked against a training graph; `apply` then cannot fail."""

    def __init__(self, checkpoint: Checkpoint, graph: TrainingGraph, names: Mapping[Tensor, str]) -> None:
        self._session, self._state, self._tensors = session_of(graph), checkpoint.state, set(names)
        self._names = dict(names)
        self._who = checkpoint.who
        self._buffers = self._read_buffers(checkpoint, names)
        self._check_numbers()

    def _read_buffers(self, checkpoint: Checkpoint, names: Mapping[Tensor, str]) -> dict[Tensor, list[Array]]:
        session = self._session
        if session.state is not None:
            session.state.use_groups(group_members(session.definition, session.linked_definitions))
        by_name = {name: tensor for tensor, name in names.items()}
        found: dict[Tensor, dict[str, Array]] = {}
        for key, entry in checkpoint.entries.items():
            if not key.startswith(OPTIMIZER):
                continue
            _, state, name = key.split("/", 2) if key.count("/") >= 2 else ("", "", "")
            tensor = by_name.get(name)
            layout = {} if session.state is None or tensor is None else session.state.layout(tensor)
            if tensor is None or state not in layout:
                kind = "a graph without an optimizer"
                if session.state is not None:
                    kind = type(session.state.optimizer if tensor is None else session.state.rule(tensor)).__name__
                raise FileError(
                    f"{self._who}: '{key}' does not fit this graph",
                    expected=f"the state of {kind}: {', '.join(layout) or 'none'}",
                    fix="give the graph the optimizer it was saved with, or restore the weights alone by name",
                )
            if entry.shape != layout[state] or entry.dtype != "F32":
                raise FileError(f"{self._who}: '{key}' is {entry}", expected=repr(TensorDescriptor(layout[state])))
            found.setdefault(tensor, {})[state] = checkpoint[key]
        ordered: dict[Tensor, list[Array]] = {}
        for tensor, given in found.items():
            assert session.state is not None
            states = session.state.layout(tensor)
            if len(given) != len(states):
                missing = ", ".join(state for state in states if state not in given)
                raise FileError(f"{self._who}: '{names[tensor]}' has no optimizer state {missing}")
            ordered[tensor] = [given[state] for state in states]
        return ordered

    def _check_numbers(self) -> None:
        state, session = self._state, self._session
        try:
            check_rng_state(state.get("platform"))
            session.random.resumed(state.get("random"))
            if session.state is not None:
                checked_rate(type(session.state.optimizer).__name__, state.get("learning_rate"))  # type: ignore[arg-type]
                self._groups = _checked_groups(session.state.optimizer, state.get("groups", []))
                self._decay = _checked_decay(session.state.optimizer, state.get("weight_decay"))
                self._missed = [_checked_counts(kind, state.get(kind, {})) for kind in _COUNTS]
                step = state.get("time_step")
                if type(step) is not int or not 1 <= step < 2**53:
                    raise DataError(f"the time step is {str(step)[:40]}", expected="a whole number from 1 on")
        except (DataError, TypeError) as error:
            raise FileError(
                f"{self._who}: its state does not fit a training graph: {shortened(error)}",
                fix="it may hold another kind of graph: restore the weights alone with exact=False",
            ) from error

    def apply(self) -> None:
        """Put everything into the graph and the process."""
        session, saved = self._session, self._state
        Platform.set_rng_state(saved["platform"])
        session.random = session.random.resumed(saved["random"])
        session.passes = None  # gradients that wait for their update belong to what was there before
        state = session.state
        if state is None:
            return
        state.time_step = saved["time_step"]
        state.optimizer.advance_to(state.time_step)
        self._apply_missed(state.optimizer)
        state.optimizer.schedule_rate(saved["learning_rate"])
        state.optimizer.applies_gradient_clipping = saved.get("applies_gradient_clipping") is True
        state.optimizer.weight_decay = self._decay
        for group, numbers in self._groups:
            for name, number in zip(_GROUP, numbers, strict=True):
                setattr(group, name, number)
        memory = memory_of(state.optimizer)
        for tensor in {*memory.buffers, *self._buffers} & self._tensors:
            values = self._buffers.get(tensor)
            present = memory.buffers.get(tensor)
            if present is None and values is not None:
                # Not compiled yet: these become the buffers when it is.
                own = state_of(tensor)
                memory.buffers[tensor] = own.optimizer_storages = [Storage(array) for array in values]
                own.has_callers_optimizer_data = False
            elif present is not None:
                # State that is not in the file had not been made yet when it was saved.
                for buffer, array in zip(present, state.initial(tensor) if values is None else values, strict=True):
                    buffer.write(array)
            if values is not None:
                memory.fresh.pop(tensor, None)
            elif state.rule(tensor).followers:
                memory.fresh[tensor] = None

    def _apply_missed(self, optimizer: Optimizer) -> None:
        memory = memory_of(optimizer)
        before = dict(memory.missed)
        for known, counts in zip((memory.missed, memory.left_at), self._missed, strict=True):
            for tensor in self._names:
                known.pop(tensor, None)
            known.update({tensor: counts[name] for tensor, name in self._names.items() if name in counts})
        if dict(memory.missed) != before:
            self._session.outdated()


def _checked_decay(optimizer: Optimizer, saved: JSON) -> float:
    """The weight decay in a file; files from before it could change have that of the descriptor."""
    if saved is None:
        return optimizer.regularization_scale if optimizer.regularization_type else 0.0
    return checked_number(type(optimizer).__name__, "weight_decay", saved, least=0.0)


def _checked_counts(kind: str, saved: JSON) -> dict[str, int]:
    """Numbers of updates by parameter; files from before they were counted have none."""
    counts = saved if isinstance(saved, dict) else {"": None}
    for name, count in counts.items():
        if type(count) is not int or not 0 < count < 2**53:
            raise DataError(f"{kind} of '{name[:40]}' is {str(count)[:40]}", expected="a whole number from 1 on")
    return dict(counts)


def _checked_groups(optimizer: Optimizer, saved: JSON) -> list[tuple[ParameterGroup, list[float | None]]]:
    """Rate, decay and norm of every group, as they are in a file."""
    if not isinstance(saved, list) or len(saved) != len(optimizer.groups):
        count = len(saved) if isinstance(saved, list) else 0
        raise DataError(f"it has {count} parameter groups, the optimizer has {len(optimizer.groups)}")
    for numbers in saved:
        if not isinstance(numbers, list) or len(numbers) != len(_GROUP):
            raise DataError(f"a parameter group is {str(numbers)[:40]}", expected=f"a list of {', '.join(_GROUP)}")
        for name, number in zip(_GROUP, numbers, strict=True):
            if number is not None:
                checked_number("ParameterGroup", name, number, least=0.0, infinite=name == "clip_norm")
        if numbers[2] == 0.0:
            raise DataError("clip_norm of a parameter group is 0", expected="more than 0")
    return list(zip(optimizer.groups, saved, strict=True))
