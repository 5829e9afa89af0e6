"""Operations compiled from shapes, and calls of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping
from ctypes import byref
from typing import Any, Final, Literal

import numpy as np

from mlcompute.devices.cpu.onednn.descriptors import Descriptor, Layout, dims, strides_of
from mlcompute.devices.cpu.onednn.library import Argument, OneDNN, Shape, own, require
from mlcompute.errors import DeviceError
from mlcompute.ops.bfloat16 import FLOAT32

_IN_ORDER = 1
_SCRATCHPAD_OF_USER = 1
_FORWARD_TRAINING = 64
_CONVOLUTION_DIRECT = 1
_QUERY_IMPLEMENTATION, _QUERY_ARGUMENT = 8, 255
_SCRATCHPAD = 80


class Primitive:
    """One compiled operation on arrays of fixed shapes and layouts, its memory given by role.

    `descriptors` holds the arrays by role, in the order of the native arguments; a primitive that needs working
    memory has a role "scratchpad", `scratchpad_bytes` long, whose contents mean nothing between calls.
    """

    def __init__(self, what: str, arguments: Mapping[str, int], describe: Callable[[OneDNN, int], int]) -> None:
        """`describe` creates the primitive's descriptor, given its attributes; calls will use one thread."""
        self.what = what
        library = require()
        with contextlib.ExitStack() as stack:
            stack.enter_context(library.threads(1))
            # The scratchpad is ours to give: it is part of the planned arena.
            attributes = library.create("primitive_attr_create")
            stack.callback(library.destroyer("primitive_attr"), attributes)
            library.call("primitive_attr_set_scratchpad_mode", attributes, _SCRATCHPAD_OF_USER)
            description = describe(library, attributes)
            own(self, library.destroyer("primitive_desc"), description)
            self.handle = library.create("primitive_create", description, doing=f"create {what}")
        own(self, library.destroyer("primitive"), self.handle)
        name = ctypes.c_char_p()
        library.call("primitive_desc_query", description, _QUERY_IMPLEMENTATION, 0, byref(name))
        self.implementation = (name.value or b"").decode()
        self.descriptors: dict[str, Descriptor] = {}
        self.arguments: dict[str, int] = {}
        for role, number in {**arguments, "scratchpad": _SCRATCHPAD}.items():
            found = library.value_of("primitive_desc_query_md", description, _QUERY_ARGUMENT, number)
            descriptor = Descriptor.copy_of(found) if found else None
            if descriptor is not None and descriptor.nbytes:
                self.descriptors[role], self.arguments[role] = descriptor, number

    @property
    def scratchpad_bytes(self) -> int:
        return self.descriptors["scratchpad"].nbytes if "scratchpad" in self.descriptors else 0

    def bind(self, **addresses: int) -> Call:
        """This primitive on arrays at these addresses, one for every role (0: given later by `set_pointer`)."""
        missing, unknown = self.descriptors.keys() - addresses.keys(), addresses.keys() - self.descriptors.keys()
        if missing or unknown - {"scratchpad"}:
            raise DeviceError(
                f"oneDNN: {self.what}: addresses for {sorted(addresses)}, needed for {list(self.descriptors)}"
            )
        return Call(self, {role: addresses[role] for role in self.descriptors})

    def __str__(self) -> str:
        formats = ", ".join(f"{role} {d}" for role, d in self.descriptors.items() if role != "scratchpad")
        return f"{self.what}  {self.implementation}  {formats}"


class Call:
    """A primitive joined with addresses. Only one thread may run it at a time.

    `native_arguments`, int64: dnnl_primitive_execute, primitive, stream, number of arguments, their address.
    They stay valid as long as this object lives.
    """

    def __init__(self, primitive: Primitive, addresses: Mapping[str, int]) -> None:
        self.primitive = primitive
        self._library = library = require()
        self._stream = library.create("stream_create", library.engine, _IN_ORDER)
        own(self, library.destroyer("stream"), self._stream)
        self._memory: dict[str, int] = {}
        for role, descriptor in primitive.descriptors.items():
            self._memory[role] = library.create("memory_create", descriptor.handle, library.engine, None)
            own(self, library.destroyer("memory"), self._memory[role])
        arguments = [Argument(primitive.arguments[role], memory) for role, memory in self._memory.items()]
        self._arguments = (Argument * len(arguments))(*arguments)
        for role, address in addresses.items():
            if address:
                self.set_pointer(role, address)
        place = ctypes.addressof(self._arguments)
        self.native_arguments: Final = np.array(
            [library.primitive_execute, primitive.handle, self._stream, len(arguments), place], np.int64
        )

    def run(self) -> None:
        """Execute it now, from Python."""
        primitive = self.primitive.handle
        self._library.call("primitive_execute", primitive, self._stream, len(self._arguments), self._arguments)

    def set_pointer(self, role: str, address: int) -> None:
        """Let a role's array start at an address. oneDNN may zero the padding of a blocked array there."""
        self._library.call("memory_set_data_handle", self._memory[role], address)


class Reorder(Primitive):
    """y = x in another layout.   roles x, y"""

    def __init__(self, source: Descriptor, target: Descriptor) -> None:
        what = f"reorder {source.shape} from {source} to {target}"

        def describe(library: OneDNN, attributes: int) -> int:
            engine = library.engine
            return library.create(
                "reorder_primitive_desc_create", source.handle, engine, target.handle, engine, attributes,
                doing=f"create {what}",
            )  # fmt: skip

        super().__init__(what, {"x": 1, "y": 17}, describe)


class Convolution(Primitive):
    """The convolution of the op table, or one of its two gradients.

    forward            roles x, w, y      y = convolution(x, w)
    backward_data      roles dy, w, dx    dx = convolution_input_gradient(dy, w)
    backward_weights   roles x, dy, dw    dw = convolution_weight_gradient(x, dy)

    x (N, C, H, W)   w (O, C / groups, kh, kw)   padding (top, bottom, left, right)   ->   y (N, O, OH, OW)
    Volumes have one axis more in front of H. Images are channels-last. The weights may end in a format oneDNN chose:
    `weights_in` and `weights_out` convert from and to the plain one, which is float32.

    image, result   types of x and y, and of their gradients: float32 or bfloat16. What is multiplied with bfloat16 is
                    bfloat16, too; the gradient of the weights is float32
    """

    _ROLES: Final[dict[str, dict[str, int]]] = {
        "forward": {"x": 1, "w": 33, "y": 17},
        "backward_data": {"dy": 145, "w": 33, "dx": 129},
        "backward_weights": {"x": 1, "dy": 145, "dw": 161},
    }

    def __init__(
        self,
        direction: Literal["forward", "backward_data", "backward_weights"],
        x: Shape,
        w: Shape,
        strides: Shape = (1, 1),
        dilations: Shape = (1, 1),
        padding: Shape = (0, 0, 0, 0),
        groups: int = 1,
        *,
        image: np.dtype[Any] = FLOAT32,
        result: np.dtype[Any] = FLOAT32,
    ) -> None:
        y = (x[0], w[0], *_windows(x[2:], w[2:], strides, dilations, padding))
        images = Descriptor(x, "channels_last", image), Descriptor(y, "channels_last", result)
        factor = FLOAT32 if direction == "backward_weights" else result if direction == "backward_data" else image
        weights, self._plain = _weights(w, groups, "any", factor), _weights(w, groups, "plain")
        window = [dims(strides), dims([d - 1 for d in dilations]), dims(padding[::2]), dims(padding[1::2])]
        what = f"convolution {direction} {x} {w}"
        create: Callable[..., int] = functools.partial(require().create, doing=f"create {what}")

        def forward(library: OneDNN, attributes: int | None) -> int:
            weights = _weights(w, groups, "any", image)
            return create(
                "convolution_forward_primitive_desc_create", library.engine, _FORWARD_TRAINING, _CONVOLUTION_DIRECT,
                images[0].handle, weights.handle, None, images[1].handle, *window, attributes,
            )  # fmt: skip

        def describe(library: OneDNN, attributes: int) -> int:
            if direction == "forward":
                return forward(library, attributes)
            hint = forward(library, None)
            # oneDNN keeps a pointer to the hint, not a copy: it has to live as long as the primitive.
            own(self, library.destroyer("primitive_desc"), hint)
            bias = [None] if direction == "backward_weights" else []
            return create(
                f"convolution_{direction}_primitive_desc_create", library.engine, _CONVOLUTION_DIRECT,
                images[0].handle, weights.handle, *bias, images[1].handle, *window, hint, attributes,
            )  # fmt: skip

        super().__init__(what, self._ROLES[direction], describe)
        self.weights = self.descriptors["dw" if direction == "backward_weights" else "w"]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, or of their gradient, in the format chosen."""
        return self.weights.nbytes

    @property
    def weights_are_plain(self) -> bool:
        """Do the weights lie as (O, C / groups, kh, kw), with nothing to convert?"""
        return self.weights == self._plain

    def weights_in(self) -> Reorder:
        """From the plain weights to the format chosen."""
        return Reorder(self._plain, self.weights)

    def weights_out(self) -> Reorder:
        """From the format chosen to the plain weights."""
        return Reorder(self.weights, self._plain)


def _weights(shape: Shape, groups: int, layout: Layout, dtype: np.dtype[Any] = FLOAT32) -> Descriptor:
    """Weights (O, C / groups, kh, kw) as oneDNN wants them: with an axis of groups in front where there are any."""
    if groups == 1:
        return Descriptor(shape, layout, dtype)
    grouped = (groups, shape[0] // groups, *shape[1:])
    if layout == "any":
        return Descriptor(grouped, layout, dtype)
    strides = strides_of(shape, layout)
    return Descriptor(grouped, (shape[0] // groups * strides[0], *strides))


def _windows(image: Shape, kernel: Shape, strides: Shape, dilations: Shape, padding: Shape) -> Shape:
    """How many windows fit along every axis."""
    return tuple(
        (image[d] + padding[2 * d] + padding[2 * d + 1] - dilations[d] * (kernel[d] - 1) - 1) // strides[d] + 1
        for d in range(len(image))
    )
