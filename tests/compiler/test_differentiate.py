"""The differentiate pass: which paths gradients take, where they add up, and where they stop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlcompute import ops
from mlcompute.compiler.differentiate import differentiate
from mlcompute.compiler.simplify import drop_unused
from mlcompute.compiler.verify import verify_steps
from mlcompute.ops.op import TABLE, Array, Trace, Value, emit_all
from tests.compiler.programs import feed
from tests.harness import check_gradients, interpret


def ones(trace: Trace, value: Value) -> Value:
    return ops.full(value, value.shape, 1.0)


def numbers(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_uses_add_up() -> None:
    trace = Trace()
    x = feed(trace, (2, 3))
    y = x * 2.0 + x * 3.0 + x
    gradients = differentiate(trace, {y: ones(trace, y)}, [x])
    memory = interpret(trace, {x: numbers((2, 3))})
    np.testing.assert_array_equal(memory[gradients[x]], np.full((2, 3), 6.0))


def test_a_seeded_value_that_is_also_computed_adds_up() -> None:
    trace = Trace()
    x = feed(trace, (3,))
    y = x * 2.0
    z = y * 5.0
    fed = feed(trace, (3,))
    gradients = differentiate(trace, {z: ones(trace, z), y: fed}, [x])
    memory = interpret(trace, {x: numbers((3,)), fed: np.float32([1, 2, 3])})
    np.testing.assert_array_equal(memory[gradients[y]], [6, 7, 8])
    np.testing.assert_array_equal(memory[gradients[x]], [12, 14, 16])


def test_only_paths_to_wanted_values_are_followed() -> None:
    trace = Trace()
    x, w, v = feed(trace, (2, 3)), feed(trace, (3, 4), "parameter"), feed(trace, (4, 5), "parameter")
    z = ops.matmul(ops.matmul(x, w), v)
    gradients = differentiate(trace, {z: ones(trace, z)}, [v])
    assert set(gradients) == {v, z}
    needed = drop_unused(trace.steps, [gradients[v]])
    assert [step.op.name for step in needed if step.phase == "gradient"] == ["transpose", "matmul"]


def test_seeds_that_lead_nowhere_are_left_out() -> None:
    trace = Trace()
    x, other = feed(trace, (2,)), feed(trace, (2,))
    y, z = ops.exp(x), ops.exp(other)
    gradients = differentiate(trace, {y: ones(trace, y), z: ones(trace, z)}, [x])
    assert z not in gradients
    assert other not in gradients


def test_a_wanted_value_without_a_path_has_no_gradient() -> None:
    trace = Trace()
    x, unused = feed(trace, (2,)), feed(trace, (2,))
    y = ops.exp(x)
    gradients = differentiate(trace, {y: ones(trace, y)}, [x, unused])
    assert unused not in gradients


def test_gradients_do_not_pass_stopped_values() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    stopped = x * 3.0
    y = stopped * x
    gradients = differentiate(trace, {y: ones(trace, y)}, [x], {stopped})
    memory = interpret(trace, {x: np.float32([2.0, 5.0])})
    np.testing.assert_array_equal(memory[gradients[x]], [6.0, 15.0])
    assert stopped not in gradients


def test_ops_without_a_derivative_end_the_path() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    y = x * ops.stop_gradient(x) + ops.convert(x > 0.0, x.dtype)
    gradients = differentiate(trace, {y: ones(trace, y)}, [x])
    memory = interpret(trace, {x: np.float32([2.0, 5.0])})
    np.testing.assert_array_equal(memory[gradients[x]], [2.0, 5.0])


def test_results_nobody_uses_have_no_gradient_of_their_own() -> None:
    """One gradient of three results is enough; all three add up."""
    trace = Trace()
    x = feed(trace, (2, 3))
    y, mean, variance = emit_all("normalize", x, axes=(1,), epsilon=1e-5)
    gradients = differentiate(trace, {mean: ones(trace, mean)}, [x])
    memory = interpret(trace, {x: numbers((2, 3))})
    np.testing.assert_allclose(memory[gradients[x]], np.full((2, 3), 1 / 3), rtol=1e-6)
    assert y not in gradients
    assert variance not in gradients
    together = lambda x: emit_all("normalize", x, axes=(1,), epsilon=1e-5)  # noqa: E731
    check_gradients(together, np.random.default_rng(0).standard_normal((2, 3)))


def test_steps_say_which_layer_and_phase_they_belong_to() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    trace.layer = "first"
    y = ops.exp(x)
    trace.layer = "second"
    z = ops.sigmoid(y)
    trace.layer = ""
    seed = feed(trace, (2,))
    differentiate(trace, {z: seed}, [x])
    layers = [step.layer for step in trace.steps if step.phase == "gradient"]
    assert layers[0] == "second"
    assert layers[-1] == "first"
    assert trace.layer == ""
    verify_steps(trace.steps, split=True)


def test_long_chains_need_no_recursion() -> None:
    trace = Trace()
    x = feed(trace, (2,))
    y = x
    for _ in range(3000):
        y = y + x
    gradients = differentiate(trace, {y: ones(trace, y)}, [x])
    memory = interpret(trace, {x: np.float32([1.0, 2.0])})
    np.testing.assert_array_equal(memory[gradients[x]], [3001.0, 3001.0])


Recipe = list[tuple[int, int, int]]


def build(recipe: Recipe, a: Value, b: Value) -> Value:
    """A smooth function of two (3, 3) values: each line combines two of the values so far."""
    pool = [a, b]
    for kind, first, second in recipe:
        x, y = pool[first % len(pool)], pool[second % len(pool)]
        choices = (
            lambda x=x: ops.tanh(x),
            lambda x=x, y=y: x * y * 0.5,
            lambda x=x, y=y: x - y,
            lambda x=x, y=y: ops.matmul(x, y) * 0.3,
            lambda x=x: ops.transpose(x),
            lambda x=x: ops.broadcast(ops.sum_(x, (0,)), (3, 3)) * 0.2,
            lambda x=x: ops.reshape(ops.reshape(x, (9,)), (3, 3)),
            lambda x=x: ops.concatenate([ops.slice_axis(x, 0, 1, 3), ops.slice_axis(x, 0, 0, 1)], 0),
            lambda x=x: emit_all("normalize", x, axes=(1,), epsilon=0.5)[0],
            lambda x=x: ops.softmax(x, 1),
        )
        pool.append(choices[kind % len(choices)]())
    return pool[-1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_any_composition_matches_finite_differences(recipe: Recipe) -> None:
    rng = np.random.default_rng(len(recipe))
    check_gradients(lambda a, b: build(recipe, a, b), rng.standard_normal((3, 3)), rng.standard_normal((3, 3)))


# Steps of one op on the same types share one description -------------------------------------------------------------


def test_steps_of_one_op_on_the_same_types_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, described = TABLE["matmul"], []
    derivative = matmul.derivative
    assert derivative is not None

    def counting(*values: Value, **attributes: object) -> object:
        described.append(values)
        return derivative(*values, **attributes)

    monkeypatch.setattr(type(matmul), "derivative", staticmethod(counting))
    trace = Trace()
    x = y = feed(trace, (2, 3))
    weights = [feed(trace, (3, 3), "parameter") for _ in range(6)]
    for number, w in enumerate(weights):
        trace.layer = f"layer {number}"
        y = ops.relu(ops.matmul(y, w)) + y
    gradients = differentiate(trace, {y: ones(trace, y)}, [x, *weights])
    assert len(described) == 1
    verify_steps(trace.steps)
    own = [step.layer for step in trace.steps if step.phase == "gradient" and step.op is matmul]
    assert own == [f"layer {number}" for number in range(5, -1, -1) for _ in range(2)]
    assert len({gradients[w] for w in weights}) == 6


def test_a_number_that_is_an_input_in_one_step_and_only_mentioned_in_another() -> None:
    """d select(c, 0, x) has a 0 of its own: it is not the step's first branch, which is 1 in the second step."""
    trace = Trace()
    x = feed(trace, (4,))
    y = ops.select(x > 0.0, 0.0, x) + ops.select(x < 1.0, 1.0, x)
    gradients = differentiate(trace, {y: ones(trace, y)}, [x])
    memory = interpret(trace, {x: np.float32([-1.0, 0.5, 0.25, 2.0])})
    np.testing.assert_array_equal(memory[gradients[x]], [1, 0, 0, 1])


def test_a_step_that_reads_a_value_twice_is_not_like_one_that_reads_two() -> None:
    trace = Trace()
    x, w = feed(trace, (3,)), feed(trace, (3,))
    y = x * x + x * w + w * w
    gradients = differentiate(trace, {y: ones(trace, y)}, [x, w])
    a, b = numbers((3,)), numbers((3,), seed=1)
    memory = interpret(trace, {x: a, w: b})
    np.testing.assert_allclose(memory[gradients[x]], 2 * a + b, rtol=1e-6)
    np.testing.assert_allclose(memory[gradients[w]], 2 * b + a, rtol=1e-6)


def test_weights_that_a_matmul_reads_transposed_get_their_gradient_as_they_lie() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 5, 3)), feed(trace, (4, 3), "parameter")
    y = ops.matmul(x, ops.transpose(w))
    gradients = differentiate(trace, {y: ones(trace, y)}, [x, w], read={y})
    verify_steps(trace.steps)
    made = [step for step in trace.steps if step.phase == "gradient"]
    transposed = [step.inputs[0].shape for step in made if step.op.name == "transpose"]
    assert transposed == [(10, 4)]
    data = {x: numbers((2, 5, 3)), w: numbers((4, 3), 1)}
    memory = interpret(trace, data)
    np.testing.assert_allclose(memory[gradients[x]], np.ones((2, 5, 4)) @ data[w], rtol=1e-5)
    np.testing.assert_allclose(memory[gradients[w]], np.ones((4, 10)) @ data[x].reshape(10, 3), rtol=1e-5)


@pytest.mark.parametrize("reader", ["a second matmul", "an addition", "somebody", "all", "the first factor"])
def test_a_transposed_matrix_that_is_read_otherwise_keeps_its_gradient(reader: str) -> None:
    trace = Trace()
    x, w = feed(trace, (3, 3)), feed(trace, (3, 3), "parameter")
    turned = ops.transpose(w)
    y = ops.matmul(turned if reader == "the first factor" else x, turned)
    if reader == "a second matmul":
        y = ops.matmul(y, turned)
    elif reader == "an addition":
        y = y + turned
    read = None if reader == "all" else {turned, y} if reader == "somebody" else {y}
    gradients = differentiate(trace, {y: ones(trace, y)}, [w], read=read)
    assert turned in gradients
    memory = interpret(trace, {x: numbers((3, 3)), w: numbers((3, 3), 1)})
    np.testing.assert_array_equal(memory[gradients[w]], memory[gradients[turned]].T)


def test_steps_that_are_alike_have_one_kind() -> None:
    trace = Trace()
    x, w = feed(trace, (2, 3)), feed(trace, (3, 3), "parameter")
    y = ops.matmul(ops.matmul(ops.matmul(x, w), w), ops.transpose(w))
    gradients = differentiate(trace, {y: ones(trace, y)}, [w])
    products = [step for step in trace.steps if step.op.name == "matmul"]
    kinds = {step.kind: (*[value.shape for value in step.inputs],) for step in products}
    assert None not in kinds
    assert len(set(kinds.values())) == len(kinds) < len(products)
    assert all(step.kind is None or step.kind.attributes is step.attributes for step in trace.steps)
    memory = interpret(trace, {x: numbers((2, 3)), w: numbers((3, 3), 1)})
    assert memory[gradients[w]].shape == (3, 3)
