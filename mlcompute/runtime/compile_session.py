"""compile: from what a graph is to programs that are built, memory that is bound, and tensors that know the graph."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import numpy as np

from mlcompute.compiler.collector import collector_paused
from mlcompute.compiler.program import Program
from mlcompute.compiler.request import Request
from mlcompute.devices import engine_of, engines_of
from mlcompute.enums import DeviceType, GraphCompilationOptions
from mlcompute.errors import CompileError, DataError, DeviceError, GraphError
from mlcompute.group.exchange import Alone
from mlcompute.group.group import TIMEOUT, Group
from mlcompute.layers.layer_state import layer_state
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.runtime.compiled_graph import CompiledGraph
from mlcompute.runtime.definition import has_tensors
from mlcompute.runtime.group_results import GroupRun
from mlcompute.runtime.group_start import begin_together
from mlcompute.runtime.group_training import GroupTraining
from mlcompute.runtime.inputs import Named
from mlcompute.runtime.last_run import LastRun
from mlcompute.runtime.make_request import input_without_batch
from mlcompute.runtime.optimizer_state import OptimizerState
from mlcompute.runtime.tensor_state import TensorState, reside, state_of
from mlcompute.runtime.training_warnings import warn_about_moved_loss, warn_about_untrained
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import read_array

if TYPE_CHECKING:
    from mlcompute.device import Device
    from mlcompute.runtime.session import Session

#: The style of `execute` -> the style of the same passes when they run one by one.
_IN_PASSES = {"fused": "split", "slice": "phases"}


def compile_graph(
    session: Session,
    device: Device,
    options: GraphCompilationOptions,
    input_tensors: Mapping[str, Tensor],
    input_tensors_data: Named,
    group: Group | None = None,
) -> None:
    """Compile and build for a device; when that fails, everything stays as it was."""
    who = session.definition.who
    if device.actual_device_type == DeviceType.ANE and session.definition.learning is not None:
        raise DeviceError(f"{who}.compile: the ANE runs inference graphs only")
    if not session.definition.nodes():
        raise CompileError(f"{who}.compile: the graph has no layers", fix="add layers with node() first")
    if group is not None and session.definition.learning is None:
        raise GraphError(
            f"{who}.compile: an inference graph is not compiled for a group",
            fix="leave group out: every process runs it by itself, on its own samples",
        )
    if len(engines_of(device)) > 1 and session.definition.learning is not None:
        group = _on_several(device, group, who)
    session.definition.declared.check("compile", "input_tensors", input_tensors)
    session.check_links(session.links, options)
    for other in session.links:
        if other is not session and other.device is not None and engine_of(other.device).name != engine_of(device).name:
            raise GraphError(
                f"{who}.compile: it is linked with a graph that was compiled for another device",
                devices=f"{device!r} here, {other.device!r} there",
                fix="compile linked graphs for one device",
            )
    constants = {
        tensor: read_array(input_tensors_data[name], tensor.descriptor, f"'{name}'").copy()
        for name, tensor in input_tensors.items()
        if name in input_tensors_data
    }
    session.wait()
    expect_memory_of_their_own(session)
    session.sends_early = group is not None and group.exchange.sends_early and _shares_memory(device)
    before = (session.device, session.options, session.constants, session.group)
    session.device, session.options, session.constants, session.group = device, options, constants, group
    try:
        compile_session(session, builds=True)
    except BaseException:  # Ctrl-C too
        session.device, session.options, session.constants, session.group = before
        raise
    if session.in_group is not None:
        begin_together(session.in_group)
    for node in session.definition.nodes_before_loss():
        layer_state(node.layer).device_type = device.actual_device_type


def expect_memory_of_their_own(session: Session) -> None:
    """Refuse two parameters over one piece of the caller's memory: each update would write the other's values."""
    found = []
    for tensor in session.definition.updated_tensors():
        storage = state_of(tensor).storage
        if storage is not None and storage.is_callers:
            memory = storage.host_memory()
            begin = memory.__array_interface__["data"][0]
            found.append((begin, begin + memory.nbytes, tensor.label))
    found.sort()
    for (_, end, label), (begin, _, other) in itertools.pairwise(found):
        if begin < end:
            raise DataError(
                f"{session.definition.who}: parameters '{label}' and '{other}' share memory",
                fix="give each its own buffer; to share weights, use one tensor in both layers",
            )


def use_optimizer(session: Session, optimizer: Optimizer) -> None:
    """Replace the optimizer, compiling again; the state of the one before is dropped."""
    learning = session.definition.learning
    assert learning is not None
    session.compile_if_needed()
    session.wait()
    before = learning.optimizer, session.state
    if session.state is not None:
        session.state.retire(session, session.definition.updated_tensors())
    learning.optimizer, session.state = optimizer, OptimizerState(optimizer)
    try:
        compile_session(session, builds=True)
    except BaseException:  # Ctrl-C too
        learning.optimizer, session.state = before
        raise


@collector_paused()
def compile_session(session: Session, *, builds: bool = False, lets_loss_move: bool = False) -> None:
    """Compile the graph; when that fails, everything stays as it was.

    builds           make kernels and memory, too, instead of when a run first needs them
    lets_loss_move   see `Session.compile_if_needed`
    """
    assert session.device is not None
    learning = session.definition.learning
    before = session.compiled
    loss_before = (learning.loss_nodes, learning.placed_on) if learning is not None else ([], [])
    try:
        node_count = session.node_count
        request = session.request()
        if learning is not None and not (builds or lets_loss_move):
            warn_about_moved_loss(learning, loss_before[1])
        compiled = CompiledGraph(request, engine_of(session.device), node_count)
        compiled.size_limit = session.size_limit
        compiled.unbatched = input_without_batch(session.definition, request)
        if compiled.unbatched is not None and session.main_batch(request) < request.batch_size:
            raise CompileError(
                f"{session.definition.who}.compile: {compiled.unbatched!r} does not share the batch axis, so a batch "
                "cannot be cut into slices",
                fix="let all inputs have the samples on their first axis, or use Group.world(slices=1)",
            )
        if not session.definition.waits_for_labels:
            styles, batch = _styles(session, builds=builds), session.main_batch(request)
            programs = compiled.get_all(styles, batch)
            compiled.count_memory_of(programs[0])
            for program in programs if builds else ():
                compiled.built(program)
        _adopt(session, compiled)
        if builds:
            _prepare(session, compiled)
    except BaseException:  # Ctrl-C too
        # What this attempt has compiled is dropped: the next run compiles again.
        session.compiled = session.compiled if session.compiled is before else None
        if learning is not None:
            learning.loss_nodes, learning.placed_on = loss_before
        raise


def _adopt(session: Session, compiled: CompiledGraph) -> None:
    request, learning = compiled.request, session.definition.learning
    if session.state is not None and learning is not None:
        session.state.use_groups(request.groups)
        session.state.check_callers(request.parameters)
        if not session.definition.waits_for_labels:
            program = compiled.get(session.main_style, session.main_batch(request))
            if not session.links:  # of linked graphs, later ones may still be built
                warn_about_untrained(request, learning, updated_by(program))
            session.state.claim(session, updated_by(program))
        session.state.prepare(request.parameters)
    session.compiled, session.passes = compiled, None
    _join_group(session, compiled)
    tensors = _resident_tensors(session, request)
    for state in map(state_of, tensors):
        if state.resident_references and state.storage is not None:
            _look_for_other_devices(state, compiled)
    reside(tensors, session, session.device)
    for tensor in request.inputs:
        state_of(tensor).device = session.device
    session.adopt_gradient_tensors()


def _prepare(session: Session, compiled: CompiledGraph) -> None:
    """Build and allocate everything that the first run of the whole graph needs."""
    if session.group is not None or session.definition.waits_for_labels:
        return
    program = compiled.get(session.main_style, session.main_batch(compiled.request))
    if compiled.crosses_devices:
        for tensor in program.persistent:
            state_of(tensor).wait_for_runs()
    executable = compiled.executable(program)
    compiled.bind(executable, session.storages(program))
    executable.prepare(tuple(program.phases))
    for style in _styles(session)[1:]:
        passes = compiled.built(compiled.get(style, program.batch_size))
        for phase in passes.program.phases:
            passes.prepare((phase,))


def _styles(session: Session, *, builds: bool = True) -> list[str]:
    """What is built when `compile` returns: what `execute` runs, and the passes by themselves."""
    main = session.main_style
    is_alone = not builds or main == "inference" or GraphCompilationOptions.DEFER_SINGLE_PASSES in session.options
    return [main] if is_alone else [main, _IN_PASSES[main]]


def _join_group(session: Session, compiled: CompiledGraph) -> None:
    """Get ready to train with other processes; or by itself, with the whole optimizer state."""
    before, session.in_group = session.in_group, None
    if session.group is not None and not session.definition.waits_for_labels:
        session.in_group = GroupTraining(session, compiled, session.group)
        session.last = GroupRun(session.in_group.results)
        if session.state is not None:
            session.in_group.update.adopt_state(session.state)
    elif before is not None:
        session.last = LastRun()
        for tensor in compiled.request.parameters if session.state is not None else ():
            assert session.state is not None
            session.state.replace(tensor, [buffer.copy() for buffer in session.state.of(tensor)])


def _look_for_other_devices(state: TensorState, compiled: CompiledGraph) -> None:
    """Runs on several devices that share a tensor must wait for each other."""
    for other in state.residents:
        others: CompiledGraph | None = getattr(other, "compiled", None)
        if others is not None and others.engine.name != compiled.engine.name:
            compiled.crosses_devices = others.crosses_devices = True


def _resident_tensors(session: Session, request: Request) -> list[Tensor]:
    """All tensors whose values the graph may hold or change; some occur several times."""
    index = request.index
    tensors = [*session.definition.declared.outputs.values(), *index.produced]
    tensors += [] if request.total is None else [request.total]
    tensors += [tensor for tensor in index.readers if tensor.keeps_data]
    for node in index.of_kinds(has_tensors):
        tensors += [slot.tensor for slot in node.layer.parameters.values()]
        tensors += node.layer.statistics.values()
    return tensors


def _shares_memory(device: Device) -> bool:
    """Does the device compute in the host's memory?"""
    return engine_of(device).wrap(np.empty(0, np.uint8)) is not None


def _on_several(device: Device, group: Group | None, who: str) -> Group:
    """The group whose slices the GPUs of a device share: of this process alone."""
    if group is None:
        return Group(Alone(TIMEOUT))
    if group.size > 1:
        raise DeviceError(
            f"{who}.compile: {len(engines_of(device))} GPUs and a group of {group.size} processes",
            expected="one GPU per process, or several GPUs in one process",
            fix="give each process its own GPU: mlc.Device(gpu_devices=[local rank])",
        )
    return group


def updated_by(program: Program) -> AbstractSet[Tensor]:
    """The parameters a training program, or the update that follows it, changes."""
    return program.exchanged.keys() or program.states.keys()
