"""recompute: what the gradient pass can make again from what it keeps anyway is not kept from the forward pass.

    n = normalize(x)    y = relu(scale n + shift)        n must stay for its own gradient; y is three maps away from it

Maps run at the speed of memory and memory is what a training step runs out of, so such values are made twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlcompute.ops.op import Step, Trace, Value

#: Values with fewer bytes per sample are not worth a second computation.
_LEAST_BYTES = 1024
#: A value that is read so many steps after its making takes its memory for a short time only.
_SOON = 10
#: Maps that may lie between a value and what it is made from again: three shortcuts of a residual network.
_MOST_MAPS = 16


def recompute(trace: Trace, keep: Iterable[Value]) -> None:
    """Rewrite `trace.steps` in place: forward values the gradient pass reads are made again there, where they can be.

    Values are looked at in the order of their making. What follows something that is made again is made from further
    back, up to a limit: of a long chain of values that follow each other by maps, one in a few stays.
    """
    run = _Recompute(trace, frozenset(keep))
    for step in list(trace.steps):
        if step.phase == "forward" and step.op.family == "map" and step.op.is_pure:
            run.consider(step)
    if run.before:
        trace.steps = run.rewritten()


class _Recompute:
    def __init__(self, trace: Trace, keep: frozenset[Value]) -> None:
        self.trace, self.keep = trace, keep
        self.makers: dict[Value, Step] = {}
        self.places = {step: index for index, step in enumerate(trace.steps)}
        self.first: dict[Value, int] = {}  # where the gradient pass first reads a value
        self.last: dict[Value, int] = {}
        self.changed: set[Value] = set()  # lasting memory that is overwritten before the update
        self.roots = shown = dict[Value, Value]()  # view -> the value whose memory it shows
        for index, step in enumerate(trace.steps):
            for value in step.results:
                self.makers[value] = step
            if step.op.is_view:
                shown[step.results[0]] = shown.get(step.inputs[0], step.inputs[0])
            if not step.op.is_pure and step.phase != "update":
                self.changed.add(step.inputs[0])
            if step.phase == "gradient":
                # Reading a view is reading what it shows.
                for value in {shown.get(value, value) for value in step.inputs} | set(step.inputs):
                    self.first.setdefault(value, index)
                    self.last[value] = index
        self.kept = {shown.get(value, value) for value in keep} | keep
        self.dropped: set[Value] = set()
        self.before: dict[int, list[Step]] = {}  # steps to insert before a place
        self.again: dict[Value, Value] = {}

    def consider(self, step: Step) -> None:
        """Make the result of a step again if the gradient pass reads it and has what it is made from."""
        (value,) = step.results
        place = self.first.get(value)
        samples = value.shape[0] if value.shape else 1
        if place is None or value in self.kept or value.nbytes < _LEAST_BYTES * samples:
            return
        if place - self.places[step] < _SOON:
            return
        chain = self._chain(step, place)
        if chain is None:
            return
        self.dropped.add(value)
        made = self.before.setdefault(place, [])
        copies: dict[Value, Value] = {}
        for part in chain:
            (result,) = part.results
            copies[result] = self.trace.value(result.shape, result.dtype)
            inputs = tuple(copies.get(v, v) for v in part.inputs)
            made.append(Step(part.op, inputs, (copies[result],), part.attributes, part.layer, "gradient"))
        self.again[value] = copies[value]

    def _chain(self, step: Step, place: int) -> list[Step] | None:
        """The maps that make a step's result from what exists at a place of the gradient pass, in order."""
        chain: list[Step] = []
        pending = [step]
        while pending:
            part = pending.pop()
            if part in chain:
                continue
            chain.append(part)
            if len(chain) > _MOST_MAPS:
                return None
            for value in part.inputs:
                if self._exists(value, place):
                    continue
                maker = self.makers.get(value)
                if (
                    maker is None
                    or maker.op.family != "map"
                    or maker.phase != "forward"
                    or not maker.op.is_pure
                ):
                    return None
                pending.append(maker)
        return sorted(chain, key=lambda part: self.places[part])

    def _exists(self, value: Value, place: int) -> bool:
        value = self.roots.get(value, value)
        if value in self.dropped:
            return False
        if value.kind != "temporary":
            return value not in self.changed
        return value in self.keep or self.last.get(value, -1) >= place

    def rewritten(self) -> list[Step]:
        steps: list[Step] = []
        for index, step in enumerate(self.trace.steps):
            steps += self.before.get(index, ())
            if step.phase == "gradient" and any(self.roots.get(v, v) in self.again for v in step.inputs):
                inputs = tuple(self._made_again(value, steps) for value in step.inputs)
                step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
            steps.append(step)
        return steps

    def _made_again(self, value: Value, steps: list[Step]) -> Value:
        """What the gradient pass reads instead of a value: views made before are made again, too."""
        maker = self.makers.get(value)
        if value in self.again or self.roots.get(value, value) not in self.again or maker is None:
            return self.again.get(value, value)
        if maker.phase == "gradient":
            return value  # its source has been replaced where it was made
        source = self._made_again(maker.inputs[0], steps)
        again = self.again[value] = self.trace.value(value.shape, value.dtype)
        steps.append(Step(maker.op, (source,), (again,), maker.attributes, maker.layer, "gradient"))
        return again
