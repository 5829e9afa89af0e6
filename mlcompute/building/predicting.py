"""A graph that answers: `graph.predict(x)`. The work is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlcompute.building.applying import Outputs
    from mlcompute.device import Device
    from mlcompute.graph import Graph


def predict(
    self: Graph,
    x: Any,
    *,
    outputs: Outputs = None,
    batch_size: int | None = None,
    device: Device | Literal["best"] = "best",
) -> Any:
    """What the graph answers for x, samples on axis 0: dropout off, running statistics used. No loss is needed.

    x           an array, a dict of them by input, or an iterable of batches; any number of samples
    outputs     names of layers, or tensors; by default what no other layer goes on computing with. Of one the answer is
                an array, of several a dictionary of arrays by name
    batch_size  by default, and at most, what the graph was built for
    device      where to run; "best": where the graph is compiled, else the best there is

    What is compiled for it is kept, and the weights are those of the graph, as they are now.

    >>> import numpy as np, mlcompute as mlc
    >>> graph = mlc.Graph()
    >>> y = graph.dense(graph.input((32, 4), "x"), 3)
    >>> graph.predict(np.ones((100, 4))).shape
    (100, 3)
    """
    from mlcompute.trainer.predictor import answers

    return answers(self, x, outputs, batch_size, device)
