"""TensorState: what the package keeps about a tensor. Users have the members of `Tensor`."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.ops.op import Array
from mlcompute.runtime.storage import Storage

if TYPE_CHECKING:
    from mlcompute.device import Device
    from mlcompute.devices.device import Engine
    from mlcompute.graph import Graph, Node
    from mlcompute.runtime.random_values import Redrawn, Rescaled
    from mlcompute.runtime.session import Session
    from mlcompute.tensor import Tensor

#: Counts the moments at which data was attached or fed, to tell which came last.
moments = itertools.count(1)


class TensorState:
    """Where a tensor's values lie, and which graphs it takes part in."""

    # What most tensors leave as it is stands here: large graphs make many of them.
    #: The values of a tensor that keeps some between runs, wherever they lie.
    storage: Storage | None = None
    #: How random values that fans guessed from the shape gave are made with the true ones; see `set_fans`.
    unscaled: Rescaled | Redrawn | None = None
    #: The device the tensor was bound or compiled to.
    device: Device | None = None
    #: Data attached by a graph's bind_and_write_data, for tensors that are fed rather than kept; and when.
    bound_data: Array | None = None
    bound_on_gpu: object = None
    bound_at: int = 0
    #: The graphs that may hold the tensor's values, or change them, by references that all tensors of a graph share.
    resident_references: tuple[weakref.ref[Session], ...] = ()
    #: (run, value): the last value that a graph computed before it was deleted.
    left_values: tuple[int, Array | None] = (0, None)
    #: The node that computes the tensor, which may be gone.
    producer: weakref.ref[Node] | None = None
    #: The graph that the tensor is an input of, or that reads it.
    graph_reference: weakref.ref[Graph] | None = None
    #: The axis that holds features (channels, classes); None where nobody can tell. Sequences have them last.
    feature_axis: int | None = None
    #: Axes of an input whose extents may differ from run to run; the descriptor has the usual ones.
    varies: tuple[int, ...] = ()
    optimizer_storages: list[Storage] = []  # noqa: RUF012  never changed in place, only replaced
    #: Did the caller supply that state? State an earlier graph left behind is not taken over.
    has_callers_optimizer_data: bool = False
    #: Was there already a warning that its values are not kept?
    _told: bool = False

    @property
    def keeps_data(self) -> bool:
        """Are there values that stay from run to run?"""
        return self.storage is not None

    @property
    def node(self) -> Node | None:
        """The node that computes the tensor, as long as there is one."""
        return None if self.producer is None else self.producer()

    def join(self, graph: Graph) -> None:
        """Belong to a graph, unless it belongs to one already."""
        if self.graph_reference is None or self.graph_reference() is None:
            self.graph_reference = weakref.ref(graph)

    def set_fans(self, fan_in: float, fan_out: float) -> None:
        """Bring random values to a layer's true fans, once: (1, in*out, h, w) does not tell them."""
        if self.unscaled is not None and self.storage is not None:
            now = self.storage.array()
            values = self.unscaled.values(now, fan_in, fan_out)
            if values is not now:
                self.storage.write(values)
            self.unscaled = None

    @property
    def residents(self) -> list[Session]:
        """The graphs that may hold the tensor's values, or change them."""
        return [found for one in self.resident_references if (found := one()) is not None]

    def wait_for_runs(self) -> list[Session]:
        """Wait for every graph that may be changing the tensor; they come back latest first."""
        residents = self.residents
        for resident in residents:
            resident.wait()
        return sorted(residents, key=lambda resident: -int(resident.last_run))

    def outdated(self) -> None:
        """Something that graphs were compiled with has changed: they compile again before the next run."""
        for resident in self.residents:
            resident.outdated()

    # The state has no reference to its tensor, which would be a cycle: what needs it is given it ----------------------

    def values(self, tensor: Tensor) -> Array | None:
        """The tensor's values in memory that may change with the next run; waits for queued work."""
        residents = self.wait_for_runs()
        if self.storage is not None:
            return self.storage.array()
        run, left = self.left_values
        for resident in residents:
            if resident.last_run > run and resident.computes(tensor):
                found = resident.fetch(tensor)
                if found is None:
                    self._say_not_kept(resident)
                return found
        return left if self.bound_data is None else self.bound_data

    def device_array_on(self, tensor: Tensor, engine: Engine) -> tuple[DeviceArray | None, bool]:
        """The newest values where a device has them, else None; and whether they lie there after the next run."""
        residents = self.wait_for_runs()
        if self.storage is not None:
            buffer = self.storage.newest_on(engine)
            return None if buffer is None else DeviceArray(buffer, self.storage.shape, self.storage.dtype), True
        latest = next((one for one in residents if one.last_run > self.left_values[0] and one.computes(tensor)), None)
        return None if latest is None else latest.device_array(tensor, engine), False

    def bind_input(self, tensor: Tensor, array: Array, device: Device, on_gpu: object = None) -> None:
        """Attach data for the coming runs; a tensor that keeps its data between runs takes over the new values.

        on_gpu   the same data where it lies on a GPU
        """
        if self.storage is not None and array.shape == self.storage.shape:
            self.rebind(tensor, array)
        self.bound_data, self.bound_on_gpu = array, on_gpu
        self.bound_at = next(moments)
        self.device = device

    def rebind(self, tensor: Tensor, array: Array) -> None:
        """Keep the values in the caller's memory from now on."""
        residents = self.wait_for_runs()
        if self.storage is None:
            self.storage = Storage(array, is_callers=True)
        else:
            self.storage.bind(array, is_callers=True)
        self.unscaled = self.bound_data = self.bound_on_gpu = None  # what a graph attached before is replaced
        self.bound_at = next(moments)
        for resident in residents:
            resident.rebound(tensor)

    def copied(self) -> TensorState:
        """For a tensor of its own with the same values; what a graph computed stays with the graph."""
        self.wait_for_runs()
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made.storage = None if self.storage is None else self.storage.copy()
        made.bound_data = None if self.bound_data is None else self.bound_data.copy()
        made.bound_on_gpu = made.graph_reference = None
        made.resident_references = ()
        made.left_values = (0, None)
        made.optimizer_storages = [state.copy() for state in self.optimizer_storages]
        return made

    def _say_not_kept(self, resident: Session) -> None:
        """A step keeps outputs and losses only; whoever reads another result is told so, once."""
        node = self.node
        if node is None or self._told:
            return
        self._told = True
        warnings.warn(
            f"the result of {node.layer.who} was not kept by the last run, so its data is None: "
            f"{_how_to_keep(node, resident)}",
            UserWarning,
            stacklevel=4,  # whoever reads `data`
        )

    def how_to_keep(self, tensor: Tensor) -> str:
        """What to do to have values that the last run computed and did not keep; empty where there are none to keep."""
        node, (run, _) = self.node, self.left_values
        if node is not None:
            for resident in self.wait_for_runs():
                if resident.last_run > run and resident.computes(tensor):
                    return _how_to_keep(node, resident)
        return ""


def _how_to_keep(node: Node, resident: Session) -> str:
    graph = resident.kind
    otherwise = "; execute_forward, a pass by itself, keeps every result" if graph == "TrainingGraph" else ""
    return f"name it in {graph}.add_outputs({{'{node.layer.label}': tensor}}){otherwise}"


def _reserve(state: TensorState, *names: str) -> None:
    """Let every state have room for some attributes, as Python plans it from what the first object of a class is given.

    One that is set later than in the first states would cost each of them a dictionary of its own.
    """
    for name in names:
        setattr(state, name, None)


_reserve(
    TensorState(),
    *("storage", "unscaled", "feature_axis", "producer", "graph_reference"),
    *("resident_references", "device", "optimizer_storages"),
)

#: The state of a tensor.
state_of: Callable[[Tensor], TensorState] = attrgetter("_state")


def reside(tensors: Iterable[Tensor], resident: Session, device: Device | None = None) -> None:
    """A compiled graph may hold the values of some tensors, or change them, on a device."""
    own = weakref.ref(resident)
    alone = (own,)
    for state in map(state_of, tensors):
        known = state.resident_references
        if not known:
            state.resident_references = alone
        elif own not in known:
            state.resident_references = (*[one for one in known if one() is not None], own)
        state.device = device or state.device


def is_fed(tensor: Tensor) -> bool:
    """Does a tensor need data from outside: no layer computes it, and it keeps none?"""
    return not tensor.keeps_data and state_of(tensor).producer is None


def storage_of(tensor: Tensor) -> Storage:
    """Where the values lie of a tensor that keeps some."""
    storage = state_of(tensor).storage
    assert storage is not None, tensor
    return storage


def current_values(tensor: Tensor) -> Array | None:
    """A tensor's values in memory that may change with the next run: no copy is made, as `data` would."""
    return state_of(tensor).values(tensor)
