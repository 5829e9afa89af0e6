"""A part of a report: the confusion matrix and the worst mistakes of a classifier."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from mlcompute.seeing.sections import Section
from mlcompute.seeing.svg import shortened, text_width
from mlcompute.seeing.table import Table
from mlcompute.seeing.units import percent, visible

if TYPE_CHECKING:
    from mlcompute.runs.evaluation import Evaluation, Mistake

#: Classes a drawn matrix has at most; of more, the pairs that are confused most are listed.
MOST_CLASSES = 32
MOST_PAIRS = 20
WIDEST_NAME = 130.0


def mistakes_section(evaluation: Evaluation) -> Section:
    """Which classes are taken for which, and the worst mistakes."""
    wrong = evaluation.samples - round(evaluation.accuracy * evaluation.samples)
    lead = (
        f"<p class=lead><b>{evaluation.samples - wrong:,}</b> of {evaluation.samples:,} samples are classified "
        f"correctly, <b>{wrong:,}</b> are not; the commonest class, {escape(visible(evaluation.commonest))}, is "
        f"{percent(evaluation.baseline)} of them. Rows are the true classes, columns the predicted ones; beside a row "
        "is the share of its class that is right.</p>"
    )
    drawn = len(evaluation.classes) <= MOST_CLASSES
    body = f'<div class="wide">{confusion_matrix(evaluation) if drawn else _pairs(evaluation)}</div>'
    beside = ""
    if evaluation.mistakes:
        tiles = "".join(_tile(one, evaluation.classes) for one in evaluation.mistakes)
        kind = "tiles" if any(one.picture for one in evaluation.mistakes) else "tiles plain"
        beside = (
            "<div><h3>The worst mistakes</h3><p class=lead>Samples whose true class got the least probability.</p>"
            f'<div class="{kind}">{tiles}</div></div>'
        )
    return Section("mistakes", "Mistakes", f'{lead}<div class="wrong-ones">{body}{beside}</div>')


def confusion_matrix(evaluation: Evaluation) -> str:
    """Cells: right ones blue, wrong ones orange, stronger for more; the share of each class that is right beside it."""
    names = [shortened(visible(name), WIDEST_NAME, 12.0) for name in evaluation.classes]
    count = len(names)
    cell = 44 if count <= 12 else 30 if count <= 20 else 22
    left = 14 + round(max(text_width(name, 12.0) for name in names) * 1.06)
    slanted = any(text_width(name, 12.0) > cell - 6 for name in names)
    top = 22 + (round(0.72 * max(text_width(name, 12.0) for name in names)) if slanted else 0)
    width, height = left + count * cell + 70 + (top if slanted else 0), top + count * cell + 6
    most_wrong = max((n for i, row in enumerate(evaluation.confusion) for n in (*row[:i], *row[i + 1 :])), default=0)
    parts = [
        f'<svg class="chart confusion" viewBox="0 0 {width} {height}" style="width:{width}px;max-width:100%" '
        'role="img" aria-label="confusion matrix: a row per true class, a column per predicted one">'
    ]
    for index, name in enumerate(names):
        x, y = left + index * cell + cell / 2, top - 8
        turn = f' transform="rotate(-40 {x:.0f} {y})" text-anchor="start"' if slanted else ' text-anchor="middle"'
        parts.append(f'<text class="tick" x="{x:.0f}" y="{y}"{turn}>{escape(name)}</text>')
    for row, numbers in enumerate(evaluation.confusion):
        y, total = top + row * cell, sum(numbers)
        middle, name = y + cell / 2 + 4, escape(names[row])
        parts.append(f'<text class="label" x="{left - 8}" y="{middle:.0f}" text-anchor="end">{name}</text>')
        for column, n in enumerate(numbers):
            right = row == column
            share = n / max(1, total) if right else n / max(1, most_wrong)
            kind, strength = ("right", 0.12 + 0.75 * share) if right else ("wrong", 0.18 + 0.6 * share)
            told = f"{evaluation.classes[row]} taken for {evaluation.classes[column]}: {n:,}"
            parts.append(
                f'<rect class="{kind if n else "none"}" x="{left + column * cell}" y="{y}" width="{cell - 2}" '
                f'height="{cell - 2}" rx="4" fill-opacity="{strength if n else 1:.2f}">'
                f"<title>{escape(visible(told))}</title></rect>"
            )
            if n and cell > 22:
                bold = " on" if right and strength > 0.5 else ""
                parts.append(
                    f'<text class="count{bold}" x="{left + column * cell + cell / 2 - 1:.0f}" y="{middle:.0f}" '
                    f'text-anchor="middle">{n if n < 10_000 else f"{n / 1000:.0f}k"}</text>'
                )
        recall = percent(numbers[row] / total) if total else "-"
        parts.append(f'<text class="value" x="{left + count * cell + 8}" y="{middle:.0f}">{recall}</text>')
    return "".join([*parts, "</svg>"])


def _pairs(evaluation: Evaluation) -> str:
    found = sorted(
        ((n, i, j) for i, row in enumerate(evaluation.confusion) for j, n in enumerate(row) if i != j and n),
        reverse=True,
    )[:MOST_PAIRS]
    rows = [
        [evaluation.classes[i], evaluation.classes[j], f"{n:,}", percent(n / max(1, sum(evaluation.confusion[i])))]
        for n, i, j in found
    ]
    return Table(["class", "taken for", "times", "of the class"], rows, frozenset({2, 3})).html()


def _tile(mistake: Mistake, classes: list[str]) -> str:
    label, predicted = (escape(visible(classes[index])) for index in (mistake.label, mistake.predicted))
    name = escape(visible(mistake.name)) or f"sample {mistake.sample:,}"
    image = f'<img alt="{name}" src="{escape(mistake.picture)}">' if mistake.picture else ""
    told = f"{name}: {percent(mistake.label_probability)} for its true class"
    return (
        f'<figure title="{told}">{image}<figcaption><b>{label}</b> taken for <b>{predicted}</b>'
        f"<span>{percent(mistake.probability)} sure{'' if image else f', {name}'}</span>"
        "</figcaption></figure>"
    )
