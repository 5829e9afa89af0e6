"""What all runs of some phases under some options share, looked up once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlcompute.compiler.program import Program
from mlcompute.compiler.request import Request
from mlcompute.ops.op import Value
from mlcompute.tensor import Tensor, TensorDescriptor


class InputSlot(NamedTuple):
    """An input some phases of a program read.

    descriptor       what its data must be like, for a full batch
    rows             how many leading rows of it; 0 for all
    rows_per_sample  how many of them make a sample; 0 when its first axis does not count samples
    """

    tensor: Tensor
    value: Value
    descriptor: TensorDescriptor
    rows: int
    rows_per_sample: int

    @classmethod
    def of(cls, tensor: Tensor, value: Value, request: Request) -> InputSlot:
        """What a run reads of an input."""
        descriptor = tensor.descriptor
        if value.shape[1:] != descriptor.shape[1:]:
            descriptor = TensorDescriptor((descriptor.shape[0], *value.shape[1:]), data_type=descriptor.data_type)
        rows = value.shape[0] if value.shape != descriptor.shape else 0
        return cls(tensor, value, descriptor, rows, rows_per_sample(tensor, request))


def rows_per_sample(tensor: Tensor, request: Request) -> int:
    """How many rows of a tensor that is fed belong to one sample; 0 when its first axis does not count samples."""
    # The gradient of a result has its shape.
    known = request.inputs.get(request.user_gradients.get(tensor, tensor))
    if known is not None:
        return known
    rows, batch = tensor.descriptor.shape[0], request.batch_size
    return 0 if rows % batch else rows // batch


@dataclass(slots=True, eq=False)
class RunSpecification:
    """Some phases of a program under some options.

    inputs       what the caller supplies
    result       what a run gives; None without a forward pass
    result_value where it can be read
    trains       a training pass, or one that draws random numbers: these, and time steps, move on with it
    begins       a forward pass runs: what the last run left is overwritten
    updates      the optimizer runs
    skips        data that was fed before is used again
    synchronous  the caller waits for the run
    copies       inputs are copied when they are collected: the run is queued, the caller may reuse the memory
    runs_ahead   it is started on the caller's thread and not waited for, if nobody has to be told of its end
    profiles, measures, prints   time per layer is kept; the time of the run is kept; times are printed
    """

    program: Program
    phases: tuple[str, ...]
    inputs: list[InputSlot]
    result: Tensor | None
    result_value: Value | None
    trains: bool
    begins: bool
    updates: bool
    skips: bool
    synchronous: bool
    copies: bool
    runs_ahead: bool
    profiles: bool
    measures: bool
    prints: bool
