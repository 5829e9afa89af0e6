"""What is known of each layer of a graph: its names, sizes and, once compiled, how the device runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlcompute.layers.names import layer_names, slots_of
from mlcompute.ops.op import Shape, Step, Value, inner_steps, overwritten_by

if TYPE_CHECKING:
    from mlcompute.compiler.program import Program
    from mlcompute.graph import Graph, Node
    from mlcompute.tensor import Tensor

#: What work belongs to when no layer asked for it: the start of the gradient pass, say.
NO_LAYER = "(graph)"


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a graph.

    name              by the rule in layers/names.py, as in programs, profiles and files
    kind              its class without "Layer"
    results           shapes of its results; `result_bytes`: what they take together
    parameters        elements the layer brings in (a tensor several layers share counts for the first)
    trainable         how many of them the optimizer may change
    statistics        elements the forward pass updates (running means)
    parameter_bytes   memory of parameters and statistics
    kernels           how the device runs its forward pass, in order; empty before compile
    device            where; empty before compile
    """

    name: str
    kind: str
    results: tuple[Shape, ...]
    result_bytes: int
    parameters: int
    trainable: int
    statistics: int
    parameter_bytes: int
    kernels: tuple[str, ...] = ()
    device: str = ""


def names_of(nodes: list[Node]) -> list[str]:
    """The name of every node's layer, by the rule in layers/names.py."""
    names = layer_names(node.layer for node in nodes)
    return [names[node.layer] for node in nodes]


def kind_of(node: Node) -> str:
    """FullyConnectedLayer -> FullyConnected; an imported operator by its own name."""
    operator = getattr(node.layer, "operator", "")
    return str(operator or type(node.layer).__name__.removesuffix("Layer"))


def layer_facts(graph: Graph, program: Program | None = None, device: str = "") -> list[LayerFacts]:
    """The layers in order; with a program also what runs them."""
    nodes = graph.nodes
    kernels = forward_kernels(program) if program is not None else {}
    counted: set[Tensor] = set()
    facts = []
    for name, node in zip(names_of(nodes), nodes, strict=True):
        slots = [slot for slot in node.layer.parameters.values() if slot.tensor not in counted]
        counted.update(slot.tensor for slot in slots)
        statistics = [tensor for tensor in node.layer.statistics.values() if tensor not in counted]
        counted.update(statistics)
        own = [*dict.fromkeys(slot.tensor for slot in slots), *statistics]
        trained = {slot.tensor for slot in slots if slot.is_updatable and node.updates}
        facts.append(
            LayerFacts(
                name,
                kind_of(node),
                tuple(result.descriptor.shape for result in node.results),
                sum(map(bytes_of, node.results)),
                sum(tensor.descriptor.element_count for tensor in own) - _count(statistics),
                _count(list(trained)),
                _count(statistics),
                sum(map(bytes_of, own)),
                tuple(kernels.get(name, ("no work",))) if program is not None else (),
                device if program is not None else "",
            )
        )
    return facts


def bytes_of(tensor: Tensor) -> int:
    """Memory the elements of a tensor take."""
    return tensor.descriptor.element_count * tensor.descriptor.data_type.numpy.itemsize


def _count(tensors: list[Tensor]) -> int:
    return sum(tensor.descriptor.element_count for tensor in tensors)


def forward_kernels(program: Program) -> dict[str, list[str]]:
    """Layer -> the kernels of its forward pass; a layer that is part of another's kernel says of whose."""
    own: dict[str, list[str]] = {}
    within: dict[str, list[str]] = {}
    for step in program.steps:
        if step.phase != "forward":
            continue
        kernel = kernel_of(program, step)
        own.setdefault(step.layer, [])
        if kernel and kernel not in own[step.layer]:
            own[step.layer].append(kernel)
        for other in layers_within(step):
            if other != step.layer:
                within.setdefault(other, []).append(f"in {step.layer}")
    found = {name: kernels or ["no work"] for name, kernels in own.items()}
    for name, homes in within.items():
        if name not in found or found[name] == ["no work"]:
            found[name] = list(dict.fromkeys(homes))
    return found


def kernel_of(program: Program, step: Step) -> str:
    """How the engine runs a step: the kernel's name, else the op's; empty for a view, which is no work."""
    if step in program.kernels:
        return program.kernels[step]
    return "" if step.results and step.results[0] in program.plan.views else step.op.name


def layers_within(step: Step) -> list[str]:
    """Names of the layers that a step, perhaps merged from several, came from."""
    names = [one.layer for one in inner_steps(step)] if "steps" in step.attributes else [step.layer]
    return [name for name in dict.fromkeys(names) if name]


@dataclass
class Owners:
    """Whose tensors are whose, to say which layer a step or a value belongs to."""

    #: Tensor -> (layer, name of the slot) for parameters and statistics.
    slots: dict[Tensor, tuple[str, str]] = field(default_factory=dict)
    #: Result -> (layer, "result" or "result_1" ...).
    results: dict[Tensor, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Owners:
        """The owners in a graph; a shared tensor belongs to the first layer that uses it."""
        owners = cls()
        nodes = graph.nodes
        for name, node in zip(names_of(nodes), nodes, strict=True):
            for slot, tensor in slots_of(node.layer).items():
                owners.slots.setdefault(tensor, (name, slot))
            for index, tensor in enumerate(node.results):
                owners.results[tensor] = (name, "result" if index == 0 else f"result_{index}")
        return owners

    def layers_of_steps(self, program: Program) -> dict[Step, str]:
        """The layer each step works for. Steps of the update belong to the layer whose parameter they change."""
        homes = {value: self.slots[tensor][0] for tensor, value in program.persistent.items() if tensor in self.slots}
        for tensor, states in program.states.items():
            if tensor in self.slots:
                homes.update(dict.fromkeys(states, self.slots[tensor][0]))
        #: Value -> the layer for which it is computed, found from the last step backwards.
        needed_by: dict[Value, str] = {}
        found: dict[Step, str] = {}
        for step in reversed(program.steps):
            name = step.layer
            if step.phase == "update" or not name:
                changed = (homes[value] for value in overwritten_by(step) if value in homes)
                asked = (needed_by[value] for value in step.results if value in needed_by)
                name = next(changed, "") or next(asked, "") or NO_LAYER
                needed_by.update(dict.fromkeys(step.inputs, name))
            found[step] = name
        return found
