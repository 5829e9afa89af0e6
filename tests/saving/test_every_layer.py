"""Every case of the layer table through a file and back: the same layers, the same tensors, the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.devices.reference import Reference
from mlcompute.saving.construction import kinds
from mlcompute.saving.description import describe
from mlcompute.saving.plain import from_text, to_text
from tests.cases.case import Case
from tests.test_layers import FAMILIES, make_tensor

Array = np.ndarray[Any, np.dtype[Any]]
Data = dict[str, Array]


class Joined:
    """Many cases as one graph: compiled once, every layer of it on its own inputs."""

    def __init__(self, cases: Sequence[Case], kind: type[mlc.TrainingGraph] | type[mlc.InferenceGraph]) -> None:
        self.graph = kind()
        self.inputs: Data = {}
        self.labels: Data = {}
        self.weights: Data = {}
        for number, case in enumerate(cases):
            self.add(f"{number}-{case.name}", case)

    def add(self, name: str, case: Case) -> None:
        inputs = {f"{name}-x{i}": array for i, array in enumerate(case.arrays())}
        labels = {f"{name}-t{i}": array for i, array in enumerate(case.label_arrays())}
        sources = {key: make_tensor(array) for key, array in inputs.items()}
        targets = {key: make_tensor(array) for key, array in labels.items()}
        layer, weights = case.make(), case.weight_array()
        self.graph.node(layer, sources=list(sources.values()), loss_labels=list(targets.values()))
        declared = {}
        if weights is not None:
            own = getattr(layer, "weights", None)
            declared = {f"{name}-w": own if own is not None else make_tensor(weights)}
            self.weights[f"{name}-w"] = weights
        self.graph.add_inputs(sources, targets, declared)
        results = self.graph.result_tensors(layer)
        self.graph.add_outputs({f"{name}-y{i}": tensor for i, tensor in enumerate(results)})
        self.inputs.update(inputs)
        self.labels.update(labels)


def run(graph: mlc.TrainingGraph | mlc.InferenceGraph, joined: Joined) -> dict[str, Array]:
    """All outputs after one forward pass."""
    if isinstance(graph, mlc.InferenceGraph):
        graph.execute(joined.inputs, joined.labels, joined.weights).wait()
    else:
        declared = graph._definition.declared
        tensors = {**declared.inputs, **declared.labels, **declared.label_weights}
        data = {**joined.inputs, **joined.labels, **joined.weights}
        graph.bind_and_write_data(data, for_inputs=tensors, to=device())
        graph.execute_forward().wait()
    return {name: np.asarray(tensor.data) for name, tensor in graph._definition.declared.outputs.items()}


def device() -> mlc.Device:
    return mlc.Device(mlc.DeviceType.CPU, engine=Reference())


def check(cases: Sequence[Case], kind: type[mlc.TrainingGraph] | type[mlc.InferenceGraph], path: Path) -> None:
    joined = Joined(cases, kind)
    mlc.save(path, joined.graph)
    joined.graph.compile(device=device())
    expected = run(joined.graph, joined)
    loaded = mlc.load(path, device())
    assert type(loaded) is kind
    assert describe(loaded) == describe(joined.graph)
    found = run(loaded, joined)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert array.dtype == found[name].dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    for before, after in zip(joined.graph.layers, loaded.layers, strict=True):
        assert before.label == after.label
        for slot, tensor in before.statistics.items():
            np.testing.assert_array_equal(after.statistics[slot].data, tensor.data, err_msg=slot)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__.split(".")[-1])
def test_every_case_comes_back_as_it_was(family: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "cases.safetensors"
    apart = [case for case in family.CASES if case.weights is not None]  # a graph shares label weights between losses
    groups = [[case] for case in apart]
    for mode in (True, False):
        wanted = (mode, None) if mode else (mode,)
        groups.append([case for case in family.CASES if case.training in wanted and case.weights is None])
    for group in filter(None, groups):
        check(group, mlc.InferenceGraph if group[0].training is False else mlc.TrainingGraph, path)


def test_every_kind_of_layer_and_optimizer_has_a_name_in_files() -> None:
    def concrete(base: type) -> set[type]:
        below = {found for kind in base.__subclasses__() for found in concrete(kind)}
        return below | ({base} if base.__name__ in mlc.__all__ else set())

    wanted = {kind.__name__ for kind in concrete(mlc.Layer) | concrete(mlc.Optimizer)}
    assert wanted - {"Layer", "Optimizer"} <= kinds().keys()


def test_descriptions_are_the_same_every_time() -> None:
    (family,) = (family for family in FAMILIES if family.__name__ == "tests.cases.attention")
    first, second = (to_text(describe(Joined(family.CASES[:10], mlc.TrainingGraph).graph)) for _ in range(2))
    assert first == second
    assert to_text(from_text(first)) == first
