"""The update of the part of all parameters that one process of a group owns, with the optimizer state for it.

Where devices compute in the host's memory, it reads everybody's sums of gradients where they lie, adds them in the
order of the tree, and leaves new parameters where all processes find them: one loop over the shard, and no copy.
"""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.compiler import Request, compile_program
from mlcompute.compiler.exchange_gradients import GLOBAL_NORM, group_norm, norm_names
from mlcompute.compiler.program import Program
from mlcompute.compiler.update import is_elementwise
from mlcompute.devices.host_memory import allocate
from mlcompute.errors import ProcessError
from mlcompute.group.exchange import Exchange, Kind
from mlcompute.ops.op import FLOAT32, Array, Value
from mlcompute.runtime.bucket_exchange import BucketExchange, of_bank
from mlcompute.runtime.buckets import BLOCK, Bucket, Piece
from mlcompute.runtime.sharded_state import ShardedState
from mlcompute.runtime.state_layout import StateLayout, whole_states
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import state_of, storage_of
from mlcompute.tensor import Tensor, TensorDescriptor

if TYPE_CHECKING:
    from mlcompute.devices.device import Executable
    from mlcompute.runtime.compiled_graph import CompiledGraph
    from mlcompute.runtime.optimizer_state import OptimizerState
    from mlcompute.runtime.session import Session

#: Sums of more parts than this are added up before the update: a loop that reads too many arrays is slow.
_MOST_PARTS = 16


class ShardUpdate:
    """A program over pieces of parameters; each piece is a tensor of its own.

    pieces    tensor -> where it lies
    program   None where this process owns no parameter
    adds      does the program add up everybody's sums? Else it reads `Bucket.reduced`
    given     state that was set, of which every process knows all, and which may not have reached the mirrors yet
    """

    def __init__(
        self,
        session: Session,
        compiled: CompiledGraph,
        exchange: Exchange,
        buckets: list[Bucket],
        shared: BucketExchange,
        layouts: list[StateLayout],
    ) -> None:
        self._session, self._compiled, self._exchange, self._buckets = session, compiled, exchange, buckets
        self._shared, self._layouts = shared, layouts
        self._queue = session.queue
        parameters = [entry.tensor for bucket in buckets for entry in bucket.entries if entry.role == "parameter"]
        self._parameters = [(tensor, state_of(tensor)) for tensor in parameters]
        #: State of parameters that stands for the parts of all processes.
        self._adopted: dict[Tensor, list[Storage]] = {}
        self.given: dict[Tensor, dict[int, Array]] = {}
        #: All states of all parameters, from all processes; None when an update has changed them since.
        self._whole: dict[Tensor, list[Array]] | None = None
        request = compiled.request
        #: Scalars of the next update besides norms.
        self._numbers: dict[str, float] = {}
        self._norm_names = [] if request.optimizer is None else norm_names(request.optimizer)
        self.adds = (
            compiled.shares_memory
            and request.optimizer is not None
            and not self._norm_names
            and is_elementwise(request.optimizer, request.groups.values())
            and all(len(parts) <= _MOST_PARTS for parts in shared.parts)
        )
        self.pieces: dict[Tensor, tuple[Bucket, Piece]] = {}
        #: Where each piece lies, by bank of its bucket.
        self._places: dict[Tensor, list[Storage]] = {}
        #: Elements that are only summed: (bucket, elements of it).
        self._summed: dict[Tensor, tuple[Bucket, slice]] = {}
        self.program: Program | None = None
        #: `Storage.rebindings` when all parameters were last found in the banks.
        self._found_at = -1
        if request.optimizer is not None:
            for bucket in buckets:
                for piece in bucket.pieces(exchange.rank):
                    self._add(bucket, piece)
                rest = bucket.summed(exchange.rank)
                if self.adds and rest is not None and bucket.dtype == FLOAT32:  # others may be rounded less often there
                    self._summed[Tensor(shape=(rest.stop - rest.start,))] = (bucket, rest)
        layout = layouts[exchange.rank]
        self._memory = shared.mirrors[exchange.rank] if session.elastic else allocate(layout.nbytes).host
        #: The state of each piece; there are two versions where others may have to go on with the one before the last.
        self._versions = [
            {
                tensor: [Storage(array, is_callers=True) for array in arrays]
                for tensor, arrays in zip(self.pieces, layout.arrays(self._memory_of(version)), strict=True)
            }
            for version in range(2 if session.elastic else 1)
        ]
        if self.pieces or self._summed:
            self._compile()

    def _add(self, bucket: Bucket, piece: Piece) -> None:
        owner, shape = piece.entry.tensor, piece.shape
        dtype = owner.descriptor.data_type.numpy
        tensor = Tensor(TensorDescriptor(shape, data_type=owner.descriptor.data_type))
        tensor.label = owner.label
        self.pieces[tensor] = (bucket, piece)
        arrays = [bank[piece.start : piece.stop].reshape(shape) for bank in bucket.banks]
        if dtype != bucket.dtype:
            arrays = [np.zeros(shape, dtype) for _ in bucket.banks]
        self._places[tensor] = [Storage(array, is_callers=True) for array in arrays]
        state_of(tensor).storage = self._places[tensor][0]

    def _compile(self) -> None:
        request, engine, banks = self._compiled.request, self._compiled.engine, len(self._buckets[0].banks)
        groups = {tensor: request.groups.get(piece.entry.tensor, ()) for tensor, (_, piece) in self.pieces.items()}
        wanted = Request(
            parameters=list(self.pieces),
            optimizer=request.optimizer,
            groups=groups,
            fuses=request.fuses,
            summands=self._shared.order if self.adds else 0,
            summed=list(self._summed),
            out_of_place=banks > 1,
            moves_states=len(self._versions) > 1,
            streams=self._shared.has_neighbours,
        )
        self.program = program = compile_program(wanted, engine, "update")
        self._scalars = {name: (value, np.empty((), value.dtype)) for name, value in program.scalars.items()}
        #: A memoryview is written twice as fast as its array.
        self._cells: list[tuple[str, Any]] = [
            (name, array.data if array.dtype.char in "fd" else array) for name, (_, array) in self._scalars.items()
        ]
        places = self._places
        #: Parameters, their values in each bank, where the own piece lies in each, and which elements that is.
        self._known = [
            (piece.entry.tensor, bucket.views[piece.entry.tensor], places[tensor], piece.inner)
            for tensor, (bucket, piece) in self.pieces.items()
        ]
        #: Pieces that the program does not leave in the buckets.
        self._elsewhere = [
            (tensor, bucket, piece)
            for tensor, (bucket, piece) in self.pieces.items()
            if not self._compiled.shares_memory or places[tensor][0].dtype != bucket.dtype
        ]
        parts = {tensor: self._parts(*place) for tensor, place in self.pieces.items()}
        self._gradients = [one for some in parts.values() for one in some]
        arena = engine.allocate(program.plan.nbytes)
        #: One for each bank that may be the current one, and where what it reads and writes lies.
        self._executables: list[tuple[Executable, list[tuple[Value, Storage]]]] = []
        for bank in range(banks):
            executable = engine.build(program, arena)
            executable.inputs = {}
            storages = [one for tensor in self.pieces for one in self._bound(program, tensor, parts[tensor], bank)]
            storages += [one for tensor in self._summed for one in self._bound_sum(program, tensor, bank)]
            self._executables.append((executable, storages))
            if self._compiled.shares_memory:  # once and for all
                executable.feed(engine, dict(self._scalars.values()))
                for value, storage in storages:
                    executable.bind(value, storage.buffer(engine))

    def _parts(self, bucket: Bucket, piece: Piece) -> list[Storage]:
        """The arrays whose sum is a piece's gradient."""
        first = bucket.shard(self._exchange.rank)[0]
        arrays = self._shared.parts[self._buckets.index(bucket)] if self.adds else [bucket.reduced]
        inner = slice(piece.start - first, piece.stop - first)
        return [Storage(array[inner].reshape(piece.shape), is_callers=True) for array in arrays]

    def _bound(self, program: Program, tensor: Tensor, parts: list[Storage], bank: int) -> list[tuple[Value, Storage]]:
        """Where the values of a piece lie when a bank is the current one."""
        old = [self._places[tensor][bank], *self._version(bank)[tensor]]
        values = [program.persistent[tensor], *program.states[tensor]]
        bound = [*zip(values, old, strict=True), *zip(program.summands[tensor], parts, strict=True)]
        places, states = self._places[tensor], self._version(bank + 1)[tensor]
        new = [places[(bank + 1) % len(places)], *states]
        for storage in new:
            storage.overwritten_by(self._compiled.clock)
        return [*bound, *zip(program.updated.get(tensor, values), new, strict=True)]

    def _bound_sum(self, program: Program, tensor: Tensor, bank: int) -> list[tuple[Value, Storage]]:
        """Where the parts of what is only added up lie, and the sum."""
        bucket, rest = self._summed[tensor]
        first = bucket.shard(self._exchange.rank)[0]
        parts = [
            array[rest.start - first : rest.stop - first] for array in self._shared.parts[self._buckets.index(bucket)]
        ]
        arrays = [*parts, bucket.banks[(bank + 1) % len(bucket.banks)][rest]]
        values = [*program.summands[tensor], *program.updated[tensor]]
        return [(value, Storage(array, is_callers=True)) for value, array in zip(values, arrays, strict=True)]

    # State ----------------------------------------------------------------------------------------------------------

    @property
    def bank(self) -> int:
        """The current bank of all buckets."""
        return self._buckets[0].current if self._buckets else 0

    def _version(self, bank: int) -> dict[Tensor, list[Storage]]:
        return self._versions[bank % len(self._versions)]

    def _memory_of(self, bank: int) -> Array:
        """The flat memory of the own state."""
        nbytes = self._layouts[self._exchange.rank].nbytes
        start = nbytes * (bank % (2 if self._session.elastic else 1))
        return self._memory[start : start + nbytes]

    @property
    def states(self) -> dict[Tensor, list[Storage]]:
        """The newest optimizer state of each piece."""
        return self._version(self.bank)

    def adopt_state(self, state: OptimizerState) -> None:
        """Take the own part of the optimizer's state, and let reading it put all parts together.

        Looked at before every update: state that was restored or bound in between is another object.
        """
        for tensor, own in self._parameters:
            adopted = self._adopted.get(tensor)
            if own.optimizer_storages is adopted:  # as nearly always, and much faster to look at
                continue
            buffers = state.of(tensor)
            if buffers is adopted:
                continue
            for number, buffer in enumerate(buffers):
                self.set_state(tensor, number, buffer.array())
            self._adopt(state, tensor, buffers)

    def _adopt(self, state: OptimizerState, tensor: Tensor, buffers: list[Storage]) -> None:
        sharded: list[Storage] = [ShardedState(self, tensor, number, one) for number, one in enumerate(buffers)]
        self._adopted[tensor] = sharded
        state.replace(tensor, sharded)

    def set_state(self, owner: Tensor, number: int, values: Array) -> None:
        """New values of one state of a parameter, of which the own part is kept."""
        self._whole = None
        if self._session.elastic:
            self.given.setdefault(owner, {})[number] = values
        for tensor, (_, piece) in self.pieces.items():
            if piece.entry.tensor is owner:
                storage = self.states[tensor][number]
                part = values if piece.is_whole else values.reshape(-1)[piece.inner]
                storage.write(part.reshape(storage.shape))

    def whole_state(self, owner: Tensor, number: int) -> Array:
        """One state of a parameter; collective when an update has changed it since the last time."""
        if self._whole is None:
            try:
                self._whole = self.gather_states()
            except ProcessError as error:
                if not error.is_lost or not self._session.goes_on_without_others():
                    raise
                assert self._session.in_group is not None
                self._whole = self._session.in_group.update.gather_states()
        return self._whole[owner][number]

    def gather_states(self) -> dict[Tensor, list[Array]]:
        """All states of all parameters, from all processes."""
        if self._whole is not None:
            return self._whole
        if self._session.elastic and self._shared.is_shared:  # at hand: nobody need be asked
            return whole_states(self._layouts, [of_bank(one, self.bank) for one in self._shared.mirrors.values()])
        self.fetch_states(self.bank)
        message = self._memory_of(self.bank).tobytes()
        messages = self._exchange.gather_bytes(Kind.STATE, message)
        return whole_states(self._layouts, [np.frombuffer(one, np.uint8) for one in messages])

    def fetch_states(self, bank: int) -> None:
        """Bring them into host memory, where the device has others."""
        for states in self._version(bank).values():
            for one in states:
                one.array()

    def states_after(self, bank: int) -> dict[Tensor, list[Array]]:
        """All states in a bank, of which processes that are gone have left mirrors. Collective among the survivors."""
        ranks = range(len(self._layouts))
        known = {rank: self._shared.mirrored(rank, bank) for rank in ranks}
        if not self._shared.is_shared:
            mine = pickle.dumps({rank: part.tobytes() for rank, part in known.items() if part is not None})
            for one in self._exchange.gather_bytes(Kind.STATE, mine):
                known.update({rank: np.frombuffer(part, np.uint8) for rank, part in pickle.loads(one).items()})
        lost = [rank for rank in ranks if known[rank] is None and not self._is_given(rank)]
        if lost:
            raise ProcessError(
                f"rank {', '.join(map(str, lost))} and the next one are gone, and with them their optimizer state",
                fix="start again from the last checkpoint",
                ranks=tuple(lost),
            )
        nothing = [np.zeros(layout.nbytes, np.uint8) for layout in self._layouts]
        parts = [nothing[rank] if (part := known[rank]) is None else part for rank in ranks]
        states = whole_states(self._layouts, parts)
        for tensor, values in self.given.items():
            for number, array in values.items():
                states[tensor][number] = array.copy()
        return states

    def _is_given(self, rank: int) -> bool:
        """Was all state in a process's shard set since the last step?"""
        layout = self._layouts[rank]
        return all(len(self.given.get(piece.entry.tensor, {})) == len(places) for piece, places in layout.places)

    def take_over(self, state: OptimizerState, states: dict[Tensor, list[Array]]) -> None:
        """Go on with these states of all parameters, of which the own part is kept."""
        for tensor, arrays in states.items():
            for number, values in enumerate(arrays):
                self.set_state(tensor, number, values)
            self._adopt(state, tensor, state.of(tensor))
        self._whole = states

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state this process has."""
        return sum(one.nbytes for version in self._versions for states in version.values() for one in states)

    def sums(self, bucket: Bucket) -> bool:
        """Does the program also add up what is not updated in a bucket, statistics and losses?"""
        return any(bucket is one for one, _ in self._summed.values())

    # Running --------------------------------------------------------------------------------------------------------

    def begin(self, state: OptimizerState) -> None:
        """An update begins: all state is where it will work on it."""
        self._numbers = state.scalars_of(state.optimizer)
        self.adopt_state(state)
        self._whole = None

    def numbers(self, state: OptimizerState) -> dict[str, float]:
        """What the update that has begun is fed, from the reduced gradients."""
        return {**self._numbers, **self._norms(state)}

    def run(self, state: OptimizerState) -> None:
        """New parameters of the own shard in the buckets' coming banks, from everybody's sums of gradients."""
        self.begin(state)
        numbers = self.numbers(state) if self._norm_names else self._numbers
        if self.program is None:
            return
        for name, cell in self._cells:
            cell[()] = numbers[name]
        bank = self.bank
        if self._found_at != Storage.rebindings:
            self._find_parameters(bank)
        self._queue.run_now(self._carry_out, bank)
        for tensor, bucket, piece in self._elsewhere:
            new = self._places[tensor][bucket.coming]
            bucket.banks[bucket.coming][piece.start : piece.stop] = new.array().reshape(-1)
        if self._session.elastic and not self._compiled.shares_memory:
            self.fetch_states(bank + 1)

    def _find_parameters(self, bank: int) -> None:
        """The last step left them in the bank, unless somebody has written them, or bound other memory, since."""
        self._found_at = Storage.rebindings
        for owner, views, places, inner in self._known:
            newest = storage_of(owner)
            if newest.host_memory() is not views[bank]:
                storage = places[bank]
                values = newest.array().reshape(-1)[inner]
                np.copyto(storage.host_memory(), values.reshape(storage.shape))
                storage.touched()
                self._found_at = -1  # it may be the caller's memory, who may write it at any time

    def _carry_out(self, bank: int) -> None:
        engine, clock = self._compiled.engine, self._compiled.clock
        executable, storages = self._executables[bank]
        if not self._compiled.shares_memory:
            for gradient in self._gradients:
                gradient.touched()
            for value, storage in storages:
                executable.bind(value, storage.buffer(engine))
            executable.feed(engine, dict(self._scalars.values()))
        try:
            completion = executable.run(("update",))
            if completion is not None:
                completion.wait()
        finally:
            clock.tick()

    def _norms(self, state: OptimizerState) -> dict[str, float]:
        """Norms over several gradients, added in blocks that do not depend on the number of processes.

        Groups with a norm of their own are clipped first; the norm of all is that of what is left.
        """
        optimizer, request = state.optimizer, self._compiled.request
        names = self._norm_names
        if not names:
            return {}
        squares, grouped = dict[Tensor, float](), dict[int, float]()
        for bucket in self._buckets:
            messages = self._exchange.gather_bytes(Kind.NORM, bucket.squares(self._exchange.rank).tobytes())
            blocks = np.concatenate([np.frombuffer(message, np.float64) for message in messages]).tolist()
            for entry in bucket.entries:
                if entry.role == "parameter":
                    squares[entry.tensor] = math.fsum(blocks[entry.start // BLOCK : -(-entry.stop // BLOCK)])
        of_group = {tensor: optimizer.clipping_group(request.groups.get(tensor, ())) for tensor in squares}
        for tensor, square in squares.items():
            group = of_group[tensor]
            if group is not None:
                grouped[group] = grouped.get(group, 0.0) + square
        limits = {group: optimizer.groups[group].clip_norm for group in grouped}
        factors = {g: min(1.0, (limits[g] or 0.0) ** 2 / total) if total else 1.0 for g, total in grouped.items()}
        total = math.fsum(
            square * (1.0 if (group := of_group[tensor]) is None else factors[group])
            for tensor, square in squares.items()
        )
        norms = dict.fromkeys(names, 0.0) | {group_norm(group): math.sqrt(sq) for group, sq in grouped.items()}
        return norms | ({GLOBAL_NORM: math.sqrt(total)} if GLOBAL_NORM in norms else {})
