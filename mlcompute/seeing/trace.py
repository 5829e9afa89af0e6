"""A profile as a trace-event file: what Perfetto (ui.perfetto.dev) reads.

One track per pass with layers and, nested in them, their kernels; one track with the runs; one counter with the
memory in use. Times are microseconds from the start of the first run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcompute.saving.atomic import write_text

if TYPE_CHECKING:
    from mlcompute.seeing.profile import Event, GraphProfile

_PROCESS = 1
_RUNS = 1  # the track of whole runs; the passes follow


def write_trace(profile: GraphProfile, path: Path) -> Path:
    """Write the file, whole or not at all."""
    # Labels are anybody's: JSON escapes them all, even halves of letters that UTF-8 cannot write.
    text = json.dumps(trace_of(profile), ensure_ascii=True, separators=(",", ":"))
    return write_text(path, text, "save_trace")


def trace_of(profile: GraphProfile) -> dict[str, Any]:
    """The trace as the object form of the format."""
    tracks = {phase: number for number, phase in enumerate(profile.phases, start=_RUNS + 1)}
    events = [_named("process_name", 0, f"{profile.graph} on {profile.device}")]
    for track, name in ((_RUNS, "runs"), *((track, f"{phase} pass") for phase, track in tracks.items())):
        events.append(_named("thread_name", track, name))
        events.append(_metadata("thread_sort_index", track, {"sort_index": track}))
    started = min((run[0].start for run in profile.runs if run), default=0.0)
    for number, run in enumerate(profile.runs, start=1):
        if not run:
            continue
        end = max(event.start + event.seconds for event in run)
        events.append(_complete(f"run {number}", "run", _RUNS, run[0].start - started, end - run[0].start, {}))
        for group in _by_layer(run):
            first, last = group[0], group[-1]
            seconds = last.start + last.seconds - first.start
            track = tracks[first.phase]
            arguments = {"layer": first.layer, "pass": first.phase}
            events.append(_complete(first.layer, "layer", track, first.start - started, seconds, arguments))
            for event in group:
                more = {"step": event.step, "op": event.op, "kernel": event.kernel or "no kernel"}
                name = event.kernel or event.op
                events.append(_complete(name, "kernel", track, event.start - started, event.seconds, more))
        events += _memory(profile, run, started)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": profile.graph,
            "device": profile.device,
            "program": profile.program,
            "batch size": str(profile.batch_size),
        },
    }


def _by_layer(run: tuple[Event, ...]) -> list[list[Event]]:
    """Kernels that follow one another for the same layer and pass."""
    groups: list[list[Event]] = []
    for event in run:
        if groups and (groups[-1][-1].layer, groups[-1][-1].phase) == (event.layer, event.phase):
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _memory(profile: GraphProfile, run: tuple[Event, ...], started: float) -> list[dict[str, Any]]:
    """The counter, wherever it changes."""
    counters = []
    before = -1
    for event in run:
        live = profile.live[event.step]
        if live != before:
            time = _microseconds(event.start - started)
            counters.append(_event("memory in use", "C", _RUNS, {"bytes": live}, ts=time))
            before = live
    return counters


def _complete(
    name: str, category: str, track: int, start: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(seconds)}
    return _event(name, "X", track, args, cat=category, **times)


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return _metadata(kind, track, {"name": name})


def _metadata(kind: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return _event(kind, "M", track, args, ts=0)


def _event(name: str, kind: str, track: int, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": kind, "pid": _PROCESS, "tid": track, "args": args, **more}


def _microseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e6, 3)
