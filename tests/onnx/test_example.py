"""The example keeps its promise, where the packages it takes its network and its data from are installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NEEDED = ("speechmos", "sklearn", "onnxruntime")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs speechmos, scikit-learn, onnxruntime"
)
def test_fine_tuning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("onnx_finetune").main()
    assert "with the same scores as here" in capsys.readouterr().out
