"""A compiled graph: programs, one per style, batch size and sizes of inputs, their executables and memory, all in one
arena."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler import Request, compile_program, compile_programs, shapes_with
from mlcompute.compiler.program import Program
from mlcompute.devices.scalars import Scalars
from mlcompute.enums import ExecutionOptions
from mlcompute.errors import Error
from mlcompute.layers.loss import LossLayer
from mlcompute.layers.objective import is_loss
from mlcompute.layers.recurrent import Recurrent
from mlcompute.ops.op import Value
from mlcompute.runtime.run_specification import InputSlot, RunSpecification
from mlcompute.runtime.sizes import Sizes, described, has_varying_inputs, size_names
from mlcompute.runtime.storage import Clock, Storage
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.devices.device import Buffer, Engine, Executable
    from mlcompute.graph import Node
    from mlcompute.runtime.inputs import CallCache


#: For how many sizes of inputs programs are kept by default.
SIZE_LIMIT = 32


class CompiledGraph:
    """What compiling a request gives. Nothing here waits for a run: runs keep the executable they were queued with.

    node_count  nodes the request was made from; more of them mean that it is out of date
    """

    def __init__(self, request: Request, engine: Engine, node_count: int) -> None:
        self.request = request
        self.node_count = node_count
        #: The newest node of all graphs when `node_count` was last found to be right.
        self.newest_node = -1
        #: An input whose first axis does not count samples, though it could: a smaller batch has no meaning for it.
        self.unbatched: Tensor | None = None
        #: Bytes of the arena. Programs of one graph never run at the same time: the largest plan of those that are run
        #: is enough for all.
        self.arena_size = 0
        #: Executables that lie in an arena which has become too small for others.
        self.outgrown: list[Executable] = []
        #: Tensors the losses' labels are fed to.
        self.labels = [tensor for tensor in request.inputs if tensor in request.labels]
        #: Tensors variable-length recurrent layers read the lengths of their sequences from.
        self.lengths = [
            node.sources[-1]
            for node in request.index.of_kinds(lambda kind: issubclass(kind, Recurrent))
            if isinstance(node.layer, Recurrent)
            and node.layer.lengths_at([source.descriptor for source in node.sources]) is not None
        ]
        #: Where parameters, statistics and states lie, looked up anew when one of them was rebound.
        self.storages: dict[Program, dict[Value, Storage]] = {}
        #: Do graphs on other devices use some of them?
        self.crosses_devices = False
        #: Counts the runs that overwrite parameters and states.
        self.clock = Clock(engine)
        #: The same for programs that overwrite only some of it: what they leave alone is as new as it was.
        self._other_clocks = {"inference": Clock(engine), "apply": Clock(engine)}
        for clock in (self.clock, *self._other_clocks.values()):
            weakref.finalize(self, clock.retire)
        #: Cached: results -> does their first axis count samples?
        self._counts_samples: dict[Tensor, bool] = {}
        #: The prepared run of the last `execute`, for calls of the same kind.
        self.call_cache: CallCache | None = None
        #: Error prefixes of inputs: (method that was called, input) -> how errors about it begin.
        self.error_prefixes: dict[tuple[str, Tensor], str] = {}
        #: MLC_DEBUG=time: every run is timed layer by layer, and the times are printed.
        self._prints_times = "time" in os.environ.get("MLC_DEBUG", "").split(",")
        self.engine = engine
        self._arena: Buffer | None = None
        self._programs: dict[tuple[str, int, bool, Sizes], Program] = {}
        #: Sizes of inputs there are programs for, the one used last at the end; with losses or without -> the request.
        self._sizes: dict[Sizes, dict[bool, Request]] = {}
        #: For how many sizes programs are kept, besides the descriptors' own; the least recently used are dropped.
        self.size_limit = SIZE_LIMIT
        self.has_varying_inputs = has_varying_inputs(request)
        #: All built executables, also those that have no memory yet (`_executables` are those that have).
        self._built: dict[Program, Executable] = {}
        self._executables: dict[Program, Executable] = {}
        #: A second executable of the same program, where consecutive steps read different parameter arrays.
        self._twins: dict[Program, Executable] = {}
        #: Executables with an arena of their own, by slice: for slices of a batch whose passes run one by one.
        self._copies: dict[tuple[Program, int], Executable] = {}
        self._listings: dict[Program, Program] = {}
        self._scalars: dict[Program, Scalars] = {}
        #: Does the device compute in the host's memory? If not, what the host writes must be sent.
        self.shares_memory = engine.wrap(np.empty(0, np.uint8)) is not None
        self._specifications: dict[tuple[Program, tuple[str, ...], int], RunSpecification] = {}
        self._lock = threading.RLock()

    def get(self, style: str, batch_size: int, with_losses: bool = True, sizes: Sizes = ()) -> Program:
        """The program for a style, batch size and sizes; without losses it ends at the predictions, without labels."""
        key = (style, batch_size, with_losses, sizes)
        found = self._programs.get(key)
        if found is not None and not sizes:
            return found
        with self._lock:
            wanted = update_request(self.request) if style == "apply" else self._request_for(with_losses, sizes)
            found = self._programs.get(key)
            if found is not None:
                return found
            full = None
            if batch_size < self.request.batch_size and style not in ("slice", "phases"):
                full = self.get(style, self.request.batch_size, with_losses, sizes)
            program = compile_program(_leading(wanted, batch_size), self.engine, style, batch_size, full)
            self._add(key, program, wanted)
            return program

    def get_all(self, styles: Sequence[str], batch_size: int) -> list[Program]:
        """Programs of several styles for one batch size."""
        if list(styles) == ["fused", "split"]:  # which begin alike
            with self._lock:
                request = _leading(self.request, batch_size)
                programs = compile_programs(request, self.engine, styles, batch_size)
                for style, program in zip(styles, programs, strict=True):
                    self._add((style, batch_size, True, ()), program, request)
        return [self.get(style, batch_size) for style in styles]

    def _add(self, key: tuple[str, int, bool, Sizes], program: Program, request: Request) -> None:
        if program.name not in ("slice", "phases"):  # what a slice gives is not the result of the batch
            program.result = request.result
        self._programs[key] = program

    def _request_for(self, with_losses: bool, sizes: Sizes) -> Request:
        """The request for inputs of some sizes, which are now the ones used last."""
        if sizes and with_losses in self._sizes.get(sizes, {}):
            self._sizes[sizes] = self._sizes.pop(sizes)
            return self._sizes[sizes][with_losses]
        request = self.request if with_losses else without_losses(self.request)
        if not sizes:
            return request
        request = dataclasses.replace(request, described=described(request, sizes))
        known = self._sizes.pop(sizes, {})
        self._sizes[sizes] = {**known, with_losses: request}
        self.limit_sizes(self.size_limit)
        return request

    def counts_samples(self, tensor: Tensor) -> bool:
        """Does the first axis of a result count samples? Its shape with another batch tells, if there can be one."""
        found = self._counts_samples.get(tensor)
        if found is None:
            found = self._counts_samples[tensor] = self._find_whether_it_counts_samples(tensor)
        return found

    def _find_whether_it_counts_samples(self, tensor: Tensor) -> bool:
        moves = any(node.layer.moves_axes or node.layer.batch_axes != () for node in self.request.nodes)
        if self.unbatched is not None or not moves:
            return True
        full = self.request.batch_size
        other = full - 1 or 2
        try:
            request = _leading(without_losses(self.request), other)
            rows, *extents = shapes_with(request, self.engine, other)[tensor]
        except Error:
            return True
        first, *wanted = tensor.descriptor.shape
        return extents == wanted and rows * full == first * other

    def limit_sizes(self, limit: int) -> None:
        """Keep programs of so many sizes, those used last."""
        with self._lock:
            self.size_limit = limit
            while len(self._sizes) > limit:
                self._forget(next(iter(self._sizes)))

    def _forget(self, sizes: Sizes) -> None:
        """Drop what was made for some sizes. Runs that are queued keep what they need."""
        del self._sizes[sizes]
        gone = {key: program for key, program in self._programs.items() if key[3] == sizes}
        for key, program in gone.items():
            del self._programs[key]
            for kept in (self._built, self._executables, self._twins, self._listings, self._scalars, self.storages):
                kept.pop(program, None)
        programs = set(gone.values())
        self._specifications = {key: one for key, one in self._specifications.items() if key[0] not in programs}
        self._copies = {key: one for key, one in self._copies.items() if key[0] not in programs}
        if self.call_cache is not None and self.call_cache.run.specification.program in programs:
            self.call_cache = None

    def programs(self) -> set[Program]:
        """Those that were compiled and not dropped since."""
        with self._lock:
            return set(self._programs.values())

    def built(self, program: Program) -> Executable:
        """The program, built; its memory is taken when it is first run (`executable`)."""
        with self._lock:
            found = self._built.get(program)
            if found is None:
                found = self._built[program] = self._build(program)
                _print_if_asked(program)
            return found

    def _build(self, program: Program, arena: Buffer | None = None) -> Executable:
        found = self.engine.build(program, arena, next(iter(self._built.values()), None))
        found.inputs = {}
        return found

    def executable(self, program: Program) -> Executable:
        """The program, ready to run."""
        found = self._executables.get(program)
        if found is None:
            with self._lock:
                found = self.built(program)
                found.place(self._arena_for(program))
                self._executables[program] = found
        return found

    def twin(self, program: Program) -> Executable:
        """A second executable of the program, in the same memory, to be bound to other parameters."""
        found = self._twins.get(program)
        if found is None:
            with self._lock:
                found = self._twins[program] = self._build(program, self._arena_for(program))
        return found

    def count_memory_of(self, program: Program) -> None:
        """Make the next arena large enough for a program that will be run."""
        self.arena_size = max(self.arena_size, program.plan.nbytes)

    def _arena_for(self, program: Program) -> Buffer:
        """The arena, large enough for a program. Others `move` there when a run begins, not while one goes on."""
        self.count_memory_of(program)
        if self._arena is None or self._arena.nbytes < self.arena_size:
            self._arena = self.engine.allocate(self.arena_size)
            self.outgrown = [*self._executables.values(), *self._twins.values()]
        return self._arena

    def move(self) -> None:
        """Before a run: move executables from outgrown arenas to the current one. Earlier results are lost."""
        with self._lock:
            assert self._arena is not None
            for executable in self.outgrown:
                executable.place(self._arena)
            self.outgrown = []

    def executable_of_slice(self, program: Program, number: int) -> Executable:
        """The program in an arena of its own: values of a slice's forward pass stay there for its gradient pass."""
        found = self._copies.get((program, number))
        if found is None:
            with self._lock:
                found = self._build(program, self.engine.allocate(program.plan.nbytes))
            self._copies[program, number] = found
        return found

    def bind(self, executable: Executable, storages: dict[Value, Storage]) -> None:
        """Let an executable work on the newest parameters, statistics and states; it remembers which they are."""
        if self.shares_memory:
            executable.bind_all(self.engine, {value: storage.in_place() for value, storage in storages.items()})
            executable.feed(self.engine, self.scalars_of(executable.program).arrays)
        else:
            for value, storage in storages.items():
                executable.bind(value, storage.buffer(self.engine))
        executable.bound_to, executable.bound_at = storages, Storage.changes

    def clock_of(self, program: Program) -> Clock:
        """What counts the runs of a program."""
        return self._other_clocks.get(program.name, self.clock)

    def specification(self, program: Program, phases: tuple[str, ...], options: ExecutionOptions) -> RunSpecification:
        """What runs of some phases share."""
        key = (program, phases, int(options))
        found = self._specifications.get(key)
        if found is None:
            asked = ExecutionOptions(options)
            prints, begins = self._prints_times, "forward" in phases
            profiles = prints or ExecutionOptions.PER_LAYER_PROFILING in asked
            measures = profiles or ExecutionOptions.PROFILING in asked
            synchronous, ahead = ExecutionOptions.SYNCHRONOUS in asked, self.engine.traits.runs_ahead
            found = self._specifications[key] = RunSpecification(
                program,
                phases,
                self._inputs(program, phases),
                program.result if begins else None,
                self._result_value(program),
                trains=program.name != "inference" or bool(program.random_keys),
                begins=begins,
                updates="update" in phases,
                skips=ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE in asked,
                synchronous=synchronous,
                copies=not synchronous and not ahead,
                runs_ahead=not synchronous and ahead and not measures,
                profiles=profiles,
                measures=measures,
                prints=prints,
            )
        return found

    def _result_value(self, program: Program) -> Value | None:
        """Where the result of a run can be read; None where that needs a closer look."""
        result = program.result
        value = program.values.get(result) if result is not None else None
        return value if value in program.kept and result not in program.persistent else None

    def _inputs(self, program: Program, phases: Sequence[str]) -> list[InputSlot]:
        """What the caller supplies for some phases: user gradients come with the gradient phase, all else with forward.

        So what only the gradient steps read is there from the forward pass on, as it was then.
        """
        # An input may itself be an output: needed, though no step reads it.
        read = {value for step in program.steps for value in step.inputs if value.kind == "input"} | program.kept
        found = []
        for tensor, value in program.inputs.items():
            arrives_with = "gradient" if tensor in self.request.user_gradients else "forward"
            if value in read and arrives_with in phases:
                found.append(InputSlot.of(tensor, value, self.request))
        return found

    def scalars_of(self, program: Program) -> Scalars:
        """Learning rate and other scalars of a program. Its runs never overlap, so they all use the same memory."""
        found = self._scalars.get(program)
        if found is None:
            found = self._scalars[program] = Scalars(program.scalars)
        return found

    def by_name(self) -> dict[str, Program]:
        """Listings of the programs compiled so far, by style and batch size: they show kernels and memory."""
        return {
            f"{style} {batch}"
            + ("" if with_losses else " without losses")
            + (f", {size_names(sizes)}" if sizes else ""): self.listing(program)
            for (style, batch, with_losses, sizes), program in self._programs.items()
        }

    def listing(self, program: Program) -> Program:
        """A program with the kernels that run it, for people to read."""
        found = self._listings.get(program)
        if found is None:
            executable = self.built(program)
            found = self._listings[program] = program.with_kernels(executable.kernels, executable.notes)
        return found


def update_request(request: Request) -> Request:
    """The optimizer alone: it updates what a step of the graph would, with gradients that are fed."""
    return Request(
        batch_size=request.batch_size,
        user_gradients={gradient: tensor for tensor, gradient in request.gradient_inputs.items()},
        parameters=list(request.gradient_inputs),
        groups=request.groups,
        optimizer=request.optimizer,
        fuses=request.fuses,
        precision=request.precision,
    )


def without_losses(request: Request) -> Request:
    """The same graph up to the predictions, for runs without labels."""
    others = _only_for_losses(request)
    nodes = [node for node in request.nodes if node not in others]
    dropped = {tensor for node in others for tensor in node.results}
    labels = request.labels | set(request.label_weights.values())
    used = {t for node in nodes for t in node.sources}
    result = _prediction(nodes, [node for node in request.nodes if node in others], request)
    return Request(
        nodes=nodes,
        batch_size=request.batch_size,
        inputs={t: scale for t, scale in request.inputs.items() if t in used or t not in labels},
        constants=request.constants,
        shared=request.shared,
        kept=[t for t in request.kept if t not in dropped and t is not request.total]
        + ([result] if result is not None else []),
        result=result,
        debugged=[t for t in request.debugged if t not in dropped],
        fuses=request.fuses,
        precision=request.precision,
        described=request.described,
    )


def _only_for_losses(request: Request) -> set[Node]:
    """Losses, what is computed from them, and what compares with labels on the way to them."""
    found: set[Node] = set()
    dropped = set[Tensor]()
    compares = request.labels - {result for node in request.nodes for result in node.results}
    for node in request.nodes:
        read = (*node.sources, *node.labels)
        if is_loss(node.layer) or not dropped.isdisjoint(read):
            dropped.update(node.results)
            found.add(node)
        if not compares.isdisjoint(read):
            compares.update(node.results)
    wanted = {node.sources[0] for node in found if isinstance(node.layer, LossLayer)}
    wanted.update(tensor for tensor in request.kept if tensor not in dropped)
    wanted.update([request.prediction] if request.prediction is not None else [])
    users: defaultdict[Tensor, list[Node]] = defaultdict(list)
    for node in request.nodes:
        for tensor in (*node.sources, *node.labels):
            users[tensor].append(node)
    for node in reversed(request.nodes):
        leads = [user for tensor in node.results for user in users[tensor]]
        compared = not compares.isdisjoint(node.results) and wanted.isdisjoint(node.results)
        if compared and leads and all(user in found for user in leads):
            found.add(node)
    return found


def _prediction(nodes: Sequence[Node], dropped: Sequence[Node], request: Request) -> Tensor | None:
    """The first result of the last layer that does more than prepare labels or weights for layers that were dropped."""
    if request.prediction is not None:
        return request.prediction
    consumed = {t for node in dropped for t in (*node.sources, *node.labels)} - {t for n in nodes for t in n.sources}
    predictions = {node.sources[0] for node in dropped if isinstance(node.layer, LossLayer)}
    # Layers that compare a prediction with labels, where the loss is an expression.
    ends = [node for node in dropped if not is_loss(node.layer) and not request.labels.isdisjoint(node.sources)]
    predictions.update(tensor for node in ends for tensor in node.sources)
    for node in reversed(nodes):
        result = node.results[0]
        if result not in consumed or result in predictions:
            return result
    return nodes[-1].results[0] if nodes else None


def _leading(request: Request, batch_size: int) -> Request:
    """For a smaller batch: the leading samples of constants that have one row per sample."""
    full = request.batch_size
    constants = {
        tensor: array[:batch_size] if full > 1 and array.shape[0] == full and tensor not in request.shared else array
        for tensor, array in request.constants.items()
    }
    return request if batch_size == full else dataclasses.replace(request, constants=constants)


def _print_if_asked(program: Program) -> None:
    wanted = os.environ.get("MLC_DEBUG", "").split(",")
    if "steps" in wanted:
        print(program, file=sys.stderr)
    if "plan" in wanted:
        print(program.plan, file=sys.stderr)
