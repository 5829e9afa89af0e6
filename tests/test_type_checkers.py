"""Type checkers: mypy accepts the package, pyright the lines people write.

For pyright, typed idioms in strict mode, the code of the guides and the examples in standard mode.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Guides whose code is checked; the others use names that no type checker can see, or other libraries' types.
GUIDES = ("checkpoints", "custom", "optimizer-state", "optimizers", "sequences", "split-execution", "start", "trainer",
          "training-graph", "user-gradients")  # fmt: skip


def test_mypy_accepts_the_package() -> None:
    """With the settings of pyproject.toml, as `make lint` does."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    run = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout


def test_pyright_accepts_what_people_write(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    idioms = (ROOT / "tests" / "test_typed_idioms.py").read_text(encoding="utf-8")
    public = idioms[: idioms.index("def test_the_words_are_those_of_the_tables")]
    (tmp_path / "idioms.py").write_text(f"# pyright: strict, reportUnusedImport=false\n{public}", encoding="utf-8")
    for guide in GUIDES:
        text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
        (tmp_path / f"{guide.replace('-', '_')}_guide.py").write_text(code, encoding="utf-8")
    settings = {
        "include": [str(tmp_path), str(ROOT / "examples")], "extraPaths": [str(ROOT), str(ROOT / "examples")],
        "exclude": [str(ROOT / "examples" / "federated.py")],  # types of a package that is not installed
        "typeCheckingMode": "standard", "pythonVersion": "3.10",
        "reportPossiblyUnboundVariable": False,  # what a loop leaves behind
    }  # fmt: skip
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    found = json.loads(run.stdout)["generalDiagnostics"]
    said = [f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}" for one in found]
    assert not [line for line, one in zip(said, found, strict=True) if one["severity"] == "error"], "\n".join(said)
