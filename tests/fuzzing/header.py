"""The header of a safetensors file: where which tensor is, and text."""

from __future__ import annotations

import json
import struct
import tempfile

from mlcompute.saving.tensor_file import header_length, parse_header
from tests.fuzzing.choices import Choices
from tests.fuzzing.json_edits import Damaged
from tests.fuzzing.seeds import checkpoints
from tests.fuzzing.target import Target

_WORDS = [
    "F32", "F16", "BF16", "F4", "F6_E2M3", "BOOL", "C64", "__metadata__", "dtype", "shape", "data_offsets",
    [0, 4], [4, 0],
]  # fmt: skip


class HeaderTarget(Target):
    """Files end behind the header: how much data there is stands in four bytes before them."""

    name, goal = "header", 6_000_000

    def __init__(self) -> None:
        self._originals, self._damaged = [], []
        for file in checkpoints():
            (length,) = struct.unpack("<Q", file[:8])
            size = struct.pack("<I", len(file) - 8 - length)
            self._originals.append(size + file[: 8 + length])
            self._damaged.append((size, Damaged(_without_texts(file[8 : 8 + length].decode()), _WORDS)))

    def edited(self, choices: Choices) -> bytes:
        size, damaged = choices.choice(self._damaged)
        text = damaged(choices).encode()
        return size + struct.pack("<Q", len(text)) + text

    def originals(self) -> list[bytes]:
        return self._originals

    def read(self, file: bytes) -> None:
        data_size = int.from_bytes(file[:4], "little")
        file = file[4:]
        length = header_length(file[:8], len(file) + data_size, "a file")
        with tempfile.TemporaryFile() as opened:
            opened.write(file)
            opened.truncate(8 + length + data_size)  # what was not written takes no place on the disk
            opened.flush()
            parse_header(opened, file[8 : 8 + length], "a file")


def _without_texts(header: str) -> str:
    """The long texts are other targets' business: here they are only bytes to copy."""
    parsed = json.loads(header)
    parsed["__metadata__"] = {key: text[:4] for key, text in parsed["__metadata__"].items()}
    return json.dumps(parsed)
