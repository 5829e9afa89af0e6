"""The cases of `onnx.backend.test`, run here: each one passes, is unsupported by design, or is wrong."""

from __future__ import annotations

import functools
import glob
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from tests.onnx.backend import run_model

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
CHUNKS = 16

#: Cases whose expected numbers nobody else can reproduce, with the reason.
BY_NAME = {
    **dict.fromkeys(
        ["test_training_dropout_default", "test_training_dropout_default_mask", "test_training_dropout",
         "test_training_dropout_mask"],
        "the expected output is one draw of another random generator",
    ),
    **dict.fromkeys(
        ["test_operator_add_broadcast", "test_operator_add_size1_singleton_broadcast",
         "test_operator_add_size1_broadcast", "test_operator_add_size1_right_broadcast", "test_operator_addconstant"],
        "doubles outside of the range of float32, in which they are computed",
    ),
}  # fmt: skip

#: Absolute tolerances for cases that expect the rounding noise of one implementation where the exact answer is 0.
NOISE = {"test_dft_inverse": 1e-6, "test_dft_inverse_opset19": 1e-6}


@dataclass
class Case:
    """A model with inputs and the outputs it must give."""

    name: str
    kind: str
    model: onnx.ModelProto
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


@dataclass
class Outcome:
    """What became of a case. `kind` is passed, folded (all of it computed at import), unsupported or wrong."""

    name: str
    kind: str
    reasons: tuple[str, ...] = ()


@functools.cache
def all_cases() -> list[Case]:
    """Every case but the full-size models, in a fixed order. Making them takes a while, so once."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite computes infinities on purpose
        found = [_read(kind, case) for kind in KINDS for case in load_model_tests(kind=kind)]
    return sorted(found, key=lambda case: case.name)


def _read(kind: str, case: Any) -> Case:
    if case.data_sets is not None:
        data = [([_array(x) for x in inputs], [_array(x) for x in outputs]) for inputs, outputs in case.data_sets]
        return Case(case.name, kind, case.model, data, case.rtol, case.atol)
    model = onnx.load(os.path.join(case.model_dir, "model.onnx"))
    folders = sorted(glob.glob(os.path.join(case.model_dir, "test_data_set_*")))
    data = [(list(_stored(folder, "input")), list(_stored(folder, "output"))) for folder in folders]
    return Case(case.name, kind, model, data, case.rtol, case.atol)


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _stored(folder: str, name: str) -> Iterator[Any]:
    for number in range(len(glob.glob(os.path.join(folder, f"{name}_*.pb")))):
        tensor = onnx.TensorProto()
        with open(os.path.join(folder, f"{name}_{number}.pb"), "rb") as file:
            data = file.read()
        try:
            tensor.ParseFromString(data)
            yield numpy_helper.to_array(tensor)
        except Exception:  # a sequence or an optional value
            yield None


def run_case(case: Case, device: mlc.Device) -> Outcome:
    """Import, compile and run one case and compare every output."""
    if case.name in BY_NAME:
        return Outcome(case.name, "unsupported", (BY_NAME[case.name],))
    folded = False
    for inputs, expected in case.data:
        try:
            outputs, graph = run_model(case.model, inputs, device)
        except mlc.onnx.ModelError as error:
            reasons = tuple(f"{problem.operator}: {problem.reason}" for problem in error.problems)
            kind = "unsupported" if all(problem.by_design for problem in error.problems) else "wrong"
            return Outcome(case.name, kind, reasons)
        except Exception as error:
            return Outcome(case.name, "wrong", (f"{type(error).__name__}: {error}",))
        folded = not graph.outputs
        for output, wanted in zip(outputs, expected, strict=True):
            problem = difference(case, output, np.asarray(wanted))
            if problem:
                return Outcome(case.name, "wrong", (problem,))
    return Outcome(case.name, "folded" if folded else "passed")


def difference(case: Case, output: Any, wanted: Any) -> str:
    """What is wrong with an output; empty when nothing is."""
    if output.dtype != wanted.dtype or output.shape != wanted.shape:
        return f"{output.dtype}{output.shape} instead of {wanted.dtype}{wanted.shape}"
    rtol, atol = case.rtol, NOISE.get(case.name, case.atol)
    # Two units in the last place of the narrow floats, which the suite itself allows for one of them.
    rtol = max(rtol, {"bfloat16": 2**-6, "float16": 2**-9}.get(wanted.dtype.name, 0.0))
    try:
        np.testing.assert_allclose(output.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=atol)
    except AssertionError as error:
        return str(error)
    return ""


@functools.cache
def reference_device() -> mlc.Device:
    return mlc.Device(engine=Reference())


@functools.cache
def outcomes(chunk: int) -> list[Outcome]:
    """What became of every CHUNKS-th case, by the NumPy engine."""
    return [run_case(case, reference_device()) for case in all_cases()[chunk::CHUNKS]]
