"""`graph.predict(x)`: predictions of a graph. The implementation is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlcompute.building.applying import Outputs
    from mlcompute.device import Device
    from mlcompute.graph import Graph
    from mlcompute.tensor import Tensor


def predict(
    self: Graph,
    x: Any,
    *,
    outputs: Outputs | Mapping[str, Tensor | str] = None,
    batch_size: int | None = None,
    device: Device | Literal["best"] = "best",
) -> Any:
    """Predictions for x, with samples on axis 0, without dropout and with running statistics. No loss is needed.

    x           an array, a dict of them by input, or an iterable of batches; any number of samples
    outputs     names of layers, or tensors; by default the results that no layer reads. One output gives an array,
                several give a dictionary of arrays by name; {name: tensor} chooses the names
    batch_size  by default, and at most, what the graph was built for
    device      where to run; "best": the device the graph is compiled for, else a GPU if there is one

    The compiled program is kept, and always uses the present weights of the graph.

    >>> import numpy as np, mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.input((32, 4), "x"), 3)
    >>> graph.predict(np.ones((100, 4))).shape
    (100, 3)
    """
    from mlcompute.trainer.predictor import answers

    return answers(self, x, outputs, batch_size, device)
