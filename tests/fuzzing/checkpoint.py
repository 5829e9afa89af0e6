"""Whole checkpoints, restored and loaded by the public calls: changed bytes, and changes behind valid hashes."""

from __future__ import annotations

import contextlib
import json

import mlcompute as mlc
from mlcompute.platform import Platform
from tests.fuzzing.byte_edits import damaged_bytes
from tests.fuzzing.choices import Choices
from tests.fuzzing.json_edits import Damaged
from tests.fuzzing.scratch import scratch_file
from tests.fuzzing.seeds import GRAPHS, checkpoints
from tests.fuzzing.target import Target
from tests.saving.files import parts, raw_file, signed, with_text

_TEXTS = ("description", "state", "manifest", "facts", "progress")
_DTYPES = ["F32", "F16", "BF16", "F64", "I32", "BOOL", "F4", "F8_E4M3"]


class CheckpointTarget(Target):
    name, goal = "checkpoint", 600_000

    def __init__(self) -> None:
        self._path = scratch_file(self.name)
        self._graph = GRAPHS[0]()
        self._files = [(*parts(file), file) for file in checkpoints()]
        self._headers = [Damaged(json.dumps(header), _DTYPES) for header, _, _ in self._files]
        self._texts = [
            {key: Damaged(header["__metadata__"][f"mlcompute.{key}"]) for key in _TEXTS} for header, _, _ in self._files
        ]
        plain = parts(checkpoints()[0])[0]
        del plain["__metadata__"]
        self._plain = Damaged(json.dumps(plain), _DTYPES)

    def edited(self, choices: Choices) -> bytes:
        number = choices.randrange(len(self._files))
        _, data, whole = self._files[number]
        kind = choices.randrange(6)
        if kind == 0:
            return damaged_bytes(whole, choices)
        if kind == 1:  # a file of another program: no hashes, and our names
            return raw_file(self._plain(choices).encode(), self._files[0][1])
        if kind >= 4:
            key = choices.choice(_TEXTS)
            return with_text(whole, key, self._texts[number][key](choices))
        text = self._headers[number](choices)
        try:
            header = json.loads(text)
            return signed(header, data if kind == 2 else damaged_bytes(data, choices, 1))
        except (ValueError, TypeError, KeyError, RecursionError):
            return raw_file(text.encode(errors="replace"), data)

    def originals(self) -> list[bytes]:
        return [whole for _, _, whole in self._files]

    def read(self, file: bytes) -> None:
        self._path.write_bytes(file)
        with contextlib.suppress(mlc.Error):  # most files hold another graph, which can be loaded nevertheless
            self._restored()
        self._loaded()

    def _restored(self) -> None:
        before = self._contents()
        try:
            mlc.restore(self._graph, self._path)
        except mlc.Error:
            assert self._contents() == before, "a refused file has changed the graph"
            raise
        self._graph = GRAPHS[0]()

    def _loaded(self) -> None:
        before = Platform.rng_state()
        try:
            mlc.load(self._path)
        except mlc.Error:
            assert Platform.rng_state() == before, "a refused file has changed the random stream"
            raise

    def _contents(self) -> object:
        layer, state = self._graph.layers[0], self._graph._session.state
        weights = layer.weights.data.tobytes(), layer.biases.data.tobytes()
        return weights, state.time_step if state else 0, Platform.rng_state()
