"""The diagnosis of a model: what can be imported and trained, and how much memory a batch takes."""

from __future__ import annotations

import warnings
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
from mlcompute.onnx.loading import load
from mlcompute.onnx.problems import ModelError, Problem
from mlcompute.onnx.rows import BY_DESIGN, ROWS, load_rows
from mlcompute.onnx.weights import STATED, Judgement, Trainable
from mlcompute.optimizers import AdamOptimizer, OptimizerDescriptor
from mlcompute.runtime.call_data import batch_of
from mlcompute.runtime.session import session_of
from mlcompute.seeing.units import size
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
    #: Every stored floating tensor: is it a weight or a constant, and why.
    judgements: dict[str, Judgement] = field(default_factory=dict)
    #: Weights that several nodes share, and those that were separated: name -> the name in the file.
    tied: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    #: Weights that no gradient reaches, with the reason; stored weights of whole numbers.
    unreached: dict[str, str] = field(default_factory=dict)
    quantized: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Bytes beyond weights and fed data, for one forward pass and for one training step with Adam; None: unknown.
    inference_memory: int | None = None
    training_memory: int | None = None
    #: Why fewer samples than `batch` cannot be run, and at which node; empty where they can.
    fixed_batch: str = ""

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
            lines.append(f"  weights  {len(self.weights)} tensors, {size(self.weight_bytes)}, {self._trained()}")
        elif self.healthy:
            lines.append("  weights  none: nothing can be trained")
        if self.inference_memory is not None and self.training_memory is not None:
            at = "" if self.batch is None else f" at batch {self.batch}"
            infer, train = size(self.inference_memory), size(self.training_memory)
            lines.append(f"  memory{at}  {infer} to infer, {train} to train with Adam")
        if self.fixed_batch:
            lines.append(f"  batch    a smaller (last) batch does not run: {self.fixed_batch}")
        lines += [f"  note     {note}" for note in self.notes]
        width = max([len(use.name) for use in self.operators], default=8)
        lines.append(f"  {'operator':<{width}}  count  imports  trains")
        for use in self.operators:
            says = "yes" if use.imports else "no"
            trains = "yes" if use.trains else "-"
            lines.append(f"  {use.name:<{width}}  {use.count:>5}  {says:<7}  {trains:<6}  {use.note}".rstrip())
        lines += self._guesses()
        if self.problems:
            lines.append("  obstacles")
            lines += [f"    {problem}" for problem in self.problems]
        return "\n".join(lines)

    def _trained(self) -> str:
        left = len(self.weights) - len(self.unreached)
        if not self.unreached:
            return "all trained"
        return "none can be trained" if not left else f"{left} can be trained"

    def _guesses(self) -> list[str]:
        """What is taken for a weight and what for a constant; constants that nodes state themselves are not listed."""
        lines = []
        for title, trained in (("taken for weights", True), ("taken for constants", False)):
            found = {n: j.reason for n, j in self.judgements.items() if j.trained == trained and j.reason != STATED}
            if found:
                lines.append(f"  {title} (trainable= changes it)")
                lines += [f"    {name}: {reason}" for name, reason in found.items()]
        if self.tied:
            lines.append("  tied: one weight in several places")
            lines += [f"    {name}: {', '.join(nodes)}" for name, nodes in self.tied.items()]
        return lines


def doctor(
    model: Any,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
    node_limit: int | None = None,
    trainable: Trainable | None = None,
    batch_norm: str = "train",
    dequantize: bool = False,
    output: str | None = None,
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the report says the same
            graph = load(
                model, batch=batch, dimensions=dimensions, shapes=shapes, constants=constants,
                memory_limit=memory_limit, node_limit=node_limit, trainable=trainable, batch_norm=batch_norm,
                dequantize=dequantize, output=output,
            )  # fmt: skip
    except ModelError as error:
        report.problems = error.problems or [Problem("model", proto.graph.name, error.message)]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the same
            _describe(report, graph)
    failed = {problem.operator for problem in report.problems}
    counts = Counter(("" if node.domain == "ai.onnx" else node.domain, node.op_type) for node in proto.graph.node)
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
    report.judgements, report.tied, report.copies = dict(graph.judgements), dict(graph.tied), dict(graph.copies)
    report.unreached, report.quantized = dict(graph.unreached), list(graph.quantized)
    if graph.copies:
        report.notes.append(f"{len(graph.copies)} weights were stored with equal ones and are separate again")
    if not graph.outputs:
        report.notes.append("no output depends on an input")
        return
    used = {tensor for node in graph.nodes for tensor in node.sources}
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
    else:
        report.fixed_batch = _fixed_batch(inference)


def _fixed_batch(graph: InferenceGraph) -> str:
    """Why a batch with one sample less cannot be run; empty when it can, or when there is but one."""
    session = session_of(graph)
    batch = session.compile_if_needed().batch_size
    if batch < 2:
        return ""
    try:
        session.program("inference", batch_of(session, batch - 1, "doctor"))
    except Error as error:
        node = error.facts.get("node")
        return f"{node}: {error.message}" if node else error.message
    return ""
