"""Random networks, forward and one training step: every engine and onnxruntime against PyTorch in float64.

Any number of threads gives the same bits, and a smaller batch the same rows. One network in four runs without oneDNN;
no step of any program is left to NumPy.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import time
import warnings
from collections.abc import Iterable, Mapping

import numpy as np
import onnxruntime
import pytest
import torch

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.device import Engine
from mlcompute.devices.reference import Reference
from mlcompute.onnx.model_writer import CannotExportError
from mlcompute.ops.op import Array
from tests.devices.native import only_native
from tests.harness import TOLERANCE
from tests.random_networks import TARGET, Network, network

#: How many networks the slow test makes, and the number of the first; one that fails is repeated by its number.
COUNT = int(os.environ.get("MLC_NETWORKS", "20000"))
FIRST = int(os.environ.get("MLC_FIRST_NETWORK", "0"))
#: Beyond this a square may leave the range of float32.
LARGEST = 1e15
RATE = 0.1
WAIT = mlc.ExecutionOptions.SYNCHRONOUS

onnxruntime.set_default_logger_severity(4)


@functools.cache
def engine(threads: int) -> Engine:
    """The native engine with so many threads; 0: the reference."""
    return Cpu(threads) if threads else Reference()


def device(threads: int) -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=engine(threads))


def empty(tensors: Mapping[str, mlc.Tensor]) -> dict[str, Array]:
    return {name: np.full(tensor.descriptor.shape, np.nan, np.float32) for name, tensor in tensors.items()}


class Compiled:
    """A network compiled for inference on the native engine with so many threads; 0: on the reference."""

    def __init__(self, net: Network, threads: int) -> None:
        self.net = net
        self.run = mlc.InferenceGraph([net.graph])
        self.run.add_inputs(net.inputs)
        self.run.add_outputs(net.outputs)
        self.run.compile(device=device(threads))

    def __call__(self, batch: int = 0) -> dict[str, Array]:
        """The outputs, written into the caller's arrays."""
        results = empty(self.net.outputs)
        feeds = {name: array[:batch] for name, array in self.net.feeds.items()} if batch else self.net.feeds
        self.run.execute(feeds, outputs_data=results, batch_size=batch, options=WAIT)
        return results


def trained(seed: int, wide: bool, threads: int) -> tuple[dict[str, Array], list[Array]]:
    """Outputs of one training step, and the weights after it."""
    net = network(seed, wide)
    labels = {}
    for name, tensor in net.outputs.items():
        labels[f"{name} wanted"] = mlc.Tensor(shape=tensor.descriptor.shape)
        loss = mlc.LossLayer.mean_squared_error(mlc.ReductionType.MEAN)
        net.graph.node(loss, source=tensor, loss_labels=[labels[f"{name} wanted"]])
    optimizer = mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=RATE))
    training = mlc.TrainingGraph([net.graph], None, optimizer)
    training.add_inputs(net.inputs, labels)
    training.add_outputs(net.outputs)
    with warnings.catch_warnings():
        # Not every layer leads to an output.
        warnings.filterwarnings("ignore", "TrainingGraph: .* will not be trained")
        training.compile(device=device(threads))
    results = empty(net.outputs)
    wanted = {name: np.full(tensor.descriptor.shape, TARGET, np.float32) for name, tensor in labels.items()}
    training.execute(net.feeds, wanted, outputs_data=results, options=WAIT)
    return results, [np.array(tensor.data) for tensor in net.weights]


class Judge:
    """Compares with PyTorch in float64: up to rounding, and to how far the answer moves when operands are rounded."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.outputs, self.slopes = net.evaluate(torch.float64)
        self._others: list[tuple[dict[str, Array], list[Array]]] = []
        found = [*self.outputs.values(), *self.slopes]
        self.is_bounded = all(np.isfinite(a).all() and np.abs(a).max(initial=0.0) < LARGEST for a in found)

    @property
    def others(self) -> list[tuple[dict[str, Array], list[Array]]]:
        """The same from operands that differ by a few roundings, and in float32: at kinks rounding decides."""
        if not self._others:
            self._others = [self.net.evaluate(torch.float64, 1e-6, seed) for seed in range(6)]
            self._others.append(self.net.evaluate(torch.float32))
        return self._others

    def moved(self, name: str) -> float:
        return max(distance(other[0][name], self.outputs[name]) for other in self.others)

    def check_outputs(self, who: str, found: Mapping[str, Array], rows: int | None = None) -> None:
        for name, array in found.items():
            right = self.outputs[name][:rows]
            if not close(array[:rows], right, 0.0):
                moved = max(distance(other[0][name][:rows], right) for other in self.others)
                off = distance(array[:rows], right)
                told = f"{who}: {name} is off by {off:.2g}, others by {moved:.2g}"
                assert close(array[:rows], right, 10 * moved), told

    def check_weights(self, who: str, found: list[Array]) -> None:
        for index, (tensor, array) in enumerate(zip(self.net.weights, found, strict=True)):
            before = self.net.numbers[tensor].astype(np.float64)
            right = before - RATE * self.slopes[index]
            if not close(array, right, 0.0):
                moved = RATE * max(distance(other[1][index], self.slopes[index]) for other in self.others)
                off = distance(array, right)
                told = f"{who}: weight {index} is off by {off:.2g}, others by {moved:.2g}"
                assert close(array, right, 10 * moved), told


def distance(a: Array, b: Array) -> float:
    return float(np.abs(a.astype(np.float64) - b).max(initial=0.0))


def close(found: Array, right: Array, moved: float) -> bool:
    relative, _ = TOLERANCE[np.dtype(np.float32)]
    size = max(1.0, float(np.abs(right).max(initial=0.0)))
    return found.shape == right.shape and distance(found, right) <= relative * size + moved


def same_bits(who: str, a: Iterable[Array], b: Iterable[Array]) -> None:
    for first, second in zip(a, b, strict=True):
        assert first.tobytes() == second.tobytes(), who


def check(seed: int, wide: bool = False) -> str:
    """Everything about one network; what could not be asked, as a word."""
    with only_native(with_onednn=seed % 4 != 3):
        return check_network(seed, wide)


def check_network(seed: int, wide: bool) -> str:
    net = network(seed, wide)
    judge = Judge(net)
    if not judge.is_bounded:
        return "unbounded"
    threads = (2, 3, 5, 8)[seed % 4]
    reference, single, several = (Compiled(net, count) for count in (0, 1, threads))
    answers = single()
    judge.check_outputs("reference", reference())
    judge.check_outputs("native", answers)
    same_bits(f"inference on {threads} threads differs", answers.values(), several().values())
    check_smaller_batch(judge, 1 + seed % max(1, net.batch - 1), reference, several)
    same_bits("after a smaller batch the same batch differs", answers.values(), several().values())
    if seed % 2:
        check_step(seed, wide, judge, threads)
    return check_elsewhere(net, judge)


def check_step(seed: int, wide: bool, judge: Judge, threads: int) -> None:
    single = trained(seed, wide, 1)
    for who, (outputs, weights) in (("reference", trained(seed, wide, 0)), ("native", single)):
        judge.check_outputs(f"{who}, training", outputs)
        judge.check_weights(f"{who}, training", weights)
    others = trained(seed, wide, threads)
    same_bits(f"outputs of training on {threads} threads differ", single[0].values(), others[0].values())
    same_bits(f"weights after training on {threads} threads differ", single[1], others[1])


def check_smaller_batch(judge: Judge, rows: int, *runs: Compiled) -> None:
    """The leading rows; across samples, both engines agree or both refuse."""
    net = judge.net
    if rows >= net.batch:
        return
    found: list[dict[str, Array] | str] = []
    for run in runs:
        try:
            found.append(run(rows))
        except mlc.Error as error:
            found.append(error.message)
    reference, native = found
    if isinstance(reference, str) or isinstance(native, str):
        assert reference == native, f"a batch of {rows}: one engine refuses: {reference!r}, {native!r}"
        assert net.mixes, f"a batch of {rows} is refused: {native}"
        return
    if net.mixes:
        for name, array in native.items():
            same_rows = np.array_equal(np.isnan(array), np.isnan(reference[name]))
            assert same_rows, f"a batch of {rows}: other rows of {name}"
            if not close(np.nan_to_num(array), np.nan_to_num(reference[name]), 0.0):
                off, moved = distance(np.nan_to_num(array), np.nan_to_num(reference[name])), judge.moved(name)
                assert off <= 10 * moved, f"a batch of {rows}: {name} is off by {off:.2g}, others by {moved:.2g}"
    else:
        judge.check_outputs(f"a batch of {rows}, reference", reference, rows)
        judge.check_outputs(f"a batch of {rows}, native", native, rows)


def check_elsewhere(net: Network, judge: Judge) -> str:
    run = mlc.InferenceGraph([net.graph])
    run.add_inputs(net.inputs)
    run.add_outputs(net.outputs)
    try:
        model = mlc.onnx.to_model(run)
    except CannotExportError:
        return "not exported"
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {info.name: net.feeds[info.name] for info in session.get_inputs()}
    judge.check_outputs("onnxruntime", dict(zip(net.outputs, session.run(list(net.outputs), feeds), strict=True)))
    return "exported"


@pytest.mark.parametrize("seed", range(24))
def test_random_network(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", range(6))
def test_random_wide_network(seed: int) -> None:
    check(seed, wide=True)


@pytest.mark.slow
def test_many_random_networks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Says every now and then how far it is; goes on after a failure, and tells the numbers of all in the end."""
    faulthandler.cancel_dump_traceback_later()  # it takes an hour without hanging
    monkeypatch.setenv("MLC_DEBUG", "")
    failed: dict[int, str] = {}
    said: dict[str, int] = {}
    start = time.monotonic()
    for count, number in enumerate(range(FIRST, FIRST + COUNT), 1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                word = check(number, wide=number % 20 == 19)
            said[word] = said.get(word, 0) + 1
        except Exception as error:
            failed[number] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            with capsys.disabled():
                print(f"\nnetwork {number} failed: {failed[number]}", flush=True)
        if count % 500 == 0 or count == COUNT:
            took = (time.monotonic() - start) / count * 1e3
            with capsys.disabled():
                print(f"\n{count} networks, {said}, {len(failed)} failed, {took:.0f} ms each", flush=True)
    assert not failed, failed
