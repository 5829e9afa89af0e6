"""oneDNN 3.x, the library of CPU primitives, through its C interface.

A `Primitive` is compiled once from shapes. `bind` joins it with addresses and returns a `Call`, whose
`native_arguments` are all that native code needs to execute it. Primitives hold no state and may be shared by threads;
calls may not.

    convolution = Convolution("forward", (32, 16, 28, 28), (32, 16, 3, 3))
    call = convolution.bind(x=x.ctypes.data, w=w.ctypes.data, y=y.ctypes.data, scratchpad=memory.ctypes.data)
"""

from mlcompute.devices.cpu.onednn.bfloat16 import (
    bfloat16_gemm,
    has_amx_instructions,
    has_bfloat16_convolutions,
    has_bfloat16_instructions,
)
from mlcompute.devices.cpu.onednn.descriptors import Descriptor, Layout, strides_of
from mlcompute.devices.cpu.onednn.library import OneDNN, load, meaning, require, why_missing
from mlcompute.devices.cpu.onednn.primitives import Call, Convolution, Primitive, Reorder

__all__ = [
    "Call", "Convolution", "Descriptor", "Layout", "OneDNN", "Primitive", "Reorder", "bfloat16_gemm",
    "has_amx_instructions", "has_bfloat16_convolutions", "has_bfloat16_instructions", "load", "meaning", "require",
    "strides_of", "why_missing",
]  # fmt: skip
