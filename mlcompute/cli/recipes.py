"""Recipes on the command line: networks that need no file of yours."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import mlcompute as mlc
from mlcompute.cli.parsing import meant
from mlcompute.data import Dataset
from mlcompute.data.series import SeriesPreprocessing
from mlcompute.data.table import TablePreprocessing
from mlcompute.data.text_file import TextPreprocessing
from mlcompute.errors import DataError

#: What each is for.
RECIPES = {
    "mlp": "one hidden layer, for tables and small images",
    "cnn": "a small convolutional network for images",
    "resnet": "a residual network for images",
    "lstm": "for time series, text, or images row by row",
    "gpt": "a small transformer for text",
    "tabular": "for tables, with embedded categories",
    "autoencoder": "samples through a narrow code and back, without labels",
}


def module(name: str) -> Any:
    """The file of a recipe, with `data` and `build` as a model file has them."""
    return importlib.import_module(f"mlcompute.recipes.{name}")


def source(name: str) -> str:
    """The text of a recipe."""
    return Path(module(name).__file__).read_text(encoding="utf-8")


def settings_of(name: str) -> list[str]:
    """What a recipe's `build` takes besides the data."""
    return list(inspect.signature(module(name).build).parameters)[1:]


def recipe_data(name: str) -> Dataset:
    """What a recipe learns from when nothing is named."""
    data: Dataset = module(name).data()
    return data


def recipe_trainer(name: str, data: Dataset, device: mlc.Device, **options: Any) -> mlc.Trainer:
    """A recipe made to measure for some data.

    options  `batch` and `rate`; what is None is the recipe's own
    """
    _expect(name, data)
    build, taken = module(name).build, settings_of(name)
    strange = [one for one in options if one not in taken]
    if strange:
        near = meant(strange[0], taken)
        raise DataError(f"{name}: this recipe has no setting {strange[0]!r}{near}", known=", ".join(taken))
    given = {name: value for name, value in options.items() if value is not None}
    trainer: mlc.Trainer = build(data, device=device, **given)
    return trainer


def _expect(name: str, data: Dataset) -> None:
    """Refuse data that a recipe is not for, and say which one is."""
    shape, given = data.shape, type(data.preprocessing)
    kind = "images" if len(shape) == 3 else "sequences" if len(shape) == 2 else "a table"
    kind = "a text" if given is TextPreprocessing else "a time series" if given is SeriesPreprocessing else kind
    fits = {
        "images": ("cnn", "resnet", "mlp", "lstm", "autoencoder"),
        "sequences": ("lstm", "mlp", "autoencoder"),
        "a time series": ("lstm", "mlp"),
        "a text": ("gpt", "lstm"),
        "a table": ("tabular", "mlp", "autoencoder"),
    }[kind]
    if name not in fits:
        raise DataError(
            f"{data.name}: {name} is not for {kind}",
            samples=f"of shape {shape}",
            fix=f"mlcompute train {fits[0]}; or {', '.join(fits[1:])}",
        )
    if name in ("cnn", "resnet") and min(shape[1:]) < 4:
        small = f"images of {shape[1]} x {shape[2]} pixels are too small for the {name}"
        raise DataError(f"{data.name}: {small}", fix="make them larger (--size), or train mlp")
    if name == "autoencoder" and given is TablePreprocessing and isinstance(data.x, dict):
        names = ", ".join(one for one in data.x if one != "numbers")
        raise DataError(
            f"{data.name}: an autoencoder needs numbers, {names} would be embedded",
            fix=f"leave them out: --column {next(one for one in data.x if one != 'numbers')}=ignored",
        )
