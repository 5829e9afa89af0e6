"""One training graph on many processes: slices of the batch, exchange of gradients, update of a shard, new parameters.

each own slice    forward, gradient      -> gradients, statistics and losses in a flat array (buckets.py)
along the tree    sums of own slices     -> one array per node of the tree (group/slices.py)
alltoall          everybody's nodes, of my shard; added in the order of the tree
update            of the parameters in my shard, with the optimizer state only I have (shard_update.py)
allgather         new parameters, statistics and losses, to everybody
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler.exchange_gradients import norm_names
from mlcompute.compiler.update import is_elementwise
from mlcompute.devices.device import Completion
from mlcompute.group.exchange import Kind
from mlcompute.group.group import Group
from mlcompute.group.slices import Node, joins
from mlcompute.ops.op import Array
from mlcompute.runtime import device_step
from mlcompute.runtime.alternating_values import AlternatingValues
from mlcompute.runtime.bucket_exchange import BucketExchange, Sums, gather_shards
from mlcompute.runtime.buckets import Entry, make_buckets
from mlcompute.runtime.group_results import GroupResults
from mlcompute.runtime.group_start import compare
from mlcompute.runtime.group_step import GroupStep
from mlcompute.runtime.run import Call, Run
from mlcompute.runtime.shard_update import ShardUpdate
from mlcompute.runtime.sizes import Sizes
from mlcompute.runtime.slice_passes import SlicePasses, largest_slice
from mlcompute.runtime.state_layout import StateLayout
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of, storage_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.compiled_graph import CompiledGraph
    from mlcompute.runtime.optimizer_state import OptimizerState
    from mlcompute.runtime.session import Session


class GroupTraining:
    """A compiled training graph in a group of processes.

    signal   a number this process sends along with its next step; `signals` are those of all, from the last step
    pass_phases   the passes that were run one by one so far
    last_step     the last whole step, prepared
    """

    def __init__(self, session: Session, compiled: CompiledGraph, group: Group) -> None:
        self.session, self.compiled, self.group = session, compiled, group
        self.exchange, self.request = group.exchange, compiled.request
        self.signal, self.signals = 0, [0] * group.size
        self.program = compiled.get("slice", largest_slice(self.request.batch_size, group.slices))
        self.slices = SlicePasses(self)
        self.pass_phases: set[str] = set()
        self.batch = 0
        #: How many steps this process has finished.
        self.steps = 0
        #: Has a slice of the current call been run? From then on, a failure must reach all processes.
        self.has_begun = False
        #: The completion of the last call, which was started on devices without waiting for its end.
        self.under_way: Completion | None = None
        self.statistics = [t for t in dict.fromkeys(self.program.writes) if t.descriptor.data_type.is_floating]
        self.losses = [t for t in dict.fromkeys(self.request.minimised) if t in self.program.values]
        #: Gradients of own slices that wait for the update, by slice; separate passes may add to them.
        self._pending: dict[int, Sums] = {}
        #: Sums of the own slices before `_coming`: the largest nodes of the tree that are complete.
        self._sums: dict[Node, Sums] = {}
        self._coming = 0
        self._spare: list[Sums] = []
        self.results = GroupResults(self)
        self.last_step: GroupStep | None = None
        compare(self)
        self.cut_into_shards()

    def cut_into_shards(self) -> None:
        """Cut what is exchanged into shards, one per process."""
        program, optimizer, group = self.program, self.request.optimizer, self.group
        tensors = [(t, "parameter", t.descriptor.shape, value.dtype) for t, value in program.exchanged.items()]
        tensors += [(t, "statistic", t.descriptor.shape, t.descriptor.data_type.numpy) for t in self.statistics]
        tensors += [(t, "loss", program.values[t].shape, program.values[t].dtype) for t in self.losses]
        whole = optimizer is not None and not is_elementwise(optimizer, self.request.groups.values())
        blocks = optimizer is not None and bool(norm_names(optimizer))
        self.buckets = make_buckets(tensors, program.chunks, group.size, group.rank, whole=whole, blocks=blocks)
        layouts = [StateLayout(self.request, self.buckets, rank) for rank in range(group.size)]
        elastic = self.session.elastic
        banks = 2 if self.compiled.shares_memory or elastic else 1
        mirrored = [2 * layout.nbytes if elastic else 0 for layout in layouts]
        self.shared = BucketExchange(group, self.buckets, banks=banks, mirrored=mirrored)
        first, last = group.slices_of(group.rank)
        self._own_slices, self._own_nodes = range(first, last), frozenset(self.shared.nodes[group.rank])
        # A single own slice writes its gradients directly into the memory that other processes read.
        own = self.shared.memory.get(first)
        self._work = (
            own if own is not None and last - first == 1 else [np.zeros(one.length, one.dtype) for one in self.buckets]
        )
        #: Tensor -> the array that a slice writes its gradient, statistic or loss to.
        self._left = {
            entry.tensor: _shown(array, entry)
            for bucket, array in zip(self.buckets, self._work, strict=True)
            for entry in bucket.entries
        }
        self.storages = {tensor: Storage(memory, is_callers=True) for tensor, memory in self._left.items()}
        self._bucket_of_loss = [
            (e.tensor, bucket) for bucket in self.buckets for e in bucket.entries if e.role == "loss"
        ]
        self.slices.forget()
        self._pending, self._sums, self._coming, self._spare = {}, {}, self._own_slices.start, []
        self.update = ShardUpdate(self.session, self.compiled, self.exchange, self.buckets, self.shared, layouts)
        #: Elements that are summed, but not by the update: (number of the bucket, bucket, elements).
        self._summed = [
            (index, bucket, rest)
            for index, bucket in enumerate(self.buckets)
            if (rest := bucket.summed(group.rank)) is not None and not self.update.sums(bucket)
        ]
        self.alternating = AlternatingValues(self.compiled, self.buckets)
        #: Runs whole steps on the devices, without the host; None where they cannot.
        self.on_devices = None if elastic else device_step.made(self)

    @property
    def nbytes(self) -> int:
        """Bytes of what is exchanged: sums of slices, new values, and what is received."""
        if self.on_devices is not None:
            return self.on_devices.nbytes
        added = () if self.update.adds else (bucket.reduced for bucket in self.buckets)
        return self.shared.nbytes + sum(int(array.nbytes) for array in (*added, *self._work))

    # The passes of own slices ---------------------------------------------------------------------------------------

    def run_passes(
        self,
        call: Call,
        batch: int,
        data: Mapping[Tensor, Any],
        style: str,
        phases: tuple[str, ...] = ("forward", "gradient"),
        *,
        goes_on: bool = False,
        factor: float = 1.0,
    ) -> None:
        """Some phases of every own slice.

        goes_on  gradients are added to those of the batches before
        factor   what means over this batch count in the whole step, where several batches make one
        """
        if "forward" in phases:
            self.results.begin(style, batch)
        self.begin_passes(batch, goes_on=goes_on)
        self.slices.run(call, batch, data, style, phases, factor)
        self.results.is_shared = True

    def begin_passes(self, batch: int, *, goes_on: bool = False) -> None:
        """Passes of own slices are about to be run."""
        self.batch = batch
        if self._sums:  # of a step that has failed
            self._release(self._sums.values())
            self._sums = {}
        self._coming = self._own_slices.start
        if self._pending and not goes_on:
            self._release(self._pending.values())
            self._pending = {}

    def step(self, batch: int, sizes: Sizes, phases: tuple[str, ...]) -> GroupStep | None:
        """A whole step, prepared; None where the processes exchange something while slices run (`run_passes`)."""
        if self.last_step is None or not self.last_step.fits(batch, sizes, phases):
            is_cut = self.program.sums or self.slices.sends_early(batch, sizes, phases)
            self.last_step = None if is_cut else GroupStep(self, batch, sizes, phases)
        return self.last_step

    def send_early(self, chunk: int) -> None:
        """The gradients of a chunk are complete, and nothing will be added to them: exchange them meanwhile."""
        for index, bucket in enumerate(self.buckets):
            if bucket.entries[0].tensor in self.program.chunks[chunk]:
                self.shared.start(index, self.batch, self.signal)

    def take_values(self, number: int, run: Run) -> None:
        """Collect the results of a slice's forward pass: its part of losses and statistics, and outputs."""
        program = run.specification.program
        if self.results.are_of_passes:  # a whole step exchanges them with the gradients
            for tensor in (*self.losses, *self.statistics):
                if tensor in program.shared:
                    self.results.add_part(number, tensor, self.storages[tensor].array())
        else:
            self.results.add_rows(number, program, run.executable.keep)

    def take_gradients(self, number: int, *, is_step: bool) -> None:
        """Add a slice's gradients to those that wait for the update.

        is_step  nothing will be added to it before the exchange: it goes up the tree at once
        """
        if not self.compiled.shares_memory:
            for storage in self.storages.values():
                storage.array()
        if is_step:
            if self._coming < number:
                self._add_missing(number)
            self._join(number, self._work)
        elif (sums := self._pending.get(number)) is None:
            self._pending[number] = self._aside(number)
        else:
            for mine, left in zip(sums, self._work, strict=True):
                np.add(mine, left, out=mine)

    def _aside(self, number: int) -> Sums:
        """A copy of a slice's gradients, before the next slice overwrites them."""
        sums = self.shared.memory.get(number)
        if sums is None or sums is self._work:
            sums = self._spare.pop() if self._spare else [np.empty_like(array) for array in self._work]
        for mine, left in zip(sums, self._work, strict=True):
            np.copyto(mine, left)
        return sums

    def _release(self, sums: Iterable[Sums]) -> None:
        """Make the memory of sums available to others."""
        for arrays in sums:
            if arrays is not self._work and all(arrays is not one for one in self.shared.memory.values()):
                self._spare.append(arrays)

    # Exchange and update --------------------------------------------------------------------------------------------

    def finish(self, *, updates: bool, is_whole_step: bool) -> None:
        """Exchange what is pending, update, and let everybody have the result.

        is_whole_step  losses and statistics are exchanged, too: those of passes run one by one have been read
        """
        self._exchange_sums(self.own_sums())
        state = self.session.state if updates else None
        if not self.update.adds:
            self._reduce()
        if state is not None:
            self.update.run(state)
        for index, bucket, rest in self._summed:
            if self.update.adds:
                self.shared.reduce(index, bucket.reduced)
            bucket.banks[bucket.coming][rest] = bucket.reduced[rest.start - bucket.shard(self.group.rank)[0] :]
        if self.session.elastic:
            self.shared.mirror(Kind.STATE, self.update.bank + 1)
        self.shared.gather(Kind.PARAMETERS)
        if self.session.elastic:
            self.results.gather_rows()
        # Everything has arrived: from here on nothing can fail, and the step counts.
        for tensor, bucket in self._bucket_of_loss if is_whole_step else ():
            self.results.losses[tensor] = bucket.views[tensor][bucket.coming].copy()
        if state is not None and is_whole_step and self.compiled.shares_memory:
            self.alternating.switch()
        else:
            self._store(state, is_whole_step=is_whole_step)
        if state is not None:
            state.advance()
        self.update.given.clear()
        self.steps += 1

    def _store(self, state: OptimizerState | None, *, is_whole_step: bool) -> None:
        """Copy new values of parameters and statistics from the buckets into memory of their own."""
        self.alternating.release()
        for bucket in self.buckets:
            for entry in bucket.entries:
                storage = state_of(entry.tensor).storage
                is_new = state is not None if entry.role == "parameter" else is_whole_step
                if entry.role != "loss" and storage is not None and is_new:
                    storage.write(bucket.views[entry.tensor][bucket.coming])
        for bucket in self.buckets if state is not None else ():
            bucket.current = bucket.coming

    def _reduce(self) -> None:
        """The sums over all slices of the own shard, in `reduced`."""
        for index, bucket in enumerate(self.buckets):
            self.shared.reduce(index, bucket.reduced)

    def finish_passes(self) -> None:
        """The update after gradient passes by themselves; gradients can be read, and used, again."""
        kept = {number: [array.copy() for array in sums] for number, sums in self._pending.items()}
        self.finish(updates=True, is_whole_step=False)
        self._pending = kept

    def own_sums(self) -> dict[Node, Sums]:
        """Sums of the own nodes of the tree; what was pending is used up."""
        if self._coming < self._own_slices.stop:
            self._add_missing(self._own_slices.stop)
        sums, self._sums, self._coming = self._sums, {}, self._own_slices.start
        return sums

    def _add_missing(self, last: int) -> None:
        """Add the pending slices before `last` along the tree; those without samples, as zeros."""
        for number in range(self._coming, last):
            arrays = self._pending.pop(number, None)
            self._join(number, [np.zeros_like(work) for work in self._work] if arrays is None else arrays)

    def _join(self, number: int, arrays: Sums) -> None:
        """Add a slice's gradients to the sum beside them in the tree, that to the next one, and so on."""
        self._coming = number + 1
        node: Node = (number, number + 1)
        for left, parent in () if node in self._own_nodes else joins(number, self._own_nodes, self.shared.root):
            before = self._sums.pop(left)
            for total, added in zip(before, arrays, strict=True):
                np.add(total, added, out=total)
            self._release([arrays])
            node, arrays = parent, before
        if arrays is self._work and len(self._own_slices) > 1:  # the next slice would overwrite it
            arrays = self._aside(number)
        self._sums[node] = arrays

    def _exchange_sums(self, sums: dict[Node, Sums], kind: Kind = Kind.STEP) -> None:
        """Exchange sums: the update finds those of the own shard from all processes."""
        self.signals = self.shared.exchange(sums, kind, self.batch, self.signal)
        self._release(sums.values())

    # Going on without others ----------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Before a step: let others have optimizer state that was set since the last one."""
        if self.session.state is not None:
            self.update.adopt_state(self.session.state)
        if self.update.given:
            self.shared.mirror(Kind.STATE, self.update.bank)
            self.exchange.barrier()

    def go_on(self) -> bool:
        """The processes that are left go on, from the last step that one of them has finished.

        Whoever has not finished it takes its outcome from one that has: then True, and the step is not run again.
        """
        session, exchange, before = self.session, self.exchange, self.update
        exchange.shrink()
        mine = json.dumps([self.steps, before.bank]).encode()
        done = [json.loads(one) for one in exchange.gather_bytes(Kind.COMPILE, mine)]
        last, bank = max(done)
        is_behind = bool(self.steps < last)
        if min(done)[0] < last:
            leads = exchange.rank == done.index([last, bank])
            told = exchange.gather_bytes(Kind.COMPILE, self._outcome() if leads else b"")
            if is_behind:
                self._take_outcome(next(one for one in told if one))
        states = before.states_after(bank)
        self.alternating.release()
        self._pending = {}
        self.cut_into_shards()
        if session.state is not None:
            self.update.take_over(session.state, states)
        self.compiled.storages.clear()
        return is_behind

    def set_elastic(self) -> None:
        """From now on the processes that are left go on when others are gone. Collective."""
        states = self.update.gather_states()
        self.session.elastic = True
        self.alternating.release()
        self.cut_into_shards()
        if self.session.state is not None:
            self.update.take_over(self.session.state, states)
        self.compiled.storages.clear()

    def _kept(self) -> list[Tensor]:
        return [tensor for tensor in (*self.program.exchanged, *self.statistics) if tensor.keeps_data]

    def _outcome(self) -> bytes:
        """Everything the last step has changed, besides optimizer state."""
        session = self.session
        kept = [storage_of(t).array() for t in self._kept()]
        time_step = None if session.state is None else session.state.time_step
        return pickle.dumps((self.steps, kept, time_step, session.random.count, self.results.outcome()))

    def _take_outcome(self, facts: bytes) -> None:
        session = self.session
        self.steps, kept, time_step, count, results = pickle.loads(facts)
        for tensor, values in zip(self._kept(), kept, strict=True):
            storage_of(tensor).write(values)
        if session.state is not None and time_step is not None:
            session.state.time_step = time_step
            session.state.optimizer.advance_to(time_step)
        session.random.move_to(count)
        self.results.take_outcome(results)

    def whole_gradients(self) -> dict[Tensor, Array]:
        """The gradients of the whole batch, for whoever reads them before the update; collective."""
        pending = {number: [array.copy() for array in sums] for number, sums in self._pending.items()}
        self._exchange_sums(self.own_sums(), Kind.GRADIENTS)
        self._reduce()
        self._pending = pending
        found: dict[Tensor, Array] = {}
        for bucket in self.buckets:
            whole = np.zeros(bucket.length, bucket.dtype)
            bucket.part(whole, self.group.rank)[...] = bucket.reduced
            gather_shards(self.exchange, Kind.GRADIENTS, bucket, whole)
            for entry in bucket.entries:
                if entry.role == "parameter":
                    found[entry.tensor] = _shown(whole, entry)
        return found


def _shown(array: Array, entry: Entry) -> Array:
    return array[entry.start : entry.stop].reshape(entry.shape)
