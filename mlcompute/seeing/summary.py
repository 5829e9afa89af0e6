"""graph.summary(): the layers as a table, and what they need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from mlcompute.devices import engine_of
from mlcompute.runtime.session import session_of
from mlcompute.seeing.layers import LayerFacts, layer_facts, names_of
from mlcompute.seeing.table import Table, for_notebook
from mlcompute.seeing.units import shape, size

if TYPE_CHECKING:
    from mlcompute.compiler.program import Program
    from mlcompute.graph import Graph
    from mlcompute.runtime.session import Session

#: Layers an HTML table lists; the middle of longer ones is summed up.
MOST_ROWS = 250


@dataclass(frozen=True)
class Summary:
    """A graph in numbers. `print` it for a table; notebooks show it as one.

    layers           facts of every layer, in order
    device           what the graph was compiled for; empty before
    device_memory    bytes the device needs for one `execute`, beyond parameters and fed data; None before compile
    state_memory     how many of them are optimizer state
    passes_memory    bytes it needs since passes were run one by one, where that takes more; else 0
    batch_size       samples the graph was compiled for
    minimises        what training minimises, where that is not simply one loss
    note             what the reader should know, e.g. that the graph has changed since compile
    """

    title: str
    layers: tuple[LayerFacts, ...]
    device: str = ""
    device_memory: int | None = None
    state_memory: int = 0
    batch_size: int = 0
    minimises: str = ""
    note: str = ""
    passes_memory: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all parameters, each tensor once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def trainable(self) -> int:
        """Elements the optimizer may change."""
        return sum(layer.trainable for layer in self.layers)

    @property
    def statistics(self) -> int:
        """Elements the forward pass updates."""
        return sum(layer.statistics for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Memory of parameters and statistics."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def result_bytes(self) -> int:
        """Memory all results would take if none shared it with another."""
        return sum(layer.result_bytes for layer in self.layers)

    def table(self, most: int | None = None) -> Table:
        """The layers as a table of text. `most` rows at most: the middle of a longer graph becomes one row."""
        compiled = any(layer.device for layer in self.layers)
        head = ["layer", "kind", "result", "size", "parameters", "size"] + (["device", "kernel"] if compiled else [])
        layers = self.layers
        if most is not None and len(layers) > most:
            first, last = layers[: most * 2 // 3], layers[len(layers) - most // 3 :]
            middle = layers[len(first) : len(layers) - len(last)]
            rows = [*map(self._row, first), _sum_row(f"… {len(middle):,} more", middle), *map(self._row, last)]
        else:
            rows = [self._row(layer) for layer in layers]
        width = len(head)
        foot = _sum_row("total", layers)
        return Table(head, [row[:width] for row in rows], frozenset({3, 4, 5}), foot=[foot[:width]])

    @staticmethod
    def _row(layer: LayerFacts) -> list[str]:
        return [
            layer.name,
            layer.kind,
            " ".join(map(shape, layer.results)),
            size(layer.result_bytes),
            f"{layer.parameters:,}" if layer.parameters else "-",
            size(layer.parameter_bytes) if layer.parameter_bytes else "-",
            layer.device,
            ", ".join(layer.kernels),
        ]

    def facts(self) -> dict[str, str]:
        """What there is to say below the table, by name."""
        facts = {}
        frozen = self.parameters - self.trainable
        if frozen or self.statistics:
            parts = [f"{self.trainable:,} trainable"] + ([f"{frozen:,} frozen"] if frozen else [])
            facts["parameters"] = ", ".join(parts + ([f"{self.statistics:,} statistics"] if self.statistics else []))
        if self.device_memory is not None:
            state = f", of which {size(self.state_memory)} optimizer state" if self.state_memory else ""
            passes = f"; {size(self.passes_memory)} since passes were run one by one" if self.passes_memory else ""
            facts["memory"] = f"{size(self.device_memory)} on the device at batch {self.batch_size}{state}{passes}"
            facts["device"] = self.device
        if self.minimises:
            facts["minimises"] = self.minimises
        if self.note:
            facts["note"] = self.note
        return facts

    def kinds(self) -> list[tuple[str, int, int]]:
        """(kind, number of layers, parameters), the most frequent first."""
        count = Counter(layer.kind for layer in self.layers)
        parameters: Counter[str] = Counter()
        for layer in self.layers:
            parameters[layer.kind] += layer.parameters
        return [(kind, number, parameters[kind]) for kind, number in count.most_common()]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The table, and what there is to say below it; with `width` only the first columns, those that fit."""
        facts, table = self.facts(), self.table()
        names = max(map(len, facts), default=0)
        lines = [f"{name:<{names}}  {fact}" for name, fact in facts.items()]
        return "\n".join([str(table if width is None else table.within(width)), *([""] if lines else []), *lines])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        facts = "".join(f"<div>{escape(name)}: {escape(fact)}</div>" for name, fact in self.facts().items())
        return for_notebook(self.table(MOST_ROWS).html(self.title) + facts)


def _sum_row(name: str, layers: tuple[LayerFacts, ...]) -> list[str]:
    parameters = sum(layer.parameters for layer in layers)
    results, own = sum(layer.result_bytes for layer in layers), sum(layer.parameter_bytes for layer in layers)
    return [name, "", "", size(results), f"{parameters:,}", size(own), "", ""]


def summarize(graph: Graph) -> Summary:
    """What `graph.summary()` gives. Compiles and runs nothing."""
    title, session = title_of(graph), session_of(graph)
    if session is None or session.device is None:
        return Summary(title, tuple(layer_facts(graph)))
    program = main_program(graph)
    if program is None:
        changed = session.compiled is None or session.compiled.node_count != session.node_count
        note = "the graph has changed since it was compiled" if changed else "the loss still waits for its labels"
        return Summary(title, tuple(layer_facts(graph)), note=f"{note}: kernels and memory are not known yet")
    engine, kind = engine_of(session.device), session.device.actual_device_type.name
    facts = engine.facts()
    threads = facts.get("threads", "")
    plural = "thread" if threads == "1" else "threads"
    step, most = program.plan.nbytes + session.state_bytes(), session.memory_size()
    return Summary(
        title,
        tuple(layer_facts(graph, program, kind)),
        f"{kind}, engine '{engine.name}'" + (f", {threads} {plural}" if threads else ""),
        step,
        session.state_bytes(),
        program.batch_size,
        note=facts.get("note", ""),
        minimises=minimises(session),
        passes_memory=most if most > step else 0,
    )


def minimises(session: Session) -> str:
    """What training minimises in words; empty where it is simply one loss, or nothing is trained."""
    from mlcompute.layers.objective import is_loss

    if session.definition.learning is None or session.compiled is None:
        return ""
    terms, nodes = session.compiled.request.minimised, session.definition.nodes()
    words = []
    for name, node in zip(names_of(nodes), nodes, strict=True):
        for tensor in node.results:
            if tensor in terms:
                count = tensor.descriptor.element_count
                words.append(name if count == 1 else f"the sum of the {count:,} elements of {name}")
                if len(terms) == 1 and count == 1 and is_loss(node.layer):
                    return ""
    return " + ".join(words)


def title_of(graph: Graph) -> str:
    """What kind of graph it is, and how long."""
    count = len(graph.nodes)
    return f"{type(graph).__name__} of {count:,} layer{'' if count == 1 else 's'}"


def main_program(graph: Graph) -> Program | None:
    """The program one call of `execute` runs, built; None before compile and when the graph has changed since."""
    session = session_of(graph)
    if session is None or session.device is None or session.definition.waits_for_labels:
        return None
    compiled = session.compiled
    if compiled is None or compiled.node_count != session.node_count:
        return None
    program = compiled.get(session.main_style, compiled.request.batch_size)
    return compiled.listing(program)
