"""mlcompute bench: training steps beside PyTorch, JAX, tinygrad and MLX, from a copy of the project."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import mlcompute
from mlcompute.cli.answer import FAILED, SUCCESS, Answer
from mlcompute.errors import DataError

EXAMPLES = ("mlcompute bench --quick",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after -- goes to the benchmark itself."""
    parser.add_argument("--quick", action="store_true", help="about two minutes in all")
    parser.add_argument("rest", nargs="*", help="further arguments of `python -m benchmarks`, after --")


def run(args: argparse.Namespace) -> Answer:
    """Benchmarks come with the source, not with the package: they need the frameworks they compare with."""
    source = Path(mlcompute.__file__).parents[1]
    if not (source / "benchmarks" / "__main__.py").exists():
        raise DataError(
            "the benchmarks come with the project's source",
            fix="run it in a clone of the project: make bench",
        )
    command = [sys.executable, "-m", "benchmarks", *(["--quick"] if args.quick else []), *args.rest]
    code = subprocess.run(command, check=False, cwd=source, stdout=sys.stderr if args.json else None).returncode
    return Answer("", {"command": command, "exit": code}, code=FAILED if code else SUCCESS)
