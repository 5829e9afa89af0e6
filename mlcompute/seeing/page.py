"""A page: heading, numbers, parts; one HTML document that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from mlcompute.seeing.page_script import LIVE, SCRIPT
from mlcompute.seeing.page_style import STYLE
from mlcompute.seeing.units import visible

if TYPE_CHECKING:
    from mlcompute.seeing.figures import Figure
    from mlcompute.seeing.sections import Section

Live = Literal["", "train", "watch"]


@dataclass
class Page:
    """What a page shows.

    heading   its title; score: what stands beside it, the accuracy
    about     words below the heading
    figures   numbers below that
    sections  its parts, in order
    footer    a last sentence
    live      "train": a server sends new parts and takes what buttons say; "watch": it only sends; "": a file
    """

    heading: str
    about: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    sections: Sequence[Section] = ()
    footer: str = ""
    score: Figure | None = None
    live: Live = ""

    def html(self) -> str:
        """The text of the document."""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{policy(self.live)}">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
            f"<title>{escape(visible(self.title))}</title><style>{STYLE}</style></head><body>"
            f'<header>{_bar(self.live)}<h1 id="heading">{self.heading_html()}</h1>'
            f"<p>{' · '.join(escape(visible(one)) for one in self.about if one)}</p>"
            f'<dl class="figures" id="figures">{self.figures_html()}</dl></header>'
            f'<nav aria-label="Parts of this page">{self._links()}</nav><main>{self._body()}</main>'
            f"<footer>{escape(self.footer)}</footer>"
            f'<script type="application/json" id="data">{embedded(self.everything())}</script>'
            f"<script>{script(self.live)}</script></body></html>\n"
        )

    @property
    def title(self) -> str:
        """What a browser's tab says."""
        return f"{self.score.value} · {self.heading}" if self.score else self.heading

    def heading_html(self) -> str:
        """The heading, with the score beside it."""
        score = ""
        if self.score is not None:
            score = f' <span class="score"><b>{escape(self.score.value)}</b> {escape(self.score.what)}</span>'
        return f"{escape(visible(self.heading))}{score}"

    def figures_html(self) -> str:
        """The numbers below the heading."""
        return "".join(
            f"<div><dt>{escape(one.what)}</dt><dd>{escape(one.value)}</dd>"
            f"<dd class=remark>{escape(one.remark)}</dd></div>"
            for one in self.figures
        )

    def everything(self) -> dict[str, Any]:
        """What the script needs of all parts."""
        return {name: value for part in self.sections for name, value in part.data.items()}

    def _links(self) -> str:
        return "".join(f'<a href="#{part.name}">{escape(part.title)}</a>' for part in self.sections)

    def _body(self) -> str:
        return "".join(
            f'<section id="{part.name}" aria-labelledby="h-{part.name}">'
            f'<h2 id="h-{part.name}">{escape(part.title)}</h2><div class="part">{part.html}</div></section>'
            for part in self.sections
        )


#: What a page that is served while training shows above its heading.
_BAR = (
    '<div class="live"><span class="lamp" id="lamp"></span><span id="state" role="status">connecting …</span>'
    '<progress id="done" max="1" value="0" aria-label="share of the steps that are done"></progress>'
    '<span class="buttons">{}</span></div>'
)
_BUTTONS = (
    '<button type="button" id="save" disabled>Save</button><button type="button" id="stop" disabled>Stop</button>'
)


def _bar(live: Live) -> str:
    return _BAR.format(_BUTTONS if live == "train" else "") if live else ""


def script(live: Live) -> str:
    """The script of a page."""
    return SCRIPT.replace("/*live*/", LIVE if live else "")


def policy(live: Live = "") -> str:
    """Nothing may be loaded, and no script but ours may run, whatever a label contains."""
    digest = base64.b64encode(hashlib.sha256(script(live).encode()).digest()).decode()
    connects = "connect-src 'self'; " if live else ""
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; {connects}base-uri 'none'; form-action 'none'"
    )


def embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in, nor holds anything that cannot be shown."""
    return json.dumps(shown_data(data), ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )


def shown_data(data: Any) -> Any:
    """The same data without what cannot be shown."""
    if isinstance(data, dict):
        return {name: shown_data(value) for name, value in data.items()}
    if isinstance(data, list):
        return [shown_data(value) for value in data]
    return visible(data) if isinstance(data, str) else data
