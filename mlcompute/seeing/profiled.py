"""What a compiled graph can show of its runs. The work is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from mlcompute.compiled import CompiledGraph
    from mlcompute.feeding import Named
    from mlcompute.seeing.profile import GraphProfile


class Profiled:
    """Time per layer and pass: a base of CompiledGraph."""

    def profile(
        self,
        inputs_data: Named,
        loss_labels_data: Named | None = None,
        loss_label_weights_data: Named | None = None,
        *,
        steps: int = 10,
        batch_size: int = 0,
    ) -> GraphProfile:
        """Where the time of `execute` goes: per layer and pass, with the kernels that run them.

        Data is given as to `execute`. After one run to warm up, `steps` whole runs are timed, then `steps` more kernel
        by kernel. All of it happens on copies and in memory of its own: parameters, optimizer state, random numbers
        and readable results stay as they are.

        print(graph.profile({"x": x}, {"t": t}))
        graph.profile({"x": x}, {"t": t}).save_trace("step.json")   # open it in ui.perfetto.dev
        """
        from mlcompute.seeing.profile import profile

        graph = cast("CompiledGraph", self)
        return profile(graph, inputs_data, loss_labels_data, loss_label_weights_data, steps, batch_size)
