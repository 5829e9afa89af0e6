"""Every case of the layer table is asked every question; every refusal must be refused with the right words."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch

import mlcompute as mlc
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.lower import Lowering
from mlcompute.compiler.plan_memory import planned
from mlcompute.compiler.verify import verify_plan, verify_steps
from mlcompute.devices import engine_of
from mlcompute.devices.device import Engine
from mlcompute.devices.host_memory import HostBuffer
from mlcompute.devices.reference import Reference
from mlcompute.enums import DataType
from mlcompute.layers.layer import Layer
from mlcompute.ops.bfloat16 import is_floating
from mlcompute.ops.op import TABLE, Array, Step
from mlcompute.runtime.call_data import collect_inputs
from tests import cases as case_package
from tests.cases.case import Case, Refusal, bfloat16_twins
from tests.harness import assert_close, interpret

torch.set_num_threads(1)

FAMILIES = [
    importlib.import_module(f"tests.cases.{module.name}")
    for module in pkgutil.iter_modules(case_package.__path__)
    if module.name != "case"
]
CASES = [
    pytest.param(c, id=f"{f.__name__.split('.')[-1]}-{c.name}")
    for f in FAMILIES
    for c in (*f.CASES, *bfloat16_twins(f.CASES))
]
REFUSALS = [pytest.param(r, id=f"{f.__name__.split('.')[-1]}-{r.name}") for f in FAMILIES for r in f.REFUSALS]

F64 = np.dtype(np.float64)
TYPES = {kind.numpy: kind for kind in DataType if kind not in (DataType.INVALID, DataType.COUNT)}


def is_loss(case: Case) -> bool:
    return bool(case.labels)


def make_tensor(array: Array) -> mlc.Tensor:
    return mlc.Tensor(shape=array.shape, data_type=TYPES[array.dtype])


def slots_of(layer: Layer) -> dict[str, mlc.Tensor]:
    return {name: slot.tensor for name, slot in layer.parameters.items()} | layer.statistics


def default_engine() -> Engine:
    """The one MLCOMPUTE_ENGINE names, else the reference."""
    return engine_of(mlc.Device.cpu()) if os.environ.get("MLCOMPUTE_ENGINE") else Reference()


class Built:
    """A case as a training graph: one layer, every input and parameter with a gradient, user gradients on results."""

    def __init__(
        self,
        case: Case,
        options: mlc.GraphCompilationOptions = mlc.GraphCompilationOptions.NONE,
        engine: Engine | None = None,
    ) -> None:
        self.case, self.layer = case, case.make()
        self.arrays, self.label_arrays = case.arrays(), case.label_arrays()
        self.sources = [make_tensor(array) for array in self.arrays]
        self.labels = [make_tensor(array) for array in self.label_arrays]
        self.graph = mlc.TrainingGraph()
        self.graph.node(self.layer, sources=self.sources, loss_labels=self.labels)
        self.results = self.graph.result_tensors(self.layer)
        weights = case.weight_array()
        self.feeds = {f"x{i}": array for i, array in enumerate(self.arrays)}
        self.label_feeds = {f"t{i}": array for i, array in enumerate(self.label_arrays)}
        self.weight_feeds = {} if weights is None else {"w": weights}
        declared: dict[str, mlc.Tensor] = {}
        if weights is not None:
            own = getattr(self.layer, "weights", None)
            declared = {"w": own if own is not None else make_tensor(weights)}
        self.inputs = {f"x{i}": tensor for i, tensor in enumerate(self.sources)}
        self.label_inputs = {f"t{i}": tensor for i, tensor in enumerate(self.labels)}
        self.weight_inputs = declared
        self.graph.add_inputs(self.inputs, self.label_inputs, declared)
        self.graph.add_outputs({f"y{i}": tensor for i, tensor in enumerate(self.results)})
        self.seeds: dict[mlc.Tensor, Array] = {}
        if not is_loss(case):
            rng = np.random.default_rng(7)
            for tensor in self.results:
                if tensor.descriptor.data_type.is_floating:
                    user = self.graph.allocate_user_gradient(tensor)
                    self.seeds[user] = rng.standard_normal(tensor.descriptor.shape).astype(
                        tensor.descriptor.data_type.numpy
                    )
        self.device = mlc.Device(mlc.DeviceType.CPU, engine=engine or default_engine())
        self.graph.compile(options=options | mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=self.device)

    def bind(self) -> None:
        feeds = {**self.feeds, **self.label_feeds, **self.weight_feeds}
        tensors = {**self.inputs, **self.label_inputs, **self.weight_inputs}
        self.graph.bind_and_write_data(feeds, for_inputs=tensors, to=self.device)
        named = {f"g{i}": pair for i, pair in enumerate(self.seeds.items())}
        self.graph.bind_and_write_data(
            {name: array for name, (_, array) in named.items()},
            for_inputs={name: tensor for name, (tensor, _) in named.items()},
            to=self.device,
        )

    def forward(self) -> list[Array]:
        self.bind()
        if self.case.training is False:
            options = mlc.ExecutionOptions.FORWARD_FOR_INFERENCE
        else:
            options = mlc.ExecutionOptions.NONE
        self.graph.execute_forward(options=options).wait()
        return [tensor.data for tensor in self.results]

    def gradients(self) -> tuple[list[Array | None], dict[str, Array | None]]:
        """After a training forward: gradients of the sources and of the parameters."""
        self.graph.execute_gradient().wait()
        found = [self.graph.gradient_tensor(tensor) for tensor in self.sources]
        sources = [None if tensor is None else tensor.data for tensor in found]
        parameters = {
            name: self.graph.gradient_data(slot.tensor, self.layer) for name, slot in self.layer.parameters.items()
        }
        return sources, parameters


def oracle_arguments(case: Case, layer: Layer) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    slots = {
        name: torch.tensor(tensor.data.astype(np.float64), requires_grad=name in layer.parameters)
        for name, tensor in slots_of(layer).items()
    }
    arrays = case.arrays() + case.label_arrays()
    weights = case.weight_array()
    if weights is not None:
        arrays.append(weights)
    tensors = []
    for index, array in enumerate(arrays):
        is_float = is_floating(array.dtype)
        tensor = torch.tensor(array.astype(np.float64) if is_float else array)
        tensors.append(tensor.requires_grad_(is_float and index < len(case.sources)))
    return slots, tensors


def as_tuple(answer: Any) -> tuple[torch.Tensor, ...]:
    return tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)


@pytest.mark.parametrize("case", CASES)
def test_forward_matches_the_oracle(case: Case) -> None:
    built = Built(case)
    slots, arguments = oracle_arguments(case, built.layer)
    results = built.forward()
    for result, tensor in zip(results, built.results, strict=True):
        assert result.shape == tensor.descriptor.shape, "the shape rule does not match what runs"
        assert result.dtype == tensor.descriptor.data_type.numpy
    if case.expect is not None:
        expected = np.asarray(case.expect, np.float64).reshape(results[0].shape)
        np.testing.assert_allclose(results[0].astype(np.float64), expected, rtol=1e-6, atol=1e-6)
    if case.oracle is not None:
        for index, (actual, expected) in enumerate(
            zip(results, as_tuple(case.oracle(slots, *arguments)), strict=True)
        ):
            assert_close(actual, expected.detach().numpy(), case.scale, f"result {index}")


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].training is not False])
def test_gradients_match_the_oracle(case: Case) -> None:
    if case.oracle is None:
        pytest.skip("the case has no formula in PyTorch; finite differences judge it")
    built = Built(case)
    slots, arguments = oracle_arguments(case, built.layer)
    built.forward()
    sources, parameters = built.gradients()
    answers = as_tuple(case.oracle(slots, *arguments))
    seeds = list(built.seeds.values())
    objective = torch.zeros((), dtype=torch.float64)
    for answer in answers:
        if not answer.is_floating_point():
            continue
        if is_loss(case):
            objective = objective + answer.sum()
        else:
            tensor_seed = seeds.pop(0) if seeds else np.zeros(answer.shape)
            objective = objective + (answer * torch.tensor(tensor_seed.astype(np.float64))).sum()
    leaves = [t for t in (*arguments[: len(case.sources)], *slots.values()) if t.requires_grad]
    expected: dict[int, torch.Tensor | None] = {}
    if objective.requires_grad and leaves:
        found = torch.autograd.grad(objective, leaves, allow_unused=True)
        expected = {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True)}

    def compare(actual: Array | None, leaf: torch.Tensor, what: str) -> None:
        gradient = expected.get(id(leaf))
        zeros = np.zeros(tuple(leaf.shape))
        wanted = zeros if gradient is None else gradient.numpy()
        if actual is None:
            assert not np.any(wanted), f"{what}: no gradient, but PyTorch has one"
        else:
            assert_close(actual, wanted, case.scale, what)

    for index, actual in enumerate(sources):
        compare(actual, arguments[index], f"source {index}")
    for name, actual in parameters.items():
        compare(actual, slots[name], name)


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].smooth])
def test_gradients_match_finite_differences(case: Case) -> None:
    """In float64, on the layer's own description, in random directions for every source and parameter at once."""
    layer = case.make()
    run = Lowering(training=case.training is not False, float_type=F64)
    arrays = case.arrays() + case.label_arrays()
    tensors = [make_tensor(array) for array in arrays]
    descriptors = [tensor.descriptor for tensor in tensors]
    layer.check_sources(descriptors)
    results = [mlc.Tensor(descriptor) for descriptor in layer.results(descriptors)]
    feeds: dict[Any, Array] = {}
    for tensor, array in zip(tensors, arrays, strict=True):
        feeds[run.input(tensor)] = array.astype(F64) if array.dtype == np.float32 else array
    weights = case.weight_array()
    if weights is not None:
        tensor = getattr(layer, "weights", None) or make_tensor(weights)
        run.weights_of[layer] = tensor
        feeds[run.input(tensor)] = weights.astype(F64)
    run.add(layer, tensors, results)
    for number, (key, _) in enumerate(run.random_keys):
        feeds[key] = np.array([1, 2, number, 4], np.uint32)
    for tensor, value in run.persistent.items():
        feeds[value] = tensor.data.astype(value.dtype)
    trainable = [run.values[slot.tensor] for slot in layer.parameters.values() if slot.tensor in run.values]
    moving = [run.values[tensor] for tensor in tensors[: len(case.sources)]]
    moving += trainable
    moving = list(dict.fromkeys(value for value in moving if value.dtype == F64))
    answers = [run.values[result] for result in results if run.values[result].is_floating]
    if not moving or not answers:
        return
    rng = np.random.default_rng(3)
    seeds = {value: run.trace.constant(rng.standard_normal(value.shape), value.dtype) for value in answers}
    steps = list(run.trace.steps)
    gradients = differentiate(run.trace, seeds, moving)
    memory = interpret(run.trace, feeds)

    def objective(changed: dict[Any, Array]) -> float:
        values = interpret(run.trace, changed, steps)
        return float(sum(np.sum(run.trace.constants[seeds[value]] * values[value]) for value in answers))

    base, step = objective(feeds), 1e-6
    for value in moving:
        direction = rng.standard_normal(value.shape)
        up = objective({**feeds, value: feeds[value] + step * direction})
        down = objective({**feeds, value: feeds[value] - step * direction})
        expected = (up - down) / (2 * step)
        actual = float(np.sum(memory[gradients[value]] * direction)) if value in gradients else 0.0
        scale = max(1.0, abs(expected), abs(base))
        assert abs(actual - expected) <= 2e-6 * scale, f"{value.label}: {actual}, differences give {expected}"


@pytest.mark.parametrize("case", CASES)
def test_running_again_and_fused_gives_the_same(case: Case) -> None:
    built = Built(case)
    if layer_is_stateful(built):
        pytest.skip("the layer's statistics or random stream move on with every run")
    first = built.forward()
    second = built.forward()
    unfused = Built(case, mlc.GraphCompilationOptions.DISABLE_LAYER_FUSION).forward()
    for a, b, c in zip(first, second, unfused, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    if case.training is False:
        return
    outputs = {f"y{i}": np.empty(t.descriptor.shape, t.descriptor.data_type.numpy) for i, t in enumerate(built.results)}
    built.graph.execute(built.feeds, built.label_feeds, built.weight_feeds, outputs_data=outputs).wait()
    for index, a in enumerate(first):
        np.testing.assert_array_equal(a, outputs[f"y{index}"])


def layer_is_stateful(built: Built) -> bool:
    session = built.graph._session
    programs = [session.program(style, session.compile_if_needed().batch_size) for style in ("split", "inference")]
    return any(program.random_keys or program.writes for program in programs)


@pytest.mark.parametrize("case", CASES)
def test_planned_memory_is_sound(case: Case) -> None:
    """Invariants hold, and with guard bytes around every value the numbers stay and no guard byte is touched."""
    built = Built(case)
    for style in ("fused", "split", "inference"):
        program = built.graph._session.program(style, built.graph._session.compile_if_needed().batch_size)
        verify_steps(program.steps, split=style == "split")
        verify_plan(program.steps, program.plan)
        if layer_is_stateful(built) or style == "inference":
            continue
        plain = run_with_plan(built, program, reuse=False, guard=0)
        guarded = run_with_plan(built, program, reuse=True, guard=64)
        for value, array in plain.items():
            np.testing.assert_array_equal(array, guarded[value])


def arrays_of(graph: Any, program: Any) -> dict[Any, Array]:
    """The memory of parameters, statistics and states."""
    return {value: storage.memory() for value, storage in graph._session.storages(program).items()}


def run_with_plan(built: Built, program: Any, reuse: bool, guard: int) -> dict[Any, Array]:
    plan = planned(program.steps, program.kept, rerunnable=program.name == "split", reuse=reuse, guard=guard)
    verify_plan(program.steps, plan)
    original, program.plan = program.plan, plan
    arena = np.full(plan.nbytes, 0xA5, np.uint8)
    executable = Reference().build(program, HostBuffer(arena))
    built.bind()
    phases = tuple(program.phases)
    course = built.graph._session.compiled.specification(program, phases, mlc.ExecutionOptions.SYNCHRONOUS)
    feeds = collect_inputs(built.graph._session, course, {}, "execute")
    executable.run_once(Reference(), phases, {**arrays_of(built.graph, program), **feeds})
    kept = {value: executable.read(value) for value in program.kept}
    used = np.zeros(plan.nbytes, bool)
    for place in plan.placements.values():
        used[place.offset : place.offset + place.nbytes] = True
    assert (arena[~used] == 0xA5).all(), "a step wrote outside its memory"
    program.plan = original
    return kept


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].batches])
def test_a_smaller_batch_is_the_leading_samples(case: Case) -> None:
    built = Built(case)
    full = built.graph._session.compile_if_needed().batch_size
    if full < 2 or layer_is_stateful(built) or is_loss(case):
        pytest.skip("a batch of one, a moving random stream or a loss over the batch: there is nothing to compare")
    whole = built.forward()
    mode = mlc.ExecutionOptions.FORWARD_FOR_INFERENCE if case.training is False else mlc.ExecutionOptions.NONE
    for count in {1, full - 1}:
        built.graph.execute_forward(batch_size=count, options=mode).wait()
        for index, (tensor, before) in enumerate(zip(built.results, whole, strict=True)):
            axes = built.layer.batch_axes
            axis = axes[index] if index < len(axes) else 0
            expected = np.take(before, range(before.shape[axis] * count // full), axis)
            assert_close(tensor.data, expected, case.scale)
        if case.training is not False:
            built.graph.execute_gradient(batch_size=count).wait()


@pytest.mark.parametrize("case", [c for c in CASES if c.values[0].updates is not None])
def test_statistics_are_updated(case: Case) -> None:
    built = Built(case)
    slots, arguments = oracle_arguments(case, built.layer)
    expected = case.updates(slots, *arguments)
    built.forward()
    tensors = slots_of(built.layer)
    for name, array in expected.items():
        array = array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        assert_close(tensors[name].data, array.reshape(tensors[name].descriptor.shape), case.scale, name)


class Expanding(Reference):
    """The reference engine without kernels for composite ops."""

    def supports(self, step: Step) -> bool:
        return step.op.expansion is None


@pytest.mark.parametrize("case", CASES)
def test_expanded_ops_agree(case: Case) -> None:
    built = Built(case)
    program = built.graph._session.program("split", built.graph._session.compile_if_needed().batch_size)
    if all(step.op.expansion is None for step in program.steps):
        pytest.skip("the case uses no composite op")
    if layer_is_stateful(built):
        mlc.Platform.set_rng_seed_to(5)
    first = built.forward()
    expanded = Built(case)
    expanded.device._engines = [Expanding()]
    expanded.graph.compile(options=mlc.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, device=expanded.device)
    if layer_is_stateful(built):
        mlc.Platform.set_rng_seed_to(5)
    second = expanded.forward()
    for a, b in zip(first, second, strict=True):
        assert_close(a, b, case.scale)
    if case.training is not False:
        for a, b in zip(built.gradients()[0], expanded.gradients()[0], strict=True):
            if a is not None and b is not None:
                assert_close(a, b, case.scale)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_say_why(refusal: Refusal) -> None:
    with pytest.raises(refusal.error) as caught:
        layer = refusal.make()
        graph = mlc.Graph()
        sources = [make_tensor(np.zeros(s, np.float32) if isinstance(s, tuple) else s) for s in refusal.sources]
        labels = [make_tensor(np.zeros(s, np.float32) if isinstance(s, tuple) else s) for s in refusal.labels]
        try:
            graph.node(layer, sources=sources, loss_labels=labels)
        finally:
            assert graph.layers == [], "a refused layer must leave the graph as it was"
    assert refusal.says in str(caught.value), str(caught.value)


def test_every_layer_has_a_case_and_a_refusal() -> None:
    layers = {cls for _, cls in inspect.getmembers(mlc, inspect.isclass) if issubclass(cls, Layer) and cls is not Layer}
    layers -= {mlc.GradientLayer}  # by itself it has nothing to differentiate: tests/test_second_derivatives.py
    have_case = {type(param.values[0].make()) for param in CASES}
    assert layers <= have_case, f"no case for {layers - have_case}"
    for family in FAMILIES:
        assert family.REFUSALS, f"{family.__name__} refuses nothing"


def test_every_op_is_used_by_some_case() -> None:
    """An op no layer, gradient or optimizer needs does not belong into a closed table."""
    assert 60 <= len(TABLE) <= 110
