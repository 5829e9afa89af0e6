"""Every version of every operator from operator set 9 on means what it meant.

Judges are onnxruntime, which runs old versions by itself, and ONNX's converter: a model and the same model converted to
the newest version must give the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import version_converter

import mlcompute as mlc
from mlcompute.onnx.rows import ROWS, load_rows
from mlcompute.ops.op import Array
from tests.onnx.backend import run_model
from tests.onnx.suite import Case, difference, reference_device
from tests.onnx.versions import NEWEST, WERE_ATTRIBUTES, examples_in, versions_of

load_rows()
onnxruntime.set_default_logger_severity(4)
NAMES = sorted(name for domain, name in ROWS if not domain)
#: What the converter changes the meaning of, with the reason; onnxruntime still judges.
WRONGLY_CONVERTED = {("Resize", 10): "positions were asymmetric then and are half pixels now"}


def test_every_version_of_every_operator_is_asked() -> None:
    assert len(NAMES) > 150
    assert sum(len(versions_of(name)) for name in NAMES) > 450


def quick(name: str) -> bool:
    """Asked in every run: operators whose attributes became operands, and some of the others."""
    return name in WERE_ATTRIBUTES or name in NAMES[::6]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if quick(n) else pytest.mark.slow) for n in NAMES])
def test_every_version(name: str) -> None:
    for version in versions_of(name):
        for case, model, given in examples_in(name, version):
            try:
                ours, _ = run_model(model, list(given.values()), reference_device())
            except mlc.onnx.ModelError as error:
                if all(problem.by_design for problem in error.problems):
                    continue  # strings, sequences and the like
                raise
            compare(case, model, given, ours)
            break
        else:
            pytest.fail(f"{name}: version {version} has no example")


def compare(case: Case, model: onnx.ModelProto, given: dict[str, Array], ours: list[Array]) -> None:
    judges = {"onnxruntime": theirs(model, given), "the converted model": after_conversion(model, given)}
    if not any(judges.values()):
        judges["the suite"] = [np.asarray(array) for array in case.data[0][1]]
    assert any(judges.values())
    for judge, answers in judges.items():
        for mine, wanted in zip(ours, answers or [], strict=False):
            # Sums of many terms that cancel keep the noise of the largest.
            noise = 1e-5 * float(np.abs(wanted).max(initial=0)) if wanted.dtype.kind == "f" else 0.0
            problem = difference(dataclasses.replace(case, atol=max(case.atol, noise)), mine, wanted)
            assert not problem, f"{case.name} in version {model.opset_import[0].version} by {judge}: {problem}"


def theirs(model: onnx.ModelProto, given: dict[str, Array]) -> list[Array] | None:
    """What onnxruntime makes of a model; None when it does not run it."""
    try:
        run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return [np.asarray(array) for array in run.run(None, given)]
    except Exception:
        return None


def after_conversion(model: onnx.ModelProto, given: dict[str, Array]) -> list[Array] | None:
    """What the model gives here once ONNX has converted it; None when it cannot be converted."""
    if (model.graph.node[0].op_type, model.opset_import[0].version) in WRONGLY_CONVERTED:
        return None
    try:
        later = version_converter.convert_version(model, NEWEST)
    except Exception:
        return None
    return run_model(later, list(given.values()), reference_device())[0]
