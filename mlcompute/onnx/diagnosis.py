"""What would become of a model: what imports, what trains, how much memory a batch takes. Nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlcompute.device import Device
from mlcompute.devices.null import Null
from mlcompute.errors import Error
from mlcompute.inference import InferenceGraph
from mlcompute.onnx.control import HANDLERS
from mlcompute.onnx.files import read_model
from mlcompute.onnx.functions import has_body
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.importer import load
from mlcompute.onnx.problems import ModelError, Problem
from mlcompute.onnx.rows import BY_DESIGN, ROWS, load_rows
from mlcompute.optimizers import AdamOptimizer, OptimizerDescriptor
from mlcompute.training import TrainingGraph


@dataclass(frozen=True)
class OperatorUse:
    """One kind of operator in a model."""

    name: str
    count: int
    imports: bool
    trains: bool
    note: str = ""


@dataclass
class Report:
    """The doctor's answer; `print` it. `healthy` means that the model imports."""

    model: str
    batch: int | None
    operators: list[OperatorUse] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weight_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    #: Bytes beyond weights and fed data, for one forward pass and for one training step with Adam; None: unknown.
    inference_memory: int | None = None
    training_memory: int | None = None

    @property
    def healthy(self) -> bool:
        """Whether the model imports."""
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.model}: " + ("imports" if self.healthy else f"{len(self.problems)} obstacle(s)")
        lines = [head]
        for title, shapes in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"  {title:<8} {name}  {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items()]
        if self.weights:
            lines.append(f"  weights  {len(self.weights)} tensors, {_size(self.weight_bytes)}, all trainable")
        if self.inference_memory is not None and self.training_memory is not None:
            at = "" if self.batch is None else f" at batch {self.batch}"
            infer, train = _size(self.inference_memory), _size(self.training_memory)
            lines.append(f"  memory{at}  {infer} to infer, {train} to train with Adam")
        lines += [f"  note     {note}" for note in self.notes]
        width = max([len(use.name) for use in self.operators], default=8)
        lines.append(f"  {'operator':<{width}}  count  imports  trains")
        for use in self.operators:
            says = "yes" if use.imports else "no"
            trains = "yes" if use.trains else "-"
            lines.append(f"  {use.name:<{width}}  {use.count:>5}  {says:<7}  {trains:<6}  {use.note}".rstrip())
        if self.problems:
            lines.append("  obstacles")
            lines += [f"    {problem}" for problem in self.problems]
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"


def doctor(
    model: Any,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
    node_limit: int | None = None,
) -> Report:
    """What would become of a model: every operator, every obstacle, weights, and memory at a batch size.

    The arguments are those of `load`. Memory is planned without an engine's fusion, so it is an upper bound.

    >>> import mlcompute as mlc
    >>> print(mlc.onnx.doctor("model.onnx", batch=32))  # doctest: +SKIP
    """
    load_rows()
    proto = read_model(model).proto
    title = str(model) if isinstance(model, (str, bytes)) or hasattr(model, "__fspath__") else proto.graph.name
    report = Report(title if len(title) < 200 else proto.graph.name, batch)
    try:
        given: dict[str, Any] = {"dimensions": dimensions, "shapes": shapes, "constants": constants}
        graph = load(model, batch=batch, memory_limit=memory_limit, node_limit=node_limit, **given)
    except ModelError as error:
        report.problems = error.problems or [Problem("model", proto.graph.name, error.message)]
    else:
        _describe(report, graph)
    failed = {problem.operator for problem in report.problems}
    counts = Counter(
        (node.domain.removeprefix("ai.onnx") if node.domain == "ai.onnx" else node.domain, node.op_type)
        for node in proto.graph.node
    )
    functions = {(function.domain, function.name) for function in proto.functions}
    for (domain, name), count in sorted(counts.items()):
        shown = f"{domain}.{name}" if domain else name
        row = ROWS.get((domain, name))
        known = row is not None or (domain, name) in HANDLERS or (domain, name) in functions
        known = known or has_body(name, domain, _version(proto, domain))
        note = BY_DESIGN.get((domain, name), "" if row is None else row.note)
        trains = known and (row is None or row.trains)
        report.operators.append(OperatorUse(shown, count, known and shown not in failed, trains, note))
    return report


def _version(proto: Any, domain: str) -> int:
    return next((int(entry.version) for entry in proto.opset_import if entry.domain in (domain, "ai.onnx")), 1)


def _describe(report: Report, graph: ImportedGraph) -> None:
    report.inputs = {name: graph.shapes[name] for name in graph.inputs}
    report.outputs = {name: graph.shapes[name] for name in graph.order}
    report.weights = {name: tensor.descriptor.shape for name, tensor in graph.weights.items()}
    report.weight_bytes = sum(t.descriptor.tensor_allocation_size_in_bytes for t in graph.weights.values())
    report.notes = list(graph.notes)
    if not graph.outputs:
        report.notes.append("no output depends on an input")
        return
    used = {tensor for node in graph._all_nodes() for tensor in node.sources}
    inputs = {name: tensor for name, tensor in graph.inputs.items() if tensor in used}
    device = Device(engine=Null())
    try:
        inference = InferenceGraph([graph])
        inference.add_inputs(inputs)
        inference.add_outputs(graph.outputs)
        inference.compile(device=device)
        report.inference_memory = inference.device_memory_size
        training = TrainingGraph([graph], None, AdamOptimizer(OptimizerDescriptor(learning_rate=1e-3)))
        training.add_inputs(inputs)
        training.add_outputs(graph.outputs)
        training.compile(device=device)
        report.training_memory = training.device_memory_size
    except Error as error:
        report.notes.append(f"memory is not known: {error.message}")
