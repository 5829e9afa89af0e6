"""Training steps over the number of threads: time, memory, and the fastest peer with as many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.measure import Found, Settings, best_peer, measure
from benchmarks.table import aligned, check, megabytes, milliseconds
from benchmarks.workloads import ALL

HEAD = ("threads", "mlcompute ms", "to fewest", "best peer ms", "which", "speed", "of sgemm", "tensors MB", "RSS MB")


def scaling(
    name: str, counts: Sequence[int], contenders: Sequence[str], settings: Settings, say: Callable[[str], None]
) -> dict[str, dict[str, Found]]:
    """Measure one workload with every number of threads, and print its table."""
    results = {}
    rows: list[Sequence[str]] = [HEAD]
    for threads in counts:
        one_count = replace(settings, modes=["train"], threads=threads, compile_of=[])
        found = measure(ALL[name], contenders, one_count, say)["train"]
        say("")
        results[str(threads)] = found
        ours, peer = found["mlcompute"], best_peer(found)
        if "median" not in ours:
            rows.append((str(threads), ours.get("error", "no times"), *[""] * (len(HEAD) - 2)))
            continue
        first = results[str(counts[0])]["mlcompute"].get("median")
        theirs = found[peer]["median"] if peer else None
        rows.append(
            (
                str(threads),
                milliseconds(ours["median"]),
                f"{first / ours['median']:.2f}x" if first else "",
                milliseconds(theirs) if theirs else "",
                peer or "",
                f"{theirs / ours['median']:.2f}x" if theirs else "",
                f"{100 * ours['of_sgemm']:.0f} %" if "of_sgemm" in ours else "",
                megabytes(ours.get("bytes_planned")),
                megabytes(ours.get("rss_bytes")),
            )
        )
    print("\n".join([f"\n{ALL[name].describes}", *aligned(rows), check(found, "train")]), flush=True)
    return results
