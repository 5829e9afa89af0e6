"""Programs of sizes that were used long ago are dropped, with all that a group has prepared for them."""

import gc
import weakref

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.runtime.session import session_of
from tests.group.threads import building, run_group


def network(across: bool) -> mlc.TrainingGraph:
    with building:
        mlc.Platform.set_rng_seed_to(3)
        graph = mlc.Graph()
        x = graph.input((4, 2, 6, 6), "x", varies=[2, 3])
        y = graph.normalize(graph.convolution(x, 3, kernel=3), across_group=across)
        t = graph.input(y.descriptor.shape, "t")
        graph.loss(y, t, "mse")
        training = mlc.TrainingGraph([graph], None, mlc.SGDOptimizer(mlc.OptimizerDescriptor(learning_rate=1e-2)))
        training.add_inputs({"x": x}, {"t": t})
    return training


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("across", [False, True])
def test_programs_of_sizes_that_went_are_not_kept(across, slices):
    """Whole steps, and steps that are cut where sums over all slices are needed; one slice per process, and two."""

    def work(group: mlc.Group) -> int:
        training = network(across)
        training.size_limit = 2
        training.compile(device=mlc.Device.cpu(), group=group)
        compiled, seen = session_of(training).compiled, []
        for extent in range(1, 8):
            x, t = (np.ones((4, channels, extent, 4), np.float32) for channels in (2, 3))
            training.execute({"x": x}, {"t": t})
            seen += [weakref.ref(one) for one in compiled.programs()]
        gc.collect()
        return len({one() for one in seen if one() is not None} - compiled.programs())

    assert run_group(2, work, slices=slices) == [0, 0]
