"""Saving: graphs with all they have learned in one safetensors file, and back. See `files.py` for the two calls.

names.py         what layers and tensors are called
construction.py  layers, descriptors and optimizers as plain data      plain.py        plain data as strict JSON
description.py   graphs as plain data                                  state.py        what changes while learning
tensor_file.py   the safetensors format                                atomic.py       files replaced whole
checkpoint.py    a file, opened and verified                           restoring.py    values into another graph
"""

from mlcompute.saving.checkpoint import Checkpoint
from mlcompute.saving.files import check_saveable, load, save
from mlcompute.saving.names import layer_names_of, names_of
from mlcompute.saving.restoring import Match, RestoreReport, restore

__all__ = [
    "Checkpoint",
    "Match",
    "RestoreReport",
    "check_saveable",
    "layer_names_of",
    "load",
    "names_of",
    "restore",
    "save",
]
