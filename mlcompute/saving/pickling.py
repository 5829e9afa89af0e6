"""Graphs through pickle, joblib and other processes: as files are, with weights, optimizer state and time step.

What was compiled stays behind: compile again where it arrives, for a device that is there. Nothing is shared with the
original, and the process's random stream is left alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from mlcompute.errors import GraphError
from mlcompute.graph import Graph
from mlcompute.platform import Platform
from mlcompute.runtime.session import session_of
from mlcompute.saving.files import load, save


def reduced(graph: Graph) -> tuple[Callable[[bytes], Graph], tuple[bytes]]:
    """What pickle keeps of a graph: how to rebuild it, and the bytes of its file."""
    session = session_of(graph)
    if session is not None and session.links:
        raise GraphError(
            f"{type(graph).__name__}: a linked graph cannot be pickled, the others would be missing",
            fix="copy.deepcopy copies all linked graphs; or build and link them where they are needed, and restore",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "graph.safetensors")
        save(path, graph)
        with open(path, "rb") as file:
            return rebuilt, (file.read(),)


def rebuilt(content: bytes) -> Graph:
    """The graph that `reduced` was given, not compiled."""
    before = Platform.rng_state()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "graph.safetensors")
        with open(path, "wb") as file:
            file.write(content)
        try:
            graph: Graph = load(path)
            return graph
        finally:
            Platform.set_rng_state(before)
