"""What was measured on a GPU, as text."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from benchmarks.gpu.contenders import PRECISIONS, workload_named
from benchmarks.gpu.measure import Results, fastest_peer
from benchmarks.measure import Found, disagreement
from benchmarks.table import aligned, megabytes, milliseconds, short

HEAD = (
    "contender", "median ms", "min ms", "turns ms", "waiting ms", "speed", "TFLOP/s", "memory MB", "ready s",
)  # fmt: skip
#: How far losses may differ, relatively, from rounding in products: the first, and those after Adam's first steps.
TOLERANCES = {"tf32": (5e-3, 5e-2), "bf16": (2e-2, 1e-1)}
#: What contenders are called in documents.
NAMES = {
    "mlcompute": "mlcompute",
    "mlcompute-tuned": "mlcompute, tuned",
    "torch": "PyTorch",
    "torch-graph": "PyTorch in a CUDA graph",
    "torch-compile": "torch.compile",
    "torch-max-autotune": "max-autotune",
    "jax": "JAX",
    "jax-flags": "JAX with flags",
}


def heading(facts: Found) -> str:
    return f"{facts['gpu']}; {facts['processor']}, {facts['cores']} cores; {facts['when']}"


def section(job: str, found: dict[str, Found]) -> str:
    """The table of one job."""
    name, precision = job.split()
    workload, peer = workload_named(name), fastest_peer(found)
    rows, failed = [HEAD], []
    for contender, entry in found.items():
        if "median" not in entry:
            failed.append(f"  {contender}: {short(entry.get('error', 'no times'))}")
            continue
        rows.append(
            (
                contender,
                milliseconds(entry["median"]),
                milliseconds(entry["minimum"]),
                f"{milliseconds(entry['minimum'])} - {milliseconds(entry['maximum'])}",
                milliseconds(entry["waiting_median"]),
                f"{found[peer]['median'] / entry['median']:.2f}x" if peer else "",
                f"{workload.flops('train') / entry['median'] / 1e12:.1f}",
                megabytes(entry.get("bytes")),
                f"{entry['ready_seconds']:.1f}",
            )
        )
    lines = [f"\n{workload.describes}, {PRECISIONS[precision]}", *(aligned(rows) if len(rows) > 1 else ())]
    return "\n".join([*lines, *failed, check(found, precision)])


def check(found: dict[str, Found], precision: str) -> str:
    """Did everybody do the same work?"""
    losses = next((entry["losses"] for entry in found.values() if "losses" in entry), None)
    if losses is None:
        return "  nobody ran"
    largest, wrong = disagreement(found, *TOLERANCES[precision])
    course = f"{losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps"
    if wrong:
        return f"  WARNING: not the same work: losses of {', '.join(wrong)} differ (up to {largest:.1e}); loss {course}"
    return f"  losses agree within {largest:.0e}: {course}"


def summary(results: Results) -> str:
    """One line per job: ours beside the fastest peer."""
    rows: list[Sequence[str]] = [("workload", "precision", "mlcompute ms", "fastest peer ms", "which", "speed")]
    for workload, precisions in results.items():
        for precision, found in precisions.items():
            ours, peer = best_of_ours(found), fastest_peer(found)
            if ours is not None and peer is not None:
                times = found[ours]["median"], found[peer]["median"]
                speed = f"{times[1] / times[0]:.2f}x"
                rows.append((workload, precision, milliseconds(times[0]), milliseconds(times[1]), peer, speed))
    return "\n".join(["\nmlcompute beside the fastest peer", *aligned(rows)]) if len(rows) > 1 else ""


def best_of_ours(found: dict[str, Found]) -> str | None:
    """Plain mlcompute if it ran, as users have it without asking; else whichever of ours did."""
    return next((name for name in ("mlcompute", "mlcompute-tuned") if "median" in found.get(name, {})), None)


def markdown(stored: Found) -> str:
    """All jobs as a table of a document: milliseconds per step in a stream of steps."""
    results: Results = stored["results"]
    every = [found for precisions in results.values() for found in precisions.values()]
    shown = [name for name in NAMES if _is_measured(name, results)]
    lines = [
        f"One {stored['machine']['gpu'].partition(',')[0]}, {day(stored['machine']['when'])}; "
        f"{versions(every)}. Milliseconds per step.",
        "",
        f"| network | {' | '.join(NAMES[name] for name in shown)} | against the fastest peer |",
        f"| --- | {'--- | ' * len(shown)}--- |",
    ]
    for workload, precisions in results.items():
        for precision, found in precisions.items():
            ours, peer = best_of_ours(found), fastest_peer(found)
            cells = [milliseconds(found[name]["median"]) if "median" in found.get(name, {}) else "-" for name in shown]
            speed = "-" if not (ours and peer) else f"{found[peer]['median'] / found[ours]['median']:.2f}x"
            title = f"{workload_named(workload).describes}, {PRECISIONS[precision]}"
            lines.append(f"| {title} | {' | '.join(cells)} | {speed} |")
    missing: dict[str, list[str]] = {}
    for workload, precisions in results.items():
        for precision, found in precisions.items():
            for name, entry in found.items():
                if "error" in entry:
                    title = f"{workload_named(workload).describes}, {PRECISIONS[precision]}"
                    said = short(entry["error"].strip().partition("\n\n")[0])  # advice on debugging follows
                    missing.setdefault(f"{NAMES[name]}: {said}", []).append(title)
    failures = sorted(f"- {why}: {'; '.join(titles)}" for why, titles in missing.items())
    return "\n".join([*lines, "", *resources(results), *(["", "Not measured:", "", *failures] if failures else [])])


def resources(results: Results) -> list[str]:
    """A second table: device memory, and seconds until the first step has run."""
    shown = [name for name in ("mlcompute", "torch-graph", "torch-compile", "jax") if _is_measured(name, results)]
    lines = [
        f"| MB of device memory, seconds to build | {' | '.join(NAMES[name] for name in shown)} |",
        f"| --- | {'--- | ' * len(shown)}".rstrip(),
    ]
    for workload, precisions in results.items():
        for precision, found in precisions.items():
            entries = [found.get(name, {}) for name in shown]
            cells = [f"{e['bytes'] / 1e6:,.1f}, {e['ready_seconds']:.1f}" if "median" in e else "-" for e in entries]
            lines.append(f"| {workload_named(workload).describes}, {PRECISIONS[precision]} | {' | '.join(cells)} |")
    return lines


def _is_measured(name: str, results: Results) -> bool:
    return any("median" in found.get(name, {}) for precisions in results.values() for found in precisions.values())


def versions(every: Sequence[dict[str, Found]]) -> str:
    """Who took part, in which version."""
    titles = {"torch": "PyTorch", "jax": "JAX", "mlcompute": "mlcompute"}
    found = {
        title: entry["version"]
        for start, title in titles.items()
        for contenders in every
        for name, entry in contenders.items()
        if name.startswith(start) and "version" in entry
    }
    return ", ".join(f"{title} {release}" for title, release in found.items())


def day(when: str) -> str:
    date = datetime.date.fromisoformat(when.split()[0])
    return f"{date.day} {date:%B %Y}"
