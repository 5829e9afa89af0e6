"""Optimizer state: buffers per optimizer and parameter, the caller's or our own, and the number of the next update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from mlcompute.devices.aligned_memory import aligned_full
from mlcompute.errors import DataError, GraphError
from mlcompute.ops.op import FLOAT32, Array, Shape
from mlcompute.optimizers.memory import memory_of
from mlcompute.optimizers.optimizer import Members, Optimizer
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import TensorState, state_of, storage_of
from mlcompute.tensor import Tensor

#: The state of every parameter with an optimizer without state. Such lists are replaced, never changed in place.
_STATELESS = TensorState.optimizer_storages


class User(Protocol):
    """A graph that updates parameters."""

    def wait(self) -> None:
        """Return when its queued runs have finished."""


class Clock:
    """The number of the next update of a set of parameters, shared by the graphs that update exactly this set."""

    def __init__(self, time_step: int) -> None:
        self.time_step = time_step
        self.updated: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.users: weakref.WeakSet[User] = weakref.WeakSet()


class OptimizerState:
    """What one optimizer remembers about the parameters of one graph.

    As in PyTorch, state belongs to an optimizer and a tensor: every graph with that optimizer uses the same buffers.
    The number of the next update belongs to a set of parameters: graphs that update the same set share it, graphs
    that update disjoint sets have one each.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._memory = memory_of(optimizer)
        self._buffers = self._memory.buffers
        self._clock = Clock(optimizer.first_step)
        self._groups: Mapping[Tensor, Members] = {}
        self._parameters: frozenset[Tensor] = frozenset()
        #: Do some states start as copies of the parameters, as averages do?
        self._follows = False
        #: The combinations of groups that parameters belong to.
        self.combinations: tuple[Members, ...] = ()

    def use_groups(self, groups: Mapping[Tensor, Members]) -> None:
        """Which groups of the optimizer the parameters of the graph belong to."""
        self._groups = self.with_missed(groups)
        self.combinations = tuple(sorted(set(self._groups.values())))

    def with_missed(self, groups: Mapping[Tensor, Members]) -> dict[Tensor, Members]:
        """Groups, with the updates that parameters have missed."""
        found = {tensor: tuple(index for index in members if index >= 0) for tensor, members in groups.items()}
        for tensor, missed in self._memory.missed.items():
            found[tensor] = (*found.get(tensor, ()), -missed)
        return found

    def count_missed(self, parameters: Iterable[Tensor]) -> None:
        """Before training these parameters: those that were not trained until now have missed updates."""
        optimizer, memory = self.optimizer, self._memory
        if not optimizer.counts or not self._clock.updated:
            return  # there is nothing to count, or no update so far
        now, trained = self.time_step, set(parameters)
        for tensor in self._parameters - trained:
            memory.left_at.setdefault(tensor, now)
        for tensor in trained:
            if tensor in memory.left_at:
                missed = memory.missed.get(tensor, 0) + now - memory.left_at.pop(tensor)
            elif now > optimizer.first_step and not (
                tensor in self._buffers or state_of(tensor).has_callers_optimizer_data
            ):
                missed = now - 1
            else:
                continue
            if missed:
                memory.missed[tensor] = missed

    def rule(self, tensor: Tensor) -> Optimizer:
        """The optimizer as it is for a parameter."""
        return self.optimizer.rule(self._groups.get(tensor, ()))

    def layout(self, tensor: Tensor) -> dict[str, Shape]:
        """Names and shapes of a parameter's state, in order."""
        return self.rule(tensor).layout(tensor.descriptor.shape)

    def shared(self) -> OptimizerState:
        """For another graph that starts with the same parameters."""
        state = OptimizerState(self.optimizer)
        state._clock = self._clock
        state.use_groups(self._groups)
        return state

    def copied(self, optimizer: Optimizer, tensors: Mapping[int, Any]) -> OptimizerState:
        """For a copy of the graph with another optimizer and parameters of its own, by the ids of the originals."""
        state = OptimizerState(optimizer)
        state.time_step = self.time_step
        for tensor, buffers in self._buffers.items():
            if id(tensor) in tensors:
                state._buffers[tensors[id(tensor)]] = [buffer.copy() for buffer in buffers]
                if tensor in self._memory.fresh:
                    state._memory.fresh[tensors[id(tensor)]] = None
        own, theirs = self._memory, state._memory
        for there, here in ((theirs.missed, own.missed), (theirs.left_at, own.left_at)):
            there.update({tensors[id(tensor)]: number for tensor, number in here.items() if id(tensor) in tensors})
        state.use_groups({tensors[id(t)]: some for t, some in self._groups.items() if id(t) in tensors})
        return state

    @property
    def time_step(self) -> int:
        """Number of the next update; advances when an update has succeeded."""
        return self._clock.time_step

    @time_step.setter
    def time_step(self, value: int) -> None:
        self._clock.time_step = value

    def claim(self, user: User, updated: AbstractSet[Tensor]) -> None:
        """A graph updates these parameters: from now on it shares the clock of those that update the same.

        Refused where the sets of two graphs overlap only in part and the optimizer counts its updates: there would be
        no one number for what they share.
        """
        mine, clocks = self._clock, self._memory.clocks
        is_mine_alone = mine.users <= {user}
        for clock in list(clocks) if updated else ():
            others = set(clock.updated)
            if (clock is mine and is_mine_alone) or others.isdisjoint(updated):
                continue
            if others == updated:
                if not mine.updated and mine.time_step != self.optimizer.first_step:
                    clock.time_step = mine.time_step  # restored before the graph was compiled
                self._use(clock, user)
                return
            if self.optimizer.counts:
                raise _overlapping(self.optimizer, updated, others)
        self._use(mine if is_mine_alone else Clock(self.optimizer.first_step), user)
        self._clock.updated = weakref.WeakSet(updated)

    def _use(self, clock: Clock, user: User) -> None:
        clocks = self._memory.clocks
        self._clock.users.discard(user)
        self._clock = clock
        clock.users.add(user)
        clocks[:] = [one for one in clocks if one is not clock and (one.users or one.updated)] + [clock]

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Provide buffers for every parameter: the caller's, existing ones, or new ones."""
        self._parameters = frozenset(parameters)
        members = {self._groups.get(tensor, ()) for tensor in self._parameters} if self._groups else {()}
        self._follows = bool(self._parameters) and any(self.optimizer.rule(some).followers for some in members)
        buffers, are_known = self._buffers, bool(self._buffers)
        starts: dict[tuple[Members, Shape], list[tuple[Shape, float]]] = {}  # parameters of large graphs are alike
        for tensor in self._parameters:
            state, known = state_of(tensor), buffers.get(tensor) if are_known else None
            if state.has_callers_optimizer_data:
                buffers[tensor] = known = state.optimizer_storages
                self._memory.fresh.pop(tensor, None)
            elif known is None:
                kind = (self._groups.get(tensor, ()), tensor.descriptor.shape)
                start = starts.get(kind)
                if start is None:
                    start = starts[kind] = self._start_of(*kind)
                known = [Storage.owning(aligned_full(*one, FLOAT32)) for one in start] if start else _STATELESS
                buffers[tensor] = known
                if self._follows and self.rule(tensor).followers:
                    self._memory.fresh[tensor] = None
            if known is not state.optimizer_storages:
                state.optimizer_storages = known

    def _start_of(self, members: Members, shape: Shape) -> list[tuple[Shape, float]]:
        """Of the states of a parameter: their shapes, and what their elements are before the first update."""
        rule = self.optimizer.rule(members)
        return [(own, rule.initial_state(name)) for name, own in rule.layout(shape).items()]

    def initial(self, tensor: Tensor) -> list[Array]:
        """What the state of a parameter is before its first update."""
        start = self._start_of(self._groups.get(tensor, ()), tensor.descriptor.shape)
        return [aligned_full(*one, FLOAT32) for one in start]

    def scalars_of(self, settings: Optimizer) -> dict[str, float]:
        """The numbers of the next update, which is about to begin."""
        if self._follows:
            self._start()
        return settings.scalars_of(self._clock.time_step, self.combinations)

    def _start(self) -> None:
        """Slow weights and averages of parameters that were never updated become what the parameters are now."""
        for tensor in self._parameters & set(self._memory.fresh):
            for buffer in self._buffers[tensor][-len(self.rule(tensor).followers) :]:
                buffer.write(storage_of(tensor).array().astype(buffer.dtype))
            del self._memory.fresh[tensor]

    def check_callers(self, parameters: Iterable[Tensor]) -> None:
        """Refuse buffers the caller has supplied that do not fit."""
        for tensor in parameters:
            state = state_of(tensor)
            if state.has_callers_optimizer_data:
                self.check(tensor, state.optimizer_storages)

    def check(self, tensor: Tensor, buffers: Sequence[object]) -> None:
        """Refuse another number of buffers than the optimizer has states, or other shapes."""
        names = self.layout(tensor)
        if len(buffers) != len(names):
            raise DataError(
                f"optimizer data of '{tensor.label}': {len(buffers)} buffers were given, "
                f"{type(self.rule(tensor)).__name__} has {len(names)} states",
                expected=", ".join(names) or "none",
            )
        for buffer, (name, shape) in zip(buffers, names.items(), strict=True):
            if isinstance(buffer, Storage) and buffer.shape != shape:
                raise DataError(
                    f"optimizer data of '{tensor.label}': {name} has shape {buffer.shape}",
                    expected=f"{shape}, as {type(self.rule(tensor)).__name__} keeps it",
                    fix="bind it after the graph was compiled",
                )

    def rebound(self, tensor: Tensor) -> None:
        """The caller has supplied other buffers for a tensor."""
        state = state_of(tensor)
        if tensor in self._buffers and state.has_callers_optimizer_data:
            self.check(tensor, state.optimizer_storages)
            self._buffers[tensor] = state.optimizer_storages
            self._memory.fresh.pop(tensor, None)

    def of(self, tensor: Tensor) -> list[Storage]:
        """The buffers of a parameter, in layout order."""
        return self._buffers[tensor]

    def replace(self, tensor: Tensor, buffers: list[Storage]) -> None:
        """Use other buffers for the same values."""
        self._buffers[tensor] = state_of(tensor).optimizer_storages = buffers

    def nbytes(self, parameters: Iterable[Tensor]) -> int:
        """Bytes the state of these parameters takes."""
        return sum(buffer.nbytes for tensor in parameters for buffer in self._buffers.get(tensor, ()))

    def retire(self, user: User, parameters: Iterable[Tensor]) -> None:
        """Another optimizer takes over in a graph: this one forgets its parameters, unless other graphs use it.

        The state of the other starts from zero, also where the caller had supplied buffers.
        """
        forgets = self._clock.users <= {user}
        for tensor in parameters:
            buffers, state = self._buffers.get(tensor), state_of(tensor)
            if buffers is not None and state.optimizer_storages is buffers:
                state.optimizer_storages, state.has_callers_optimizer_data = [], False
            if forgets:
                self._buffers.pop(tensor, None)
        self._clock.users.discard(user)
        if forgets:
            self._clock.updated.clear()

    def advance(self) -> None:
        """One update of all parameters has succeeded."""
        clock = self._clock
        clock.time_step += 1
        self.optimizer.advance_to(clock.time_step)

    def retreat(self) -> None:
        """An update that was counted has failed."""
        self.time_step -= 1
        self.optimizer.advance_to(self.time_step)


def _overlapping(optimizer: Optimizer, updated: AbstractSet[Tensor], others: AbstractSet[Tensor]) -> GraphError:
    def listed(tensors: AbstractSet[Tensor]) -> str:
        labels = sorted(tensor.label for tensor in tensors)
        return ", ".join(f"'{label}'" for label in labels[:5]) + (", ..." if len(labels) > 5 else "")

    facts = {"both": updated & others, "here only": updated - others, "there only": others - updated}
    return GraphError(
        f"TrainingGraph: {type(optimizer).__name__} counts its updates, and two graphs that use this one optimizer "
        "update some parameters together and some alone",
        fix="give each graph an optimizer of its own, or let both update the same parameters (freeze the others: "
        "layer.updates = False)",
        **{name: listed(tensors) for name, tensors in facts.items() if tensors},
    )
