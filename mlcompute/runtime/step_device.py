"""One device of a training step: its slices' programs, what they leave, and the update (see device_step.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler.accumulate_gradients import SHARE
from mlcompute.compiler.exchange_gradients import SLICE
from mlcompute.compiler.program import Program
from mlcompute.devices.device import Buffer, Engine, Executable
from mlcompute.devices.device_exchange import SumTree
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.group.slices import Node, joins, split_at
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.buckets import Bucket, Entry
from mlcompute.runtime.compiled_graph import CompiledGraph
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of, storage_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.device_step import DeviceStep

#: Buffers of one device, by bucket.
Sums = list[Buffer]


class StepDevice:
    """One device: its slices' programs, what they leave, and the update.

    whole      by bucket: sums over all slices of the batch, of the own shard at least
    values     by bucket: where the newest parameters, statistics and losses lie
    received   by rank, node and bucket: sums of other devices, of the own shard
    """

    def __init__(self, step: DeviceStep, rank: int) -> None:
        training = self._training = step.training
        self._step, self.rank = step, rank
        self._exchange, self._buckets = step.exchange, training.buckets
        self.engine: Engine = step.exchange.engines[rank - step.first]
        compiled = training.compiled
        if self.engine is not compiled.engine:
            compiled = CompiledGraph(compiled.request, self.engine, compiled.node_count)
        self.compiled = compiled
        self._own_nodes = step.nodes[rank]
        self._work, self.whole, self.values = (self._allocated() for _ in range(3))
        self._zeros: Sums | None = None
        self._all_spare = [self._allocated() for _ in range(self._sums_at_once())]
        self._spare = list(self._all_spare)
        self._sums: dict[Node, Sums] = {}
        self.received = {
            source: [
                [self._shard_memory(bucket) for bucket in range(len(self._buckets))] for _ in step.nodes[source]
            ]
            for source in range(step.exchange.size)
            if source != rank
        }  # fmt: skip
        #: Tensor -> the part of a buffer that a slice writes its gradient, statistic or loss to.
        self._left = {
            entry.tensor: self._part(self._work[index], bucket, entry)
            for index, bucket in enumerate(self._buckets)
            for entry in bucket.entries
        }
        self._waited_for: dict[str, Buffer] = {}
        #: Outputs of all own slices in one buffer, the place of each, and how often the buffer had to grow.
        self._rows = self.engine.allocate(0)
        self._places: dict[int, list[tuple[Value, Buffer]]] = {}
        self._slices: dict[int, Executable] = {}
        self.rows_moved = 0
        #: Storages of parameters and statistics with their buffers; valid for `_placed_at` rebindings.
        self._placed: list[tuple[Storage, Buffer]] = []
        self._placed_at = -1
        self._place_values()
        self._build_update()

    def _allocated(self) -> Sums:
        return [self.engine.allocate(bucket.length * bucket.dtype.itemsize) for bucket in self._buckets]

    def _shard_memory(self, bucket: int) -> Buffer:
        first, last = self._step.bounds[bucket][self.rank : self.rank + 2]
        return self.engine.allocate((last - first) * self._buckets[bucket].dtype.itemsize)

    def _part(self, buffer: Buffer, bucket: Bucket, entry: Entry) -> Buffer:
        size = bucket.dtype.itemsize
        return self._exchange.part(buffer, entry.start * size, (entry.stop - entry.start) * size)

    def _place_values(self) -> None:
        """Parameters and statistics lie side by side on the device: new ones arrive with one copy."""
        for index, bucket in enumerate(self._buckets):
            for entry in bucket.entries:
                storage = state_of(entry.tensor).storage
                if storage is not None and fits_bucket(bucket, entry):
                    self._placed.append((storage, self._part(self.values[index], bucket, entry)))
                if storage is not None:
                    storage.overwritten_by(self._step.clock)

    def _build_update(self) -> None:
        update, program = self._training.update, self._training.update.program
        self._update: Executable | None = None
        if program is None:
            return
        self._update = self.engine.build(program, self.engine.allocate(program.plan.nbytes))
        self._update.inputs = {}
        self._update_storages: list[tuple[Value, Storage]] = []
        for tensor, (bucket, piece) in update.pieces.items():
            index, size, owner = self._buckets.index(bucket), bucket.dtype.itemsize, storage_of(piece.entry.tensor)
            nbytes = (piece.stop - piece.start) * size
            gradient = self._exchange.part(self.whole[index], piece.start * size, nbytes)
            self._update.bind(program.summands[tensor][0], gradient)
            if piece.is_whole:
                self._update_storages.append((program.persistent[tensor], owner))
            else:
                part = self._exchange.part(self.values[index], piece.start * size, nbytes)
                self._update.bind(program.persistent[tensor], part)
            self._update_storages += zip(program.states[tensor], update.states[tensor], strict=True)
            for state in update.states[tensor]:
                state.overwritten_by(self._step.clock)

    @property
    def nbytes(self) -> int:
        """Bytes of what is exchanged."""
        buckets = sum(bucket.length * bucket.dtype.itemsize for bucket in self._buckets)
        received = sum(one.nbytes for nodes in self.received.values() for node in nodes for one in node)
        return buckets * (3 + len(self._all_spare)) + received + self._rows.nbytes

    def _sums_at_once(self) -> int:
        """How many sums wait for others, at most, while the own slices are run (see `take`)."""
        first, last = self._step.own[self.rank]
        waiting: set[Node] = set()
        most = 0
        for number in range(first, last):
            node, is_work = (number, number + 1), True
            for left, parent in joins(number, self._own_nodes, self._step.root):
                waiting.remove(left)
                node, is_work = parent, False
            if not (is_work and number == last - 1):
                waiting.add(node)
            most = max(most, len(waiting))
        return most

    # Slices -----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins, whatever became of the one before, and wherever parameters were bound to since."""
        if self._placed_at != Storage.changes:
            for storage, buffer in self._placed:
                if not storage.lies_in(self.engine, buffer):
                    storage.place(self.engine, buffer)
            self._placed_at = Storage.changes
        if self.compiled.outgrown:
            self.compiled.move()
        # The same memory for the same sums in every step: it may have been captured.
        self._spare = list(self._all_spare)
        self._sums = {}

    @property
    def slice_count(self) -> int:
        """How many slices it runs."""
        first, last = self._step.own[self.rank]
        return last - first

    def bound(self, program: Program, number: int) -> Executable:
        """The program of a slice, with the newest parameters, and what it leaves where it is looked for."""
        compiled, engine = self.compiled, self.engine
        # Slices that wait for sums over all of them need memory of their own meanwhile.
        waits = bool(program.sums)
        executable = compiled.executable_of_slice(program, number) if waits else compiled.executable(program)
        if executable.bound_to is not self or executable.bound_at != Storage.changes:
            for tensor, value in program.persistent.items():
                executable.bind(value, storage_of(tensor).buffer(engine))
            for tensor, value in (*program.exchanged.items(), *program.shared.items()):
                executable.bind(value, self._left[tensor])
            for phase, value in program.sums.items():
                executable.bind(value, self._sum_memory(phase, value))
            executable.bound_to, executable.bound_at = self, Storage.changes
        return executable

    def fed(self, program: Program, inputs: Mapping[Value, Any], share: float) -> Mapping[Value, Any]:
        """All that a slice is fed that is such a share of the batch."""
        scalars = self.compiled.scalars_of(program)
        for name, cell in scalars.cells:
            cell[()] = {SHARE: share, SLICE: share}[name]
        keys = self._training.session.random.keys(program.random_keys)
        return {**inputs, **keys, **scalars.arrays}

    def _sum_memory(self, phase: str, value: Value) -> Buffer:
        """Where slices leave what is added up when a phase ends, and find the sum."""
        if phase not in self._waited_for:
            self._waited_for[phase] = self.engine.allocate(value.nbytes)
        return self._waited_for[phase]

    def read_sum(self, phase: str, value: Value) -> Array:
        """What the slice that ran last has left to be added up."""
        found = np.empty(value.shape, value.dtype)
        self._waited_for[phase].read(found)
        return found

    def write_sum(self, phase: str, values: Array) -> None:
        """The sum over all slices."""
        if phase in self._waited_for:
            self._waited_for[phase].write(values)

    def take(self, number: int, *, is_empty: bool) -> None:
        """Add what the slice before has left to the sums of the tree; of a slice without samples that is nothing."""
        node, arrays = (number, number + 1), self._work
        if is_empty:
            self._zeros = arrays = self._zeros or self._allocated()
        for left, parent in joins(number, self._own_nodes, self._step.root):
            before = self._sums.pop(left)
            for total, added, bucket in zip(before, arrays, self._buckets, strict=True):
                self._exchange.add(self.rank, total, (total, added), bucket.dtype)
            if arrays is not self._work and arrays is not self._zeros:
                self._spare.append(arrays)
            node, arrays = parent, before
        is_last = number == self._step.own[self.rank][1] - 1
        if arrays is self._zeros or (arrays is self._work and not is_last):  # the next slice will overwrite it
            memory = self._spare.pop()
            for target, source in zip(memory, arrays, strict=True):
                self._exchange.copy(self.rank, target, source)
            arrays = memory
        self._sums[node] = arrays

    # Exchange and update ----------------------------------------------------------------------------------------------

    def sent(self, bucket: int, place: int, target: int) -> Buffer:
        """Another device's shard of the sum of an own node."""
        return self._step.shard(bucket, target, self._sums[self._own_nodes[place]][bucket])

    def reduce(self) -> None:
        """Add the own shard of all nodes along the tree."""
        step = self._step
        for index, bucket in enumerate(self._buckets):
            leaves: dict[Node, Buffer] = {
                node: self.sent(index, place, self.rank) for place, node in enumerate(self._own_nodes)
            }
            for source, nodes in self.received.items():
                for node, buffers in zip(step.nodes[source], nodes, strict=True):
                    leaves[node] = buffers[index]
            target = step.shard(index, self.rank, self.whole[index])
            if step.root in leaves:
                self._exchange.copy(self.rank, target, leaves[step.root])
            elif target.nbytes:
                self._exchange.add(self.rank, target, _tree(leaves, step.root), bucket.dtype)

    updating = ReadOnly[Executable | None](
        "The program of the update; None where this process owns no parameter.", "_update"
    )

    def bind_update(self) -> None:
        """Let the update work on the newest parameters and states."""
        executable = self._update
        if executable is not None and executable.bound_at != Storage.changes:
            for value, storage in self._update_storages:
                executable.bind(value, storage.buffer(self.engine))
            executable.bound_at = Storage.changes

    def feed_update(self, numbers: Mapping[str, float], slot: int) -> None:
        """Write the scalars of the next update."""
        executable = self._update
        if executable is not None:
            scalars = executable.program.scalars.items()
            arrays = {value: np.array(numbers[name], value.dtype) for name, value in scalars}
            self._exchange.feed(self.rank, executable, arrays, slot)

    def update(self, slot: int) -> None:
        """New parameters of the own shard, or of all; what is not updated comes from the sums as it is."""
        if self._update is not None:
            self._exchange.run(self.rank, self._update, ("update",), slot)
        for index, bucket in enumerate(self._buckets):
            first, last = bucket.shard(self._training.group.rank)
            first, size = max(first, bucket.updated), bucket.dtype.itemsize
            if first < last:
                target, source = (
                    self._exchange.part(buffers[index], first * size, (last - first) * size)
                    for buffers in (self.values, self.whole)
                )
                if self._step.can_fail:
                    self._exchange.add(self.rank, target, source, bucket.dtype, is_guarded=True)
                else:
                    self._exchange.copy(self.rank, target, source)

    # Outputs of a captured step ---------------------------------------------------------------------------------------

    def place_rows(self, slices: Sequence[tuple[int, Executable]]) -> bool:
        """Find memory for the outputs of slices, given by number; False where some have gaps."""
        if self._slices == dict(slices):  # as in nearly every step
            return True
        sizes: list[tuple[int, Value, int]] = []
        for number, executable in slices:
            for _, value in self._training.results.outputs_of(executable.program):
                if executable.device_array(value) is None:
                    return False
                sizes.append((number, value, value.nbytes))
        self._make_room(sum(_rounded(nbytes) for _, _, nbytes in sizes))
        self._places, start = {}, 0
        for number, value, nbytes in sizes:
            self._places.setdefault(number, []).append((value, self._exchange.part(self._rows, start, nbytes)))
            start += _rounded(nbytes)
        self._slices = dict(slices)
        return True

    def reserve(self, executable: Executable) -> None:
        """Memory for what a step of slices with this program is fed, twice, and for its outputs."""
        if self._exchange.captures:
            self._exchange.reserve(self.rank, executable, 2 * self.slice_count)
            outputs = self._training.results.outputs_of(executable.program)
            self._make_room(self.slice_count * sum(_rounded(value.nbytes) for _, value in outputs))

    def _make_room(self, nbytes: int) -> None:
        if nbytes > self._rows.nbytes:
            self._rows = self.engine.allocate(nbytes)
            self.rows_moved += 1

    def copy_rows(self, number: int) -> None:
        """Outputs of a slice, before the next one overwrites them."""
        for value, buffer in self._places.get(number, ()):
            array = self._slices[number].device_array(value)
            assert array is not None
            self._exchange.copy(self.rank, buffer, array.buffer)

    def kept_rows(self, number: int) -> Callable[[Value], Callable[[], Array]]:
        """What gives an output of a slice of the step that was enqueued last."""
        places = dict(self._places.get(number, ()))

        def keep(value: Value) -> Callable[[], Array]:
            return self._exchange.keep(self.rank, DeviceArray(places[value], value.shape, value.dtype))

        return keep

    def losses(self) -> list[tuple[Tensor, Callable[[], Array]]]:
        """Losses of the whole batch, when the device has come so far."""
        found = []
        for index, bucket in enumerate(self._buckets):
            for entry in bucket.entries:
                if entry.role == "loss":
                    array = DeviceArray(self._part(self.values[index], bucket, entry), entry.shape, bucket.dtype)
                    found.append((entry.tensor, self._exchange.keep(self.rank, array)))
        return found


def fits_bucket(bucket: Bucket, entry: Entry) -> bool:
    """Do a tensor's values have the type of its bucket?"""
    return entry.tensor.descriptor.data_type.numpy == bucket.dtype


def _tree(leaves: Mapping[Node, Buffer], node: Node) -> SumTree:
    """The sum of a node from the sums of nodes under it, added as the tree says."""
    found = leaves.get(node)
    if found is not None:
        return found
    middle = split_at(node)
    return (_tree(leaves, (node[0], middle)), _tree(leaves, (middle, node[1])))


def _rounded(nbytes: int) -> int:
    """Outputs begin at multiples of 256 bytes."""
    return -(-nbytes // 256) * 256
