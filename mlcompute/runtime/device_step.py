"""A whole training step of a group on devices with memory of their own: gradients never go through the host.

A group is processes with a GPU each, or one process with several GPUs. Every device runs its slices of the batch and
adds what they leave along the tree (group/slices.py), all of it enqueued and nothing waited for. Then

    all devices            the sums of every shard go to the device it belongs to, which adds them along the tree
    GPUs of one process    all shards go to all of them, and each updates all parameters: each has all optimizer state
    processes              each updates the parameters of its shard, and these go to all others
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler.accumulate_gradients import SHARE
from mlcompute.compiler.exchange_gradients import SLICE, norm_names
from mlcompute.compiler.program import Program
from mlcompute.devices.device import Buffer, Completion, Engine, Executable
from mlcompute.devices.device_exchange import DeviceExchange, SumTree, Transfer
from mlcompute.devices.foreign_array import Lying
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DeviceError
from mlcompute.execution import has_option
from mlcompute.group.exchange import Kind
from mlcompute.group.slices import Node, cut, nodes_of, parent_of, split_at
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.compiled_graph import CompiledGraph
from mlcompute.runtime.lanes import BLOCK, Entry, Lane
from mlcompute.runtime.storage import Clock, Storage
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.group_training import GroupTraining
    from mlcompute.runtime.run import Call

_PHASES = ("forward", "gradient")
#: What a kernel that adds up buffers takes, and so many nodes of the tree there may be at most.
_MOST_NODES = 400
#: Buffers of one device, by lane.
_Sums = list[Buffer]


def made(training: GroupTraining) -> DeviceStep | None:
    """The step on devices; None where the host must exchange: its memory is shared, or no engine connects them."""
    session, group = training.session, training.group
    assert session.device is not None
    engines = session.device.engines
    exchange = None
    reason = _why_not(training)
    if not reason:
        meet = functools.partial(training.exchange.gather_bytes, Kind.COMPILE)
        exchange = engines[0].join(engines, group.rank, max(group.size, len(engines)), meet)
    if exchange is None and len(engines) > 1 and training.request.optimizer is not None:
        raise DeviceError(
            f"{session.definition.who}.compile: the graph cannot be trained on {len(engines)} devices",
            reason=reason or f"nothing connects {' and '.join(engine.name for engine in engines)}",
            fix="compile it for one device",
        )
    group.between_devices = "" if exchange is None else exchange.name
    return None if exchange is None else DeviceStep(training, exchange)


def _why_not(training: GroupTraining) -> str:
    """Why gradients go through the host; empty when they need not."""
    if training.compiled.shares_memory:
        return "the devices compute in the host's memory"
    if training.request.optimizer is None:
        return "the graph has no optimizer"
    if training.group.slices > _MOST_NODES:
        return f"a batch is cut into {training.group.slices} slices, of at most {_MOST_NODES}"
    for lane in training.lanes:
        if lane.dtype not in (np.float32, np.float64):
            return f"{lane.entries[0].tensor!r} is {lane.dtype}, and sums are float32 or float64"
        for entry in lane.entries if training.group.size > 1 else ():
            if not _fits(lane, entry):  # what is gathered are the parameters themselves
                return f"{entry.tensor!r} has gradients of another type"
    return ""


class DeviceStep:
    """The devices of this process, and what they exchange with those of others.

    root     of the tree of slices; `own`: the slices of each device, `nodes`: the nodes of the tree it sends
    bounds   of every lane, where each device's shard begins, and the end
    clock    when the devices last overwrote parameters, statistics and optimizer state
    """

    def __init__(self, training: GroupTraining, exchange: DeviceExchange) -> None:
        self.training, self.exchange = training, exchange
        slices, size = training.group.slices, exchange.size
        self.root: Node = (0, slices)
        self.own = cut(slices, size)
        self.nodes = [nodes_of(own, self.root) for own in self.own]
        self.bounds = [_bounds(lane, training.group.size, size) for lane in training.lanes]
        self.clock = Clock(*exchange.engines)
        self._devices = [_Device(self, rank) for rank in range(exchange.rank, exchange.rank + len(exchange.engines))]
        for device in self._devices:  # the first step costs what the hundredth does
            device.compiled.executable(device.compiled.get("slice", training.program.batch_size))

    @property
    def name(self) -> str:
        """What carries gradients from one device to another."""
        return self.exchange.name

    @property
    def nbytes(self) -> int:
        """Bytes on the first device of what is exchanged."""
        return self._devices[0].nbytes

    # A step -----------------------------------------------------------------------------------------------------------

    def run(self, call: Call, batch: int, data: Mapping[Tensor, Any]) -> Completion | None:
        """Forward, gradient, exchange and update of one batch: started, and to be waited for; None: finished."""
        training = self.training
        training.session.raise_unseen_error()
        session, state = training.session, training.session.state
        assert state is not None
        training.batch = batch
        training.results.begin("slice", batch)
        random = session.random = session.random.current()
        start = random.count
        try:
            self._run_slices(call, batch, data, start)
        finally:
            random.move_to(start)
        if training.group.size > 1:
            nothing = [np.empty(0, np.uint8)] * training.group.size
            words = training.exchange.alltoall(Kind.STEP, nothing, nothing, same=batch, word=training.signal)
            training.signals = words
        self._reduce()
        numbers = self._numbers()
        for device in self._devices:  # all before the first one changes anything: they may fetch from each other
            device.bind_update()
        for device in self._devices:
            device.update(numbers)
        if training.group.size > 1:
            self._gather([device.values for device in self._devices])
            self.exchange.wait(training.exchange.timeout)  # a process may be gone
        self.clock.tick()
        random.move_to(start + training.group.slices)
        training.results.losses.update(self._devices[0].losses())
        training.results.is_shared = True
        state.advance()
        training.steps += 1
        completion = self.exchange.mark()
        if not _is_waited_for(call):
            return completion
        completion.wait()
        return None

    def _run_slices(self, call: Call, batch: int, data: Mapping[Tensor, Any], start: int) -> None:
        """All slices, in turn on all devices, which run side by side; part by part where they wait for sums."""
        training, random = self.training, self.training.session.random
        slices = self._slices(batch)
        sizes = training.session.sizes_of(data)
        whole: dict[Tensor, Array] | None = None
        started: dict[int, Executable] = {}
        ran: dict[_Device, tuple[int, Executable]] = {}
        completions: list[Completion] = []
        for device in self._devices:
            device.begin()
        parts = training.program.parts(_PHASES)
        for place, (names, total) in enumerate(parts):
            for device, number, (first, last) in slices:
                if first < last and place == 0:
                    program = device.compiled.get("slice", last - first, True, sizes)
                    specification = device.compiled.specification(program, _PHASES, ExecutionOptions.SYNCHRONOUS)
                    if whole is None:
                        whole = training.slices.whole_batch(specification, call, batch, data)
                        random.prepare(program.random_keys)
                    random.move_to(start + number)
                    training.has_begun = True
                    inputs = training.slices.sliced(specification.inputs, whole, (first, last))
                    started[number] = device.prepared(program, number, inputs, (last - first) / batch)
                if first < last:
                    executable = started[number]
                    self._take_rows(ran, device)
                    completion = executable.run(executable.program.parts(_PHASES)[place][0])
                    if completion is not None and executable.can_fail:
                        completions.append(completion)
                    if total is not None:
                        training.results.add_sum(number, device.read_sum(names[-1], total))
                if place == len(parts) - 1:
                    device.take(number, is_empty=first == last)
                    if first < last:
                        ran[device] = (number, executable)
            if total is not None:
                values = training.results.take_sum(total.shape, total.dtype)
                for device in self._devices:
                    device.write_sum(names[-1], values)
        for device in self._devices:
            self._take_rows(ran, device)
        for completion in completions:  # nothing is updated after a slice that failed
            completion.wait()

    def _take_rows(self, ran: dict[_Device, tuple[int, Executable]], device: _Device) -> None:
        """Outputs of the slice a device ran last, before the next: by now the other devices have got theirs to run."""
        if device in ran:
            number, executable = ran.pop(device)
            self.training.results.add_rows(number, executable, executable.program)

    def _slices(self, batch: int) -> list[tuple[_Device, int, tuple[int, int]]]:
        """(device, number of the slice, its samples) of all own slices, so that devices take turns."""
        samples = cut(batch, self.training.group.slices)
        turns = range(max(last - first for first, last in self.own))
        found = [(device, self.own[device.rank][0] + turn) for turn in turns for device in self._devices]
        return [(device, number, samples[number]) for device, number in found if number < self.own[device.rank][1]]

    def _reduce(self) -> None:
        """Sums over all slices, of every device's own shard; in one process then of all shards on all devices."""
        transfers: list[Transfer] = []
        for source in range(self.exchange.size):
            for target in range(self.exchange.size):
                for place, _ in enumerate(self.nodes[source] if source != target else ()):
                    for lane in range(len(self.bounds)):
                        read, written = self._local(source), self._local(target)
                        transfers.append(
                            Transfer(
                                source,
                                target,
                                None if read is None else read.sent(lane, place, target),
                                None if written is None else written.received[source][place][lane],
                            )
                        )
        self.exchange.move(transfers)
        for device in self._devices:
            device.reduce()
        if self.training.group.size == 1:
            self._gather([device.whole for device in self._devices])

    def _gather(self, buffers: Sequence[_Sums]) -> None:
        """Every device's shard of these lanes, to all others."""
        transfers = []
        for source in range(self.exchange.size):
            for target in range(self.exchange.size):
                for lane in range(len(self.bounds)) if source != target else ():
                    local = [None if self._local(rank) is None else rank - self.first for rank in (source, target)]
                    read, written = (None if k is None else self.shard(lane, source, buffers[k][lane]) for k in local)
                    transfers.append(Transfer(source, target, read, written))
        self.exchange.move(transfers)

    @property
    def first(self) -> int:
        """The rank of the first device of this process."""
        return self.exchange.rank

    def _local(self, rank: int) -> _Device | None:
        place = rank - self.first
        return self._devices[place] if 0 <= place < len(self._devices) else None

    def shard(self, lane: int, rank: int, buffer: Buffer) -> Buffer:
        """A device's shard of a buffer as long as a lane."""
        first, last = self.bounds[lane][rank : rank + 2]
        size = self.training.lanes[lane].dtype.itemsize
        return self.exchange.part(buffer, first * size, (last - first) * size)

    def _numbers(self) -> dict[str, float]:
        """What the update is fed. Norms are those the host computes, whatever the device."""
        training = self.training
        optimizer, state = training.request.optimizer, training.session.state
        assert optimizer is not None
        assert state is not None
        if norm_names(optimizer):
            for index, lane in enumerate(training.lanes):
                first, _ = lane.shard(training.group.rank)
                self._devices[0].whole[index].read(lane.reduced, first * lane.dtype.itemsize)
        return training.update.numbers(state)


class _Device:
    """One device: its slices' programs, what they leave, and the update.

    whole      by lane: sums over all slices of the batch, of the own shard at least
    values     by lane: where the newest parameters, statistics and losses lie
    received   by rank, node and lane: sums of other devices, of the own shard
    """

    def __init__(self, step: DeviceStep, rank: int) -> None:
        training = self._training = step.training
        self._step, self.rank = step, rank
        self._exchange, self._lanes = step.exchange, training.lanes
        self.engine: Engine = step.exchange.engines[rank - step.first]
        compiled = training.compiled
        if self.engine is not compiled.engine:
            compiled = CompiledGraph(compiled.request, self.engine, compiled.node_count)
        self.compiled = compiled
        self._own_nodes = step.nodes[rank]
        self._work, self.whole, self.values = (self._allocated() for _ in range(3))
        self._zeros: _Sums | None = None
        self._spare = [self._allocated() for _ in range(self._sums_at_once())]
        self._allocations = 3 + len(self._spare)
        self._sums: dict[Node, _Sums] = {}
        self.received = {
            source: [
                [self._shard_memory(lane) for lane in range(len(self._lanes))] for _ in step.nodes[source]
            ]
            for source in range(step.exchange.size)
            if source != rank
        }  # fmt: skip
        #: Where slices leave what they have computed.
        self._left = {
            entry.tensor: self._part(self._work[index], lane, entry)
            for index, lane in enumerate(self._lanes)
            for entry in lane.entries
        }
        self._waited_for: dict[str, Buffer] = {}
        #: Where parameters and statistics lie, looked at again when something was bound elsewhere.
        self._placed: list[tuple[Storage, Buffer]] = []
        self._placed_at = -1
        self._place_values()
        self._build_update()

    def _allocated(self) -> _Sums:
        return [self.engine.allocate(lane.length * lane.dtype.itemsize) for lane in self._lanes]

    def _shard_memory(self, lane: int) -> Buffer:
        first, last = self._step.bounds[lane][self.rank : self.rank + 2]
        return self.engine.allocate((last - first) * self._lanes[lane].dtype.itemsize)

    def _part(self, buffer: Buffer, lane: Lane, entry: Entry) -> Buffer:
        size = lane.dtype.itemsize
        return self._exchange.part(buffer, entry.start * size, (entry.stop - entry.start) * size)

    def _place_values(self) -> None:
        """Parameters and statistics lie side by side on the device: new ones arrive with one copy."""
        for index, lane in enumerate(self._lanes):
            for entry in lane.entries:
                storage = entry.tensor.storage
                if storage is not None and _fits(lane, entry):
                    self._placed.append((storage, self._part(self.values[index], lane, entry)))
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
        for tensor, (lane, piece) in update.pieces.items():
            index, size, owner = self._lanes.index(lane), lane.dtype.itemsize, piece.entry.tensor.storage
            assert owner is not None
            nbytes = (piece.stop - piece.start) * size
            gradient = self._exchange.part(self.whole[index], piece.start * size, nbytes)
            self._update.bind(program.exchanged[tensor], gradient)
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
        lanes = sum(lane.length * lane.dtype.itemsize for lane in self._lanes)
        received = sum(one.nbytes for nodes in self.received.values() for node in nodes for one in node)
        return lanes * self._allocations + received

    def _sums_at_once(self) -> int:
        """How many sums wait for others, at most, while the own slices are run (see `take`)."""
        first, last = self._step.own[self.rank]
        waiting: set[Node] = set()
        most = 0
        for number in range(first, last):
            node, is_work = (number, number + 1), True
            while node not in self._own_nodes:
                found = parent_of(node, self._step.root)
                assert found is not None
                if node == found[1]:
                    break
                waiting.remove(found[1])
                node, is_work = found[0], False
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
        self._spare += [sums for sums in self._sums.values() if sums is not self._work]
        self._sums = {}

    def prepared(self, program: Program, number: int, inputs: Mapping[Value, Any], share: float) -> Executable:
        """A slice that is such a share of the batch, fed and ready to run."""
        compiled, engine = self.compiled, self.engine
        # Slices that wait for sums over all of them need memory of their own meanwhile.
        waits = bool(program.sums)
        executable = compiled.executable_of_slice(program, number) if waits else compiled.executable(program)
        if executable.bound_to is not self or executable.bound_at != Storage.changes:
            for tensor, value in program.persistent.items():
                assert tensor.storage is not None
                executable.bind(value, tensor.storage.buffer(engine))
            for tensor, value in (*program.exchanged.items(), *program.shared.items()):
                executable.bind(value, self._left[tensor])
            for phase, value in program.sums.items():
                executable.bind(value, self._sum_memory(phase, value))
            executable.bound_to, executable.bound_at = self, Storage.changes
        scalars = compiled.scalars_of(program)
        for name, cell in scalars.cells:
            cell[()] = {SHARE: share, SLICE: share}[name]
        keys = self._training.session.random.keys(program.random_keys)
        executable.feed(engine, {**inputs, **keys, **scalars.arrays})
        return executable

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
        while node not in self._own_nodes:
            found = parent_of(node, self._step.root)
            assert found is not None
            parent, left = found
            if node == left:
                break
            before = self._sums.pop(left)
            for total, added, lane in zip(before, arrays, self._lanes, strict=True):
                self._exchange.add(self.rank, total, (total, added), lane.dtype)
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

    def sent(self, lane: int, place: int, target: int) -> Buffer:
        """Another device's shard of the sum of an own node."""
        return self._step.shard(lane, target, self._sums[self._own_nodes[place]][lane])

    def reduce(self) -> None:
        """Add the own shard of all nodes along the tree."""
        step = self._step
        for index, lane in enumerate(self._lanes):
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
                self._exchange.add(self.rank, target, _tree(leaves, step.root), lane.dtype)

    def bind_update(self) -> None:
        """Let the update work on the newest parameters and states."""
        executable = self._update
        if executable is not None and executable.bound_at != Storage.changes:
            for value, storage in self._update_storages:
                executable.bind(value, storage.buffer(self.engine))
            executable.bound_at = Storage.changes

    def update(self, numbers: Mapping[str, float]) -> None:
        """New parameters of the own shard, or of all; what is not updated comes from the sums as it is."""
        executable = self._update
        if executable is not None:
            scalars = executable.program.scalars.items()
            executable.feed(self.engine, {value: np.array(numbers[name], value.dtype) for name, value in scalars})
            executable.run(("update",))
        for index, lane in enumerate(self._lanes):
            first, last = lane.shard(self._training.group.rank)
            first, size = max(first, lane.updated), lane.dtype.itemsize
            if first < last:
                target, source = (
                    self._exchange.part(buffers[index], first * size, (last - first) * size)
                    for buffers in (self.values, self.whole)
                )
                self._exchange.copy(self.rank, target, source)

    def losses(self) -> list[tuple[Tensor, Callable[[], Array]]]:
        """Losses of the whole batch, when the device has come so far."""
        found = []
        for index, lane in enumerate(self._lanes):
            for entry in lane.entries:
                if entry.role == "loss":
                    lying = Lying(self._part(self.values[index], lane, entry), entry.shape, lane.dtype)
                    found.append((entry.tensor, self._exchange.keep(self.rank, lying)))
        return found


def _is_waited_for(call: Call) -> bool:
    """Must a step have finished when its call returns, or be told of when it has?"""
    asked = ExecutionOptions.SYNCHRONOUS | ExecutionOptions.PROFILING
    return call.completion_handler is not None or bool(call.outputs_data) or has_option(call.options, asked)


def _fits(lane: Lane, entry: Entry) -> bool:
    """Do a tensor's values have the type of its lane?"""
    return entry.tensor.descriptor.data_type.numpy == lane.dtype


def _bounds(lane: Lane, processes: int, size: int) -> list[int]:
    """Where each device's shard of a lane begins: for processes as the lane says, they own what lies in it."""
    if processes > 1:
        return lane.bounds
    return [0, *(BLOCK * last for _, last in cut(lane.length // BLOCK, size))]


def _tree(leaves: Mapping[Node, Buffer], node: Node) -> SumTree:
    """The sum of a node from the sums of nodes under it, added as the tree says."""
    found = leaves.get(node)
    if found is not None:
        return found
    middle = split_at(node)
    return (_tree(leaves, (node[0], middle)), _tree(leaves, (middle, node[1])))
