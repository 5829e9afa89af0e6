"""The generated pages leave nothing out: every public name has its entry, every name of ML Compute its row."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlcompute as mlc
from tests.docs.test_errors import raised
from tests.inventory import CALLBACKS, CLASSES, ENUMS, FUNCTIONS, MEMBERS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    # As Sphinx does it, in a process whose classes no test has touched.
    code = f"import sys; sys.path[:0] = {[str(DOCS), str(DOCS.parent)]!r}; import reference, pathlib; "
    code += f"reference.write_pages(pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    return folder


def test_every_public_name_has_one_entry(pages: Path) -> None:
    pytest.importorskip("onnx")
    text = "\n".join(path.read_text("utf-8") for path in (pages / "api").glob("*.rst"))
    entry = re.compile(r"^\.\. py:\w+:: (\w+).*\n   :module: (\S+)$", re.MULTILINE)
    entries = [f"{module}.{name}" for name, module in entry.findall(text)]
    assert len(entries) == len(set(entries))
    modules = [name for name in mlc.__all__ if inspect.ismodule(getattr(mlc, name))]
    assert sorted(modules) == ["callbacks", "data", "debug", "initializers", "metrics", "onnx", "schedules"]
    wanted = {f"mlcompute.{name}" for name in mlc.__all__ if name not in modules}
    for module in ("onnx", "data", "callbacks", "metrics", "initializers"):
        wanted |= {f"mlcompute.{module}.{name}" for name in getattr(mlc, module).__all__ if name != "metrics_from"}
    wanted |= {"mlcompute.schedules.Cosine", "mlcompute.debug.find_nan", "mlcompute.sklearn.MLCClassifier"}
    assert wanted <= set(entries)


def test_every_member_of_a_public_class_is_described() -> None:
    """Whoever types `tensor.` and TAB sees what the documentation describes, and nothing else."""
    command = [sys.executable, "-m", "tests.docs.members"]  # in a process whose classes no test has touched
    found = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=True, timeout=300)
    assert not found.stdout.split()


def test_a_parameter_is_described_once(pages: Path) -> None:
    text = (pages / "api" / "optimizers.rst").read_text("utf-8")
    adam = text.split(".. py:class:: AdamOptimizer(")[1].split(".. py:class::")[0]
    assert adam.count("**epsilon** (float): Added to the root of the second moment") == 1
    assert ".. py:property:: epsilon" not in adam
    assert "time_step** (int): Number of the first update; more than 1 to resume" in adam
    assert "py:property:: learning_rate" not in adam  # described with Optimizer
    assert text.count(".. py:property:: learning_rate\n") == 2  # Optimizer, ParameterGroup


def test_every_page_of_the_reference_is_in_its_index(pages: Path) -> None:
    index = (pages / "api.rst").read_text("utf-8")
    assert all(f"api/{path.stem}\n" in index for path in (pages / "api").glob("*.rst"))


def test_every_name_of_ml_compute_has_a_row_that_can_be_called(pages: Path) -> None:
    rows: list[str] = []
    for section in re.split(r"^## ", (pages / "names.md").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        owner = re.match(r"\w+ → `mlc\.(\w+)`", section)
        own = [line.split("| ")[-1].removesuffix(" |") for line in section.splitlines() if line.endswith("` |")]
        rows += own
        if owner is not None:
            for python in own:
                _check(getattr(mlc, owner.group(1)), python.strip("`"))
    values = sum(len(kind.members) for kind in ENUMS.values())
    assert len(rows) == len(MEMBERS) + values + len(FUNCTIONS) + len(CALLBACKS)
    assert len(CLASSES) + len(ENUMS) == 75


def test_every_message_is_on_the_page_of_messages(pages: Path) -> None:
    text = (pages / "messages.md").read_text("utf-8").replace("\\|", "|")
    for kind in ("ShapeError", "DataError", "GraphError", "ExecutionError", "FileError", "CannotExportError"):
        for message in raised()[kind]:
            assert message in text or not re.search("[a-z]", message.removesuffix("None")), message


def _check(owner: type, python: str) -> None:
    """`node(layer, sources=…)` can be written like that: plain arguments by place, the others by name."""
    match = re.fullmatch(r"(?:\w+\.)?(\w+)(?:\((.*)\))?", python)
    assert match is not None, python
    name, arguments = match.groups()
    if arguments is None:
        return  # a property or a value: tests/test_inventory.py reads every one of them
    call = owner if name == owner.__name__ else getattr(owner, name)
    given = arguments.split(", ") if arguments else []
    by_place = [one for one in given if not one.endswith("=…")]
    by_name = {one.removesuffix("=…"): one for one in given if one.endswith("=…")}
    signature = inspect.signature(call)
    instance = ["self"] if "self" in signature.parameters else []
    bound = signature.bind_partial(*instance, *by_place, **by_name)
    assert [bound.arguments[one] for one in by_place] == by_place, python
