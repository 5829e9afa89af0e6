"""A table of text: in monospaced columns, and in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mlcompute.seeing.units import cut, places, visible

Row = Sequence[str]
#: Characters of a last column that are worth showing.
LEAST = 16


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head.

    numeric  indices of columns that are aligned to the right
    foot     rows below the others: totals
    widest   most characters a cell may have in the text form; in the last column all stay, nothing stands behind it
    """

    head: Row
    rows: Sequence[Row]
    numeric: frozenset[int] = frozenset()
    foot: Sequence[Row] = ()
    widest: int = 48

    def __str__(self) -> str:
        everything, widths = self._texts(), self._widths()
        return "\n".join(
            "  ".join(
                _padding(cell, width) + cell if column in self.numeric else cell + _padding(cell, width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in everything
        )

    def within(self, width: int) -> Table:
        """Without the last columns, as many as do not fit; words in the last one may be cut, if some of them fit."""
        *before, last = self._widths()
        least = sum(before) + 2 * len(before) + (last if len(before) in self.numeric else min(last, LEAST))
        if least <= width or not before:
            return self
        fewer = [[row[:-1] for row in rows] for rows in (self.rows, self.foot)]
        return Table(self.head[:-1], fewer[0], self.numeric, fewer[1], self.widest).within(width)

    def _texts(self) -> list[list[str]]:
        """The cells as they are printed."""
        rows = ([visible(cell).replace("\n", " ") for cell in row] for row in (self.head, *self.rows, *self.foot))
        return [[*(cut(one, self.widest) for one in row[:-1]), row[-1]] for row in rows]

    def _widths(self) -> list[int]:
        return [max(map(places, column)) for column in zip(*self._texts(), strict=True)]

    def html(self, caption: str = "") -> str:
        """A table element; everything in it is escaped."""
        parts = ["<table>"]
        if caption:
            parts.append(f"<caption>{escape(visible(caption))}</caption>")
        parts.append(f"<thead><tr>{self._cells(self.head, 'th')}</tr></thead><tbody>")
        parts += [f"<tr>{self._cells(row, 'td')}</tr>" for row in self.rows]
        parts.append("</tbody>")
        if self.foot:
            parts.append("<tfoot>" + "".join(f"<tr>{self._cells(row, 'td')}</tr>" for row in self.foot) + "</tfoot>")
        return "".join([*parts, "</table>"])

    def _cells(self, row: Row, tag: str) -> str:
        cells = []
        for column, cell in enumerate(row):
            # The first cell of a row names it: screen readers then say it with every other.
            name, scope = ("th", ' scope="row"') if tag == "td" and column == 0 else (tag, "")
            scope = scope or (' scope="col"' if tag == "th" else "")
            kind = ' class="n"' if column in self.numeric else ""
            cells.append(f"<{name}{scope}{kind}>{escape(visible(cell))}</{name}>")
        return "".join(cells)


def _padding(text: str, width: int) -> str:
    return " " * (width - places(text))


#: For tables that stand alone in a notebook; scoped, so that nothing else on the page changes.
NOTEBOOK_STYLE = (
    "<style>.mlc-table table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}"
    ".mlc-table th,.mlc-table td{padding:3px 12px 3px 0;text-align:left;border:0;font-weight:400;white-space:nowrap}"
    ".mlc-table thead th{opacity:.65;border-bottom:1px solid currentColor}"
    ".mlc-table tfoot td,.mlc-table tfoot th{font-weight:600;border-top:1px solid currentColor}"
    ".mlc-table .n{text-align:right}.mlc-table caption{text-align:left;padding:4px 0;opacity:.8}</style>"
)


def for_notebook(content: str) -> str:
    """HTML that looks the same in light and dark notebooks: it takes the colour of the text around it."""
    return f'<div class="mlc-table" style="overflow-x:auto">{NOTEBOOK_STYLE}{content}</div>'
