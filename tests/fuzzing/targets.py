"""All targets by name."""

from __future__ import annotations

from tests.fuzzing.checkpoint import CheckpointTarget
from tests.fuzzing.description import Description
from tests.fuzzing.header import HeaderTarget
from tests.fuzzing.onnx_model import OnnxModel
from tests.fuzzing.target import Target
from tests.fuzzing.texts import Texts

TARGETS: dict[str, type[Target]] = {
    kind.name: kind for kind in (Description, Texts, HeaderTarget, CheckpointTarget, OnnxModel)
}
