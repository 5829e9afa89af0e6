"""Public members of public classes, and of objects people hold, that nothing describes: `python -m tests.docs.members`.

A docstring describes a member, a comment (`#:`) above it, or a line of its class's docstring. What a constructor takes
is in its signature.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mlcompute as mlc

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))


def undescribed() -> Iterator[str]:
    """Class.member, for every one."""
    import api  # docs/api.py

    for cls in api._public():
        if not issubclass(cls, enum.Enum):
            yield from (f"{cls.__name__}.{name}" for name in dir(cls) if not _is_described(cls, name, api))
    for thing in objects():
        cls = type(thing)
        own = {name for name in vars(thing) if not name.startswith("_")} if hasattr(thing, "__dict__") else set()
        yield from sorted(f"{cls.__name__}.{name}" for name in own if not _is_described(cls, name, api))


def objects() -> list[Any]:
    """One of each kind that people hold while they build and run a graph."""
    graph = mlc.Graph()
    x = graph.input((1, 3), "x")
    y = graph.dense(x, 2)
    inference = mlc.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    device = mlc.Device.cpu()
    inference.compile(device=device)
    run = inference.execute({"x": np.zeros((1, 3), np.float32)})
    parameter = graph.layers[0].parameters["weights"]
    training = mlc.TrainingGraph([graph], optimizer=mlc.AdamOptimizer(learning_rate=0.1))
    held = [y, graph, inference, training, device, run, run.result, *graph.layers, parameter, parameter.tensor]
    return [*held, y.descriptor, training.optimizer, mlc.TensorData(bytearray(4))]


def _is_described(cls: type, name: str, api: Any) -> bool:
    owners = [base for base in cls.__mro__ if name in {*vars(base), *getattr(base, "__annotations__", {})}]
    if name.startswith("_") or (owners and not owners[0].__module__.startswith("mlcompute")):
        return True
    if name in api._parameters(cls):
        return True
    named = re.compile(rf"(^|[\s`,]){name}($|[\s`,:])")
    return any(api._doc_of(base, name, vars(base)[name]) for base in owners if name in vars(base)) or any(
        named.search(base.__doc__ or "") for base in cls.__mro__ if base.__module__.startswith("mlcompute")
    )


if __name__ == "__main__":
    print("\n".join(sorted(set(undescribed()))))
