"""The update of the part of all parameters that one process of a group owns, with the optimizer state for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler import Request, compile_program
from mlcompute.compiler.exchange_gradients import GLOBAL_NORM, group_norm, norm_names
from mlcompute.compiler.program import Program
from mlcompute.execution import Execution
from mlcompute.group.exchange import Exchange, Kind
from mlcompute.ops.op import Array, Shape
from mlcompute.runtime.lanes import BLOCK, Lane, Piece
from mlcompute.runtime.sharded_state import ShardedState
from mlcompute.runtime.storage import Storage
from mlcompute.tensor import Tensor, TensorDescriptor

if TYPE_CHECKING:
    from mlcompute.runtime.compiled_graph import CompiledGraph
    from mlcompute.runtime.optimizer_state import OptimizerState
    from mlcompute.runtime.session import Session


class ShardUpdate:
    """A program over pieces of parameters; each piece is a tensor of its own, in the memory of its lane.

    pieces    tensor -> where it lies
    states    tensor -> its optimizer state
    program   None where this process owns no parameter
    """

    def __init__(self, session: Session, compiled: CompiledGraph, exchange: Exchange, lanes: list[Lane]) -> None:
        self._session, self._compiled, self._exchange, self._lanes = session, compiled, exchange, lanes
        self._parameters = [entry.tensor for lane in lanes for entry in lane.entries if entry.role == "parameter"]
        #: State of parameters that stands for the parts of all processes.
        self._adopted: dict[Tensor, list[Storage]] = {}
        self.pieces: dict[Tensor, tuple[Lane, Piece]] = {}
        self._gradients: dict[Tensor, Storage] = {}
        self.states: dict[Tensor, list[Storage]] = {}
        self.program: Program | None = None
        #: All states of all parameters, from all processes; None when an update has changed them since.
        self._whole: dict[Tensor, list[Array]] | None = None
        if compiled.request.optimizer is not None:
            for lane in lanes:
                for piece in lane.pieces(exchange.rank):
                    self._add(lane, piece)
        if self.pieces:
            self._compile()

    def _add(self, lane: Lane, piece: Piece) -> None:
        owner, first = piece.entry.tensor, lane.shard(self._exchange.rank)[0]
        shape = piece.shape
        dtype = owner.descriptor.data_type.numpy
        memory = lane.values[piece.start : piece.stop].reshape(shape) if dtype == lane.dtype else np.zeros(shape, dtype)
        tensor = Tensor(TensorDescriptor(shape, data_type=owner.descriptor.data_type))
        tensor.label, tensor.storage = owner.label, Storage(memory, is_callers=True)
        self.pieces[tensor] = (lane, piece)
        gradient = lane.reduced[piece.start - first : piece.stop - first].reshape(shape)
        self._gradients[tensor] = Storage(gradient, is_callers=True)
        dtype = tensor.state_descriptor.data_type.numpy
        self.states[tensor] = [Storage(np.zeros(extents, dtype)) for extents in self._layout(piece)]

    def _layout(self, piece: Piece) -> list[Shape]:
        """The shapes of a piece's state: those of a whole parameter, or as many elements as the piece has."""
        optimizer = self._compiled.request.optimizer
        assert optimizer is not None
        groups = self._compiled.request.groups.get(piece.entry.tensor, ())
        return list(optimizer.rule(groups).layout(piece.shape).values())

    def _compile(self) -> None:
        request, engine = self._compiled.request, self._compiled.engine
        groups = {tensor: request.groups.get(piece.entry.tensor, ()) for tensor, (_, piece) in self.pieces.items()}
        wanted = Request(parameters=list(self.pieces), optimizer=request.optimizer, groups=groups, fuses=request.fuses)
        self.program = program = compile_program(wanted, engine, "update")
        self._executable = engine.build(program, engine.allocate(program.plan.nbytes))
        self._executable.inputs = {}
        self._scalars = {name: (value, np.empty((), value.dtype)) for name, value in program.scalars.items()}
        self._bound_at = -1
        #: When the parameters of pieces were last stored from the lanes.
        self._stored_at: dict[Tensor, int] = {}
        clock = self._compiled.clock
        self._storages = []
        for tensor in self.pieces:
            assert tensor.storage is not None
            tensor.storage.overwritten_by(clock)
            for state in self.states[tensor]:
                state.overwritten_by(clock)
            values = [program.persistent[tensor], program.exchanged[tensor], *program.states[tensor]]
            storages = [tensor.storage, self._gradients[tensor], *self.states[tensor]]
            self._storages += list(zip(values, storages, strict=True))

    # State ----------------------------------------------------------------------------------------------------------

    def adopt_state(self, state: OptimizerState) -> None:
        """Take the own part of the optimizer's state, and let reading it put all parts together.

        Looked at before every update: state that was restored or bound in between is another object.
        """
        for tensor in self._parameters:
            buffers = state.of(tensor)
            if buffers is self._adopted.get(tensor):
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
        for tensor, (_, piece) in self.pieces.items():
            if piece.entry.tensor is owner:
                storage = self.states[tensor][number]
                part = values if piece.is_whole else values.reshape(-1)[piece.inner]
                storage.write(part.reshape(storage.shape))

    def whole_state(self, owner: Tensor, number: int) -> Array:
        """One state of a parameter; collective when an update has changed it since the last time."""
        if self._whole is None:
            self._whole = self.gather_states()
        return self._whole[owner][number]

    def gather_states(self) -> dict[Tensor, list[Array]]:
        """All states of all parameters, from all processes."""
        mine = [one.array() for states in self.states.values() for one in states]
        message = b"".join(np.ascontiguousarray(array).tobytes() for array in mine)
        found: dict[Tensor, list[Array]] = {}
        for rank, received in enumerate(self._exchange.gather_bytes(Kind.STATE, message)):
            offset = 0
            for lane in self._lanes:
                for piece in lane.pieces(rank):
                    offset = self._read_states(piece, received, offset, found)
        return found

    def _read_states(self, piece: Piece, received: bytes, offset: int, found: dict[Tensor, list[Array]]) -> int:
        """The states of a piece out of what a process has sent; where they end."""
        owner, shapes = piece.entry.tensor, self._layout(piece)
        dtype = owner.state_descriptor.data_type.numpy
        if owner not in found:
            whole = shapes if piece.is_whole else [piece.entry.shape] * len(shapes)
            found[owner] = [np.zeros(shape, dtype) for shape in whole]
        for target, shape in zip(found[owner], shapes, strict=True):
            count = int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(received, dtype, count, offset)
            part = slice(None) if piece.is_whole else piece.inner
            target.reshape(-1)[part] = values
            offset += values.nbytes
        return offset

    def know_states(self, states: dict[Tensor, list[Array]]) -> None:
        """All states are at hand: nobody need be asked until the next update."""
        self._whole = states

    @property
    def knows_states(self) -> bool:
        """Are all states at hand?"""
        return self._whole is not None

    def take_over(self, state: OptimizerState, states: dict[Tensor, list[Array]]) -> None:
        """Go on with these states of all parameters, of which the own part is kept."""
        for tensor, arrays in states.items():
            for number, values in enumerate(arrays):
                self.set_state(tensor, number, values)
            self._adopt(state, tensor, state.of(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of optimizer state this process has."""
        return sum(one.nbytes for states in self.states.values() for one in states)

    # Running --------------------------------------------------------------------------------------------------------

    def numbers(self, state: OptimizerState) -> dict[str, float]:
        """An update begins: what it is fed, from the reduced gradients."""
        state.start()
        self.adopt_state(state)
        self._whole = None
        return {**state.optimizer.scalars_of(state.time_step, state.combinations), **self._norms(state)}

    def run(self, state: OptimizerState) -> None:
        """New parameters of the own shard in the lanes' values, from the reduced gradients."""
        numbers = self.numbers(state)
        if self.program is None:
            return
        for name, (_, array) in self._scalars.items():
            array[()] = numbers[name]
        shares = self._compiled.shares_memory
        # The last exchange left the parameters here; others may have written them since, the caller at any time.
        for tensor, (_, piece) in self.pieces.items():
            owner, storage = piece.entry.tensor.storage, tensor.storage
            assert owner is not None
            assert storage is not None
            if shares and not owner.is_callers and self._stored_at.get(tensor) == owner.moment:
                continue
            np.copyto(storage.host_memory(), owner.array().reshape(-1)[piece.inner].reshape(storage.shape))
            if not shares:
                storage.touched()
                self._gradients[tensor].touched()
        device = self._session.device
        assert device is not None
        execution = Execution(device.queue, self._carry_out)
        device.queue.submit(execution, True, None)
        execution.wait()
        for tensor, (lane, piece) in self.pieces.items():
            assert tensor.storage is not None
            if not shares or tensor.storage.dtype != lane.dtype:
                lane.values[piece.start : piece.stop] = tensor.storage.array().reshape(-1)

    def _carry_out(self) -> None:
        executable, engine, clock = self._executable, self._compiled.engine, self._compiled.clock
        if not self._compiled.shares_memory or self._bound_at != Storage.changes:
            for value, storage in self._storages:
                executable.bind(value, storage.buffer(engine))
            self._bound_at = Storage.changes
        executable.feed(engine, dict(self._scalars.values()))
        try:
            completion = executable.run(("update",))
            if completion is not None:
                completion.wait()
        finally:
            clock.tick()

    def stored(self) -> None:
        """All parameters were just stored from the lanes: they are what the pieces hold."""
        owners = {tensor: piece.entry.tensor.storage for tensor, (_, piece) in self.pieces.items()}
        if owners:
            self._stored_at = {tensor: one.moment for tensor, one in owners.items() if one is not None}

    def _norms(self, state: OptimizerState) -> dict[str, float]:
        """Norms over several gradients, added in blocks that do not depend on the number of processes.

        Groups with a norm of their own are clipped first; the norm of all is that of what is left.
        """
        optimizer, request = state.optimizer, self._compiled.request
        names = norm_names(optimizer)
        if not names:
            return {}
        squares, grouped = dict[Tensor, float](), dict[int, float]()
        for lane in self._lanes:
            messages = self._exchange.gather_bytes(Kind.NORM, lane.squares(self._exchange.rank).tobytes())
            blocks = np.concatenate([np.frombuffer(message, np.float64) for message in messages]).tolist()
            for entry in lane.entries:
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
