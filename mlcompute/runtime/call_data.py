"""The data of a call: its batch size, its arrays by name, and a source for every input of its phases."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcompute.errors import DataError, ShapeError
from mlcompute.ops.op import Value
from mlcompute.runtime.inputs import InputData, Named
from mlcompute.runtime.run_specification import RunSpecification
from mlcompute.tensor import Tensor
from mlcompute.tensor_data import expect_no_booleans, read_array

if TYPE_CHECKING:
    from mlcompute.runtime.session import Session


def batch_of(session: Session, batch_size: int, method: str) -> int:
    """The number of samples a call asks for, if the graph can run as many."""
    request, who = session.compile_if_needed(), f"{session.definition.who}.{method}"
    full = request.batch_size
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)):
        raise TypeError(f"{who}: batch_size must be a whole number, not {batch_size!r}")
    if batch_size in (0, full):
        return full
    if batch_size < 0:
        raise ShapeError(
            f"{who}: batch_size is {batch_size}", expected=f"0 (the tensors' own, {full}) or the number of samples"
        )
    fixed = next((tensor for tensor, array in session.constants.items() if array.shape[0] == full > 1), None)
    if batch_size > full and fixed is not None and fixed not in request.shared:
        raise ShapeError(
            f"{who}: batch_size is {batch_size}, but '{session.name_of(fixed)}' was compiled as a "
            f"constant of {full} samples",
            fix=f"run at most {full} samples, or compile it again with more",
        )
    if session.current.unbatched is not None:
        raise ShapeError(
            f"{who}: batch_size is {batch_size}, but {session.current.unbatched!r} does not share the batch axis",
            fix="pass batch_size=0 for graphs whose inputs have different first extents",
        )
    return int(batch_size)


def named_data(
    session: Session, method: str, inputs: Named | None, labels: Named | None, weights: Named | None
) -> dict[Tensor, Any]:
    """Data by tensor; unknown names are refused."""
    found = session.definition.declared.find(method, inputs, labels, weights, session.current.lengths)
    for tensor in session.compile_if_needed().added & found.keys():
        expect_no_booleans(found[tensor], f"{session.definition.who}.{method}: '{session.name_of(tensor)}'")
    for tensor, constant in session.constants.items():
        if tensor in found:
            who = f"{session.definition.who}.{method}: '{session.name_of(tensor)}'"
            if not np.array_equal(read_array(found[tensor], tensor.descriptor, who), constant):
                raise DataError(
                    f"{who} was compiled as a constant and cannot be fed other data", fix="compile it again"
                )
    return found


def collect_inputs(
    session: Session,
    specification: RunSpecification,
    data: Mapping[Tensor, Any],
    method: str,
    copies: bool | AbstractSet[Value] | None = None,
) -> InputData:
    """Something for every input of the phases that will run.

    copies  all of it, none, or these values; by default as the specification says
    """
    prefixes = session.current.error_prefixes

    def who(tensor: Tensor) -> str:
        if (method, tensor) not in prefixes:
            prefixes[method, tensor] = f"{session.definition.who}.{method}: '{session.name_of(tensor)}'"
        return prefixes[method, tensor]

    copies = specification.copies if copies is None else copies
    return session.inputs.collect(
        specification.inputs, data, who, session.linked_value, skips=specification.skips, copies=copies,
        engine=session.current.engine,
    )  # fmt: skip


def has_labels(session: Session, data: Mapping[Tensor, Any], skips: bool) -> bool:
    """Can the losses be computed in a run in inference mode?"""
    return not session.definition.waits_for_labels and all(
        label in session.constants or session.inputs.has(label, data, skips, session.linked_value)
        for label in session.current.labels
    )
