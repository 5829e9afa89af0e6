"""A whole training step of a group on devices with memory of their own: gradients never go through the host.

A group is processes with a GPU each, or one process with several GPUs. Every device runs its slices of the batch and
adds what they leave along the tree (group/slices.py), all of it enqueued and nothing waited for. Then

    all devices            the sums of every shard go to the device it belongs to, which adds them along the tree
    GPUs of one process    all shards go to all of them, and each updates all parameters: each has all optimizer state
    processes              each updates the parameters of its shard, and these go to all others

Where the exchange can be captured (`DeviceExchange.captures`), all of this is one graph per device, or a few where the
host has something to do in between: sums that slices wait for, norms over several gradients, large data of the next
slice. Invalid data in a slice shows only after that graph: a flag goes with the sums, and where it is set, no device
changes anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlcompute.compiler.exchange_gradients import norm_names
from mlcompute.compiler.program import Program
from mlcompute.devices import engines_of
from mlcompute.devices.device import Buffer, Completion, Executable
from mlcompute.devices.device_exchange import DeviceExchange, Transfer, Work
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import DeviceError
from mlcompute.execution import has_option
from mlcompute.group.exchange import Kind
from mlcompute.group.slices import Node, cut, nodes_of
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.buckets import BLOCK, Bucket
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.runtime.sizes import Sizes
from mlcompute.runtime.slice_passes import Part
from mlcompute.runtime.step_device import StepDevice, Sums, fits_bucket
from mlcompute.runtime.storage import Clock
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.runtime.group_training import GroupTraining
    from mlcompute.runtime.run import Call

_PHASES = ("forward", "gradient")
#: One kernel adds up the sums of all nodes of the tree: their addresses are its arguments, which take 4 kB at most.
_MOST_NODES = 400
#: Answers of `DeviceExchange.readiness`, which go to the other processes with the signal.
_LEVELS = 3


def made(training: GroupTraining) -> DeviceStep | None:
    """The step on devices; None where the host must exchange: its memory is shared, or no engine connects them."""
    session, group = training.session, training.group
    assert session.device is not None
    engines = engines_of(session.device)
    exchange = None
    reason = _why_not(training)
    if not reason:
        gather = functools.partial(training.exchange.gather_bytes, Kind.COMPILE)
        exchange = engines[0].join(engines, group.rank, max(group.size, len(engines)), gather)
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
    for bucket in training.buckets:
        if bucket.dtype not in (np.float32, np.float64):
            return f"{bucket.entries[0].tensor!r} is {bucket.dtype}, and sums are float32 or float64"
        for entry in bucket.entries if training.group.size > 1 else ():
            if not fits_bucket(bucket, entry):  # what is gathered are the parameters themselves
                return f"{entry.tensor!r} has gradients of another type"
    return ""


class _Slice(NamedTuple):
    """A slice of the batch, the device that runs it, and its program."""

    device: StepDevice
    part: Part
    executable: Executable

    @property
    def number(self) -> int:
        """Which slice it is."""
        return self.part.number


class DeviceStep:
    """The devices of this process, and what they exchange with those of others.

    root     of the tree of slices; `own`: the slices of each device, `nodes`: the nodes of the tree it sends
    bounds   of every bucket, where each device's shard begins, and the end
    clock    when the devices last overwrote parameters, statistics and optimizer state
    """

    def __init__(self, training: GroupTraining, exchange: DeviceExchange) -> None:
        self.training, self.exchange = training, exchange
        slices, size = training.group.slices, exchange.size
        self.root: Node = (0, slices)
        self.own = cut(slices, size)
        self.nodes = [nodes_of(own, self.root) for own in self.own]
        self.bounds = [_bounds(bucket, training.group.size, size) for bucket in training.buckets]
        self.clock = Clock(*exchange.engines)
        optimizer = training.request.optimizer
        self._has_norms = optimizer is not None and bool(norm_names(optimizer))
        self._devices = [StepDevice(self, rank) for rank in range(exchange.rank, exchange.rank + len(exchange.engines))]
        #: Which of two sets of inputs this step reads: those of the next step are written while it runs.
        self._bank = 0
        #: Must captured steps check for invalid data? Decided for the largest slice, so alike on all processes.
        self.can_fail = False
        for device in self._devices:  # the first step costs what the hundredth does
            executable = device.compiled.executable(device.compiled.get("slice", training.program.batch_size))
            device.reserve(executable)
            self.can_fail |= exchange.captures and executable.can_fail

    name = ReadOnly[str]("What carries gradients from one device to another.", "exchange.name")

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
        self._bank = 1 - self._bank
        random = session.random = session.random.current()
        start, sizes = random.count, session.sizes_of(data)
        for device in self._devices:
            device.begin()
        try:
            slices = self._slices(batch, sizes)
            feed = self._feeding(slices, call, batch, data, start)
            is_whole = self._is_whole(slices)
            if is_whole:
                for one in slices:
                    self.exchange.feed(one.device.rank, one.executable, feed(one), self._slot(one))
            else:
                self._run_slices(slices, feed)
        finally:
            random.move_to(start)
        training.update.begin(state)
        for device in self._devices:  # all before the first one changes anything: they may fetch from each other
            device.bind_update()
        works = self._works(slices, (batch, sizes), is_whole=is_whole)
        self._perform(works, batch, [one.executable for one in slices])
        self.clock.tick()
        random.move_to(start + training.group.slices)
        for one in slices if is_whole else ():
            training.results.add_rows(one.number, one.executable.program, one.device.kept_rows(one.number))
        training.results.losses.update(self._devices[0].losses())
        training.results.is_shared = True
        state.advance()
        training.steps += 1
        completion = self.exchange.mark()
        if not _is_waited_for(call):
            return completion
        completion.wait()
        return None

    def _works(self, slices: Sequence[_Slice], layout: tuple[int, Sizes], *, is_whole: bool) -> list[Work]:
        """What the host does not interrupt: up to the sums over all slices, and from there on, or all at once."""
        updates = [device.updating for device in self._devices if device.updating is not None]
        key = (layout, is_whole, *(device.rows_moved for device in self._devices))
        own = [one.executable for one in slices] if is_whole else []

        def add_up() -> None:
            if self.can_fail:
                self.exchange.clear_failures()
            if is_whole:
                self._enqueue_slices(slices)
            self._reduce()

        def update() -> None:
            for device in self._devices:
                device.update(self._bank)
            if self.training.group.size > 1:
                self._gather([device.values for device in self._devices])

        def both() -> None:
            add_up()
            update()

        if self._has_norms:
            return [Work(("sums", key), self._bank, own, add_up), Work(("update", key), self._bank, updates, update)]
        return [Work(("step", key), self._bank, [*own, *updates], both)]

    def _perform(self, works: Sequence[Work], batch: int, executables: Sequence[Executable]) -> None:
        """Do it, as all processes can, and wait where one of them may be gone or a slice may have failed."""
        training, exchange = self.training, self.exchange
        readiness = min(exchange.readiness(work) for work in works)
        if training.group.size > 1:
            nothing = [np.empty(0, np.uint8)] * training.group.size
            word = training.signal * _LEVELS + readiness
            words = training.exchange.alltoall(Kind.STEP, nothing, nothing, same=batch, word=word)
            training.signals = [word // _LEVELS for word in words]
            readiness = min(word % _LEVELS for word in words)
        for work in works:
            if work is works[-1]:
                numbers = self._numbers()
                for device in self._devices:
                    device.feed_update(numbers, self._bank)
            exchange.perform(work, readiness)
            if training.group.size > 1:
                exchange.wait(training.exchange.timeout)  # a process may be gone
            if self.can_fail and exchange.has_failed(executables, _PHASES):
                training.exchange.barrier()  # the process that has failed says why

    # Slices -----------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _turns(self) -> list[tuple[StepDevice, int]]:
        """(device, number of the slice) of all own slices, so that devices take turns."""
        turns = range(max(device.slice_count for device in self._devices))
        found = [(device, self.own[device.rank][0] + turn) for turn in turns for device in self._devices]
        return [(device, number) for device, number in found if number < self.own[device.rank][1]]

    def _slices(self, batch: int, sizes: Sizes) -> list[_Slice]:
        """All own slices that have samples, and their programs, bound to the newest parameters."""
        samples = cut(batch, self.training.group.slices)
        found = []
        for device, number in self._turns:
            first, last = samples[number]
            if first < last:
                program = device.compiled.get("slice", last - first, True, sizes)
                part = Part(number, first, last, (last - first) / batch)
                found.append(_Slice(device, part, device.bound(program, number)))
        return found

    def _feeding(
        self, slices: Sequence[_Slice], call: Call, batch: int, data: Mapping[Tensor, Any], start: int
    ) -> Callable[[_Slice], Mapping[Value, Any]]:
        """What gives the arrays that a slice is fed. The data of the call is looked at now."""
        training, random = self.training, self.training.session.random
        whole: dict[Tensor, Array] = {}
        specifications: dict[Program, RunSpecification] = {}
        for device, _, executable in slices:
            program = executable.program
            if program not in specifications:
                specification = device.compiled.specification(program, _PHASES, ExecutionOptions.SYNCHRONOUS)
                if not specifications:
                    whole = training.slices.whole_batch(specification, call, batch, data)
                    random.prepare(program.random_keys)
                specifications[program] = specification
        training.has_begun = True

        def feed(one: _Slice) -> Mapping[Value, Any]:
            program = one.executable.program
            random.move_to(start + one.number)
            inputs = training.slices.sliced(specifications[program].inputs, whole, one.part)
            return one.device.fed(program, inputs, one.part.share)

        return feed

    def _is_whole(self, slices: Sequence[_Slice]) -> bool:
        """Can slices and exchange be one graph? Not where the host must look at something in between.

        That is at sums over all slices that they wait for, and at outputs with gaps. Nor where one slice should compute
        while the data of the next is copied.
        """
        exchange = self.exchange
        return (
            exchange.captures
            and not self.training.program.sums
            and not any(one.device.slice_count > 1 and exchange.overlaps(one.executable) for one in slices)
            and all(device.place_rows(self._of(device, slices)) for device in self._devices)
        )

    def _of(self, device: StepDevice, slices: Sequence[_Slice]) -> list[tuple[int, Executable]]:
        """The slices of one device."""
        return [(one.number, one.executable) for one in slices if one.device is device]

    def _slot(self, one: _Slice) -> int:
        """Which of what its program is fed is for this slice."""
        return self._bank * one.device.slice_count + one.number - self.own[one.device.rank][0]

    def _enqueue_slices(self, slices: Sequence[_Slice]) -> None:
        """All slices, fed before, one behind the other on each device."""
        by_number = {one.number: one for one in slices}
        for device, number in self._turns:
            one = by_number.get(number)
            if one is not None:
                self.exchange.run(device.rank, one.executable, _PHASES, self._slot(one))
                device.copy_rows(number)
            device.take(number, is_empty=one is None)
        for device, executable in dict.fromkeys((one.device, one.executable) for one in slices):
            if executable.can_fail:
                self.exchange.note_failure(device.rank, executable)

    def _run_slices(self, slices: Sequence[_Slice], feed: Callable[[_Slice], Mapping[Value, Any]]) -> None:
        """All slices, in turn on all devices, which run side by side; part by part where they wait for sums."""
        training = self.training
        ran: dict[StepDevice, _Slice] = {}
        completions: list[Completion] = []
        by_number = {one.number: one for one in slices}
        parts = training.program.parts(_PHASES)
        for place, (names, total) in enumerate(parts):
            for device, number in self._turns:
                one = by_number.get(number)
                if one is not None:
                    if place == 0:
                        one.executable.feed(device.engine, feed(one))
                    self._take_rows(ran, device)
                    completion = one.executable.run(one.executable.program.parts(_PHASES)[place][0])
                    if completion is not None and one.executable.can_fail:
                        completions.append(completion)
                    if total is not None:
                        training.results.add_sum(number, device.read_sum(names[-1], total))
                if place == len(parts) - 1:
                    device.take(number, is_empty=one is None)
                    if one is not None:
                        ran[device] = one
            if total is not None:
                values = training.results.take_sum(total.shape, total.dtype)
                for device in self._devices:
                    device.write_sum(names[-1], values)
        for device in self._devices:
            self._take_rows(ran, device)
        for completion in completions:  # nothing is updated after a slice that failed
            completion.wait()

    def _take_rows(self, ran: dict[StepDevice, _Slice], device: StepDevice) -> None:
        """Outputs of the slice a device ran last, before the next: by now the other devices have got theirs to run."""
        if device in ran:
            one = ran.pop(device)
            self.training.results.add_rows(one.number, one.executable.program, one.executable.keep)

    # Exchange ---------------------------------------------------------------------------------------------------------

    def _reduce(self) -> None:
        """Sums over all slices, of every device's own shard; in one process then of all shards on all devices."""
        transfers: list[Transfer] = []
        for source in range(self.exchange.size):
            for target in range(self.exchange.size):
                for place, _ in enumerate(self.nodes[source] if source != target else ()):
                    for bucket in range(len(self.bounds)):
                        read, written = self._local(source), self._local(target)
                        transfers.append(
                            Transfer(
                                source,
                                target,
                                None if read is None else read.sent(bucket, place, target),
                                None if written is None else written.received[source][place][bucket],
                            )
                        )
        self.exchange.move([*transfers, *self.exchange.failures()] if self.can_fail else transfers)
        for device in self._devices:
            device.reduce()
            if self.can_fail:
                self.exchange.guard(device.rank, device.updating)
        if self.training.group.size == 1:
            self._gather([device.whole for device in self._devices])

    def _gather(self, buffers: Sequence[Sums]) -> None:
        """Every device's shard of these buckets, to all others."""
        transfers = []
        for source in range(self.exchange.size):
            for target in range(self.exchange.size):
                for bucket in range(len(self.bounds)) if source != target else ():
                    local = [None if self._local(rank) is None else rank - self.first for rank in (source, target)]
                    read, written = (
                        None if k is None else self.shard(bucket, source, buffers[k][bucket]) for k in local
                    )
                    transfers.append(Transfer(source, target, read, written))
        self.exchange.move(transfers)

    first = ReadOnly[int]("The rank of the first device of this process.", "exchange.rank")

    def _local(self, rank: int) -> StepDevice | None:
        place = rank - self.first
        return self._devices[place] if 0 <= place < len(self._devices) else None

    def shard(self, bucket: int, rank: int, buffer: Buffer) -> Buffer:
        """A device's shard of a buffer as long as a bucket."""
        first, last = self.bounds[bucket][rank : rank + 2]
        size = self.training.buckets[bucket].dtype.itemsize
        return self.exchange.part(buffer, first * size, (last - first) * size)

    def _numbers(self) -> dict[str, float]:
        """What the update is fed. Norms are those the host computes, whatever the device."""
        training = self.training
        state = training.session.state
        assert state is not None
        if self._has_norms:
            for index, bucket in enumerate(training.buckets):
                first, _ = bucket.shard(training.group.rank)
                self._devices[0].whole[index].read(bucket.reduced, first * bucket.dtype.itemsize)
        return training.update.numbers(state)


def _is_waited_for(call: Call) -> bool:
    """Must a step have finished when its call returns, or be told of when it has?"""
    asked = ExecutionOptions.SYNCHRONOUS | ExecutionOptions.PROFILING
    return call.completion_handler is not None or bool(call.outputs_data) or has_option(call.options, asked)


def _bounds(bucket: Bucket, processes: int, size: int) -> list[int]:
    """Where each device's shard of a bucket begins: for processes as the bucket says, they own what lies in it."""
    if processes > 1:
        return bucket.bounds
    return [0, *(BLOCK * last for _, last in cut(bucket.length // BLOCK, size))]
