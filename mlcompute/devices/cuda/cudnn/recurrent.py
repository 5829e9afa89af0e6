"""Recurrent layers of cuDNN: one direction of one LSTM, GRU or simple layer, and its gradient.

Its weights lie one after the other in a weight space: those of the inputs, those of the hidden state, then biases; in
each, the gates in cuDNN's order. What the gradient needs of the forward pass lies in a reserve space, which computing
the gradient overwrites.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from mlcompute.devices.cuda.cudnn import library as dnn
from mlcompute.devices.cuda.cudnn.library import Cudnn, CudnnError
from mlcompute.devices.cuda.libraries import Gpu, imported
from mlcompute.errors import DeviceError

#: cudnnRNNMode_t
RNN_RELU, RNN_TANH, LSTM, GRU = 0, 1, 2, 3
#: cudnnRNNAlgo_t: the one whose sums are the same in every run
RNN_ALGO_STANDARD = 0
#: cudnnRNNBiasMode_t
RNN_SINGLE_INP_BIAS, RNN_DOUBLE_BIAS = 1, 2
#: cudnnDirectionMode_t, cudnnRNNInputMode_t
UNIDIRECTIONAL, LINEAR_INPUT = 0, 0
#: cudnnRNNDataLayout_t: (samples, times, features)
RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED = 2
#: Of the last argument of cudnnSetRNNDescriptor_v8: such layouts are allowed.
RNN_PADDED_IO_ENABLED = 1
#: cudnnMathType_t
DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3
#: cudnnForwardMode_t
FWD_MODE_INFERENCE, FWD_MODE_TRAINING = 0, 1
#: cudnnWgradMode_t: the only one there is for recurrent layers
WGRAD_MODE_ADD = 0

#: An address at which no weights lie: cuDNN is asked where parts of them would be.
_BASE = 1 << 40


@dataclass(frozen=True)
class RecurrentProblem:
    """x (samples, times, inputs)   h0, c0 (samples, hidden)   ->   y (samples, times, hidden), last h and c.

    cell     "lstm", "gru", "tanh" or "relu"
    trains   is there a gradient to come?
    """

    cell: str
    data_type: int
    samples: int
    times: int
    inputs: int
    hidden: int
    trains: bool

    @property
    def gates(self) -> int:
        """Parts of the sums of inputs; there are as many of the hidden state."""
        return {"lstm": 4, "gru": 3}.get(self.cell, 1)

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return 4 if self.data_type == dnn.DATA_FLOAT else 2


_MODES = {"relu": RNN_RELU, "tanh": RNN_TANH, "lstm": LSTM, "gru": GRU}


class RecurrentPlan:
    """A problem on one GPU.

    weight_bytes     of the weight space
    workspace_bytes  memory either pass needs while it runs
    reserve_bytes    what the forward pass leaves for the gradient; 0 where there is none
    places           where the weight space has the weights of the inputs, those of the hidden state, and biases, in
                     elements; gates follow each other
    """

    def __init__(self, cudnn: Cudnn, gpu: Gpu, problem: RecurrentProblem, allows_tf32: bool) -> None:
        self.problem, self._cudnn, self._handle = problem, cudnn, cudnn.handle(gpu.ordinal)
        p = problem
        dropout = _Described(cudnn, "DropoutDescriptor", "SetDropoutDescriptor", self._handle, 0.0, None, 0, 0)
        bias = RNN_DOUBLE_BIAS if p.cell == "gru" else RNN_SINGLE_INP_BIAS
        math = TENSOR_OP_MATH if p.data_type != dnn.DATA_FLOAT else DEFAULT_MATH if allows_tf32 else FMA_MATH
        self._rnn = _Described(
            cudnn, "RNNDescriptor", "SetRNNDescriptor_v8", RNN_ALGO_STANDARD, _MODES[p.cell], bias, UNIDIRECTIONAL,
            LINEAR_INPUT, p.data_type, dnn.DATA_FLOAT, math, p.inputs, p.hidden, p.hidden, 1, dropout.handle,
            RNN_PADDED_IO_ENABLED,
        )  # fmt: skip
        self._x, self._y = (self._sequences(width) for width in (p.inputs, p.hidden))
        shape = (1, p.samples, p.hidden)
        strides = (p.samples * p.hidden, p.hidden, 1)
        self._state = _Described(
            cudnn, "TensorDescriptor", "SetTensorNdDescriptor", p.data_type, 3, (c_int * 3)(*shape),
            (c_int * 3)(*strides),
        )  # fmt: skip
        self._keeps = [dropout]
        self._mode = FWD_MODE_TRAINING if p.trains else FWD_MODE_INFERENCE
        weights, work, reserve = c_size_t(), c_size_t(), c_size_t()
        cudnn.call("GetRNNWeightSpaceSize", self._handle, self._rnn.handle, byref(weights))
        cudnn.call(
            "GetRNNTempSpaceSizes", self._handle, self._rnn.handle, self._mode, self._x.handle, byref(work),
            byref(reserve),
        )  # fmt: skip
        self.weight_bytes, self.workspace_bytes = weights.value, work.value
        self.reserve_bytes = reserve.value if p.trains else 0
        self.places = self._found_places()

    def _sequences(self, width: int) -> _Described:
        p = self.problem
        lengths = (c_int * p.samples)(*[p.times] * p.samples)
        return _Described(
            self._cudnn, "RNNDataDescriptor", "SetRNNDataDescriptor", p.data_type,
            RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED, p.times, p.samples, width, lengths, None,
        )  # fmt: skip

    def _found_places(self) -> tuple[int, int, int]:
        """Where matrices and biases begin; a CudnnError if gates do not follow each other."""
        p = self.problem
        inputs, hidden, biases = (
            self._addresses(range(p.gates), False),
            self._addresses(range(p.gates, 2 * p.gates), False),
            self._addresses(range(2 * p.gates if p.cell == "gru" else p.gates), True),
        )
        wanted = [(inputs, p.hidden * p.inputs), (hidden, p.hidden * p.hidden), (biases, p.hidden)]
        for found, size in wanted:
            if found != [found[0] + number * size * p.item for number in range(len(found))]:
                raise CudnnError(f"{self._cudnn.name}: gates of {p} do not follow each other")
        first, second, third = ((found[0] - _BASE) // p.item for found, _ in wanted)
        return first, second, third

    def _addresses(self, numbers: Sequence[int], of_bias: bool) -> list[int]:
        matrix, bias = (_Described(self._cudnn, "TensorDescriptor") for _ in range(2))
        found = []
        for number in numbers:
            addresses = c_void_p(), c_void_p()
            self._cudnn.call(
                "GetRNNWeightParams", self._handle, self._rnn.handle, 0, self.weight_bytes, _BASE, number,
                matrix.handle, byref(addresses[0]), bias.handle, byref(addresses[1]),
            )  # fmt: skip
            found.append(addresses[of_bias].value or 0)
        return found

    def forward(self, stream: int, addresses: Sequence[int | None]) -> None:
        """x, weights, h0, c0, y, last h, last c, workspace, reserve; of cells without c, None for it."""
        x, weights, h0, c0, y, h, c, workspace, reserve = addresses
        with self._cudnn.lock:
            self._cudnn.call("SetStream", self._handle, stream)
            self._cudnn.call(
                "RNNForward", self._handle, self._rnn.handle, self._mode, None, self._x.handle, x, self._y.handle, y,
                self._state.handle, h0, h, self._state.handle, c0, c, self.weight_bytes, weights,
                self.workspace_bytes, workspace, self.reserve_bytes, reserve, doing=str(self.problem),
            )  # fmt: skip

    def copy_reserve(self, stream: int, reserve: int, copy: int) -> None:
        """What the forward pass left, for a gradient that may be computed again."""
        _check(_driver().cuMemcpyDtoDAsync(copy, reserve, self.reserve_bytes, stream), "copying the reserve")

    def backward(self, stream: int, addresses: Sequence[int | None]) -> None:
        """dy, dh, dc, x, weights, h0, c0, y, then dx, gradients of the weights, dh0, dc0, workspace, reserve."""
        dy, dh, dc, x, weights, h0, c0, y, dx, gradients, dh0, dc0, workspace, reserve = addresses
        spaces = (self.workspace_bytes, workspace, self.reserve_bytes, reserve)
        with self._cudnn.lock:
            self._cudnn.call("SetStream", self._handle, stream)
            self._cudnn.call(
                "RNNBackwardData_v8", self._handle, self._rnn.handle, None, self._y.handle, y, dy, self._x.handle, dx,
                self._state.handle, h0, dh, dh0, self._state.handle, c0, dc, dc0, self.weight_bytes, weights, *spaces,
                doing=f"the gradient of {self.problem}",
            )  # fmt: skip
            _check(_driver().cuMemsetD8Async(gradients, 0, self.weight_bytes, stream), "clearing gradients")
            self._cudnn.call(
                "RNNBackwardWeights_v8", self._handle, self._rnn.handle, WGRAD_MODE_ADD, None, self._x.handle, x,
                self._state.handle, h0, self._y.handle, y, self.weight_bytes, gradients, *spaces,
                doing=f"the gradient of {self.problem}",
            )  # fmt: skip


@functools.lru_cache(maxsize=256)
def find_recurrent_plan(problem: RecurrentProblem, gpu: Gpu, allows_tf32: bool) -> RecurrentPlan | None:
    """A plan whose results are the same in every run; None where cuDNN refuses the problem, or is not installed."""
    try:
        return RecurrentPlan(dnn.require(), gpu, problem, allows_tf32)
    except DeviceError:
        return None


class _Described:
    """A descriptor of the older interface: created, set once, destroyed with this object."""

    def __init__(self, cudnn: Cudnn, kind: str, setter: str = "", *arguments: Any) -> None:
        handle = c_void_p()
        cudnn.call(f"Create{kind}", byref(handle))
        self.handle = handle.value or 0
        weakref.finalize(self, cudnn.function(f"Destroy{kind}"), self.handle).atexit = False
        if setter:
            cudnn.call(setter, self.handle, *arguments)


def _driver() -> Any:
    return imported("cuda.bindings.driver", "cuda-bindings")


def _check(answer: tuple[Any, ...], doing: str) -> None:
    if int(answer[0]) != 0:
        raise DeviceError(f"CUDA: a recurrent layer by cuDNN, {doing}: {answer[0]}")
