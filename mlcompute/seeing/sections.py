"""The parts of a report, each as HTML text: learning, gradients, time, memory, graph, layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from mlcompute.seeing.charts import Chart, Line, condensed, line_chart, norm_map
from mlcompute.seeing.diagram import Box, diagram_of
from mlcompute.seeing.figures import device_memory_of, kind_of, trained_elsewhere
from mlcompute.seeing.layers import LayerFacts
from mlcompute.seeing.memory_map import memory_map
from mlcompute.seeing.summary import MOST_ROWS, Summary
from mlcompute.seeing.svg import FAMILY_MEANINGS, MOST_BOXES, Drawing, draw
from mlcompute.seeing.table import Table
from mlcompute.seeing.units import duration, number, shape, size, visible

if TYPE_CHECKING:
    from mlcompute.graph import Graph
    from mlcompute.runs import Run
    from mlcompute.seeing.history import Curves
    from mlcompute.seeing.memory import MemoryTimeline
    from mlcompute.seeing.profile import GraphProfile

#: Layers the bars of time show; the cheaper ones are summed up.
MOST_BARS = 60
#: What training happened under, rather than how it went: shown last.
_CONDITIONS = {"learning rate", "lr", "samples per second"}


@dataclass
class Section:
    """A part of the page: its anchor, its heading, its HTML, and data its script needs."""

    name: str
    title: str
    html: str
    data: dict[str, Any] = field(default_factory=dict)


def learning_section(curves: Curves) -> Section:
    """Loss and metrics, and their numbers."""
    charts = learning_charts(curves)
    return Section(
        "learning", "Learning", plots(charts) + _epoch_table(curves), {"charts": [chart.data for chart in charts]}
    )


def learning_charts(curves: Curves) -> list[Chart]:
    """Every metric in a chart of its own, training and validation together."""
    joined: dict[str, list[Line]] = {}
    for name, curve in curves.epochs.items():
        metric, who = metric_and_part(name)
        kind = "c1 dash" if who == "validation" else "c0"
        joined.setdefault(metric, []).append(Line(f"{who} {metric}".strip(), condensed(curve), kind))
    charts = [line_chart(metric, lines, "epoch") for metric, lines in joined.items() if metric not in _CONDITIONS]
    for name, curve in curves.steps.items():
        title = f"{name.replace('_', ' ')} per step"
        charts.append(line_chart(title, [Line(title, condensed(curve), "c0")], "step"))
    charts += [
        line_chart(metric, lines, "epoch")
        for metric, lines in joined.items()
        if metric in _CONDITIONS and _varies(lines)
    ]
    return charts


def plots(charts: Sequence[Chart]) -> str:
    """Charts side by side, each with a line for the numbers under the pointer."""
    figures = "".join(
        f'<figure class="plot" tabindex="0" data-chart="{index}">{chart.svg}<figcaption class="readout">'
        f"&nbsp;</figcaption></figure>"
        for index, chart in enumerate(charts)
    )
    return f'<div class="plots">{figures}</div>'


def _varies(lines: Sequence[Line]) -> bool:
    """A rate that never changes needs no picture: it stands in the table."""
    return any(point.y != line.points[0].y for line in lines for point in line.points)


def metric_and_part(name: str) -> tuple[str, str]:
    """val_loss -> (loss, validation)."""
    for prefix in ("val_", "validation_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix).replace("_", " "), "validation"
    return name.replace("_", " "), ""


def _epoch_table(curves: Curves) -> str:
    if not curves.epochs:
        return ""
    columns = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves.epochs.values()]
    epochs = sorted({place for column in columns for place in column})
    count = len(epochs)
    shown = epochs if count <= 60 else [*epochs[:20], *epochs[-40:]]
    rows = [[f"{at:.0f}", *(number(column[at]) if at in column else "" for column in columns)] for at in shown]
    table = Table(["epoch", *curves.epochs], rows, frozenset(range(1, len(curves.epochs) + 1)))
    note = "" if len(rows) == count else f" ({len(rows)} of {count})"
    return f"<details><summary>Numbers per epoch{note}</summary><div class=wide>{table.html()}</div></details>"


def gradient_section(curves: Curves) -> Section:
    """Gradient norms: a row per layer."""
    text = (
        "<p class=lead>Each row is a layer, each column a moment of training; the scale counts in powers of ten. "
        "A row that fades into the page learns nothing; one that stands out more and more may explode.</p>"
    )
    return Section("gradients", "Gradient norms", f"{text}<div class=wide>{norm_map(curves.gradient_norms)}</div>")


def time_section(profile: GraphProfile) -> Section:
    """A bar per layer, divided into passes."""
    layers = [(name, passes, sum(passes.values())) for name, passes in profile.by_layer().items()]
    rest = sorted(layers, key=lambda row: -row[2])[MOST_BARS:]
    dropped = {name for name, _, _ in rest}
    rows = [row for row in layers if row[0] not in dropped]
    longest = max((total for _, _, total in rows), default=0.0) or 1.0
    whole = profile.total or 1.0
    kernels: dict[str, list[str]] = {}
    for row in profile.rows:
        kernels.setdefault(row.layer, []).append(f"{row.phase}: {', '.join(row.kernels) or 'no kernel'}")
    body = []
    for index, (name, passes, total) in enumerate(rows):
        bars = "".join(
            f'<i class="{phase}" style="width:{100 * seconds / longest:.2f}%" title="{phase} {duration(seconds)}"></i>'
            for phase, seconds in passes.items()
        )
        parts = "".join(f"<td class=n>{duration(passes[p]) if p in passes else '-'}</td>" for p in profile.phases)
        body.append(
            f'<tr data-order="{index}" data-time="{total * 1e6:.2f}">'
            f'<th scope="row" title="{escape(visible("; ".join(kernels[name])))}">{escape(visible(name))}</th>'
            f'<td class="bars">{bars}</td>{parts}<td class=n>{duration(total)}</td>'
            f"<td class=n>{total / whole:.1%}</td></tr>"
        )
    if rest:
        total = sum(seconds for _, _, seconds in rest)
        empty = "<td></td>" * (len(profile.phases) + 1)
        body.append(
            f'<tr data-order="1e9" data-time="0"><th scope="row">… {len(rest):,} more layers</th>{empty}'
            f"<td class=n>{duration(total)}</td><td class=n>{total / whole:.1%}</td></tr>"
        )
    heads = "".join(f'<th scope="col" class=n>{phase}</th>' for phase in profile.phases)
    legend = "".join(f'<span><i class="{phase}"></i>{phase}</span>' for phase in profile.phases)
    html = (
        f"<p class=lead>A whole run takes <b>{duration(profile.step_time)}</b> (median of {len(profile.step_times)}); "
        f"measured kernel by kernel, as below, {duration(profile.total)}. Several layers may share one kernel: "
        "its time is the first one's.</p>"
        f'<div class="legend">{legend}<button type="button" class="needs-script" id="sort" aria-pressed="false">'
        "Slowest first</button></div>"
        f'<div class="wide"><table class="times"><thead><tr><th scope="col">layer</th><th scope="col"></th>{heads}'
        f'<th scope="col" class=n>all</th><th scope="col" class=n>share</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f"<details><summary>Kernels of every layer and pass</summary><div class=wide>"
        f"{profile.table(MOST_ROWS).html()}</div></details>"
    )
    return Section("time", "Time", html)


def memory_section(timeline: MemoryTimeline, summary: Summary, run: Run | None = None) -> Section:
    """Where every tensor lies, and when."""
    picture = memory_map(timeline)
    largest = sorted(timeline.allocations, key=lambda allocation: -allocation.nbytes)[:20]
    table = Table(
        ["tensor", "type", "size", "from byte", "steps", "pass"],
        [
            [
                allocation.what,
                f"{allocation.dtype} {shape(allocation.shape)}",
                size(allocation.nbytes),
                f"{allocation.offset:,}",
                f"{allocation.first} to {allocation.last}",
                allocation.phase + (", kept" if allocation.kept else ""),
            ]
            for allocation in largest
        ],
        frozenset({2, 3, 4}),
    )
    apart = sum(allocation.nbytes for allocation in timeline.allocations)
    saved = f" Without sharing, the {len(timeline.allocations):,} tensors would take {size(apart)}." if apart else ""
    state = f" Optimizer state takes {size(summary.state_memory)} more." if summary.state_memory else ""
    hidden = f" The {picture.hidden:,} smallest are not drawn." if picture.hidden else ""
    legend = "".join(
        f'<span><i class="{name}"></i>{text}</span>'
        for name, text in (
            ("forward", "forward results"),
            ("gradient", "gradients"),
            ("update", "update"),
            ("workspace", "workspace of one kernel"),
        )
        if any(allocation.phase == name for allocation in timeline.allocations)
    )
    html = (
        f"<p class=lead>One arena of <b>{size(timeline.nbytes)}</b> holds every intermediate tensor of a step: height "
        "is address, time runs to the right. Tensors whose lifetimes do not meet share bytes."
        f"{saved}{state}{hidden}{_elsewhere(run, summary)}{_measured(run)}</p>"
        f'<div class="legend">{legend}</div>'
        f'<div class="map" id="arena" tabindex="0" role="group" aria-label="Memory over the steps of a run. '
        f'Arrow keys go from tensor to tensor.">{picture.svg}</div>'
        '<div class="detail" id="tensor" aria-live="polite"><span class="needs-script">Point at a tensor, or use the '
        "arrow keys, to see what it is.</span></div>"
        f"<details><summary>The largest tensors</summary><div class=wide>{table.html()}</div></details>"
    )
    return Section("memory", "Memory over a step", html, {"tensors": picture.data})


def _elsewhere(run: Run | None, summary: Summary) -> str:
    """Whose plan is shown, where it is not that of the device that trained."""
    if not trained_elsewhere(run, summary):
        return ""
    took = device_memory_of(run)
    there = f", where a step took <b>{size(took)}</b>" if took else ""
    return (
        f" This is the plan for the {kind_of(summary)} here; the run trained on a {run.facts['device'].upper()}{there}."
    )


def _measured(run: Run | None) -> str:
    """What the process really took, beside what was planned for a step."""
    peak = (run.facts.get("memory") or {}).get("process_peak") if run is not None else None
    if not peak:
        return ""
    return (
        f" The process that trained took <b>{size(peak)}</b> at most, as the system counted it: Python, its libraries, "
        "the data and all programs together."
    )


def graph_section(graph: Graph, summary: Summary, profile: GraphProfile | None) -> Section:
    """The picture of the graph; a box tells about its layers when it is chosen."""
    diagram = diagram_of(graph, MOST_BOXES)

    def attributes(index: int, box: Box) -> str:
        focus = 0 if index == 0 else -1
        label = escape(visible(f"{box.label}, {box.detail}"))
        return f' data-box="{index}" tabindex="{focus}" role="button" aria-label="{label}"'

    picture = draw(diagram, summary.title, Drawing(alone=False, attributes=attributes))
    # Boxes can be chosen one by one, so the whole is a group of buttons and not one image.
    picture = picture.replace('role="img"', 'role="group" aria-label="The graph"', 1)
    times = profile.by_layer() if profile is not None else {}
    boxes = [_box_facts(box, summary.layers, times) for box in diagram.boxes]
    families = dict.fromkeys(box.family for box in diagram.boxes)
    legend = "".join(f'<span><i class="f-{name}"></i>{FAMILY_MEANINGS[name]}</span>' for name in families)
    html = (
        f'<div class="legend">{legend}</div><div class="graph"><div class="canvas">{picture}</div>'
        '<aside class="detail" id="layer" aria-live="polite"><span class="needs-script">Choose a box, by pointer or '
        "with the arrow keys, to see its shapes, parameters and kernels.</span></aside></div>"
    )
    return Section("graph", "Graph", html, {"boxes": boxes})


def _box_facts(box: Box, layers: tuple[LayerFacts, ...], times: dict[str, dict[str, float]]) -> list[list[str]]:
    """(name, fact) pairs for the panel beside the graph; the first is its heading."""
    if not box.layers:
        return [["", box.label], ["kind", "fed at every run"], ["shape", box.detail]]
    own = [layers[index] for index in box.layers]
    parameters = sum(layer.parameters for layer in own)
    facts = [["", box.label], ["kind", own[0].kind if len(own) == 1 else f"{len(own)} layers"]]
    facts.append(["result", " ".join(map(shape, own[-1].results))])
    facts.append(["result size", size(own[-1].result_bytes)])
    if parameters:
        frozen = parameters - sum(layer.trainable for layer in own)
        facts.append(["parameters", f"{parameters:,}" + (f", {frozen:,} frozen" if frozen else "")])
        facts.append(["parameter size", size(sum(layer.parameter_bytes for layer in own))])
    if len(own) == 1 and own[0].kernels:
        facts += [["kernel", ", ".join(own[0].kernels)], ["device", own[0].device]]
    passes: dict[str, float] = {}
    for layer in own:
        for phase, seconds in times.get(layer.name, {}).items():
            passes[phase] = passes.get(phase, 0.0) + seconds
    facts += [[phase, duration(seconds)] for phase, seconds in passes.items()]
    return facts


def layers_section(summary: Summary) -> Section:
    """The table of `graph.summary()`."""
    facts = "".join(f"<dt>{name}</dt><dd>{escape(visible(fact))}</dd>" for name, fact in summary.facts().items())
    kinds = ""
    if len(summary.layers) > MOST_ROWS:
        rows = [[kind, f"{count:,}", f"{parameters:,}"] for kind, count, parameters in summary.kinds()]
        kinds = f"<div class=wide>{Table(['kind', 'layers', 'parameters'], rows, frozenset({1, 2})).html()}</div>"
    html = f"{kinds}<div class=wide>{summary.table(MOST_ROWS).html()}</div><dl>{facts}</dl>"
    return Section("layers", "Layers", html)
