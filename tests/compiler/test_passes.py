"""The list of passes: what applies when, what is checked after each, and what MLC_DEBUG=passes prints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute import compiler, ops
from mlcompute.compiler import PASSES, Context, Pass, Request, compile_program
from mlcompute.compiler.exchange_sums import exchange_sums
from mlcompute.compiler.index import Index
from mlcompute.compiler.program import Program
from mlcompute.compiler.verify import verify_steps
from mlcompute.devices.device import Traits
from mlcompute.devices.null import Null
from mlcompute.ops.op import FLOAT32, TABLE, Step, Trace


class Capable(Null):
    traits = Traits(
        fuses_elementwise=True,
        fuses_epilogues=True,
        fuses_normalization=True,
        attention_by_token=True,
        recurrent_reserve=True,
        merges_matmuls=1,
        channels_last=True,
        updates_last=True,
    )


#: A training step in one call, on one process, adds up nothing and exchanges nothing.
FUSED = [
    each.name
    for each in PASSES
    if each.name not in ("accumulate_gradients", "start_from_exchanged") and "exchange" not in each.name
]


def with_one_more(transform: Any) -> list[Pass]:
    """The list with one more pass, after everything has become what the device supports."""
    place = [each.name for each in PASSES].index("expand") + 1
    return [*PASSES[:place], Pass(transform), *PASSES[place:]]


def described(optimizer: bool = True, precision: str = "float32") -> Request:
    """A convolution with a ReLU and a loss."""
    graph = mlc.Graph()
    x = graph.input((4, 2, 6, 6), "x")
    y = graph.flatten(graph.convolution(x, 3, kernel=3, activation="relu"))
    sgd = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=0.1)) if optimizer else None
    training = mlc.TrainingGraph([graph], mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN), sgd)
    training.add_inputs({"x": x}, {"t": mlc.Tensor(shape=y.descriptor.shape)})
    training.compile(device=mlc.Device(mlc.DeviceType.CPU, engine=Null(), precision=precision))
    return training._session.compile_if_needed()


def applied(style: str, engine: Null, **settings: Any) -> list[str]:
    context = Context(described(**settings), engine, Program(style, 4))
    return [each.name for each in PASSES if each.when(context)]


def test_which_passes_apply() -> None:
    assert applied("fused", Capable(), precision="bf16") == FUSED
    assert "lower_precision" not in applied("fused", Capable())
    assert "accumulate_gradients" in applied("accumulate", Capable())
    part, update = applied("slice", Capable()), applied("update", Capable())
    assert "exchange_gradients" in part
    assert "add_updates" not in part
    assert "start_from_exchanged" in update
    assert "add_gradients" not in update
    plain = applied("inference", Null())
    assert "add_gradients" not in plain
    assert "add_updates" not in plain
    assert "channels_last" not in plain
    assert "fuse_elementwise" not in plain
    assert plain[0] == "lower"
    assert plain[-1] == "plan_memory"
    split = applied("split", Capable(), optimizer=False)
    for absent in ("add_updates", "schedule_updates", "pool_indices", "fuse_update_into_matmul"):
        assert absent not in split


def test_every_pass_is_named_like_its_file() -> None:
    for each in PASSES:
        module = each.transform.__module__.rsplit(".", 1)[1]
        assert module == each.name


def test_passes_leave_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in, steps out: the list a pass was given holds the same steps afterwards."""

    def watched(each: Pass) -> Pass:
        def transform(steps: list[Step], context: Context) -> list[Step]:
            before, texts = list(steps), [repr(step) for step in steps]
            found = each.transform(steps, context)
            assert steps[: len(before)] == before or steps is context.trace.steps, each.name
            assert [repr(step) for step in before] == texts, each.name
            return found

        return Pass(transform, each.when)

    monkeypatch.setattr(compiler, "PASSES", [watched(each) for each in PASSES])
    for style in compiler.STYLES:
        compile_program(described(precision="bf16"), Capable(), style)


def test_a_pass_that_breaks_something_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_DEBUG", "verify")

    def forgetful(steps: list[Step], context: Context) -> list[Step]:
        return steps[1:]

    monkeypatch.setattr(compiler, "PASSES", with_one_more(forgetful))
    with pytest.raises(AssertionError, match=r"after the pass forgetful: .*is used before it exists"):
        compile_program(described(), Null(), "fused")


def test_a_pass_that_makes_what_the_device_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLC_DEBUG", "verify")

    def inventive(steps: list[Step], context: Context) -> list[Step]:
        x = steps[0].inputs[0]
        result = context.trace.value(x.shape, x.dtype)
        return [Step(TABLE["softmax"], (x,), (result,), {"axis": 1}), *steps]

    monkeypatch.setattr(compiler, "PASSES", with_one_more(inventive))
    with pytest.raises(AssertionError, match=r"after the pass inventive: .*'null' does not support it"):
        compile_program(described(), Null({"softmax"}), "fused")


def test_what_passes_print(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    request = described(precision="bf16")
    monkeypatch.setenv("MLC_DEBUG", "passes")
    compile_program(request, Capable(), "fused")
    text = capsys.readouterr().err
    assert "lower (fused, batch 4): 0 -> " in text
    assert "+ Convolution" in text or "+ convolution" in text.lower()
    assert "fuse_elementwise (fused, batch 4)" in text
    titles = [line.split(" ", 1)[0] for line in text.splitlines() if not line.startswith(" ")]
    assert titles == FUSED


# Index ----------------------------------------------------------------------------------------------------------------


def test_an_index_knows_makers_readers_and_aliases() -> None:
    trace = Trace()
    x = trace.value((2, 3), FLOAT32, "input")
    y = ops.exp(x)
    z = ops.transpose(y)
    flat = ops.emit("reshape", ops.transpose(z), shape=(6,))
    square = y * y
    index = Index(trace.steps)
    assert index.makers[y] is trace.steps[0]
    assert x not in index.makers
    assert [step.op.name for step in index.readers[y]] == ["transpose", "multiply"], "each step once"
    assert index.base(flat) is y
    assert index.base(square) is square
    assert index.positions[trace.steps[2]] == 2


def test_an_index_is_made_once_for_a_list() -> None:
    trace = Trace()
    ops.exp(trace.value((2,), FLOAT32, "input"))
    context = Context(Request(), Null(), Program("fused", 1), trace=trace)
    first = context.index(trace.steps)
    assert context.index(trace.steps) is first
    assert context.index(list(trace.steps)) is not first
    assert np.array_equal(list(first.positions.values()), [0])


def test_exchange_sums_ends_a_phase_where_sums_are_needed() -> None:
    trace = Trace()
    x = trace.value((2,), np.dtype(np.float32), "input")
    y = ops.sum_over_slices(x * 2.0) + 1.0
    context = Context(Request(), Null(), Program("slice", 1), trace=trace)
    steps = exchange_sums(trace.steps, context)
    assert [(step.op.name, step.phase) for step in steps] == [
        ("multiply", "forward"),
        ("assign", "forward"),
        ("copy", "forward:1"),
        ("add", "forward:1"),
    ]
    assert steps[-1].results == (y,)
    program = context.program
    program.steps = steps
    assert list(program.sums) == ["forward"]
    assert [names for names, _ in program.parts(("forward",))] == [("forward",), ("forward:1",)]
    verify_steps(steps)
