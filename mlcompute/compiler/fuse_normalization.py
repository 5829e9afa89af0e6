"""fuse_normalization: elementwise ops around a normalisation, or its gradient, become part of its kernel.

    x = conv     n, m, v = normalize(x)     y = relu(n scale + shift + r)       read x twice, read r, write y
    dz = select(y <= 0, 0, dy)     dx, sums = normalize_gradient(dz, n, v, scale)   read dy and x twice, write dx

Both take passes over memory: one for the statistics or sums, one to write. What is elementwise before them is computed
in both passes, what follows in the second, so that nothing in between is written and read again. Sums are those of the
steps alone; the numbers do not depend on what is fused.
"""

from __future__ import annotations

from mlcompute.compiler.context import Context
from mlcompute.compiler.fuse_elementwise import FusedElementwise
from mlcompute.compiler.index import Index
from mlcompute.compiler.share_recomputed import share_recomputed
from mlcompute.ops.op import Step, Value, overwritten_by

#: What such a step is about.
NORMALIZATIONS = ("normalize", "normalize_groups")
NORMALIZATION_GRADIENTS = ("normalize_gradient", "normalize_groups_gradient")
CORES = (*NORMALIZATIONS, *NORMALIZATION_GRADIENTS)
#: Steps before and after it that are looked at.
_WINDOW = 64
#: Elementwise ops in one step, and values as large as the normalised one that it reads.
_MOST_OPS = 32
_MOST_INPUTS = 8


class FusedNormalization(FusedElementwise):
    """Elementwise ops, `normalize` or `normalize_gradient`, and elementwise ops, all over one shape.

    Some of the ops may be over the shape of the statistics.
    """

    name = "fused_normalization"
    elementwise = False


FUSED_NORMALIZATION = FusedNormalization()


def core_of(step: Step) -> Step:
    """The normalisation of a step that is one, or contains one."""
    if step.op.name in CORES:
        return step
    found: Step = next(each for each in step.attributes["steps"] if each.op.name in CORES)
    return found


def fuse_normalization(steps: list[Step], context: Context) -> list[Step]:
    """Every normalisation with the elementwise steps around it as a single step."""
    if context.index(steps).op_names.isdisjoint(CORES):
        return steps
    steps = share_recomputed(_gradients_first(steps, context), context, NORMALIZATION_GRADIENTS)
    run = _Fusion(steps, context)
    for step in steps:
        if step.op.name in CORES:
            run.try_step(step)
    return run.rewritten() if run.fused else steps


def _gradients_first(steps: list[Step], context: Context) -> list[Step]:
    """Gradients of normalisations, with the elementwise steps they need, move to where their operands exist.

    Others that read the same operands, such as the gradient of a scale, then follow and can be fused with them.
    """
    index = context.index(steps)
    moved: set[Step] = set()
    after: dict[int, list[Step]] = {}
    for core in steps:
        if core.op.name not in NORMALIZATION_GRADIENTS:
            continue
        place = index.positions[core]
        lowest = place
        while lowest > max(0, place - _WINDOW) and steps[lowest - 1].phase == core.phase:
            lowest -= 1
        together, pending, anchor = {core}, [core], lowest - 1
        while pending:
            for value in pending.pop().inputs:
                maker = index.makers.get(value)
                position = -1 if maker is None else index.positions[maker]
                if maker is None or maker in together or position < lowest:
                    continue
                simple = maker.op.is_view or (maker.op.family == "elementwise" and maker.op.is_pure)
                if simple and maker.phase == core.phase and maker not in moved:
                    together.add(maker)
                    pending.append(maker)
                else:
                    anchor = max(anchor, position)
        between = [step for step in steps[anchor + 1 : place] if step not in together]
        if anchor < lowest or not between or any(step in moved or not step.op.is_pure for step in between):
            continue
        moved |= {step for step in together if index.positions[step] > anchor}
        after.setdefault(anchor, []).extend(
            sorted((step for step in together if index.positions[step] > anchor), key=lambda s: index.positions[s])
        )
    if not moved:
        return steps
    ordered: list[Step] = []
    for position, step in enumerate(steps):
        if step not in moved:
            ordered.append(step)
        ordered += after.get(position, ())
    return ordered


class _Fusion:
    def __init__(self, steps: list[Step], context: Context) -> None:
        self.steps, self.context = steps, context
        self.index: Index = context.index(steps)
        self.taken: set[Step] = set()  # by fused steps
        self.places = dict(self.index.positions)  # where steps stand once the normalisations so far are fused
        self.fused: dict[Step, Step] = {}  # normalisation -> the step it is part of
        self.views: dict[Step, list[Step]] = {}  # normalisation -> views that must stand before it

    def try_step(self, core: Step) -> None:
        """Fuse what stands around a normalisation, if there is something."""
        along = core.inputs[: 1 if core.op.name in NORMALIZATIONS else 2]
        if core.results[0].shape == core.results[1].shape or not all(map(self.is_plain, along)):
            return
        group = _Group(self, core)
        group.add_before()
        group.add_after()
        if len(group.members) == 1:
            return
        fused = group.step()
        if self.context.engine.supports(fused):
            self.fused[core] = fused
            self.taken.update(group.members)
            self.views[core] = list(group.views)
            self.places.update(dict.fromkeys((*group.members, *group.views), group.place))

    def is_plain(self, value: Value) -> bool:
        """Do its elements lie one after the other? Else other loops than those of the step alone might be chosen."""
        maker = self.index.makers.get(value)
        while maker is not None and maker.op.is_view:
            if maker.op.name != "reshape":
                return False
            maker = self.index.makers.get(maker.inputs[0])
        return True

    def rewritten(self) -> list[Step]:
        moved = {view for views in self.views.values() for view in views}
        steps: list[Step] = []
        placed: set[Step] = set()
        for step in self.steps:
            if step in self.fused:
                steps += [view for view in self.views[step] if view not in placed]
                placed.update(self.views[step])
                steps.append(self.fused[step])
            elif step not in self.taken and not (step in moved and step in placed):
                steps.append(step)
        return steps


class _Group:
    """One normalisation and the steps that become part of it."""

    def __init__(self, run: _Fusion, core: Step) -> None:
        self.run, self.core, self.index = run, core, run.index
        self.place = self.index.positions[core]
        self.shape, self.small = core.results[0].shape, core.results[1].shape
        self.members: dict[Step, None] = {core: None}
        self.made: set[Value] = set(core.results)
        self.views: dict[Step, None] = {}
        self.overwritten: set[Value] = set()

    def _is_candidate(self, step: Step) -> bool:
        return (
            step.op.family == "elementwise"
            and step.op.is_pure
            and step.phase == self.core.phase
            and step not in self.run.taken
            and len(self.members) <= _MOST_OPS
        )

    def _fits(self, step: Step) -> bool:
        """May its operands be read by the kernel: plain ones, and not too many large ones?"""
        large = {
            value
            for each in (*self.members, step)
            for value in each.inputs
            if value.shape == self.shape and value not in self.made and value not in step.results
        }
        return len(large) <= _MOST_INPUTS and all(
            self.run.is_plain(value) for value in step.inputs if value.size > 1 and value not in self.made
        )

    def add_before(self) -> None:
        """Steps whose results only the group, or steps after the normalisation, read."""
        read = set(self.core.inputs)
        for place in range(self.place - 1, max(-1, self.place - _WINDOW), -1):
            step = self.index.steps[place]
            self.overwritten.update(overwritten_by(step))
            if not self._is_candidate(step) or step.results[0] not in read:
                continue
            (result,) = step.results
            readers = self.index.readers.get(result, ())
            after = [reader for reader in readers if reader not in self.members]
            is_small = result.shape == self.small and result not in self.run.context.kept
            if is_small:  # what is the same for all elements is computed again by every thread, but never stored
                fits = not after
            else:
                is_later = all(self.run.places[reader] > self.place for reader in after)
                fits = result.shape == self.shape and is_later
            if fits and self._reads_unchanged(step) and self._fits(step):
                self.members[step] = None
                self.made.add(result)
                read.update(step.inputs)

    def add_after(self) -> None:
        """Steps that read what the group computes, and otherwise what exists before it or can be computed from that."""
        full = {value for value in self.made if value.shape == self.shape}
        apart: dict[Value, Step] = {}  # results of steps that need nothing of the group, and could join it
        self.overwritten = set()
        for place in range(self.place + 1, min(len(self.index.steps), self.place + _WINDOW)):
            step = self.index.steps[place]
            self.overwritten.update(overwritten_by(step))
            if not self._is_candidate(step) or step.results[0].shape != self.shape or not self._reads_unchanged(step):
                continue
            views: dict[Step, None] = {}
            joining: dict[Step, None] = {}
            if not all(value in full or self._joins(value, step, apart, joining, views) for value in step.inputs):
                continue
            if full.isdisjoint(step.inputs):
                apart[step.results[0]] = step
            elif all(self._fits(each) for each in (*joining, step)):
                self.members.update(dict.fromkeys((*joining, step)))
                self.views.update(views)
                made = {each.results[0] for each in (*joining, step)}
                self.made |= made
                full |= made
        self._leave_conversions()

    def _joins(
        self, value: Value, reader: Step, apart: dict[Value, Step], joining: dict[Step, None], views: dict[Step, None]
    ) -> bool:
        """Is an operand there before the normalisation? Or is it computed from what is, for its reader alone?"""
        step = apart.get(value)
        if step is None:
            return self._exists(value, views)
        if self.index.readers[value] != [reader] or value in self.run.context.kept:
            return False
        if all(self._joins(source, step, apart, joining, views) for source in step.inputs):
            joining[step] = None
            return True
        return False

    def _leave_conversions(self) -> None:
        """What is stored in a narrow type and read elsewhere in a wide one is converted there, not stored twice."""
        for step in list(self.members):
            (result, *_) = step.results
            if (
                step.op.name == "convert"
                and self.run.places[step] > self.place
                and result.dtype.itemsize > step.inputs[0].dtype.itemsize
                and not any(reader in self.members for reader in self.index.readers.get(result, ()))
            ):
                del self.members[step]
                self.made.discard(result)

    def _reads_unchanged(self, step: Step) -> bool:
        """Is nothing it reads overwritten between it and the normalisation?"""
        return not any(self.index.base(value) in self.overwritten for value in step.inputs)

    def _exists(self, value: Value, views: dict[Step, None]) -> bool:
        """Is a value there before the normalisation, or a view of one that is? Such views are noted, in order."""
        maker = self.index.makers.get(value)
        if maker is None or self.run.places[maker] < self.place:
            return True
        if maker.op.is_view and maker.inputs[0] not in self.made and self._exists(maker.inputs[0], views):
            views[maker] = None
            return True
        return False

    def step(self) -> Step:
        members = sorted(self.members, key=lambda step: self.index.positions[step])
        inside = set(members)
        read: dict[Value, None] = {}
        stored: list[Value] = []
        for step in members:
            for value in step.inputs:
                if value not in self.made:
                    read[value] = None
            for value in step.results:
                outside = any(reader not in inside for reader in self.index.readers.get(value, ()))
                if outside or value in self.run.context.kept:
                    stored.append(value)
        inputs = tuple(read)
        attributes = {"steps": tuple(members), "stored": tuple(stored), "inputs": inputs}
        return Step(FUSED_NORMALIZATION, inputs, tuple(stored), attributes, self.core.layer, self.core.phase)
