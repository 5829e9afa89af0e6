"""ONNX models, imported."""

from __future__ import annotations

import functools
from pathlib import Path

import onnx

import mlcompute as mlc
from tests.fuzzing.choices import Choices
from tests.fuzzing.proto_edits import damaged_model
from tests.fuzzing.target import Target
from tests.onnx.mutants import originals

#: What a caller allows for the constants of a model it does not trust.
MEMORY_LIMIT = 1 << 24
_LARGEST = 4000


class OnnxModel(Target):
    name, goal = "onnx", 1_000_000
    longest_message = 200_000  # it lists everything that cannot be imported

    def __init__(self) -> None:
        self._models = [onnx.ModelProto.FromString(file) for file in _files()]

    def edited(self, choices: Choices) -> bytes:
        return damaged_model(choices.choice(self._models), choices)

    def originals(self) -> list[bytes]:
        from tests.onnx.suite import all_cases

        one_operator = [case.model.SerializeToString() for case in all_cases() if case.kind == "node"]
        return [*_files(), *(file for file in one_operator if len(file) < 1000)]

    def read(self, file: bytes) -> None:
        mlc.onnx.load(file, batch=2, memory_limit=MEMORY_LIMIT)


@functools.cache
def _files() -> list[bytes]:
    """Our own, and the small ones that come with onnx."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    stored = (path.read_bytes() for path in sorted(folder.glob("*/*/model.onnx")) if path.stat().st_size < _LARGEST)
    return [*originals(), *stored]
