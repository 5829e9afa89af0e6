"""The interface between the compiler and runtime and a device, on one page.

The compiler asks an `Engine` what it supports; memory is a `Buffer`; a built program is an `Executable`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mlcompute.compiler.program import Program
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.devices.scalars import Scalars
from mlcompute.enums import DeviceType
from mlcompute.ops.op import Array, Step, Value

if TYPE_CHECKING:
    from mlcompute.devices.device_exchange import DeviceExchange


@dataclass(frozen=True)
class Traits:
    """What the compiler should know of a device before it chooses a form for the steps.

    fuses_elementwise  a run of elementwise ops is one kernel, so one step should be made of it
    fuses_epilogues    a matmul or convolution can add a bias, or apply an activation, before it stores its result
    fuses_normalization   elementwise ops before and after a normalisation are computed in its own passes over memory
    exact_statistics   `normalize` gives (x - mean) / sqrt(variance + epsilon) of the very mean and variance it gives:
                       elementwise ops that compute it again give the same bits
    attention_by_token    attention gives (n, l, heads, d), and keeps the logarithms of the softmax's denominators
    recurrent_reserve     recurrent layers may keep bytes for their gradient that only the device can read
    merges_matmuls     matmuls of one matrix of at least so many rows with several weights become one; 0: none do
    recomputes_factors    what a matmul or convolution of the gradient pass reads is computed again, not kept
    updates_last       many updates are one kernel, so they should follow each other, and not their gradients
    channels_last      the fastest image kernels are those for (N, H, W, C)
    reuse_delay        memory of small values is not used again for so many steps: steps that use the same memory could
                       not become one launch
    matmul_reuse_delay    the same of memory that a large matmul used last: what would use it could not run beside the
                       matmul
    owns_rows          a thread computes the same rows of every value and finds them in its cache: memory should go on
                       to values of the same size
    mixes_types        a matmul or convolution reads each operand in the type it is stored in, float32 or bfloat16: it
                       is converted while the kernel packs it, so weights need no copy in bfloat16
    runs_ahead         a run is started and need not be waited for: those started after it wait for it on the device
    """

    fuses_elementwise: bool = False
    fuses_epilogues: bool = False
    fuses_normalization: bool = False
    exact_statistics: bool = False
    attention_by_token: bool = False
    recurrent_reserve: bool = False
    merges_matmuls: int = 0
    recomputes_factors: bool = True
    updates_last: bool = False
    channels_last: bool = False
    reuse_delay: int = 0
    matmul_reuse_delay: int = 0
    owns_rows: bool = False
    mixes_types: bool = False
    runs_ahead: bool = False


class Buffer(ABC):
    """Memory of a device.

    host  the same memory as an array, where the host can use it; None where it lies elsewhere
    """

    __slots__ = ()
    host: Array | None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    @abstractmethod
    def write(self, array: Array, offset: int = 0) -> None:
        """Copy an array to the device, to that many bytes from the start. It may be reused when the call returns."""

    @abstractmethod
    def read(self, out: Array, offset: int = 0) -> None:
        """Copy from the device into an array, after everything that was started before."""


@dataclass(frozen=True)
class GpuDevice:
    """A GPU: what `Device.gpu_devices` lists, and `Device(gpu_devices=[...])` takes.

    identifier   "cuda:0" is the first one
    name         as its maker calls it
    memory       bytes
    compute_capability   its generation: (9, 0)
    """

    identifier: str
    name: str
    memory: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a GPU in bytes: `Device.memory_use`. `print` it for a table.

    total, free   as the driver says
    buffers       of graphs in this process: intermediate results, parameters, optimizer state, inputs. Exact
    libraries     what NVIDIA's libraries have taken for handles and code
    kernels       machine code that was made for the graphs
    graphs        captured CUDA graphs
    other         the driver's context, what it rounds up, and other processes
    """

    total: int
    free: int
    buffers: int
    libraries: int
    kernels: int
    graphs: int
    other: int

    def __str__(self) -> str:
        rows = [(name, getattr(self, name)) for name in self.__dataclass_fields__]
        return "\n".join(f"{name:<10} {nbytes / 1e6:>12,.1f} MB" for name, nbytes in rows)


class Engine(ABC):
    """A place where programs run: one device. It implements ops, never layers."""

    #: Also tells devices of one kind apart: "cpu", "cuda:0".
    name: str
    device_type: ClassVar[DeviceType]
    traits: Traits = Traits()
    #: What activations may be stored in: "float32", "bf16". With "bf16" `supports` is asked about bfloat16 operands.
    precisions: tuple[str, ...] = ("float32",)
    #: With "bf16", values of fewer elements stay float32: converting them would take longer than they take to move.
    smallest_bfloat16: int = 0

    def facts(self) -> dict[str, str]:
        """What the engine is made of on this machine, for people to read; "note" is shown below summaries too."""
        return {}

    @property
    def gpu(self) -> GpuDevice | None:
        """The GPU it runs on; None where it is something else."""
        return None

    def memory(self) -> DeviceMemory | None:
        """What is taken of its memory, and for what; None where that is the host's."""
        return None

    def warm_up(self, steps: Sequence[Step]) -> None:
        """Steps that are about to be planned and built: what takes long beside that may begin now.

        They are as the layers described them; `supports` has not been asked about them yet.
        """
        return

    @abstractmethod
    def supports(self, step: Step) -> bool:
        """Is there a kernel for this step: its op, types, shapes and attributes? If not, the compiler expands it.

        Of a step that a pass has fused: is it also faster than the steps it was made of? If not, these stay.
        """

    def recurrent_reserve(self, step: Step, trains: bool) -> int | None:
        """For `lstm` and `rnn`: bytes it wants to keep for the gradient in place of gates; None: the op as it is.

        trains  is there a gradient? If not, the bytes are 0
        """
        return None

    def needs_dense(self, steps: Sequence[Step], views: Mapping[Value, Value]) -> Mapping[Step, Sequence[Value]]:
        """Inputs that kernels cannot read through views: the compiler copies them into memory of their own.

        views  what needs no memory, since it shows another value's
        """
        return {}

    def workspace(self, step: Step) -> int:
        """Bytes a step needs in the arena while it runs, besides its inputs and results: the same for all of a kind."""
        return 0

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device, filled with zeros. DeviceError when there is not enough."""

    @abstractmethod
    def wrap(self, array: Array) -> Buffer | None:
        """The host's own memory as a buffer, without a copy; None where the device cannot use it in place."""

    def upload(self, array: Array) -> Buffer:
        """A buffer with an array's values: the array's own memory where the device can use that, else a copy."""
        buffer = self.wrap(array)
        if buffer is None:
            buffer = self.allocate(array.nbytes)
            buffer.write(array)
        return buffer

    def adopt(self, data: object, who: str) -> Any:
        """An array of another library in this device's memory, as something `Executable.feed` takes; None for others.

        `fits` says whether a value can be read from it as it is; called, it gives itself; NumPy can convert it.
        `buffer` is its memory for programs to work in, or None where that must not be.
        """
        return None

    def to_dlpack(self, values: Array | DeviceArray, stream: Any, *, shares: bool = False) -> Any:
        """A copy of values in this device's memory as a DLPack capsule, ready for work on the receiver's stream.

        shares   no copy, but the memory they lie in
        """
        raise BufferError(f"device '{self.name}' has no memory that DLPack could hand out")

    def join(
        self, engines: Sequence[Engine], rank: int, size: int, gather: Callable[[bytes], list[bytes]]
    ) -> DeviceExchange | None:
        """How memory gets from one device to another without the host; None where the host must carry it.

        engines   the devices of this process that train together, this one first
        rank      of the first of them, among `size` devices of all processes
        gather    sends a message to all processes and returns theirs, by rank
        """
        return None

    @abstractmethod
    def build(self, program: Program, arena: Buffer | None = None, like: Executable | None = None) -> Executable:
        """Make a program ready to run: its machine code, and all else but memory. The program stays as it is.

        arena   where it runs, at least as large as its plan; None: `Executable.place` says so before its first run
        like    built before for the same graph: what both need is made once
        """

    def synchronize(self) -> None:
        """Return when everything that was started on the device is done."""
        return


class Completion(ABC):
    """A run that has been started."""

    __slots__ = ()

    @abstractmethod
    def is_done(self) -> bool:
        """Has it finished? Never waits."""

    def has_news(self) -> bool:
        """Is it worth asking how it went? False as long as nothing shows, without asking the device."""
        return self.is_done()

    def has_succeeded(self) -> bool:
        """Has it finished, and well? False as long as that is not known without asking the device."""
        return False

    def result(self, value: Value) -> Array:
        """One of the values that the program `sends`, as of this run, whatever has run since; waits for it."""
        raise KeyError(value)

    @abstractmethod
    def wait(self) -> None:
        """Return when it has finished; raises ExecutionError naming the layer that could not be carried out."""


class Executable(ABC):
    """A built program. Runs phases; values it keeps can be read afterwards."""

    program: Program
    #: The buffers of inputs, as they were last fed.
    inputs: dict[Value, Buffer]
    #: May a run fail after it was started, because of the numbers it was fed?
    can_fail: bool = True
    #: Does a run that fails change nothing that outlives it, so that others may be started before that is known?
    contains_failures: bool = False
    #: Kept values that every run sends to the host by itself: its completion has them.
    sends: Mapping[Value, object] = {}
    #: For whoever binds parameters: what they were last bound to, and how many changes there had been by then.
    bound_to: object = None
    bound_at: int = -1
    #: How each step is run, for people to read.
    kernels: Mapping[Step, str] = {}
    #: More about that, for the printed program: how threads share the work, say.
    notes: Mapping[Step, str] = {}

    @abstractmethod
    def place(self, arena: Buffer) -> None:
        """Run in this arena from the next run on. What the last one has left in another can be read no more."""

    @abstractmethod
    def bind(self, value: Value, buffer: Buffer) -> None:
        """Use this memory for a value the arena does not hold, from the next run on."""

    def bind_all(self, engine: Engine, arrays: Mapping[Value, Array]) -> None:
        """`bind` for many values, where the device can use the host's memory in place."""
        for value, array in arrays.items():
            self.bind(value, engine.upload(array))

    def feed(self, engine: Engine, inputs: Mapping[Value, Array], scalars: Scalars | None = None) -> None:
        """Let the next run read these arrays: in place where the device can, else in memory of its own.

        What is copied may be reused when the call returns.

        scalars   besides; None: as they were, or they are among the inputs
        """
        for value, array in (inputs if scalars is None else {**inputs, **scalars.arrays}).items():
            buffer = self.inputs.get(value)
            if buffer is not None and buffer.host is array:  # the same memory as last time
                continue
            if buffer is None or buffer.host is not None:
                wrapped = engine.wrap(array)
                buffer = self.inputs[value] = wrapped or engine.allocate(value.nbytes)
                self.bind(value, buffer)
                if wrapped is not None:
                    continue
            buffer.write(array)

    def prepare(self, phases: Sequence[str]) -> None:
        """Do what can be done before the first run of some phases, so that it costs what later ones do."""
        return

    @abstractmethod
    def run(self, phases: Sequence[str], profile: Profile | None = None) -> Completion | None:
        """Start all steps of the named phases, in order. None when they have finished on return.

        Parameters and states are read and written in place. Raises ExecutionError naming the layer when a step cannot
        be carried out; where that shows only later, the completion raises it. A run that failed has changed nothing
        that outlives it, or says what.
        """

    @abstractmethod
    def read(self, value: Value) -> Array:
        """A copy of a kept value, as of the last run."""

    def keep(self, value: Value) -> Array | Callable[[], Array]:
        """A kept value as of the last run, or how to get it later, whatever has run by then."""
        return self.read(value)

    def device_array(self, value: Value) -> DeviceArray | None:
        """A kept value where it lies, until the next run; None where it has gaps, or no memory of the device's own."""
        return None

    def run_once(
        self, engine: Engine, phases: Sequence[str], arrays: Mapping[Value, Array], profile: Profile | None = None
    ) -> None:
        """Run with these arrays and wait: what checks and measurements need, which own all they bind."""
        for value, array in arrays.items():
            self.bind(value, engine.upload(array))
        completion = self.run(phases, profile)
        if completion is not None:
            completion.wait()


@dataclass
class Profile:
    """Seconds per layer and phase of one run. `print` it for a table."""

    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    started: float = field(default_factory=time.perf_counter)

    def add(self, step: Step, seconds: float, start: float | None = None) -> None:
        """Count time for the layer a step came from; `start`: when it began, if that is not so many seconds ago."""
        self.seconds[step.layer or "(graph)", step.phase] += seconds

    def __str__(self) -> str:
        layers = list(dict.fromkeys(layer for layer, _ in self.seconds))
        phases = list(dict.fromkeys(phase for _, phase in self.seconds))
        width = max([len("layer"), *map(len, layers)])
        lines = [f"{'layer':<{width}}" + "".join(f"{phase + ' ms':>14}" for phase in phases) + f"{'total ms':>14}"]
        for layer in [*layers, "total"]:
            rows = layers if layer == "total" else [layer]
            times = [sum(self.seconds.get((row, phase), 0.0) for row in rows) for phase in phases]
            cells = "".join(f"{1e3 * seconds:>14.3f}" for seconds in (*times, sum(times)))
            lines.append(f"{layer:<{width}}{cells}")
        return "\n".join(lines)
