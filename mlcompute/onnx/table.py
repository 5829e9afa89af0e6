"""The operator table as a page: what imports, trains and exports, generated from the rows themselves."""

from __future__ import annotations

from typing import Any

from mlcompute.onnx.control import HANDLERS
from mlcompute.onnx.native_operators import AS_OPS, OPSET, same_meaning
from mlcompute.onnx.rows import BY_DESIGN, ROWS, load_rows

_TAKEN_APART = {
    "Constant": "a constant, never a weight, unless trainable= names it",
    "If": "the condition must be known at import; constants= may give it",
    "Loop": "unrolled; the trip count and the condition must be known at import",
    "Scan": "unrolled",
    "Gradient": "the nodes between are described again and differentiated",
}


def operator_table() -> str:
    """A Markdown table of all operators: | operator | imports | trains | exports | notes |."""
    import onnx.defs

    load_rows()
    rows: dict[tuple[str, str], tuple[str, str, str, str]] = {}
    for (domain, name), row in ROWS.items():
        native = not domain and name not in AS_OPS and same_meaning(name, onnx.defs.onnx_opset_version(), False)
        old = not domain and name not in AS_OPS and same_meaning(name, OPSET, False)
        exports = "as itself" if native or old else "as smaller operators"
        needs = ", ".join(map(str, sorted(row.needs)))
        note = "; ".join(filter(None, [row.note, f"operand {needs} known at import" if needs else ""]))
        rows[domain, name] = ("yes", "yes" if row.trains else "-", exports, note)
    for domain, name in HANDLERS:
        note = _TAKEN_APART.get(name, "taken apart at import")
        rows[domain, name] = ("yes", "yes", "as what it unfolds into", note)
    schemas: list[Any] = list(onnx.defs.get_all_schemas())
    for schema in schemas:
        key = (schema.domain, schema.name)
        if key not in rows and key not in BY_DESIGN and (schema.has_function or schema.has_context_dependent_function):
            rows[key] = ("yes", "yes", "as smaller operators", "by ONNX's own definition in smaller operators")
    for key, reason in BY_DESIGN.items():
        rows[key] = ("no", "-", "-", reason)
    lines = ["| operator | imports | trains | exports | notes |", "| --- | --- | --- | --- | --- |"]
    for (domain, name), cells in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1])):
        shown = f"{domain}.{name}" if domain else name
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
