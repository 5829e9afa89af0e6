"""CTC loss, for sequences whose labels are not aligned with time: speech, handwriting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlcompute import ops
from mlcompute.enums import DataType, ReductionType
from mlcompute.errors import DataError
from mlcompute.layers.arguments import member, whole
from mlcompute.layers.layer import FLOATS, INDICES, Forward, Layer
from mlcompute.layers.read_only import ReadOnly
from mlcompute.ops.op import Shape, Value
from mlcompute.tensor import TensorDescriptor

_INT32 = np.dtype(np.int32)


class CTCLossLayer(Layer):
    """-log of the probability that softmax(x) spells the targets, over all alignments; as torch.nn.CTCLoss.

    sources   x (n, time, classes), scores before the softmax; targets (n, labels), INT32 or INT64; then, if sequences
              differ in length, input lengths (n), from 1 to time, and target lengths (n), from 0 to labels: what lies
              beyond is not read
    results   MEAN: the mean of loss / target length, (1,); SUM: (1,); NONE: the loss of every sample, (n,)

    blank           the class that stands for nothing; no target
    zero_infinity   targets that do not fit into their time have loss and gradient 0 instead of infinity and NaN
    """

    default_label = "CTCLoss"
    source_types = FLOATS | INDICES
    source_count = (2, 4)

    blank = ReadOnly[int]("The class that stands for nothing.")
    reduction_type = ReadOnly[ReductionType]("What becomes of the losses of the samples.")
    zero_infinity = ReadOnly[bool]("Do targets that do not fit count nothing?")

    def __init__(
        self, blank: int = 0, reduction_type: ReductionType = ReductionType.MEAN, zero_infinity: bool = False
    ) -> None:
        super().__init__()
        self._blank = whole(self.who, "blank", blank, 0)
        self._reduction_type = member(self.who, "reduction_type", ReductionType, reduction_type)
        self.expect(
            self._reduction_type in (ReductionType.MEAN, ReductionType.SUM, ReductionType.NONE),
            f"reduction_type is {self._reduction_type.name}",
            expected="MEAN, SUM or NONE",
            error=DataError,
        )
        self._zero_infinity = bool(zero_infinity)

    def feature_axis(self, known: Sequence[int | None], sources: Sequence[Shape], result: Shape) -> int | None:
        return None

    def results(self, sources: Sequence[TensorDescriptor]) -> list[TensorDescriptor]:
        x, targets, *lengths = sources
        self.expect(
            len(x.shape) == 3 and x.data_type in FLOATS,
            f"the scores must be floating, (n, time, classes), not {x.data_type.name} {x.shape}",
        )
        n, _, classes = x.shape
        self.expect(
            len(targets.shape) == 2 and targets.shape[0] == n and targets.data_type in INDICES,
            f"the targets must be INT32 or INT64, ({n}, labels), not {targets.data_type.name} {targets.shape}",
        )
        self.expect(
            self._blank < classes, f"blank is {self._blank}, there are {classes} classes", expected="one of the classes"
        )
        self.expect(
            len(lengths) != 1, "input lengths without target lengths", fix="give both, or neither: all are full then"
        )
        for name, given in zip(("input", "target"), lengths, strict=False):
            self.expect(
                given.data_type in INDICES and given.shape == (n,),
                f"the {name} lengths must be INT32 or INT64, ({n},), not {given.data_type.name} {given.shape}",
            )
        kept = self._reduction_type == ReductionType.NONE
        return [TensorDescriptor((n,) if kept else (1,), data_type=DataType(x.data_type))]

    def forward(self, run: Forward, *sources: Value) -> Value:
        x, targets, *lengths = sources
        n, steps, _ = x.shape
        longest = targets.shape[1]
        if not lengths:
            full = ((steps, _INT32), (longest, _INT32))
            lengths = [x.trace.constant(np.full(n, extent), dtype) for extent, dtype in full]
        targets, *lengths = (ops.slice_axis(ops.convert(given, _INT32), 0, 0, n) for given in (targets, *lengths))
        log_probabilities = ops.log_softmax(x, 2)
        losses = ops.ctc_loss(
            log_probabilities, targets, lengths[0], lengths[1], blank=self._blank, zero_infinity=self._zero_infinity
        )
        if self._reduction_type == ReductionType.NONE:
            return losses
        if self._reduction_type == ReductionType.MEAN:
            losses = losses / (ops.maximum(ops.convert(lengths[1], x.dtype), 1.0) * float(n))
        return ops.reshape(ops.sum_(losses, (0,)), (1,))
