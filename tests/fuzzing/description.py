"""The description of a graph: JSON text, and the graph it stands for."""

from __future__ import annotations

from mlcompute.enums import DataType, GraphCompilationOptions
from mlcompute.errors import FileError
from mlcompute.platform import Platform
from mlcompute.saving.construction import _enumerations, kinds
from mlcompute.saving.description import rebuild
from mlcompute.saving.plain import from_text
from tests.fuzzing.choices import Choices
from tests.fuzzing.json_edits import Damaged
from tests.fuzzing.seeds import texts
from tests.fuzzing.target import Target


class Description(Target):
    name, goal = "description", 1_200_000

    def __init__(self) -> None:
        words = [
            *({"$kind": name} for name in kinds()),
            *({"$enum": f"{name}.{member}"} for name, kind in _enumerations().items() for member in kind.__members__),
            *DataType.__members__, *GraphCompilationOptions.__members__, "Graph", "TrainingGraph", "InferenceGraph",
            {"$tensor": "x"}, {"$tensor": "input"}, {"gradient_of": "x"}, {"$operator": {}},
            {"array": ["<f8", [2**40], ""]}, {"array": ["<f4", [1], "AAAAAA=="]}, {"bytes": "AA"}, {"float": "inf"},
        ]  # fmt: skip
        self._texts = [Damaged(text, words) for text in texts("description")]

    def edited(self, choices: Choices) -> bytes:
        return choices.choice(self._texts)(choices).encode()

    def originals(self) -> list[bytes]:
        return [damaged.text.encode() for damaged in self._texts]

    def read(self, file: bytes) -> None:
        try:
            value = from_text(file.decode())
        except ValueError as error:  # what `Checkpoint` does with a text it cannot read
            raise FileError("no description") from error
        rebuild(value, "a file")

    def state(self) -> object:
        return Platform.rng_state()
