"""rematerialize: values that the gradient pass can compute from what is kept anyway are not kept.

    n = normalize(x)    y = relu(scale n + shift)        n must stay for its own gradient; y is three ops away from it

Elementwise ops run at the speed of memory, and memory is what a training step runs out of: such values are computed
twice. On devices with much memory (`Traits.recomputes_factors` is False) only those are that elementwise steps alone
read: they need not be written again.

Where normalised values follow exactly from the statistics that are stored (`Traits.exact_statistics`), a normalisation
is one more elementwise op of x: y is computed from x, which its own gradient reads (`recompute_normalized`).

Where no memory is won, time is: a value the gradient pass reads soon, or that lasts because phases are run one by one,
is computed again if it is large and one op away from what the gradient pass reads in any case.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_normalization import NORMALIZATIONS
from mlcompute.compiler.recompute_normalized import renormalized
from mlcompute.ops.op import Step, Value

#: Values with fewer bytes per sample are not worth a second computation.
_LEAST_BYTES = 1024
#: A value that is read so many steps after its making takes its memory for a short time only.
_SOON = 10
#: Bytes of a value that no cache keeps until it is read again.
_LARGE = 1 << 20
#: Elementwise ops between a value and what it is computed from again: three shortcuts of a residual network.
_MOST_OPS = 16


def rematerialize(steps: list[Step], context: Context) -> list[Step]:
    """Forward values the gradient pass reads are computed again there, where they can be.

    Values are looked at in the order of their making. What depends on something that is computed again is computed from
    further back, up to a limit: of a long chain of elementwise ops, the result of one in a few stays.
    """
    candidates = [step for step in steps if step.phase == "forward" and _is_worth(step)]
    if not candidates:
        return steps
    run = _Rematerialize(steps, context)
    for step in candidates:
        run.consider(step)
    return run.rewritten() if run.before else steps


def recomputed_by_elementwise(steps: list[Step], context: Context) -> set[Value]:
    """Forward values that nothing has to keep: elementwise ops compute them again from what the gradient pass reads.

    It is the same for all styles of execution: neither what a style keeps counts, nor how max pooling, in which they
    differ, reads its source.
    """
    candidates = [step for step in steps if step.phase == "forward" and _is_worth(step)]
    if not candidates:
        return set()
    run = _Rematerialize([step for step in steps if not step.op.name.startswith("max_pool")], context)
    run.keep, readable = frozenset(), context.readable
    for step in candidates:
        (value,) = step.results
        place = run.first.get(value)
        if place is not None and value not in readable and run.chain(step, place) is not None:
            run.dropped.add(value)
    return run.dropped


def _is_worth(step: Step) -> bool:
    """Is it an elementwise step whose result is not small?"""
    if step.op.family != "elementwise" or not step.op.is_pure:
        return False
    (value,) = step.results
    return value.nbytes >= _LEAST_BYTES * (value.shape[0] if value.shape else 1)


class _Rematerialize:
    def __init__(self, steps: list[Step], context: Context) -> None:
        self.steps, self.trace, self.keep = steps, context.trace, context.kept
        self.in_phases = context.program.runs_in_phases
        index = context.index(steps)
        self.lasting: set[Value] = set()  # what others than elementwise steps of the gradient pass read
        self.recomputes_factors = context.engine.traits.recomputes_factors
        self.exact_statistics = context.engine.traits.exact_statistics
        self.makers, self.positions, self.aliases = index.makers, index.positions, index.aliases
        self.first: dict[Value, int] = {}  # where the gradient pass first reads a value
        self.last: dict[Value, int] = {}
        self.changed: set[Value] = set()  # parameters and statistics that are overwritten before the update
        for position, step in enumerate(steps):
            if not step.op.is_pure and step.phase != "update":
                self.changed.add(step.inputs[0])
            if step.phase == "gradient":
                # Reading a view is reading what it shows.
                for value in {index.base(value) for value in step.inputs} | set(step.inputs):
                    self.first.setdefault(value, position)
                    self.last[value] = position
                if step.op.family != "elementwise" and not step.op.is_view:
                    self.lasting.update(index.base(value) for value in step.inputs)
        self.kept = {index.base(value) for value in self.keep} | self.keep
        self.dropped: set[Value] = set()
        self.before: dict[int, list[Step]] = {}  # steps to insert before a place
        self.copies: dict[Value, Value] = {}

    def consider(self, step: Step) -> None:
        """Compute the result of a step again if the gradient pass reads it and has what it is made from."""
        (value,) = step.results
        place = self.first.get(value)
        if place is None or value in self.kept:
            return
        saves_memory = not self.in_phases and place - self.positions[step] >= _SOON
        if value in self.lasting and not (saves_memory and self.recomputes_factors):
            return
        if saves_memory:
            chain = self.chain(step, place)
        elif value.nbytes >= _LARGE and all(self._is_read(each, place) for each in step.inputs):
            chain = [step]
        else:
            chain = None
        if chain is None:
            return
        self.dropped.add(value)
        made: list[Step] = []
        copies: dict[Value, Value] = {}
        for part in chain:
            result = part.results[0]
            inputs = tuple(copies.get(v, v) for v in part.inputs)
            if part.op.name in NORMALIZATIONS:
                made += renormalized(part, inputs[0], self.trace)
                copies[result] = made[-1].results[0]
                continue
            copies[result] = self.trace.value(result.shape, result.dtype)
            made.append(Step(part.op, inputs, (copies[result],), part.attributes, part.layer, "gradient"))
        # What is the same for many elements first: the others are then neighbours, and become one kernel.
        made.sort(key=lambda part: part.results[0].size >= value.size)
        self.before.setdefault(place, []).extend(made)
        self.copies[value] = copies[value]

    def chain(self, step: Step, place: int) -> list[Step] | None:
        """The elementwise steps from what exists at a place of the gradient pass to a step's result, in order."""
        chain: list[Step] = []
        pending = [step]
        while pending:
            part = pending.pop()
            if part in chain:
                continue
            chain.append(part)
            if len(chain) > _MOST_OPS:
                return None
            for value in part.inputs:
                if self._exists(value, place):
                    continue
                maker = self.makers.get(value)
                if maker is None or maker.phase != "forward" or not self._can_repeat(maker, value, place):
                    return None
                pending.append(maker)
        return sorted(chain, key=lambda part: self.positions[part])

    def _can_repeat(self, maker: Step, value: Value, place: int) -> bool:
        """Is a value's maker elementwise, or a normalisation whose statistics are there?"""
        if maker.op.name in NORMALIZATIONS and self.exact_statistics:
            n, *statistics = maker.results
            return value is n and all(self._exists(each, place) for each in statistics)
        return maker.op.family == "elementwise" and maker.op.is_pure

    def _is_read(self, value: Value, place: int) -> bool:
        """Does the gradient pass read a value in any case, at a place or later?"""
        return self._exists(value, place) and (
            not value.shape or self.last.get(self.aliases.get(value, value), -1) >= place
        )

    def _exists(self, value: Value, place: int) -> bool:
        value = self.aliases.get(value, value)
        if value in self.dropped:
            return False
        if value.kind != "temporary":
            return value not in self.changed
        return value in self.keep or self.last.get(value, -1) >= place

    def rewritten(self) -> list[Step]:
        steps: list[Step] = []
        for index, step in enumerate(self.steps):
            steps += self.before.get(index, ())
            if step.phase == "gradient" and any(self.aliases.get(v, v) in self.copies for v in step.inputs):
                inputs = tuple(self._rematerialized(value, steps) for value in step.inputs)
                step = Step(step.op, inputs, step.results, step.attributes, step.layer, step.phase)
            steps.append(step)
        return steps

    def _rematerialized(self, value: Value, steps: list[Step]) -> Value:
        """What the gradient pass reads instead of a value: views made before are repeated, too."""
        maker = self.makers.get(value)
        if value in self.copies or self.aliases.get(value, value) not in self.copies or maker is None:
            return self.copies.get(value, value)
        if maker.phase == "gradient":
            return value  # its source has been replaced where it was made
        source = self._rematerialized(maker.inputs[0], steps)
        copy = self.copies[value] = self.trace.value(value.shape, value.dtype)
        steps.append(Step(maker.op, (source,), (copy,), maker.attributes, maker.layer, "gradient"))
        return copy
