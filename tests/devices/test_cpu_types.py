"""Every layer in every type it takes: the reference's numbers, and no step left to NumPy, with oneDNN and without."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.cpu.device import Cpu
from mlcompute.devices.reference import Reference
from mlcompute.ops.op import Array
from tests.cases.case import Case
from tests.devices.cuda_cases import answers
from tests.devices.native import only_native
from tests.harness import assert_close
from tests.test_layers import CASES, Built

Row = tuple[Case, mlc.DataType]


@functools.cache
def engine() -> Cpu:
    return Cpu(2)


def retyped(case: Case, kind: mlc.DataType) -> Case:
    """The case with its sources of the first one's type in another, as far as that type reaches."""
    arrays = case.arrays()
    first = arrays[0].dtype

    def converted(array: Array) -> Array:
        if kind.numpy.kind in "iu" and array.dtype.kind != "b":
            array = np.clip(np.nan_to_num(array), 0 if kind.numpy.kind == "u" else -100, 100)
        with np.errstate(all="ignore"):  # what is beyond float16's range becomes infinite
            return array.astype(kind.numpy)

    return dataclasses.replace(case, sources=[converted(a) if a.dtype == first else a for a in arrays])


def rows() -> list[Row]:
    """Every case in every other type its layer takes."""
    found = []
    for parameters in CASES:
        case = parameters.values[0]
        arrays = case.arrays()
        if arrays:
            kinds = sorted(type(case.make()).source_types)
            found += [(case, kind) for kind in kinds if kind.numpy != arrays[0].dtype]
    return found


def check(case: Case, kind: mlc.DataType, with_onednn: bool) -> bool:
    """False: the layer refuses this type with these settings."""
    changed = retyped(case, kind)
    try:
        expected = answers(Built(changed, engine=Reference()))
    except mlc.Error:
        return False
    with only_native(with_onednn):
        actual = answers(Built(changed, engine=engine()))
    for name, array in expected.items():
        found = actual[name]
        assert (array is None) == (found is None), f"{case.name}, {kind.name}: {name}"
        if array is not None and found is not None:
            # float16 rounds where the engines' sums differ.
            assert_close(found, array, 4 * case.scale, f"{case.name}, {kind.name}: {name}")
    return True


def by_layer() -> list[Row]:
    """The first case of every layer that takes a type, one row for each type."""
    found: dict[tuple[type, mlc.DataType], Row] = {}
    for case, kind in rows():
        found.setdefault((type(case.make()), kind), (case, kind))
    return list(found.values())


def test_layers_are_native_in_other_types() -> None:
    for number, (case, kind) in enumerate(by_layer()[::3]):
        check(case, kind, with_onednn=number % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("with_onednn", [True, False])
def test_every_case_is_native_in_every_type(with_onednn: bool) -> None:
    taken = sum(check(case, kind, with_onednn) for case, kind in rows())
    assert taken > 3000
