"""From a description of a graph to a program. `compile_program` is the table of contents: one line per pass."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlcompute import ops
from mlcompute.collector import collector_paused
from mlcompute.compiler.alike import settle, update_alike
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.expand import expand
from mlcompute.compiler.follow import follow
from mlcompute.compiler.fuse import fuse
from mlcompute.compiler.join import join
from mlcompute.compiler.layout import channels_last
from mlcompute.compiler.lower import Lowering
from mlcompute.compiler.merge import merge
from mlcompute.compiler.orient import orient
from mlcompute.compiler.plan import plan_like, plan_memory
from mlcompute.compiler.program import Program
from mlcompute.compiler.recompute import recompute
from mlcompute.compiler.remember import remember
from mlcompute.compiler.schedule import store_early, update_early
from mlcompute.compiler.simplify import simplify
from mlcompute.compiler.update import Updated, update
from mlcompute.compiler.verify import is_verifying, verify_program, verify_steps
from mlcompute.errors import ShapeError
from mlcompute.graph import Node
from mlcompute.layers.layer import Layer
from mlcompute.ops.op import FLOAT32, Array, Value
from mlcompute.optimizers.optimizer import Optimizer
from mlcompute.tensor import Tensor

if TYPE_CHECKING:
    from mlcompute.devices.device import Engine


@dataclass(eq=False)
class Description:
    """What a training or inference graph asks the compiler for.

    inputs          tensors fed before each run -> samples they hold per sample of the batch; 0: not scaled
    constants       inputs whose data is known now
    shared          inputs and constants of which no axis counts samples
    kept            tensors that stay readable after every run; `kept_gradients`: tensors whose gradients do
    debugged        tensors that stay readable together with their gradients
    result          what a run answers
    minimised       the sum of these is: the gradient pass starts from them, with ones
    total           that sum as a tensor of its own, where there are several
    user_gradients  tensor a gradient from outside is fed to -> the tensor whose gradient it adds to
    wanted          tensors that are not parameters but need a gradient
    parameters      tensors the optimizer updates
    """

    nodes: list[Node] = field(default_factory=list)
    batch_size: int = 1
    inputs: dict[Tensor, int] = field(default_factory=dict)
    constants: dict[Tensor, Array] = field(default_factory=dict)
    shared: set[Tensor] = field(default_factory=set)
    label_weights: dict[Layer, Tensor] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    kept_gradients: list[Tensor] = field(default_factory=list)
    debugged: list[Tensor] = field(default_factory=list)
    result: Tensor | None = None
    minimised: list[Tensor] = field(default_factory=list)
    total: Tensor | None = None
    stopped: set[Tensor] = field(default_factory=set)
    user_gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    wanted: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    optimizer: Optimizer | None = None
    fuses: bool = True


#: Styles of execution. fused: one call, tight memory. split: phases run apart and again, everything readable.
#: inference: forward only, dropout off, running statistics used.
STYLES = ("fused", "split", "inference")


def compile_program(
    description: Description, engine: Engine, style: str, batch_size: int = 0, like: Program | None = None
) -> Program:
    """Graph in, program out. One line per pass, one file per pass.

    batch_size  samples per run; 0: as many as the tensors have
    like        the same program for the full batch, whose memory plan a smaller batch reuses
    """
    with collector_paused():
        return _compile(description, engine, style, batch_size or description.batch_size, like)


def _compile(description: Description, engine: Engine, style: str, batch_size: int, like: Program | None) -> Program:
    verifies = is_verifying()
    program = Program(style, batch_size)
    run = _lower(description, program, batch_size, training=style != "inference")
    if style != "inference":
        _differentiate(description, program, run)
        _update(description, program, run, engine)
    trace = run.trace
    if verifies:
        verify_steps(trace.steps, split=True)
    kept = _kept(description, program, style)
    expanded = expand(trace, engine.supports)
    if verifies:
        verify_steps(trace.steps, split=True)
    simplified = simplify(trace, [expanded[value] for value in kept])
    if verifies:
        verify_steps(trace.steps, split=True)

    def final(value: Value) -> Value:
        return simplified[expanded[value]]

    program.values = {tensor: final(value) for tensor, value in program.values.items()}
    program.gradients = {tensor: final(value) for tensor, value in program.gradients.items()}
    program.kept = {final(value) for value in kept}
    # What is joined or turned is so in every style or in none: another order of sums would round otherwise, and the
    # styles must agree.
    readable = {*program.kept, *program.values.values(), *program.gradients.values()}
    join(trace, program.kept, readable)
    if engine.prefers_channels_last:
        channels_last(trace, program.kept)
    orient(trace, readable)
    if style == "fused":
        remember(trace, program.kept)
        recompute(trace, program.kept)
    settle(trace)
    merges = description.fuses and engine.merges
    steps = merge(trace.steps, program.kept) if merges else trace.steps
    if style != "split":
        steps = update_early(steps)
    if style == "fused" and merges:
        steps = follow(steps, program.kept, engine.follows)
    program.steps = fuse(steps) if description.fuses and not merges else steps
    program.plan = plan_like(like, program, engine.workspace) or plan_memory(
        program.steps, program.kept, rerunnable=style == "split", workspace=engine.workspace
    )
    used = {value for step in program.steps for value in step.inputs} | program.kept
    program.constants = {value: array for value, array in trace.constants.items() if value in used}
    if verifies:
        verify_program(program)
    trace.clear()  # a program nobody needs any more is then gone at once, without the cyclic collector
    return program


def _lower(description: Description, program: Program, batch_size: int, training: bool) -> Lowering:
    """Layers -> steps of the forward phase."""
    run = Lowering(training)
    run.weights_of = description.label_weights
    for tensor, scale in description.inputs.items():
        shape = tensor.descriptor.shape
        if scale and batch_size != description.batch_size:
            shape = (scale * batch_size, *shape[1:])
        program.inputs[tensor] = run.input(tensor, shape)
    for tensor, array in description.constants.items():
        run.values[tensor] = run.trace.constant(array)
    for node in description.nodes:
        try:
            run.add(node.layer, [*node.sources, *node.labels], node.results, node.updates)
        except ShapeError as error:
            if batch_size != description.batch_size:
                error.add_fact("batch_size", f"{batch_size} of {description.batch_size}")
            raise
    if description.total is not None:
        run.values[description.total] = _total(run, description.minimised)
    for tensor, value in run.writes:
        ops.assign(run.values[tensor], value)
    program.values, program.persistent = run.values, run.persistent
    program.writes = [tensor for tensor, _ in run.writes]
    program.random_keys = run.random_keys
    return run


def _total(run: Lowering, terms: Sequence[Tensor]) -> Value:
    """The sum of all elements of several tensors, as one number.   (1,)"""
    run.trace.layer = "total loss"
    values = [ops.convert(run.values[term], run.float_type) for term in terms]
    sums = [ops.reshape(ops.sum_(value, range(value.rank)) if value.size > 1 else value, (1,)) for value in values]
    total = functools.reduce(operator.add, sums)
    run.trace.layer = ""
    return total


def _differentiate(description: Description, program: Program, run: Lowering) -> None:
    """Steps of the gradient phase."""
    trace, values = run.trace, run.values
    trace.phase = "gradient"
    seeds: dict[Value, Value] = {}
    for tensor in description.minimised:
        loss = values[tensor]
        seeds[loss] = ops.full(loss, loss.shape, 1.0)
    for given, tensor in description.user_gradients.items():
        if tensor not in values:
            continue
        fed = run.input(given, values[tensor].shape)
        program.inputs[given] = fed
        value = values[tensor]
        seeds[value] = seeds[value] + fed if value in seeds else fed
    sources = [values[tensor] for tensor in (*description.parameters, *description.wanted) if tensor in values]
    stopped = {values[tensor] for tensor in description.stopped if tensor in values}
    gradients = differentiate(trace, seeds, sources, stopped)
    for value, gradient in gradients.items():
        if gradient.kind == "input":
            # Fed memory is the caller's; a gradient that may be read later needs its own.
            gradients[value] = ops.copy(gradient)
    program.gradients = {tensor: gradients[value] for tensor, value in values.items() if value in gradients}


def _update(description: Description, program: Program, run: Lowering, engine: Engine) -> None:
    """Steps of the update phase."""
    optimizer, trace = description.optimizer, run.trace
    if optimizer is None:
        return
    updated: list[Updated] = []
    for tensor in description.parameters:
        gradient = program.gradients.get(tensor)
        if gradient is None:
            continue
        value = run.values[tensor]
        # Second moments of small gradients vanish in half precision: state is kept in float32 at least.
        dtype = FLOAT32 if value.dtype.itemsize < FLOAT32.itemsize else value.dtype
        states = [trace.value(value.shape, dtype, "state", name) for name in optimizer.state_names]
        program.states[tensor] = states
        updated.append((value, gradient, states))
    if not updated:
        return
    program.scalars = {name: trace.value((), FLOAT32, "scalar", name) for name in optimizer.scalar_names}
    if description.fuses and engine.merges:
        updated = update_alike(trace, optimizer, updated, program.scalars, engine.supports)
    start = len(trace.steps)
    store_early(trace, update(trace, optimizer, updated, program.scalars), start)


def _kept(description: Description, program: Program, style: str) -> list[Value]:
    """Values somebody may read after a run."""
    values, gradients = program.values, program.gradients
    tensors = [tensor for tensor in (*description.kept, *description.debugged) if tensor in values]
    kept = [values[tensor] for tensor in tensors]
    wanted = (*description.kept_gradients, *description.debugged)
    kept += [gradients[tensor] for tensor in wanted if tensor in gradients]
    if style == "split":
        kept += [values[result] for node in description.nodes for result in node.results]
        kept += list(gradients.values())
    return kept


__all__ = ["STYLES", "Description", "compile_program"]
