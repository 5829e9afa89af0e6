"""ONNX import and export: load a model as a trainable graph, and write graphs as ONNX.

    graph = mlc.onnx.load("model.onnx", batch=32)       a Graph with inputs, outputs and trainable weights by name
    print(mlc.onnx.doctor("model.onnx", batch=32))      what imports, what trains, how much memory
    mlc.onnx.save(inference_graph, "model.onnx")        a model other programs run

Needs the `onnx` package (`pip install mlcompute[onnx]`), which is imported when one of these is first called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlcompute.foreign_names import no_member

if TYPE_CHECKING:
    from mlcompute.onnx.diagnosis import Report, doctor
    from mlcompute.onnx.exporter import save, to_model
    from mlcompute.onnx.imported import ImportedGraph
    from mlcompute.onnx.loading import load
    from mlcompute.onnx.model_writer import CannotExportError
    from mlcompute.onnx.problems import ModelError, Problem
    from mlcompute.onnx.table import operator_table

_WHERE = {
    "CannotExportError": "model_writer",
    "ImportedGraph": "imported",
    "ModelError": "problems",
    "Problem": "problems",
    "Report": "diagnosis",
    "doctor": "diagnosis",
    "load": "loading",
    "operator_table": "table",
    "save": "exporter",
    "to_model": "exporter",
}

__all__ = [
    "CannotExportError", "ImportedGraph", "ModelError", "Problem", "Report", "doctor", "load", "operator_table", "save",
    "to_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Everything is loaded on first use: `import mlcompute` must stay quick, and onnx is optional.
    if name not in _WHERE:
        raise no_member(__name__, name, __all__)
    import importlib
    import importlib.util

    if importlib.util.find_spec("onnx") is None:
        raise ImportError(f"mlcompute.onnx.{name} needs the package onnx: pip install mlcompute[onnx]", name="onnx")
    found = getattr(importlib.import_module(f"mlcompute.onnx.{_WHERE[name]}"), name)
    globals()[name] = found
    return found
