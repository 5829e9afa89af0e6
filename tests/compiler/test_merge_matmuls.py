"""merge_matmuls: products of one matrix with several weights are one, and nobody can tell but by the time they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler.merge_matmuls import merge_matmuls
from mlcompute.compiler.simplify import drop_unused
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.cuda.device import Cuda
from mlcompute.devices.device import Traits
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Trace, Value
from tests.compiler.programs import Supporting, apply, feed, run
from tests.devices.cuda_emulator import bench
from tests.nets import MEAN, SYNC, Array, normal, sgd, values_of


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supporting, "traits", Traits(merges_matmuls=1))


def products(trace: Trace, widths: tuple[int, ...], biases: int, heads: int = 0) -> tuple[list[Value], list[Value]]:
    """What is fed, and x wᵀ, with biases or without, in heads or not, for weights of some widths."""
    x = feed(trace, (2, 5, 4))
    fed, results = [x], []
    for number, width in enumerate(widths):
        w = feed(trace, (width, 4), "parameter")
        y = ops.matmul(ops.reshape(x, (10, 4)), ops.transpose(w))
        fed.append(w)
        if number < biases:
            fed.append(feed(trace, (width,), "parameter"))
            y = y + fed[-1]
        y = ops.reshape(y, (2, 5, width))
        results.append(ops.reshape(y, (2, 5, heads, width // heads)) if heads else y)
    return fed, results


@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("biases", [0, 3, 1])
@pytest.mark.parametrize("widths", [(6, 6, 6), (6, 2, 4)])
def test_three_products_are_one(widths: tuple[int, ...], biases: int, heads: int) -> None:
    trace = Trace()
    fed, results = products(trace, widths, biases, heads)
    expected = run(trace, fed, results)
    apply(merge_matmuls, trace, results)
    trace.steps = drop_unused(trace.steps, results)
    verify_steps(trace.steps)
    names = [step.op.name for step in trace.steps]
    assert names.count("matmul") == 1
    assert names.count("slice") == 3
    assert names.count("add") == (1 if biases == 3 else biases)
    if biases != 1 and (not heads or len(set(widths)) == 1):
        assert names[-3:] == ["slice"] * 3, "reshapes come before slices: after them they would be copies"
    for a, b in zip(run(trace, fed, results), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_what_stays_apart() -> None:
    def other_x(trace: Trace) -> list[Value]:
        a, b = feed(trace, (5, 4)), feed(trace, (5, 4))
        return [ops.matmul(x, ops.transpose(feed(trace, (3, 4), "parameter"))) for x in (a, b)]

    def one_weight(trace: Trace) -> list[Value]:
        x, w = feed(trace, (5, 4)), feed(trace, (3, 4), "parameter")
        return [ops.matmul(x, ops.transpose(w)), ops.matmul(x, ops.transpose(w))]

    def computed_weights(trace: Trace) -> list[Value]:
        x = feed(trace, (5, 4))
        return [ops.matmul(x, ops.transpose(ops.exp(feed(trace, (3, 4), "parameter")))) for _ in range(2)]

    for fn in (other_x, one_weight, computed_weights):
        trace = Trace()
        results = fn(trace)
        steps = list(trace.steps)
        apply(merge_matmuls, trace, results)
        assert trace.steps == steps, fn.__name__


def test_few_rows_and_large_products_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, least in ((10, 11), (1 << 21, 1)):
        monkeypatch.setattr(Supporting, "traits", Traits(merges_matmuls=least))
        trace = Trace()
        x = feed(trace, (rows, 4))
        for _ in range(2):
            ops.matmul(x, ops.transpose(feed(trace, (5, 4), "parameter")))
        steps = list(trace.steps)
        apply(merge_matmuls, trace)
        assert trace.steps == steps


# Networks -------------------------------------------------------------------------------------------------------------

Network = Callable[[mlc.Graph, mlc.Tensor], mlc.Tensor]


def attention(**options: object) -> Network:
    return lambda g, x: g.attention(x, heads=2, **options)  # type: ignore[arg-type]


def branches(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    """Dense layers of different widths on one tensor, read in several ways."""
    a, b = g.dense(x, 8, activation="relu"), g.dense(x, 8, biases=False)
    c = g.dense(x, 4)
    return g.add(g.multiply(a, b), g.dense(c, 8))


def frozen_queries(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    return g.add(g.multiply(g.dense(x, 8, updates=False), g.dense(x, 8)), g.dense(x, 8))


def shared_weights(g: mlc.Graph, x: mlc.Tensor) -> mlc.Tensor:
    w = mlc.Tensor(shape=(8, 8), data=0.3 * normal(8, 8, seed=9))
    first = g.multiply(g.dense(x, 8, weights=w), g.dense(x, 8))
    return g.add(g.multiply(g.dense(first, 8, weights=w), g.dense(first, 8)), g.dense(x, 8, weights=w))


NETWORKS: dict[str, Network] = {
    "attention": attention(),
    "without biases": attention(biases=False),
    "causal, rotary": attention(causal=True, rotary=True),
    "grouped heads": attention(key_value_heads=1),
    "other widths of values": attention(value_dimension=4),
    "frozen": attention(updates=False),
    "dense layers": branches,
    "frozen queries": frozen_queries,
    "shared weights": shared_weights,
}


class Trained:
    """A network after two steps, at once or pass by pass; then with a gradient of the caller's own, too."""

    def __init__(self, network: Network, device: mlc.Device, split: bool = False, batch: int = 3) -> None:
        mlc.Platform.set_rng_seed_to(5)
        graph = mlc.Graph()
        x = graph.input((3, 5, 8), "x")
        hidden = network(graph, graph.dense(x, 8))
        scores, t = graph.dense(hidden, 8), mlc.Tensor(shape=(3, 5, 8))
        training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(MEAN), sgd(0.02))
        training.add_inputs({"x": x}, {"t": t})
        training.add_outputs({"scores": scores})
        data = {x: normal(batch, 5, 8, seed=1), t: normal(batch, 5, 8, seed=2)}
        if split:
            data[training.allocate_user_gradient(hidden)] = 0.1 * normal(3, 5, 8, seed=3)
        training.compile(device=device)
        for _ in range(2):
            if split:
                training.bind_and_write_data(
                    {str(k): array for k, array in enumerate(data.values())},
                    for_inputs={str(k): tensor for k, tensor in enumerate(data)},
                    to=device,
                )
                training.execute_forward()
                training.execute_gradient()
                training.execute_optimizer_update().wait()
            else:
                training.execute({"x": data[x]}, {"t": data[t]}, batch_size=batch, options=SYNC)
        self.results: list[Array] = [np.asarray(scores.data)[:batch], *values_of(training)]
        if split:
            self.results += training.gradients().values()
        steps = training._session.program("split" if split else "fused", batch).steps
        self.names = [step.op.name for step in steps]


class Merging(Reference):
    traits = Traits(merges_matmuls=1)


def agree(found: list[Array], expected: list[Array], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_learn_the_same(name: str, split: bool) -> None:
    apart = Trained(NETWORKS[name], mlc.Device(engine=Reference()), split)
    merged = Trained(NETWORKS[name], mlc.Device(engine=Merging()), split)
    assert merged.names.count("matmul") < apart.names.count("matmul")
    agree(merged.results, apart.results)


def test_smaller_batches() -> None:
    merged, apart = (Trained(attention(), mlc.Device(engine=each), batch=2) for each in (Merging(), Reference()))
    agree(merged.results, apart.results)


@bench.needs_engine
def test_the_gradients_of_queries_keys_and_values_are_written_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    device = mlc.Device(engine=bench.engine(), precision="bf16")
    apart = Trained(attention(causal=True), device)
    monkeypatch.setattr(Cuda, "traits", replace(Cuda.traits, merges_matmuls=1))
    merged = Trained(attention(causal=True), device)
    assert "attention_by_token_joined_gradient" in merged.names
    assert "slice_gradient" not in merged.names
    agree(merged.results, apart.results, 2e-2)
