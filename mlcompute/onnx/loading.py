"""onnx.load: a model as a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlcompute.errors import Error
from mlcompute.onnx.choices import Choices
from mlcompute.onnx.files import read_model
from mlcompute.onnx.imported import ImportedGraph
from mlcompute.onnx.importer import AgainError, Importer
from mlcompute.onnx.problems import ModelError
from mlcompute.onnx.weights import Trainable


def load(
    model: Any,
    *,
    batch: int | None = None,
    dimensions: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    memory_limit: int | None = None,
    node_limit: int | None = None,
    trainable: Trainable | None = None,
    batch_norm: str = "train",
    dequantize: bool = False,
    output: str | None = None,
) -> ImportedGraph:
    """A model as a graph whose weights can be trained.

    model         a path, the bytes of a file, or an onnx.ModelProto
    batch         the first extent of inputs that leave it open; with it, every extent of the same name
    dimensions    other open extents by their name in the model; `shapes`: whole shapes by the input's name
    constants     numbers of inputs, or of values the model computes, that shapes and branches depend on; they are taken
                  only where an operator needs them
    memory_limit  bytes all constants and weights together may take; by default what the file holds, 8 more for each of
                  its numbers, and 32 MiB: a small file cannot make a large import
    node_limit    nodes loops and functions may unfold into; by default 4000, and 8 for each node of the model
    trainable     which stored tensors are weights: patterns such as "classifier.*", and then no others are; or a
                  function of a name that answers True, False, or None to leave it to the guess; by default, the guess
    batch_norm    "train": batch normalization uses the batch's statistics in training graphs and keeps the running
                  ones; "frozen": it uses the running ones everywhere and leaves them as they are
    dequantize    read a quantized model as one of floating numbers, whose weights can be trained
    output        the output a loss is put on, for models with several

    A file does not say what was trained: `ImportedGraph.judgements` and `doctor` list what was taken for a weight or a
    constant, and why. What cannot be imported is listed in one ModelError, all of it; then nothing has been imported.

    >>> import mlcompute as mlc
    >>> graph = mlc.onnx.load("model.onnx", batch=32)  # doctest: +SKIP
    >>> training = mlc.TrainingGraph([graph], loss, optimizer)  # doctest: +SKIP
    >>> training.add_inputs(graph.inputs, {"labels": labels})  # doctest: +SKIP
    """
    choices = Choices(trainable, batch_norm, dequantize, output)
    file = read_model(model)
    fixed: frozenset[str] = frozenset()
    while True:
        try:
            return Importer(
                file, batch=batch, dimensions=dimensions or {}, shapes=shapes or {}, constants=constants or {},
                memory_limit=memory_limit, node_limit=node_limit, choices=choices, fixed=fixed,
            ).run()  # fmt: skip
        except AgainError as again:
            fixed = again.fixed
        except (Error, Warning):  # warnings, where the caller made errors of them
            raise
        except Exception as error:
            # A damaged file can be wrong in ways nobody thought of; the caller gets one kind of error for all of them.
            raise ModelError(
                "onnx.load: the model has no meaning as it stands", reason=f"{type(error).__name__}: {error}"
            ) from error
