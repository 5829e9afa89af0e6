"""oneDNN 3.x, the library of CPU primitives, through its C interface.

A `Primitive` is compiled once from shapes. `bind` joins it with addresses and gives a `Call`, whose five `words` are
all that native code needs to execute it. Primitives hold no state and may be shared by threads; calls may not.

    product = Matmul((32, 784), (784, 128))
    product.bind(a=a.ctypes.data, b=b.ctypes.data, y=y.ctypes.data, scratchpad=memory.ctypes.data).run()
"""

from mlcompute.devices.cpu.onednn.descriptors import Descriptor, Layout, strides_of
from mlcompute.devices.cpu.onednn.library import OneDNN, load, meaning, require, why_missing
from mlcompute.devices.cpu.onednn.primitives import Activation, Call, Convolution, Matmul, Primitive, Reorder

__all__ = [
    "Activation", "Call", "Convolution", "Descriptor", "Layout", "Matmul", "OneDNN", "Primitive", "Reorder", "load",
    "meaning", "require", "strides_of", "why_missing",
]  # fmt: skip
