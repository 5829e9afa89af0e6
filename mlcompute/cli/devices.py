"""mlcompute devices: what this machine has to compute with."""

from __future__ import annotations

import argparse

import mlcompute as mlc
from mlcompute.cli.answer import Answer

EXAMPLES = ("mlcompute devices --json",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> Answer:
    """The engine behind every device."""
    engine = mlc.Device.cpu().engine
    facts = {"engine": engine.name, **engine.facts()}
    gpu = mlc.Device.gpu()
    text = [f"cpu  {mlc.Platform.describe().replace(chr(10), chr(10) + '     ')}"]
    text.append("gpu  none found" if gpu is None else f"gpu  {gpu!r}")
    return Answer("\n".join(text), {"cpu": facts, "gpu": None if gpu is None else repr(gpu)})
