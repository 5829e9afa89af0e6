"""What can be read after a run: its values stay in the graph's memory until the next run begins."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref

from mlcompute.devices.device import Completion, Executable
from mlcompute.devices.foreign_array import DeviceArray
from mlcompute.ops.op import Array, Value
from mlcompute.runtime.passes import Passes
from mlcompute.runtime.run_result import ResultState
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.tensor import Tensor

_numbers = itertools.count(1)


class LastRun:
    """The last run of one graph.

    number  rises with every run, over all graphs; 0 before the first
    passes  the passes run one by one that the last run belonged to; None: it was a run of another kind
    """

    def __init__(self) -> None:
        self.number = 0
        self.passes: Passes | None = None
        #: The executable of the last run; None while a run overwrites its results.
        self.executable: Executable | None = None
        #: Its result, by a weak reference: it is copied before the next run only if somebody still holds it.
        self._result: weakref.ref[ResultState] | None = None
        self._result_value: Value | None = None
        self._keeping = threading.RLock()  # the graph may be taken apart inside of it
        self._weakly: weakref.ref[LastRun] = weakref.ref(self)

    def is_overwritten(self) -> None:
        """Another run is about to begin: give the result memory of its own, if somebody holds it."""
        if self._result is not None:
            self.keep_result()
            self._result = None
        self.executable = None

    def finished(
        self, executable: Executable, specification: RunSpecification, completion: Completion | None
    ) -> ResultState | None:
        """A run has succeeded, or was started and will most likely. Its result, if it has one."""
        self.executable = executable
        self.number = next(_numbers)
        if specification.result is None:
            return None
        result, value = ResultState(specification.result, self._weakly), specification.result_value
        if completion is not None and value is not None and value in executable.sends:
            result.kept = functools.partial(completion.result, value)
        else:
            self._result, self._result_value = weakref.ref(result), value
        return result

    def has_failed(self, number: int) -> None:
        """A run that was taken for finished has failed: if it was the last, there is nothing to read."""
        if self.number == number:
            self.executable = self._result = None

    def keep_result(self, of: ResultState | None = None) -> None:
        """Copy the result out of the graph's memory, if somebody holds it.

        of  only if it is this one: the queue's thread may have kept it meanwhile, and begun another run
        """
        with self._keeping:  # a reader and the queue's thread may both be here
            result = self._result() if self._result is not None else None
            if result is not None and result.kept is None and (of is None or of is result):
                value, executable = self._result_value, self.executable
                if value is not None and executable is not None:
                    result.kept = executable.keep(value)
                else:
                    result.kept = self.value(result.of)

    def computed(self, tensor: Tensor) -> bool:
        """Did it compute this tensor?"""
        return self.executable is not None and tensor in self.executable.program.values

    def value(self, tensor: Tensor) -> Array | None:
        """The value of a result; None when it was not kept."""
        value = self._kept(tensor)
        return None if value is None or self.executable is None else self.executable.read(value)

    def device_array(self, tensor: Tensor) -> DeviceArray | None:
        """The same where it lies on the device, if it does so in one piece."""
        value = self._kept(tensor)
        return None if value is None or self.executable is None else self.executable.device_array(value)

    def _kept(self, tensor: Tensor) -> Value | None:
        if self.executable is None:
            return None
        program = self.executable.program
        value = program.values.get(tensor)
        return None if value not in program.kept or tensor in program.persistent else value

    @property
    def has_gradients(self) -> bool:
        """Was it a gradient pass by itself, or an update after one?"""
        return self.passes is not None and "gradient" in self.passes.finished

    def gradient(self, tensor: Tensor) -> Array | None:
        """The gradient of a tensor as of a gradient pass that was run by itself."""
        if self.passes is None or not self.has_gradients:
            return None
        value = self.passes.program.gradients.get(tensor)
        return None if value is None else self.passes.executable.read(value)

    def kept_gradient(self, tensor: Tensor) -> Array | None:
        """The gradient of a tensor, also of a fused run if it was an output or its layer is being debugged."""
        gradient = self.gradient(tensor)
        if gradient is not None or self.executable is None:
            return gradient
        program = self.executable.program
        value = program.gradients.get(tensor) if program.name == "fused" else None
        return self.executable.read(value) if value is not None and value in program.kept else None
