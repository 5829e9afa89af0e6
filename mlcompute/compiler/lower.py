"""lower: layers become steps. Each layer describes its own forward pass; this file gives it what it needs for that."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from mlcompute import ops
from mlcompute.compiler.context import Context
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.exchange_gradients import SLICE
from mlcompute.compiler.expand import expanded
from mlcompute.errors import CompileError, ShapeError
from mlcompute.layers.layer import Layer
from mlcompute.layers.names import LayerNames, slot_name, slots_of
from mlcompute.ops.bfloat16 import is_half
from mlcompute.ops.op import FLOAT32, Shape, Step, Trace, Value, emit
from mlcompute.tensor import Tensor


def lower(steps: list[Step], context: Context) -> list[Step]:
    """Steps of the forward phase."""
    request, program = context.request, context.program
    batch_size, full = program.batch_size, request.batch_size
    run = context.lowering = Lowering(training=context.style != "inference", trace=context.trace)
    run.weights_of, run.stopped = request.label_weights, request.stopped
    run.shape_with_full_batch = request.shape_of
    run.is_slice = context.style in ("slice", "phases") and request.slices > 1
    run.trained = frozenset(request.parameters)
    for tensor, scale in request.inputs.items():
        shape = request.shape_of(tensor)
        if scale and batch_size != full:
            shape = (scale * batch_size, *shape[1:])
        program.inputs[tensor] = run.input(tensor, shape)
    for tensor, array in request.constants.items():
        run.values[tensor] = run.trace.constant(array)
    for tensor in request.parameters if context.style == "apply" else ():
        run.value_of(tensor)
    for node in request.nodes:
        try:
            run.add(node.layer, [*node.sources, *node.labels], node.results, node.updates)
        except ShapeError as error:
            if batch_size != full:
                error.add_fact("batch_size", f"{batch_size} of {full}")
            raise
    if request.total is not None:
        run.values[request.total] = _total(run, request.minimised)
    for tensor, value in run.writes.items():
        ops.assign(run.values[tensor], value)
    program.values, program.persistent = run.values, run.persistent
    program.writes = list(run.writes)
    program.random_keys = run.random_keys
    return context.trace.steps


def _total(run: Lowering, terms: Sequence[Tensor]) -> Value:
    """The sum of all elements of several tensors, as one number.   (1,)"""
    run.trace.layer = "total loss"
    values = [ops.convert(run.values[term], run.float_type) for term in terms]
    sums = [ops.reshape(ops.sum_(value, range(value.rank)) if value.size > 1 else value, (1,)) for value in values]
    total = functools.reduce(operator.add, sums)
    run.trace.layer = ""
    return total


class Lowering:
    """The trace of one graph's forward pass and the values its tensors became. Implements `layers.layer.Forward`."""

    def __init__(self, training: bool, float_type: np.dtype[Any] = FLOAT32, trace: Trace | None = None) -> None:
        self.training = training
        self.updates = True
        self.trace = Trace() if trace is None else trace
        #: What FLOAT32 tensors are computed in. Anything but float32 serves only checks of the mathematics.
        self.float_type = float_type
        self.values: dict[Tensor, Value] = {}
        #: Tensors the steps read from or write to memory that outlives a run, in the order of first use.
        self.persistent: dict[Tensor, Value] = {}
        #: Tensor -> the new value that is stored when the pass has succeeded, in the order of the last writes.
        self.writes: dict[Tensor, Value] = {}
        #: Random streams: scalar key value -> the seed the layer asked for.
        self.random_keys: list[tuple[Value, int]] = []
        self.weights_of: dict[Layer, Tensor] = {}
        #: Tensors no gradient passes.
        self.stopped: AbstractSet[Tensor] = frozenset()
        #: The shape a tensor was promised to have.
        self.shape_with_full_batch: Callable[[Tensor], Shape] = lambda tensor: tensor.descriptor.shape
        #: What the optimizer updates: in a layer that is not trained these are constants.
        self.trained: AbstractSet[Tensor] = frozenset()
        #: Is it the pass of a slice of the batch?
        self.is_slice = False
        #: What part of the batch it is.
        self.share: Value | None = None
        #: Tensors whose samples do not lie along their first axis.
        self._moved: set[Tensor] = set()
        self._name_of = LayerNames()
        #: Tensors of the layers added so far by name.
        self._slot_names: dict[Tensor, str] = {}

    def input(self, tensor: Tensor, shape: Shape | None = None) -> Value:
        """A value the caller feeds before each run."""
        value = self.trace.value(shape or tensor.descriptor.shape, self.dtype_of(tensor), "input", tensor.label)
        self.values[tensor] = value
        return value

    def dtype_of(self, tensor: Tensor) -> np.dtype[Any]:
        dtype = tensor.descriptor.data_type.numpy
        return dtype if self.float_type is FLOAT32 or dtype != FLOAT32 else self.float_type

    def value_of(self, tensor: Tensor) -> Value:
        """The value a tensor has at this point: computed, fed, or kept in memory between runs."""
        value = self.values.get(tensor)
        if value is None:
            name = self._slot_names.get(tensor, tensor.label)
            value = self.trace.value(tensor.descriptor.shape, self.dtype_of(tensor), "parameter", name)
            self.values[tensor] = self.persistent[tensor] = value
        return value

    # What layers ask (layers.layer.Forward) --------------------------------------------------------------------

    def read(self, tensor: Tensor, shape: Shape | None = None) -> Value:
        if tensor in self.writes:
            # Of several layers that share statistics, each goes on from what the one before left.
            value = ops.stop_gradient(self.writes[tensor])
        else:
            value = self.value_of(tensor)
            # A parameter that is trained elsewhere gets no gradient from a layer that is not trained.
            value = value if self.updates or tensor not in self.trained else ops.stop_gradient(value)
        if value.dtype is not FLOAT32 and is_half(value.dtype):
            value = ops.convert(value, FLOAT32)
        return value if shape is None else ops.reshape(value, shape)

    def write(self, tensor: Tensor, value: Value) -> None:
        target = self.value_of(tensor)
        new = ops.convert(ops.reshape(value, target.shape), target.dtype)
        self.writes.pop(tensor, None)
        self.writes[tensor] = new  # what is written again counts as written last

    def uniform(self, like: Value, shape: Shape, seed: int) -> Value:
        key = self.trace.value((4,), np.dtype(np.uint32), "scalar", "random key")
        self.random_keys.append((key, seed))
        return ops.random_uniform(key, shape)

    def shape_of(self, tensor: Tensor) -> Shape:
        value = self.values.get(tensor)
        return tensor.descriptor.shape if value is None else value.shape

    def slice_share(self) -> Value:
        if self.share is None:
            self.share = self.trace.value((), FLOAT32, "scalar", SLICE)
        return self.share

    def sum_over_slices(self, value: Value) -> Value:
        return ops.sum_over_slices(value) if self.is_slice else value

    def label_weights(self, layer: Layer) -> Value | None:
        tensor = self.weights_of.get(layer)
        return None if tensor is None else self.read(tensor)

    def gradient(self, layer: Layer, y: Value, xs: Sequence[Value]) -> list[Value]:
        trace = self.trace
        start, name, phase = len(trace.steps), trace.layer, trace.phase
        stopped = {self.values[tensor] for tensor in self.stopped if tensor in self.values}
        found = differentiate(trace, {y: ops.full(y, y.shape, 1.0)}, xs, stopped)
        missing = next((number for number, x in enumerate(xs) if x not in found), None)
        if missing is not None:
            raise CompileError(
                f"{layer.who}: what is differentiated does not depend on tensor {missing} of those given",
                shape=xs[missing].shape,
                fix="give tensors that it is computed from, and that no stopped gradient separates from it",
            )
        # The gradient may be differentiated again: what has no derivative becomes smaller ops that do.
        before, made = trace.steps[:start], trace.steps[start:]
        smaller, substitution = expanded(made, trace, lambda step: not _lacks_derivative(step), layer.who)
        for step in smaller:
            step.phase = phase
        trace.steps, trace.layer, trace.phase = [*before, *smaller], name, phase
        return [substitution[found[x]] for x in xs]

    # ------------------------------------------------------------------------------------------------------------

    def add(self, layer: Layer, sources: Sequence[Tensor], results: Sequence[Tensor], updates: bool = True) -> None:
        """Append one layer's forward pass; `updates`: it is trained."""
        self.updates = updates
        self.trace.layer = name = self._name_of(layer)
        names = self._slot_names
        for slot, tensor in slots_of(layer).items():
            if tensor not in names:
                names[tensor] = slot_name(name, slot)
        known = self.values
        inputs = values = [known[source] if source in known else self.value_of(source) for source in sources]
        if not layer.moves_data:
            inputs = [
                value if value.dtype is FLOAT32 or not is_half(value.dtype) else ops.convert(value, FLOAT32)
                for value in values
            ]
        answers = layer.forward(self, *inputs)
        answers = [answers] if isinstance(answers, Value) else answers
        if not isinstance(answers, (list, tuple)) or not all(isinstance(answer, Value) for answer in answers):
            given = type(answers).__name__
            raise TypeError(f"{layer.who}: forward must return what ops give, a Value or a list of them, not {given}")
        if len(answers) != len(results):
            is_full = all(value.shape == source.descriptor.shape for value, source in zip(values, sources, strict=True))
            kind = type(layer).__name__
            raise ShapeError(
                f"{layer.who}: gives {len(answers)} results for this batch size, {len(results)} for the full one"
                if not is_full
                else f"{layer.who}: forward gives {len(answers)} results, and {len(results)} were declared",
                fix=f"let {kind}.results declare as many as forward returns" if is_full else "pass batch_size=0",
            )
        for index, (tensor, answer) in enumerate(zip(results, answers, strict=True)):
            full = self.shape_with_full_batch(tensor)
            if full != answer.shape:
                self._check(layer, index, tensor, answer.shape, full, sources)
            dtype = self.dtype_of(tensor)
            if answer.dtype is not dtype:
                answer = ops.convert(answer, dtype)
            if answer in values or answer.kind != "temporary":
                # A tensor of its own needs a value of its own: stopping its gradient must not stop the source's.
                answer = emit("reshape", answer, shape=answer.shape)
            known[tensor] = answer
        self.trace.layer = ""

    def _check(
        self, layer: Layer, index: int, tensor: Tensor, shape: Shape, full: Shape, sources: Sequence[Tensor]
    ) -> None:
        """The extents a layer computes are those it promised, apart from the number of samples.

        shape, full   of result `index`, and of that tensor with the full batch
        """
        moves = layer.batch_axes is None  # samples may lie along any axis
        if not self.is_slice:  # where it is one, what is computed across samples would be of the slice alone
            moves = moves or layer.moves_axes or not self._moved.isdisjoint(sources)
        axes = layer.batch_axes or ()
        axis = axes[index] if index < len(axes) else 0
        promised, computed = list(full), list(shape)
        if moves and len(promised) == len(computed):
            if promised[1:] != computed[1:]:
                self._moved.add(tensor)
            promised = computed
        elif len(promised) == len(computed):
            promised[axis] = computed[axis]
        if promised != computed:
            raise CompileError(
                f"{layer.who}: computes shape {shape}, its result tensor says {full}",
                fix="pass batch_size=0 if the layers of this graph do not share one batch axis"
                if type(layer).__module__.startswith("mlcompute.")
                else f"let {type(layer).__name__}.results declare the shape that forward computes",
            )


def _lacks_derivative(step: Step) -> bool:
    """Can a step be differentiated only as the smaller ones it expands into?

    Recurrent gradients cannot: they read what only the gradient of the forward op may read.
    """
    return step.op.derivative is None and step.op.expansion is not None and step.op.family != "recurrent"
