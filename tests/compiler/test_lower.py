"""The lower pass: what layers get when they describe themselves, and what the trace says about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.lower import Lowering
from mlcompute.compiler.verify import verify_steps
from mlcompute.enums import DataType
from mlcompute.errors import CompileError, ShapeError
from mlcompute.layers.layer import ALL_TYPES, FLOATS, Forward, Layer
from mlcompute.ops.op import Value
from tests.harness import interpret

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)


class Probe(Layer):
    """A layer made of one function."""

    default_label = "Probe"
    source_types = ALL_TYPES

    def __init__(self, describe: object, results: Sequence[mlc.TensorDescriptor] | None = None) -> None:
        super().__init__()
        self.describe, self.promised = describe, results

    def results(self, sources: Sequence[mlc.TensorDescriptor]) -> list[mlc.TensorDescriptor]:
        return list(self.promised or sources)

    def forward(self, run: Forward, *sources: Value) -> Value | Sequence[Value]:
        return self.describe(run, *sources)  # type: ignore[operator, no-any-return]


class Narrow(Probe):
    source_types = FLOATS
    moves_data: ClassVar[bool] = True


def lowered(layer: Layer, *tensors: mlc.Tensor, run: Lowering | None = None) -> tuple[Lowering, list[mlc.Tensor]]:
    run = run or Lowering(training=True)
    for tensor in tensors:
        if tensor not in run.values:
            run.input(tensor)
    results = [mlc.Tensor(descriptor) for descriptor in layer.results([t.descriptor for t in tensors])]
    run.add(layer, tensors, results)
    return run, results


def test_sources_are_fed_parameters_are_kept() -> None:
    x, w = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(1, 3), fill_with_data=2.0)
    run, (y,) = lowered(Probe(lambda run, x: x * run.read(w)), x)
    assert run.values[x].kind == "input"
    assert run.values[w].kind == "parameter"
    assert list(run.persistent) == [w]
    memory = interpret(run.trace, {run.values[x]: np.ones((2, 3), F32), run.values[w]: w.data})
    np.testing.assert_array_equal(memory[run.values[y]], np.full((2, 3), 2.0))


def test_a_tensor_shared_by_layers_is_one_value() -> None:
    x, w = mlc.Tensor(shape=(2, 3)), mlc.Tensor(shape=(3,), fill_with_data=2.0)
    run, (y,) = lowered(Probe(lambda run, x: x * run.read(w)), x)
    run, _ = lowered(Probe(lambda run, x: x + run.read(w)), y, run=run)
    assert list(run.persistent) == [w]
    assert sum(run.values[w] in step.inputs for step in run.trace.steps) == 2


def test_layers_with_one_label_get_different_names() -> None:
    x = mlc.Tensor(shape=(2,))
    run, (y,) = lowered(Probe(lambda run, x: ops.exp(x)), x)
    run, (z,) = lowered(Probe(lambda run, x: ops.exp(x)), y, run=run)
    lowered(Probe(lambda run, x: ops.exp(x)), z, run=run)
    assert [step.layer for step in run.trace.steps] == ["probe", "probe_1", "probe_2"]


def test_half_precision_is_computed_in_single_and_rounded_once() -> None:
    x = mlc.Tensor(shape=(2,), data_type=DataType.FLOAT16)
    seen: list[Value] = []
    run, (y,) = lowered(Probe(lambda run, x: [seen.append(x), ops.exp(x)][1]), x)
    assert seen[0].dtype == F32
    assert run.values[y].dtype == F16
    assert [step.op.name for step in run.trace.steps] == ["convert", "exp", "convert"]


def test_layers_that_move_data_keep_their_type() -> None:
    x = mlc.Tensor(shape=(2,), data_type=DataType.FLOAT16)
    run, _ = lowered(Narrow(lambda run, x: ops.copy(x)), x)
    assert [step.op.name for step in run.trace.steps] == ["copy"]


def test_half_precision_parameters_are_read_in_single() -> None:
    x = mlc.Tensor(shape=(2,))
    w = mlc.Tensor(shape=(2,), data_type=DataType.FLOAT16, fill_with_data=1.0)
    run, _ = lowered(Probe(lambda run, x: x + run.read(w)), x)
    assert run.values[w].dtype == F16


def test_the_mathematics_can_be_checked_in_double() -> None:
    x = mlc.Tensor(shape=(2,))
    w = mlc.Tensor(shape=(2,), fill_with_data=1.0)
    run = Lowering(training=True, float_type=F64)
    run, (y,) = lowered(Probe(lambda run, x: x + run.read(w)), x, run=run)
    assert {run.values[tensor].dtype for tensor in (x, w, y)} == {F64}


def test_a_result_is_never_the_source_itself() -> None:
    """Else stopping the gradient of one tensor would stop the other's."""
    x = mlc.Tensor(shape=(2,))
    run, (y, z) = lowered(Probe(lambda run, x: [x, x], [x.descriptor, x.descriptor]), x)
    values = {run.values[tensor] for tensor in (x, y, z)}
    assert len(values) == 3


def test_a_result_is_never_a_parameter_itself() -> None:
    x, w = mlc.Tensor(shape=(2,)), mlc.Tensor(shape=(2,), fill_with_data=1.0)
    run, (y,) = lowered(Probe(lambda run, x: run.read(w)), x)
    assert run.values[y].kind == "temporary"


def test_writes_wait_for_the_end_of_the_pass() -> None:
    x = mlc.Tensor(shape=(2, 1))
    statistic = mlc.Tensor(shape=(2,), data_type=DataType.FLOAT16, fill_with_data=0.0)

    def describe(run: Forward, x: Value) -> Value:
        run.write(statistic, x)
        return ops.exp(x)

    run, _ = lowered(Probe(describe), x)
    ((tensor, value),) = run.writes.items()
    assert tensor is statistic
    assert (value.shape, value.dtype) == ((2,), F16)
    assert all(step.op.name != "assign" for step in run.trace.steps)


def test_random_streams_are_told_apart() -> None:
    x = mlc.Tensor(shape=(2, 3))

    def describe(run: Forward, x: Value) -> Value:
        return x * run.uniform(x, x.shape, 7) * run.uniform(x, x.shape, 0)

    run, _ = lowered(Probe(describe), x)
    assert [seed for _, seed in run.random_keys] == [7, 0]
    assert len({key for key, _ in run.random_keys}) == 2


def test_label_weights_reach_their_layer_only() -> None:
    x, weights = mlc.Tensor(shape=(2,)), mlc.Tensor(shape=(2,))
    seen: list[Value | None] = []

    def describe(run: Forward, x: Value) -> Value:
        seen.append(run.label_weights(layer))
        return ops.exp(x)

    layer = Probe(describe)
    run = Lowering(training=True)
    run.input(weights)
    run.weights_of[layer] = weights
    lowered(layer, x, run=run)
    layer = Probe(describe)
    lowered(layer, x, run=run)
    assert seen == [run.values[weights], None]


def test_a_smaller_batch_changes_the_batch_axis_only() -> None:
    x = mlc.Tensor(shape=(4, 3))
    y = mlc.Tensor(shape=(4, 3))
    run = Lowering(training=True)
    run.input(x, (2, 3))
    run.add(Probe(lambda run, x: ops.exp(x)), [x], [y])
    assert run.values[y].shape == (2, 3)
    with pytest.raises(CompileError, match=r"Probe 'Probe': computes shape \(2, 2\), its result tensor says \(4, 3\)"):
        run.add(Probe(lambda run, x: ops.slice_axis(x, 1, 0, 2)), [x], [y])


def test_a_layer_that_gives_fewer_results_is_refused() -> None:
    x = mlc.Tensor(shape=(4, 3))
    run = Lowering(training=True)
    run.input(x)
    two = [mlc.Tensor(shape=(4, 3)), mlc.Tensor(shape=(4, 3))]
    with pytest.raises(ShapeError, match=r"(?s)gives 1 results, and 2 were declared.*let Probe\.results declare"):
        run.add(Probe(lambda run, x: ops.exp(x)), [x], two)
    smaller = Lowering(training=True)
    smaller.input(x, (2, 3))
    with pytest.raises(ShapeError, match="gives 1 results for this batch size, 2 for the full one"):
        smaller.add(Probe(lambda run, x: ops.exp(x)), [x], two)
    for answer, kind in ((None, "NoneType"), (3.0, "float"), ([3.0], "list")):
        with pytest.raises(TypeError, match=f"must return what ops give, a Value or a list of them, not {kind}"):
            run.add(Probe(lambda run, x, answer=answer: answer), [x], two)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("declared", "says"),
    [(mlc.TensorDescriptor((4, 3)), "not TensorDescriptor"), ([(4, 3)], r"not list \[\(4, 3\)\]"), (None, "not None")],
)
def test_a_layer_that_declares_something_else_is_refused(declared: Any, says: str) -> None:
    class Declares(Probe):
        def results(self, sources: Any) -> Any:
            return declared

    graph = mlc.Graph()
    with pytest.raises(TypeError, match=f"results must return a list of TensorDescriptors, {says}"):
        graph.node(Declares(lambda run, x: x), source=graph.input((4, 3), "x"))


def test_a_whole_graph() -> None:
    x = mlc.Tensor(shape=(2, 3))
    w = mlc.Tensor(shape=(4, 3), fill_with_data=0.5)
    descriptor = mlc.ConvolutionDescriptor(input_feature_channel_count=3, output_feature_channel_count=4)
    run, (h,) = lowered(mlc.FullyConnectedLayer(w, None, descriptor), x)
    run, (y,) = lowered(mlc.SoftmaxLayer(mlc.SoftmaxOperation.SOFTMAX, 1), h, run=run)
    verify_steps(run.trace.steps)
    memory = interpret(run.trace, {run.values[x]: np.ones((2, 3), F32), run.values[w]: w.data})
    np.testing.assert_allclose(memory[run.values[y]], np.full((2, 4), 0.25), rtol=1e-6)
