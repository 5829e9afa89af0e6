"""The other texts in a checkpoint - manifest, state, facts, progress, version - each in a file with valid hashes."""

from __future__ import annotations

from mlcompute.platform import Platform
from mlcompute.saving.checkpoint import Checkpoint
from mlcompute.saving.names import names_of
from mlcompute.saving.state import SavedState
from tests.fuzzing.choices import Choices
from tests.fuzzing.json_edits import Damaged
from tests.fuzzing.scratch import scratch_file
from tests.fuzzing.seeds import GRAPHS, checkpoints
from tests.fuzzing.target import Target
from tests.saving.files import parts, with_text

_KEYS = ("manifest", "state", "facts", "progress", "version")


class Texts(Target):
    """The first byte of a file says which text the others are."""

    name, goal = "texts", 1_200_000

    def __init__(self) -> None:
        # The description is another target's business, and long.
        self._whole = with_text(checkpoints()[0], "description", None)
        metadata = parts(self._whole)[0]["__metadata__"]
        self._damaged = [Damaged(metadata[f"mlcompute.{key}"]) for key in _KEYS]
        self._graph = GRAPHS[0]()
        self._names = names_of(self._graph)
        self._path = scratch_file(self.name)

    def edited(self, choices: Choices) -> bytes:
        number = choices.choice((0, 1, 1, 1, 2, 3, 4))
        return bytes([number]) + self._damaged[number](choices).encode(errors="replace")

    def originals(self) -> list[bytes]:
        return [bytes([number]) + damaged.text.encode() for number, damaged in enumerate(self._damaged)]

    def read(self, file: bytes) -> None:
        key = _KEYS[file[0] % len(_KEYS)] if file else "version"
        self._path.write_bytes(with_text(self._whole, key, file[1:].decode(errors="replace")))
        with Checkpoint(self._path) as checkpoint:
            SavedState(checkpoint, self._graph, self._names)

    def state(self) -> object:
        return Platform.rng_state()
