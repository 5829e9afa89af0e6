"""Passes that know tensors, on hand-written steps: gradients, their sums and exchange, updates, what is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import ops
from mlcompute.compiler import PASSES, Context, Request, compile_program
from mlcompute.compiler.accumulate_gradients import KEEP, SHARE, accumulate_gradients
from mlcompute.compiler.add_gradients import add_gradients
from mlcompute.compiler.add_updates import add_updates
from mlcompute.compiler.cut_for_exchange import cut_for_exchange
from mlcompute.compiler.drop_unread import drop_unread
from mlcompute.compiler.exchange_gradients import GLOBAL_NORM, SLICE, exchange_gradients
from mlcompute.compiler.fuse_elementwise import fuse_elementwise
from mlcompute.compiler.fuse_update_into_matmul import fuse_update_into_matmul
from mlcompute.compiler.lower import Lowering
from mlcompute.compiler.mark_kept import mark_kept
from mlcompute.compiler.program import Program
from mlcompute.compiler.start_from_exchanged import start_from_exchanged
from mlcompute.compiler.verify import verify_steps
from mlcompute.compiler.write_exchanged import write_exchanged
from mlcompute.devices import engine_of
from mlcompute.ops.op import Array, Step, Value, run_meaning
from tests.compiler.programs import Supporting, apply, feed


class Hand:
    """loss = mean((x w)²) as four steps, and a running statistic s <- (s + loss) / 2."""

    def __init__(self, style: str = "fused", optimizer: mlc.Optimizer | None = None) -> None:
        self.x, self.w, self.s = (mlc.Tensor(shape=shape) for shape in ((2, 3), (3, 1), (1, 1)))
        self.y, self.loss = mlc.Tensor(shape=(2, 1)), mlc.Tensor(shape=(1, 1))
        self.request = Request(batch_size=2, parameters=[self.w], minimised=[self.loss], optimizer=optimizer)
        self.request.inputs, self.request.averaged = {self.x: 1}, {self.loss}
        self.context = Context(self.request, Supporting(lambda step: True), Program(style, 2))
        run = self.run = self.context.lowering = Lowering(training=True, trace=self.context.trace)
        x, w, s = run.input(self.x), run.value_of(self.w), run.value_of(self.s)
        y = run.values[self.y] = ops.matmul(x, w)
        loss = run.values[self.loss] = ops.sum_(y * y, (0, 1)) * 0.5
        run.write(self.s, (s + loss) * 0.5)
        ops.assign(s, run.writes[self.s])
        self.program.values, self.program.persistent = run.values, run.persistent
        self.steps = run.trace.steps

    @property
    def program(self) -> Program:
        return self.context.program

    def after(self, *passes: object) -> list[Step]:
        """The steps after some passes, none of which changes what it is given."""
        for one in passes:
            before = list(self.steps)
            steps = one(self.steps, self.context)  # type: ignore[operator]
            assert before == self.steps[: len(before)]
            self.steps = steps
        verify_steps(self.steps)
        return self.steps

    def compute(self, memory: dict[Value, Array]) -> dict[Value, Array]:
        """Every value; memory that is assigned to is changed."""
        memory = {**self.context.trace.constants, **memory}
        for step in self.steps:
            arrays = run_meaning(step, [memory[value] for value in step.inputs])
            memory.update(zip(step.results, arrays, strict=True))
        return memory


X, W = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1], [0], [-1]])
#: d/dw of mean((x w)²).
GRADIENT = X.T @ (X @ W)


def fed(hand: Hand) -> dict[Value, Array]:
    values = hand.run.values
    return {values[hand.x]: X, values[hand.w]: W.copy(), values[hand.s]: np.float32([[2]])}


def test_add_gradients() -> None:
    hand = Hand()
    steps = hand.after(add_gradients)
    assert [step.phase for step in steps] == sorted((step.phase for step in steps), key=["forward", "gradient"].index)
    assert hand.program.gradients.keys() >= {hand.w, hand.loss}
    np.testing.assert_allclose(hand.compute(fed(hand))[hand.program.gradients[hand.w]], GRADIENT)


def test_gradients_of_the_caller_are_added() -> None:
    hand = Hand()
    given = mlc.Tensor(shape=(2, 1))
    hand.request.user_gradients = {given: hand.y}
    hand.after(add_gradients)
    memory = fed(hand) | {hand.program.inputs[given]: np.float32([[1], [1]])}
    expected = GRADIENT + X.T @ np.ones((2, 1), np.float32)
    np.testing.assert_allclose(hand.compute(memory)[hand.program.gradients[hand.w]], expected)


def test_accumulate_gradients() -> None:
    hand = Hand("accumulate")
    hand.after(add_gradients, accumulate_gradients)
    sums, scalars = hand.program.gradient_sums[hand.w], hand.program.scalars
    for keep, before in ((0.0, np.nan), (1.0, 7.0)):
        memory = fed(hand) | {sums: np.full((3, 1), before, np.float32)}
        memory |= {scalars[SHARE]: np.float32(0.25), scalars[KEEP]: np.float32(keep)}
        expected = 0.25 * GRADIENT + (before if keep else 0.0)
        np.testing.assert_allclose(hand.compute(memory)[hand.program.gradients[hand.w]], expected)
        np.testing.assert_allclose(memory[sums], expected)


def test_exchange_gradients() -> None:
    """A slice of a quarter of the batch leaves its share of the gradient, the statistic and the loss; s stays."""
    hand = Hand("slice")
    steps = hand.after(add_gradients, exchange_gradients)
    program = hand.program
    assert [step.op.name for step in steps].count("assign") == 3
    memory = fed(hand) | {program.scalars[name]: np.float32(0.25) for name in (SHARE, SLICE)}
    left = {**program.shared, **program.exchanged}
    memory |= {value: np.empty(value.shape, value.dtype) for value in left.values()}
    hand.compute(memory)
    loss = 0.5 * float(((X @ W) ** 2).sum())
    np.testing.assert_allclose(memory[program.exchanged[hand.w]], 0.25 * GRADIENT)
    np.testing.assert_allclose(memory[program.shared[hand.loss]], [[0.25 * loss]])
    np.testing.assert_allclose(memory[program.shared[hand.s]], [[0.25 * 0.5 * (2 + loss)]])
    np.testing.assert_array_equal(memory[hand.run.values[hand.s]], [[2]])


def test_write_exchanged() -> None:
    """The product that makes the gradient writes where it is exchanged; the copy at the end is gone."""
    hand = Hand("slice")
    before = [step.op.name for step in hand.after(add_gradients, exchange_gradients)]
    after = [step.op.name for step in hand.after(write_exchanged)]
    assert before.count("assign") - after.count("assign") == 1
    program = hand.program
    (maker,) = [step for step in hand.steps if program.exchanged[hand.w] in step.results]
    assert maker.op.name != "assign"
    memory = fed(hand) | {program.scalars[name]: np.float32(0.25) for name in (SHARE, SLICE)}
    memory |= {value: np.empty(value.shape, value.dtype) for value in program.shared.values()}
    made = hand.compute(memory)
    np.testing.assert_allclose(made[program.exchanged[hand.w]], 0.25 * GRADIENT)


@pytest.mark.parametrize(("chunk", "phases"), [(12, ["gradient", "gradient:1"]), (13, ["gradient", "gradient"])])
def test_cut_for_exchange(chunk: int, phases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a chunk of gradients is a phase of its own, unless what is left is less than a chunk."""
    monkeypatch.setattr(sys.modules[cut_for_exchange.__module__], "CHUNK_BYTES", chunk)
    hand = Hand("slice")
    hand.after(add_gradients, exchange_gradients)
    program = hand.program
    first = next(step for step in hand.steps if step.inputs[:1] == (program.exchanged[hand.w],))
    other = hand.context.trace.value((3, 1), first.inputs[1].dtype, "state", "another")
    program.exchanged[hand.s] = other
    second = Step(first.op, (other, first.inputs[1]), first.results, first.attributes, first.layer, first.phase)
    cut = cut_for_exchange([first, second], hand.context)
    assert [step.phase for step in cut] == phases
    assert program.chunks == ([[hand.w], [hand.s]] if phases[0] != phases[1] else [])


def test_start_from_exchanged() -> None:
    optimizer = mlc.SGDOptimizer(
        learning_rate=0.5,
        applies_gradient_clipping=True,
        gradient_clipping_type=mlc.GradientClippingType.BY_GLOBAL_NORM,
        maximum_clipping_norm=1.0,
    )
    hand = Hand("update", optimizer)
    hand.steps = hand.run.trace.steps = []
    hand.after(start_from_exchanged, add_updates)
    program = hand.program
    assert {step.phase for step in hand.steps} == {"update"}
    memory = fed(hand) | {program.summands[hand.w][0]: GRADIENT}
    numbers = optimizer.scalars_of(1, [()]) | {GLOBAL_NORM: 4.0}
    memory |= {value: np.float32(numbers[name]) for name, value in program.scalars.items()}
    hand.compute(memory)
    np.testing.assert_allclose(memory[hand.run.values[hand.w]], W - 0.5 * GRADIENT / 4.0, rtol=1e-6)


def test_sums_are_added_in_the_loop_of_their_update() -> None:
    """However many parameters a process updates: each of them is read, and its gradients, in one loop."""
    parameters = [mlc.Tensor(shape=(size,)) for size in (3, 5, 7)]
    optimizer = mlc.AdamOptimizer(learning_rate=0.1)
    request = Request(parameters=parameters, optimizer=optimizer, summands=((0, 1), 2), out_of_place=True)
    program = compile_program(request, engine_of(mlc.Device.cpu()), "update")
    assert [step.op.name for step in program.steps] == ["fused_elementwise"] * 3
    assert all(set(program.summands[t]) <= set(step.inputs) for t, step in zip(parameters, program.steps, strict=True))


@pytest.mark.parametrize("sizes", [(1,), (7, 256), (1000,)])
@pytest.mark.parametrize("trains", [True, False], ids=["beside an update", "alone"])
def test_what_is_not_updated_is_added_up_in_the_same_order(sizes: tuple[int, ...], trains: bool) -> None:
    engine, rng = engine_of(mlc.Device.cpu()), np.random.default_rng(0)
    parameters = [mlc.Tensor(shape=(5,))] if trains else []
    summed = [mlc.Tensor(shape=(size,)) for size in sizes]
    request = Request(
        parameters=parameters,
        optimizer=mlc.SGDOptimizer(learning_rate=0.1),
        summands=((0, 1), (2, 3)),
        summed=summed,
        out_of_place=True,
    )
    program = compile_program(request, engine, "update")
    executable = engine.build(program, engine.allocate(program.plan.nbytes))
    memory: dict[Value, Array] = {value: np.zeros((), value.dtype) for value in program.scalars.values()}
    for values in (program.persistent.values(), *program.summands.values(), *program.updated.values()):
        memory |= {value: rng.standard_normal(value.shape).astype(value.dtype) for value in values}
    for value, array in memory.items():
        buffer = engine.wrap(array)
        assert buffer is not None
        executable.bind(value, buffer)
    executable.run(("update",))
    for tensor in summed:
        a, b, c, d = (memory[value] for value in program.summands[tensor])
        np.testing.assert_array_equal(memory[program.updated[tensor][0]], (a + b) + (c + d))


def test_add_updates() -> None:
    optimizer = mlc.SGDOptimizer(learning_rate=0.5, momentum_scale=0.9)
    hand = Hand(optimizer=optimizer)
    steps = hand.after(add_gradients, add_updates)
    assert steps[-1].phase == "update"
    (momentum,) = hand.program.states[hand.w]
    memory = fed(hand) | {momentum: np.ones((3, 1), np.float32)}
    memory |= {hand.program.scalars[name]: np.float32(n) for name, n in optimizer.scalars_of(1, [()]).items()}
    hand.compute(memory)
    np.testing.assert_allclose(memory[hand.run.values[hand.w]], W - (0.9 + 0.5 * GRADIENT), rtol=1e-6)


@pytest.mark.parametrize("style", ["fused", "split"])
def test_mark_kept_and_drop_unread(style: str) -> None:
    hand = Hand(style)
    hand.request.kept = [hand.y]
    steps = hand.after(add_gradients)
    assert hand.after(mark_kept) == steps, "the same in all styles"
    assert hand.run.values[hand.y] in hand.context.kept
    left = hand.after(drop_unread)
    gradients = set(hand.program.gradients.values())
    assert (gradients <= hand.context.kept) is (style == "split")
    made = {value for step in left for value in step.results}
    assert left == [step for step in steps if step in left], "the same ones, in their order"
    assert hand.run.values[hand.y] in made
    assert (gradients <= made) is (style == "split"), "nobody reads gradients of fused steps, and there is no update"
    hand.request.kept_gradients = [hand.w]
    hand.after(mark_kept)
    assert hand.program.gradients[hand.w] in hand.context.kept


def test_fuse_update_into_matmul() -> None:
    """w <- w - aᵀ b as one step, unless somebody else reads aᵀ b."""
    for is_kept in (False, True):
        hand = Hand()
        trace = hand.context.trace
        a, b, w = feed(trace, (5, 3)), feed(trace, (5, 4)), feed(trace, (3, 4), "parameter")
        trace.steps, trace.phase = [], "gradient"
        gradient = ops.matmul(ops.transpose(a), b)
        trace.phase = "update"
        ops.assign(w, w - gradient)
        kept = [gradient] if is_kept else []
        apply(fuse_elementwise, trace, kept)
        apply(fuse_update_into_matmul, trace, kept)
        names = [step.op.name for step in trace.steps]
        assert ("matmul_update" in names) is not is_kept
        hand.steps = trace.steps
        memory = {v: np.random.default_rng(v.index).standard_normal(v.shape).astype("f") for v in (a, b, w)}
        before = memory[w].copy()
        hand.compute(memory)
        np.testing.assert_allclose(memory[w], before - memory[a].T @ memory[b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("factor", "fuses"), [("input", True), ("updated", False), ("target", False)])
def test_a_matmul_reads_parameters_as_they_were(factor: str, fuses: bool) -> None:
    """The gradient of b in a b is computed before a is overwritten; and not while what it reads is."""
    trace = Hand().context.trace
    a, w = feed(trace, (4, 3), "parameter"), feed(trace, (3, 4), "parameter")
    b, rate = feed(trace, (4, 4)), feed(trace, ())
    left = {"input": feed(trace, (4, 3)), "updated": a, "target": ops.reshape(w, (4, 3))}[factor]
    trace.phase = "gradient"
    gradient = ops.matmul(ops.transpose(left), b)
    trace.phase = "update"
    ops.assign(a, a - rate)
    ops.assign(w, w - gradient)
    apply(fuse_elementwise, trace)
    apply(fuse_update_into_matmul, trace)
    assert ("matmul_update" in [step.op.name for step in trace.steps]) is fuses


def test_every_pass_has_tests() -> None:
    """Some test of this folder imports it from its file."""
    texts = [file.read_text() for file in Path(__file__).parent.glob("test_*.py")]
    assert not [one.name for one in PASSES if not any(f"mlcompute.compiler.{one.name} import" in t for t in texts)]
