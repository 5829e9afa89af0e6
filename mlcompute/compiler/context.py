"""State that passes share: the program being compiled, and the request."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlcompute.compiler.index import Index
from mlcompute.compiler.program import Program
from mlcompute.compiler.request import Request
from mlcompute.compiler.substitution import Substitution
from mlcompute.ops.op import Step, Trace, Value

if TYPE_CHECKING:
    from mlcompute.compiler.lower import Lowering
    from mlcompute.devices.device import Engine


@dataclass(eq=False)
class Context:
    """One compilation.

    request  what is to be compiled
    engine       the device it is compiled for
    program      what is known of the result so far; its steps are set at the end
    like         the same program for the full batch, whose memory plan a smaller batch reuses
    trace        makes new values and holds the constants
    lowering     the values that tensors became; there once `lower` has run
    kept         values somebody may read after a run
    phases_in_order   all forward steps stand before all gradient steps, and these before the updates
    is_expanded       the device has said that it supports every step
    """

    request: Request
    engine: Engine
    program: Program
    like: Program | None = None
    trace: Trace = field(default_factory=Trace)
    lowering: Lowering = field(init=False)
    kept: frozenset[Value] = frozenset()
    phases_in_order: bool = True
    is_expanded: bool = False
    _index: Index | None = None

    @property
    def style(self) -> str:
        """How the program will be run: one of `STYLES`."""
        return self.program.name

    @property
    def fuses_elementwise(self) -> bool:
        """Should elementwise steps be fused?"""
        return self.request.fuses and self.engine.traits.fuses_elementwise

    @property
    def readable(self) -> frozenset[Value]:
        """Values that some style of execution keeps: styles that must round alike ask for these, not for `kept`."""
        return frozenset((*self.kept, *self.program.values.values(), *self.program.gradients.values()))

    def copied(self) -> Context:
        """The same so far, to go on in another way."""
        found = copy.copy(self)
        found.program = self.program.copied()
        return found

    def index(self, steps: list[Step]) -> Index:
        """Makers, readers and aliases of some steps; made once for as long as passes hand the same list on."""
        if self._index is None or self._index.steps is not steps:
            self._index = Index(steps)
        return self._index

    def substitute(self, substitution: Substitution) -> None:
        """Some values were replaced by others: say so wherever the outside world knows them."""
        replaced, program = substitution.replaced, self.program
        if not replaced:
            return
        program.values, program.gradients = (
            known | {tensor: substitution[value] for tensor, value in known.items() if value in replaced}
            for known in (program.values, program.gradients)
        )
        self.kept = frozenset(substitution[value] for value in self.kept)


#: From steps to steps. A pass never changes the list or the steps it is given.
Transform = Callable[[list[Step], Context], list[Step]]


def always(context: Context) -> bool:
    """The predicate of passes that every compilation needs."""
    return True


@dataclass(frozen=True)
class Pass:
    """One line of the compiler's table of contents: what is done, and when it applies."""

    transform: Transform
    when: Callable[[Context], bool] = always

    @property
    def name(self) -> str:
        """What the pass is called, as its file."""
        return self.transform.__name__
