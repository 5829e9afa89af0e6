"""What other processes or threads read is stored past the caches: the same bits, wherever it begins."""

from __future__ import annotations

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.compiler import Request, compile_program
from mlcompute.compiler.program import Program
from mlcompute.devices.cpu.codegen.code import Code
from mlcompute.devices.cpu.codegen.streaming import has_streaming_stores
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.cpu.kernels import elementwise
from mlcompute.devices.cpu.runtime import schedule, threads
from mlcompute.devices.loop_nest import LoopNest, Operands, elementwise_nest
from mlcompute.ops.op import Array, Value, inner_steps
from tests.devices.tapes import dense_layers, tape

GUARD = 256


def update(engine: Cpu, shape: tuple[int, ...], *, streams: bool) -> tuple[Program, mlc.Tensor]:
    """The update of one parameter, out of place, from a gradient in two parts."""
    parameter = mlc.Tensor(shape=shape)
    request = Request(
        parameters=[parameter],
        optimizer=mlc.AdamOptimizer(learning_rate=0.1),
        summands=(0, 1),
        out_of_place=True,
        streams=streams,
    )
    return compile_program(request, engine, "update"), parameter


def updated(engine: Cpu, shape: tuple[int, ...], offset: int, *, streams: bool) -> list[bytes]:
    """New parameters and state, after writing parameters so many bytes behind a cache line."""
    program, parameter = update(engine, shape, streams=streams)
    executable, rng = engine.build(program, engine.allocate(program.plan.nbytes)), np.random.default_rng(0)
    new = program.updated[parameter][0]
    memory: dict[Value, Array] = {value: np.full((), 0.5, value.dtype) for value in program.scalars.values()}
    for value in (program.persistent[parameter], *program.summands[parameter], *program.states[parameter]):
        memory[value] = rng.random(value.shape, np.float32)
    room = np.full(new.nbytes + 3 * GUARD, 0xA5, np.uint8)
    start = GUARD - room.ctypes.data % 64 + offset
    memory[new] = room[start : start + new.nbytes].view(np.float32).reshape(shape)
    for value, array in memory.items():
        buffer = engine.wrap(array)
        assert buffer is not None
        executable.bind(value, buffer)
    executable.run(("update",))
    assert (room[:start] == 0xA5).all()
    assert (room[start + new.nbytes :] == 0xA5).all()
    return [memory[value].tobytes() for value in (new, *program.states[parameter])]


@pytest.mark.parametrize("shape", [(1,), (7,), (16,), (63,), (1000,), (9, 33), (40, 48), (4099,)])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_same_bits(shape: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    engine = Cpu(number)
    expected = updated(Cpu(1), shape, 0, streams=False)
    for offset in (0, 4, 32, 60):
        assert updated(engine, shape, offset, streams=True) == expected


def nest_of(*, streams: bool) -> LoopNest:
    program, _ = update(Cpu(1), (64,), streams=streams)
    (step,) = program.steps
    return elementwise_nest(step, inner_steps(step), Operands(program.steps, {}))


def text(nest: LoopNest) -> str:
    """The loop as it is written where no cache has it."""
    code, firsts, count = Code("written"), [], 2 + len(nest.extents)
    for each in nest.operands:
        firsts.append(count)
        count += 1 + len(each.strides)
    elementwise._Writer(code, nest, firsts).write(in_pieces=False)
    return code.text()


def test_only_new_parameters_are_streamed() -> None:
    assert [each.streams for each in nest_of(streams=True).stores].count(True) == 1
    assert not any(each.streams for each in nest_of(streams=False).stores)
    assert nest_of(streams=True).structure() != nest_of(streams=False).structure()


needs_streaming = pytest.mark.skipif(not has_streaming_stores(), reason="this machine's stores are all ordinary ones")


@needs_streaming
def test_what_is_streamed() -> None:
    assert text(nest_of(streams=True)).count("!nontemporal") == 1
    assert "nontemporal" not in text(nest_of(streams=False))


@needs_streaming
def test_streams_are_finished_behind_a_kernel_that_streams() -> None:
    """Others are told by an ordinary store that they may read."""
    runner = threads.tape_runner().text()
    assert runner.index("call void %") < runner.index("call void @llvm.x86.sse.sfence()")


@pytest.mark.parametrize(
    ("rows", "number", "streams"), [(512, 2, [True, True]), (512, 1, [False, False]), (1, 2, [True, False])]
)
def test_weights_that_other_threads_read_are_streamed(
    rows: int, number: int, streams: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many rows every thread multiplies its own with all weights.

    One row is multiplied with rows of the weights that are a thread's own, and going back with columns of them: those
    of the last layer, which is updated first. Nothing goes back beyond the first one.
    """
    monkeypatch.setattr(schedule, "WORTH_SHARING", 1e-9)
    updates = [
        bool(turn & threads.STREAM)
        for entry, turn in tape(dense_layers(rows, 256), number)
        if entry.step.phase == "update" and any(one.base.shape == (256, 256) for one in entry.writes)
    ]
    assert updates == streams
    biases = [turn for entry, turn in tape(dense_layers(rows, 256), number) if entry.writes[0].base.shape == (256,)]
    assert not any(turn & threads.STREAM for turn in biases)
