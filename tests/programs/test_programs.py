"""Programs as people write them, here and in PyTorch: the same numbers from the same weights, in about as many lines.

A pair is `examples/programs/NAME.py` and `NAME_torch.py` beside this file. Both have `build()`, which gives one network
or several, and `train(*networks, batches)`, which gives the losses of its steps; `data()` of the example gives batches.
Where there is a `predict(*networks, batch)`, it is compared too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mlcompute as mlc

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "programs"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
#: Losses of ten or so steps in float32, whose sums are added in another order: relative to the loss.
LOSS_TOLERANCE = 1e-5
#: Weights: the norm of the difference, relative to the norm of what training changed. It is larger because an Adam step
#: of a gradient near 0, which is mostly rounding, is as long as any other.
WEIGHT_TOLERANCE = 1e-4
#: Parts that both sides share, and that are in the example only.
SHARED = {"data", "play"}


def ours(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"programs_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def theirs(name: str) -> ModuleType:
    return importlib.import_module(f"tests.programs.{name}_torch")


@pytest.fixture
def same_epsilon() -> Iterator[None]:
    """Adam's epsilon is added before the bias correction here and after it in PyTorch (docs/from-pytorch.md)."""
    steps: dict[torch.optim.Optimizer, int] = {}

    def as_here(optimizer: torch.optim.Optimizer, *_: object) -> None:
        steps[optimizer] = steps.get(optimizer, 0) + 1
        if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            for group in optimizer.param_groups:
                group["eps"] = 1e-8 / (1 - group["betas"][1] ** steps[optimizer]) ** 0.5

    hook = register_optimizer_step_pre_hook(as_here)
    yield
    hook.remove()


@pytest.fixture
def muon_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's Muon makes matrices orthogonal in bfloat16, here it is done in the precision of the parameter."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)


def listed(networks: Any) -> list[Any]:
    return list(networks) if isinstance(networks, tuple) else [networks]


def code_lines(path: Path) -> int:
    """Lines with code: no blank lines, comments, docstrings, nothing of SHARED and no `__main__` part."""
    text = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_shared = isinstance(node, ast.FunctionDef) and node.name in SHARED
        is_main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        if is_docstring or is_shared or is_main:
            assert isinstance(node, ast.stmt)
            assert node.end_lineno is not None
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@pytest.mark.usefixtures("same_epsilon", "muon_in_float32")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_as_pytorch(name: str) -> None:
    here, there = ours(name), theirs(name)
    torch.manual_seed(0)
    models, graphs = listed(there.build()), listed(here.build())
    for graph, model in zip(graphs, models, strict=True):
        mlc.from_state_dict(graph, model.state_dict())
    starts = [{key: tensor.clone() for key, tensor in model.state_dict().items()} for model in models]
    expected = there.train(*models, here.data())
    losses = here.train(*graphs, here.data())
    assert len(losses) >= 5
    np.testing.assert_allclose(losses, expected, rtol=LOSS_TOLERANCE, atol=1e-6)
    for graph, model, start in zip(graphs, models, starts, strict=True):
        state = model.state_dict()
        for key, array in mlc.to_state_dict(graph).items():
            if key.endswith("running_var"):
                continue  # of a batch of n the biased variance here, PyTorch's is n / (n - 1) times as large
            change = np.linalg.norm(state[key] - start[key])
            difference = np.linalg.norm(array - state[key].numpy())
            assert difference <= WEIGHT_TOLERANCE * change + 1e-6, f"{key}: {difference} of {change}"
    if hasattr(here, "predict"):
        batch = list(here.data())[-1]
        np.testing.assert_allclose(here.predict(*graphs, batch), there.predict(*models, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_about_as_many_lines_as_pytorch(name: str) -> None:
    assert code_lines(EXAMPLES / f"{name}.py") <= 1.2 * code_lines(HERE / f"{name}_torch.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / f"{name}.py")]
    run = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "an example shows what it learned"


def test_the_gallery_has_every_example_and_counts_right() -> None:
    docs = ROOT / "docs"
    text = (docs / "gallery.md").read_text(encoding="utf-8")
    for name in PROGRAMS:
        lines = f"{code_lines(EXAMPLES / f'{name}.py')} / {code_lines(HERE / f'{name}_torch.py')}"
        row = re.search(rf"^\| !\[{name}\]\((\S+)\) \| `{name}` \| .* \| (\d+ / \d+) \| [\d.]+ s \|$", text, re.M)
        assert row is not None, f"docs/gallery.md has no row for {name}"
        assert row[2] == lines, f"docs/gallery.md: {name} has {lines} lines"
        assert 300 < (docs / row[1]).stat().st_size < 30_000, "python docs/gallery_pictures.py makes it"
    for path in EXAMPLES.parent.glob("*.py"):
        assert path.stem in ("blocks", "images") or f"| `{path.stem}` |" in text, f"docs/gallery.md: {path.stem}?"
