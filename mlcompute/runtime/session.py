"""What a training or inference graph has at run time: a device, compiled programs, queued runs and the last run."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from mlcompute.building.node_index import NodeIndex
from mlcompute.compiler.program import Program
from mlcompute.compiler.request import Request
from mlcompute.devices import queue_of
from mlcompute.enums import GraphCompilationOptions
from mlcompute.errors import CompileError, ExecutionError, GraphError
from mlcompute.graph import Graph, Node
from mlcompute.group.group import Group
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Array, Value, overwritten_by
from mlcompute.platform import RandomPasses
from mlcompute.runtime.compile_session import compile_session, expect_memory_of_their_own
from mlcompute.runtime.compiled_graph import SIZE_LIMIT, CompiledGraph
from mlcompute.runtime.definition import Definition
from mlcompute.runtime.group_start import averaged_over_samples
from mlcompute.runtime.group_training import GroupTraining
from mlcompute.runtime.inputs import Inputs
from mlcompute.runtime.last_run import LastRun
from mlcompute.runtime.make_request import make_request, minimised_terms
from mlcompute.runtime.optimizer_state import OptimizerState
from mlcompute.runtime.passes import Passes
from mlcompute.runtime.run_specification import rows_per_sample
from mlcompute.runtime.sizes import Sizes, sizes_of
from mlcompute.runtime.slice_passes import largest_slice
from mlcompute.runtime.storage import Storage
from mlcompute.runtime.tensor_state import reside, state_of
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.device import Device
    from mlcompute.devices.device import Engine
    from mlcompute.devices.foreign_array import DeviceArray
    from mlcompute.inference import InferenceGraph
    from mlcompute.runtime.job import Job
    from mlcompute.runtime.queue import WorkQueue
    from mlcompute.training import TrainingGraph

#: How many runs may be unchecked before the device is asked for their outcome; failures show without asking.
_MOST_UNCHECKED = 8


class Session:
    """One graph at run time. Its tensors know it: it may hold their values, or be changing them.

    device     what it was compiled for; None before
    group      the processes that train it together; None: this one alone
    links      the sessions of linked graphs in order, itself among them; empty for a graph that stands alone
    compiled   None when there is nothing compiled, or something it depends on has changed since
    unchecked  runs that may still fail, or whose failure nobody may have seen
    passes     the passes run one by one that were last asked for; None: some other run
    state      of the optimizer; None without one
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.device: Device | None = None
        self.group: Group | None = None
        #: Do the processes that are left go on when others are gone?
        self.elastic = False
        #: The graph in that group, once it is compiled.
        self.in_group: GroupTraining | None = None
        #: Are gradients sent to other processes while others are computed?
        self.sends_early = False
        self.options = GraphCompilationOptions.NONE
        self.constants: dict[Tensor, Array] = {}
        self.links: list[Session] = []
        self.compiled: CompiledGraph | None = None
        self.inputs = Inputs()
        self.unchecked: deque[Job] = deque()
        #: Are the weights replaced by their averages? Nothing can be trained meanwhile.
        self.has_averaged_weights = False
        self._checking = threading.Lock()
        self.last = LastRun()
        self.passes: Passes | None = None
        self.random = RandomPasses()
        self.size_limit = SIZE_LIMIT
        #: Sums of gradients over several batches, for gradient accumulation.
        self.gradient_sums: dict[Tensor, Storage] = {}
        optimizer = definition.learning.optimizer if definition.learning is not None else None
        self.state = OptimizerState(optimizer) if optimizer is not None else None

    def copied(self, definition: Definition) -> Session:
        """For a graph over the same weights: it is compiled when it is first run, and shares the optimizer's state."""
        if self.links:
            raise GraphError(
                f"{definition.who}: a linked graph cannot be copied by itself",
                fix="copy.deepcopy copies all linked graphs with their weights; or make new graphs and link them",
            )
        self.wait()
        copied = Session(definition)
        copied.device, copied.options, copied.constants = self.device, self.options, dict(self.constants)
        copied.group = self.group
        copied.random = copy.copy(self.random)
        copied.state = None if self.state is None else self.state.shared()
        copied.adopt_gradient_tensors()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """For a graph with weights, optimizer and state of its own; linked graphs are copied with it."""
        self.wait()
        copied = memo[id(self)] = Session.__new__(Session)
        Session.__init__(copied, copy.deepcopy(self.definition, memo))
        copied.device, copied.options, copied.group = self.device, self.options, self.group
        copied.constants = copy.deepcopy(self.constants, memo)
        copied.links = [copy.deepcopy(link, memo) for link in self.links]
        copied.random = copy.copy(self.random)
        if self.state is not None and copied.state is not None:
            copied.state = self.state.copied(copied.state.optimizer, memo)
        copied.adopt_gradient_tensors()
        return copied

    def adopt_gradient_tensors(self) -> None:
        """Answer for the values of the gradient tensors from now on."""
        if self.definition.learning is not None:
            reside(self.definition.learning.gradient_of, self)

    # Links ----------------------------------------------------------------------------------------------------------

    def link(self, others: Sequence[Session]) -> None:
        """Join the sessions of later graphs to this one, the first."""
        group = list(dict.fromkeys([self, *others]))
        for member in group:
            if member.device is not None:
                member.check_links(group, member.options)
        for member in group:
            member.links = group
            member.outdated()

    def check_links(self, group: Sequence[Session], options: GraphCompilationOptions) -> None:
        """Refuse linked graphs that were not compiled to be linked."""
        if len(group) > 1 and GraphCompilationOptions.LINK_GRAPHS not in options:
            raise GraphError(
                f"{self.definition.who}: a linked graph was compiled without LINK_GRAPHS",
                fix="compile every linked graph with options=GraphCompilationOptions.LINK_GRAPHS",
            )

    @property
    def earlier(self) -> list[Session]:
        """Linked graphs before this one."""
        return self.links[: self.links.index(self)] if self.links else []

    @property
    def later(self) -> list[Session]:
        """Linked graphs after this one."""
        return self.links[self.links.index(self) + 1 :] if self.links else []

    @property
    def linked_definitions(self) -> list[Definition]:
        """What the other linked graphs are."""
        return [other.definition for other in self.links if other is not self]

    def linked_value(self, tensor: Tensor) -> Callable[[], Array | None] | None:
        """How to get a tensor that another graph, linked with this one, computes; None when none does."""
        learns = self.definition.learning is not None
        for other in self.earlier if learns else self.links:
            if other is not self and any(tensor in node.results for node in other.definition.nodes()):
                return functools.partial(other.latest, tensor)
        source = self.definition.source_of(tensor)
        users = [other for other in self.later if source in other.definition.used_tensors()]
        return functools.partial(_sum_of_gradients, source, users) if source is not None and users else None

    # Compiling ------------------------------------------------------------------------------------------------------

    def compile_if_needed(self, *, lets_loss_move: bool = False) -> Request:
        """Compile what was declared or changed since the last time. What was asked of the compiler.

        lets_loss_move   the caller sees to layers that have come between the graph and its loss: no warning
        """
        if self.device is None:
            raise ExecutionError(
                f"{self.definition.who}: the graph is not compiled", fix="call compile(device=...) first"
            )
        if self.compiled is not None and self.compiled.newest_node != Node.newest:
            # Some graph has got a node; is it one of those this one is made of, or linked with?
            if self.compiled.node_count == self.node_count:
                self.compiled.newest_node = Node.newest
            else:
                self.compiled = None
        if self.compiled is None:
            compile_session(self, lets_loss_move=lets_loss_move)
        return self.current.request

    @property
    def current(self) -> CompiledGraph:
        """What is compiled; asked for after `compile_if_needed`."""
        assert self.compiled is not None
        return self.compiled

    @property
    def queue(self) -> WorkQueue:
        """Where runs wait for their turn on the device."""
        assert self.device is not None
        return queue_of(self.device)

    @property
    def node_count(self) -> int:
        """Nodes of this and all linked graphs."""
        return sum(other.definition.node_count for other in self.links or [self])

    @property
    def main_style(self) -> str:
        """The style whose memory `device_memory_size` speaks of right after compile."""
        if self.group is not None:
            return "slice"
        return "inference" if self.definition.learning is None else "fused"

    def main_batch(self, request: Request) -> int:
        """How many samples a run of that style has."""
        return self.main_rows(request.batch_size)

    def main_rows(self, batch_size: int) -> int:
        """How many samples a run of that style has, for a batch of so many."""
        return batch_size if self.group is None else largest_slice(batch_size, self.group.slices)

    def request(self) -> Request:
        """The request for the compiler."""
        earlier, later = ([other.definition for other in some] for some in (self.earlier, self.later))
        request = make_request(self.definition, self.options, self.constants, earlier, later)
        if self.state is not None:
            self.state.count_missed(request.parameters)
            request.groups = self.state.with_missed(request.groups)
        if self.device is not None:
            request.precision = self.device.precision
        if self.group is not None:
            request.averaged = averaged_over_samples(self.definition, request)
            request.slices = self.group.slices
            request.sends_early = self.sends_early
        return request

    def set_elastic(self, elastic: bool) -> None:
        """Do the processes that are left go on when others are gone? Collective."""
        if elastic and not self.elastic and self.in_group is not None:
            self.in_group.set_elastic()
        self.elastic = elastic

    def goes_on_without_others(self) -> bool:
        """When processes of the group are gone between steps: go on with those that are left, if that is asked for."""
        if not self.elastic or self.in_group is None:
            return False
        self.in_group.go_on()
        return True

    def outdated(self) -> None:
        """Something the programs depend on has changed: compile again before the next run."""
        self.compiled = None

    # Programs and memory --------------------------------------------------------------------------------------------

    def program(self, style: str, batch_size: int, with_losses: bool = True, sizes: Sizes = ()) -> Program:
        """The program for a style, batch size and sizes of inputs, compiled at its first use."""
        return self.current.get(style, batch_size, with_losses, sizes)

    def sizes_of(self, data: Mapping[Tensor, Any]) -> Sizes:
        """The sizes of the data of a call, where they differ from the inputs' own."""
        return sizes_of(self.current.request, data) if self.current.has_varying_inputs else ()

    def set_size_limit(self, limit: int) -> None:
        """Keep programs of so many sizes of inputs."""
        self.size_limit = limit
        if self.compiled is not None:
            self.compiled.limit_sizes(limit)

    def memory_size(self) -> int:
        """Bytes of arena, optimizer state and sums of gradients; 0 before compile."""
        if self.device is None:
            return 0
        self.compile_if_needed()
        exchanged = 0 if self.in_group is None else self.in_group.nbytes
        return (
            exchanged
            + self.current.arena_size
            + self.state_bytes()
            + sum(one.nbytes for one in self.gradient_sums.values())
        )

    def state_bytes(self) -> int:
        """Bytes of optimizer state."""
        if self.state is None or self.compiled is None:
            return 0
        if self.in_group is not None:
            return self.in_group.update.nbytes
        return self.state.nbytes(self.compiled.request.parameters)

    def storages(self, program: Program) -> dict[Value, Storage]:
        """Where parameters, statistics and states lie; looked up anew only when some tensor was rebound."""
        compiled = self.current
        found = compiled.storages.get(program)
        if found is None:
            found = {}
            for tensor, value in program.persistent.items():
                storage = state_of(tensor).storage
                if storage is None:
                    raise CompileError(f"{self.definition.who}: {tensor!r} has no data")
                found[value] = storage
            if "update" in program.phases and any(storage.is_callers for storage in found.values()):
                expect_memory_of_their_own(self)  # it may have been bound after compile
            for tensor, values in program.states.items():
                if values:
                    assert self.state is not None
                    found.update(zip(values, self.state.of(tensor), strict=True))
            for tensor, value in program.gradient_sums.items():
                if tensor not in self.gradient_sums:
                    self.gradient_sums[tensor] = Storage.owning(np.zeros(value.shape, value.dtype))
                found[value] = self.gradient_sums[tensor]
            if self.in_group is not None:
                left = {**program.exchanged, **program.shared}
                found.update({value: self.in_group.storages[tensor] for tensor, value in left.items()})
                found.update(
                    {value: self.in_group.slices.sum_storage(phase, value) for phase, value in program.sums.items()}
                )
            overwritten = {value for step in program.steps if not step.op.is_pure for value in overwritten_by(step)}
            if self.in_group is not None:  # steps write what is exchanged as their results
                results = (value for step in program.steps for value in step.results)
                overwritten.update(value for value in results if value.kind != "temporary")
            for value, storage in found.items():
                if value in overwritten:
                    storage.overwritten_by(compiled.clock_of(program))
            compiled.storages[program] = found
        return found

    def minimised(self) -> list[Tensor]:
        """The tensors whose sum is minimised."""
        earlier, later = ([other.definition for other in some] for some in (self.earlier, self.later))
        return minimised_terms(self.definition, NodeIndex(self.definition.nodes()), earlier, later)

    def name_of(self, tensor: Tensor) -> str:
        """What messages call a tensor."""
        return self.definition.declared.name_of(tensor)

    def rows_per_sample(self, tensor: Tensor) -> int | None:
        """How many rows of a tensor belong to one sample; None where the graph cannot tell yet."""
        if self.compiled is None or tensor.keeps_data:
            return None
        return rows_per_sample(tensor, self.compiled.request)

    def counts_samples(self, tensor: Tensor) -> bool:
        """Does the first axis of a result count samples, as far as the graph can tell?"""
        self.compile_if_needed()
        return self.current.counts_samples(tensor)

    # Runs -----------------------------------------------------------------------------------------------------------

    def raise_unseen_error(self) -> None:
        """Raise what an earlier run failed with, if nobody was told."""
        unchecked = self.unchecked
        try:
            oldest, newest = unchecked[0], unchecked[-1]
        except IndexError:
            return
        if len(unchecked) <= _MOST_UNCHECKED and not oldest.has_news() and (newest is oldest or not newest.has_news()):
            return
        with self._checking:
            for run in list(unchecked):
                if not run.is_checked:
                    break
                self.has_seen(run)
                if run.error is not None and not run.error_was_seen:
                    run.raise_error()

    def has_seen(self, run: Job) -> None:
        """Note that a run was waited for, so that its error need not be raised again."""
        try:  # noqa: SIM105  a small step would pay for a context manager
            self.unchecked.remove(run)
        except ValueError:
            pass  # another thread has looked at it, too

    def expect_own_weights(self, method: str) -> None:
        """Refuse an update while the weights are their averages."""
        if self.has_averaged_weights:
            raise ExecutionError(
                f"TrainingGraph.{method}: within averaged_weights nothing is trained: the weights are put back when it "
                "ends",
                fix="evaluate or save there, and train afterwards",
            )

    def wait(self) -> None:
        """Return when all queued runs have finished; raises an error nobody has seen yet.

        Inside a completion handler it returns at once: what the run computed can be read there.
        """
        with self._checking:
            try:
                last = self.unchecked[-1]
            except IndexError:  # or another thread has just taken the last one
                last = None
        if last is not None:
            if not last.queue.is_running_here():
                last.queue.wait_for(last)
            last.wait_for_device()
            self.raise_unseen_error()

    # What its tensors ask (mlcompute/runtime/tensor_state.py) ---------------------------------------------------------

    kind = ReadOnly[str]("What messages call the graph.", "definition.who")
    last_run = ReadOnly[int]("Rises with every run, over all graphs.", "last.number")

    def computes(self, tensor: Tensor) -> bool:
        """Did the last run compute this tensor?"""
        return self.definition.source_of(tensor) is not None or self.last.computed(tensor)

    def fetch(self, tensor: Tensor) -> Array | None:
        """The value a result or gradient tensor had in the last run; None when that run did not keep it."""
        source = self.definition.source_of(tensor)
        return self.last.value(tensor) if source is None else self.last.kept_gradient(source)

    def device_array(self, tensor: Tensor, engine: Engine) -> DeviceArray | None:
        """The value a result had in the last run, where it lies on a device; None when it does not."""
        is_here = self.compiled is not None and self.compiled.engine is engine
        return self.last.device_array(tensor) if is_here and self.definition.source_of(tensor) is None else None

    def latest(self, tensor: Tensor) -> Array | None:
        """The value of a result in the last run, for a linked graph."""
        self.wait()
        return self.fetch(tensor)

    def rebound(self, tensor: Tensor) -> None:
        """A parameter or its optimizer state has got other memory: look it up again before the next run."""
        if self.state is not None:
            self.state.rebound(tensor)
        if self.compiled is not None:
            self.compiled.call_cache = None
            self.compiled.storages.clear()

    def synchronize(self) -> None:
        """Wait for queued runs and bring memory the caller has bound up to date with the device."""
        self.wait()
        for storages in self.compiled.storages.values() if self.compiled is not None else ():
            for storage in storages.values():
                if storage.is_callers:
                    storage.array()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Outputs somebody still holds stay readable without the graph that computed them."""
        # When Python ends, modules may be emptied before graphs are: the name `sys` is gone then.
        compiled, last = getattr(self, "compiled", None), getattr(self, "last", None)
        if compiled is not None and last is not None and last.executable is not None and not is_finalizing():
            last.keep_result()
            # Other processes do not know that a graph is dropped here: what is not at hand is not asked for.
            at_hand = None if self.in_group is None else self.in_group.results.losses
            for tensor in compiled.request.kept if at_hand is None else at_hand:
                state = state_of(tensor)
                if self.computes(tensor) and state.left_values[0] < last.number:
                    state.left_values = (last.number, self.fetch(tensor))


@overload
def session_of(graph: TrainingGraph | InferenceGraph) -> Session: ...
@overload
def session_of(graph: Graph) -> Session | None: ...
def session_of(graph: Graph) -> Session | None:
    """What a training or inference graph has at run time; None for a plain graph."""
    found: Session | None = getattr(graph, "_session", None)
    return found


def _sum_of_gradients(tensor: Tensor, users: Sequence[Session]) -> Array | None:
    """What later linked graphs contribute to a tensor's gradient; None when one of them has yet to run its pass."""
    for user in users:
        user.wait()
        if not user.last.has_gradients:
            return None
    parts = [part for user in users if (part := user.last.gradient(tensor)) is not None]
    return sum(parts[1:], parts[0]) if parts else np.zeros(tensor.descriptor.shape, tensor.descriptor.data_type.numpy)
