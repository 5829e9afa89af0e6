"""Index: which step produces, reads and aliases each value of a list of steps. One analysis for all passes."""

from __future__ import annotations

from functools import cached_property

from mlcompute.ops.op import Step, Value


class Index:
    """Tables over some steps, each made when it is first asked for. Valid as long as the list is not changed."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps

    @cached_property
    def op_names(self) -> frozenset[str]:
        """Names of the ops there are: a pass about others has nothing to look for."""
        return frozenset({op.name for op in {step.op for step in self.steps}})

    @cached_property
    def makers(self) -> dict[Value, Step]:
        """Value -> the step that computes it; inputs, parameters and constants have none."""
        return {value: step for step in self.steps for value in step.results}

    @cached_property
    def readers(self) -> dict[Value, list[Step]]:
        """Value -> the steps that read it, each once, in order."""
        readers: dict[Value, list[Step]] = {}
        for step in self.steps:
            inputs = step.inputs
            for value in inputs if len(inputs) < 2 else dict.fromkeys(inputs):
                known = readers.get(value)
                if known is None:
                    readers[value] = [step]
                else:
                    known.append(step)
        return readers

    @cached_property
    def positions(self) -> dict[Step, int]:
        """Step -> its place in the list."""
        return {step: position for position, step in enumerate(self.steps)}

    @cached_property
    def aliases(self) -> dict[Value, Value]:
        """View -> the value whose memory it shows."""
        aliases: dict[Value, Value] = {}
        for step in self.steps:
            if step.op.is_view:
                source = step.inputs[0]
                aliases[step.results[0]] = aliases.get(source, source)
        return aliases

    @cached_property
    def views(self) -> dict[Value, Value]:
        """View that needs no memory -> the value whose memory it shows; see `views_of`."""
        return views_of(self.steps)

    def base(self, value: Value) -> Value:
        """The value whose memory a value shows: itself unless it is a view."""
        return self.aliases.get(value, value)


def views_of(steps: list[Step]) -> dict[Value, Value]:
    """Results of view ops that need no memory: all but reshapes of values that do not lie in row-major order."""
    views: dict[Value, Value] = {}
    scattered: set[Value] = set()
    for step in steps:
        if not step.op.is_view:
            continue
        source, result = step.inputs[0], step.results[0]
        if step.op.name == "reshape":
            if source in scattered:
                continue
        elif source in scattered or scatters(step):
            scattered.add(result)
        views[result] = views.get(source, source)
    return views


def scatters(step: Step) -> bool:
    """Does a view other than a reshape leave row-major order? All do but a slice of whole rows, without gaps."""
    if step.op.name != "slice":
        return True
    a, shape = step.attributes, step.inputs[0].shape
    return any(k != 1 for k in a["stride"]) or any(
        s != 0 or e != extent for s, e, extent in zip(a["start"][1:], a["end"][1:], shape[1:], strict=True)
    )
