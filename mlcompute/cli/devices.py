"""mlcompute devices: list the devices of this machine."""

from __future__ import annotations

import argparse

import mlcompute as mlc
from mlcompute.cli.answer import Answer
from mlcompute.device import gpu_engines, why_no_gpu
from mlcompute.devices import engine_of

EXAMPLES = ("mlcompute devices --json",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> Answer:
    """The engine behind every device."""
    engine = engine_of(mlc.Device.cpu())
    facts = {"engine": engine.name, **engine.facts()}
    text = [_shown("cpu", facts)]
    gpus = {engine.name: engine.facts() for engine in gpu_engines()}
    text += [_shown(name, found) for name, found in gpus.items()] or [f"gpu  none: {why_no_gpu()}"]
    return Answer("\n".join(text), {"cpu": facts, "gpu": gpus or None})


def _shown(name: str, facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    lines = [f"{key:<{width}}  {fact}" for key, fact in facts.items()]
    return "\n".join(f"{name if number == 0 else '':<{len(name)}}  {line}" for number, line in enumerate(lines))
