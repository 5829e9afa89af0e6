"""What was measured, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.contenders import YARDSTICK
from benchmarks.contenders.sgemm import FLOPS
from benchmarks.measure import IDLE_LOAD, Found, best_peer, disagreement
from benchmarks.workloads import ALL, MODES

HEAD = (
    "contender", "median ms", "min ms", "10-90 % ms", "speed", "of sgemm", "tensors MB", "RSS MB", "cold s", "cached s",
)  # fmt: skip


def heading(facts: Found, threads: int) -> str:
    lines = [f"{facts['processor']}, {facts['cores']} cores, {threads} threads each, {facts['when']}"]
    if facts["load"] is not None:
        lines.append(f"load average {', '.join(f'{load:.2f}' for load in facts['load'])}")
        if facts["load"][0] > IDLE_LOAD:
            lines.append("WARNING: the machine is not idle; compare ratios, not times, and repeat when it is")
    return "\n".join(lines)


def section(workload: str, mode: str, found: dict[str, Found]) -> str:
    """The table of one workload in one mode."""
    peer = best_peer(found)
    rows = [HEAD]
    failed = []
    for name, entry in found.items():
        if name == YARDSTICK.name and "median" in entry:
            continue
        if "median" not in entry:
            failed.append(f"  {name}: {short(entry.get('error', 'no times'))}")
            continue
        tensors = entry.get("bytes_planned", entry.get("bytes_live"))
        rows.append(
            (
                name,
                milliseconds(entry["median"]),
                milliseconds(entry["minimum"]),
                f"{milliseconds(entry['low'])} - {milliseconds(entry['high'])}",
                f"{found[peer]['median'] / entry['median']:.2f}x" if peer else "",
                f"{100 * entry['of_sgemm']:.1f} %" if "of_sgemm" in entry else "",
                megabytes(tensors),
                megabytes(entry.get("rss_bytes")),
                f"{entry['cold_seconds']:.2f}" if "cold_seconds" in entry else "",
                f"{entry['cached_seconds']:.2f}" if "cached_seconds" in entry else "",
            )
        )
    return "\n".join([f"\n{ALL[workload].describes}: {MODES[mode]}", *aligned(rows), *failed, check(found, mode)])


def check(found: dict[str, Found], mode: str) -> str:
    """Did everybody do the same work?"""
    losses = next((e["losses"] for n, e in found.items() if "losses" in e and n != YARDSTICK.name), None)
    if losses is None:
        return "  nobody ran"
    largest, wrong = disagreement(found)
    course = f"{losses[0]:.4f}" + (f" -> {losses[-1]:.4f} in {len(losses)} steps" if mode != "infer" else "")
    if wrong:
        return f"  WARNING: not the same work: losses of {', '.join(wrong)} differ (up to {largest:.1e}); loss {course}"
    return f"  losses agree within {largest:.0e}: {course}"


def summary(results: dict[str, dict[str, dict[str, Found]]]) -> str:
    """One line per workload and mode, then what does not belong to a workload."""
    rows: list[Sequence[str]] = [("workload", "mode", "mlcompute ms", "best peer ms", "which", "speed", "by round")]
    for workload, modes in results.items():
        for mode, found in modes.items():
            ours, peer = found.get("mlcompute", {}), best_peer(found)
            if "median" in ours and peer is not None:
                theirs = found[peer]
                turns = [b / a for a, b in zip(ours["round_medians"], theirs["round_medians"], strict=False)]
                rows.append(
                    (
                        workload,
                        mode,
                        milliseconds(ours["median"]),
                        milliseconds(theirs["median"]),
                        peer,
                        f"{theirs['median'] / ours['median']:.2f}x",
                        f"{min(turns):.2f} - {max(turns):.2f}",
                    )
                )
    lines = ["\nmlcompute beside the best peer", *aligned(rows)] if len(rows) > 1 else []
    return "\n".join([*lines, *extras(results)])


def extras(results: dict[str, dict[str, dict[str, Found]]]) -> list[str]:
    every = [(workload, found) for workload, modes in results.items() for found in modes.values()]
    lines = []
    rates = [FLOPS / found[YARDSTICK.name]["minimum"] / 1e9 for _, found in every if "minimum" in found[YARDSTICK.name]]
    if rates:
        lines.append(f"sgemm: {min(rates):.0f} - {max(rates):.0f} GFLOP/s in the course of the run")
    imports = {
        name: (entry["version"], entry["import_seconds"])
        for _, found in every
        for name, entry in found.items()
        if "import_seconds" in entry and name != YARDSTICK.name
    }
    lines += [f"import {name} {release}: {seconds:.2f} s" for name, (release, seconds) in imports.items()]
    overhead = results.get("mlp1", {}).get("train", {}).get("mlcompute", {}).get("seconds_outside_native")
    if overhead is not None:
        lines.append(f"mlcompute, MLP batch 1: {1e6 * overhead:.1f} microseconds per step outside its native call")
    lines += [
        f"mlcompute, {workload}: compiled in {ours['cold_compiling_seconds']:.2f} s, "
        f"from the cache in {ours['cached_compiling_seconds']:.2f} s"
        for workload, found in every
        if "cached_compiling_seconds" in (ours := found.get("mlcompute", {}))
    ]
    reasons = {
        name: entry["error"]
        for _, found in every
        for name, entry in found.items()
        if "cannot be imported" in entry.get("error", "")
    }
    return ["", *lines, *(f"missing: {name}: {reason}" for name, reason in reasons.items())]


# Formatting ---------------------------------------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip()


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def megabytes(count: Any) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 140 else f"{line[:137]}..."
