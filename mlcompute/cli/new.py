"""mlcompute new: write a recipe as a script that you can change."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from mlcompute.cli.answer import Answer
from mlcompute.cli.parsing import meant
from mlcompute.cli.recipes import RECIPES, source
from mlcompute.errors import DataError
from mlcompute.saving.atomic import replace_file

EXAMPLES = ("mlcompute new cnn", "mlcompute new tabular houses.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which recipe, and where it goes."""
    parser.add_argument("recipe", help="; ".join(f"{name}: {what}" for name, what in RECIPES.items()))
    parser.add_argument("file", nargs="?", metavar="FILE", help="what the script is called (RECIPE.py)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> Answer:
    """A script of about thirty lines that runs as it is."""
    if args.recipe not in RECIPES:
        near = meant(args.recipe, RECIPES)
        raise DataError(f"{args.recipe}: there is no such recipe{near}", expected=", ".join(RECIPES))
    path = Path(args.file or f"{args.recipe}.py")
    if path.suffix != ".py":
        meant_path = shlex.quote(f"{path}.py")
        raise DataError(f"{path}: a script is called something.py", fix=f"mlcompute new {args.recipe} {meant_path}")
    if path.exists() and not args.overwrite:
        raise DataError(f"{path}: is there already", fix="name another file, or --overwrite replaces it")
    text = source(args.recipe).replace(f"{args.recipe}.py", shlex.quote(path.name))
    text = text.replace(f"{args.recipe}.safetensors", f"{path.stem}.safetensors")
    replace_file(str(path), lambda file: file.write(text.encode("utf-8")), "new")
    typed = shlex.quote(str(path))
    lines = [f"{path}: {RECIPES[args.recipe]}", f"train it:  python {typed}   or   mlcompute train {typed} --report"]
    return Answer("\n".join(lines), {"file": str(path), "recipe": args.recipe})
