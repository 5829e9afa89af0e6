"""NativeLibrary: the functions of one of NVIDIA's C libraries, called with errors that say what was being done."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import byref, c_int, c_void_p
from typing import Any, ClassVar

from mlcompute.errors import DeviceError


class NativeLibrary:
    """A loaded library; each of them says what it is called and which functions of it are used.

    title       "cuDNN"
    prefix      what its functions begin with: "cudnn"
    wheel       what to install for it
    versions    those that have all functions
    signatures  the functions' arguments; all return a status, except those in `returns`
    """

    title: ClassVar[str]
    prefix: ClassVar[str]
    wheel: ClassVar[str]
    versions: ClassVar[str]
    signatures: ClassVar[Mapping[str, Sequence[Any]]]
    returns: ClassVar[Mapping[str, Any]]
    #: What tells the meaning of a status.
    explains: ClassVar[str] = "GetErrorString"

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path, self._library = path, library
        for name, arguments in self.signatures.items():
            function = getattr(library, f"{self.prefix}{name}", None)
            if function is None:
                raise DeviceError(
                    f"{self.title}: {path} has no function {self.prefix}{name}",
                    expected=self.versions,
                    fix=f"pip install {self.wheel}",
                )
            function.argtypes, function.restype = arguments, self.returns.get(name, c_int)
        self.version = self._read_version()
        self._handles: dict[int, int] = {}

    @property
    def name(self) -> str:
        """Which one: "cuDNN 9.19.0"."""
        major, rest = divmod(self.version, 10000)
        return f"{self.title} {major}.{rest // 100}.{rest % 100}"

    def _read_version(self) -> int:
        return int(self.function("GetVersion")())

    def function(self, name: str) -> Any:
        """A function, by its name without the prefix."""
        return getattr(self._library, f"{self.prefix}{name}")

    def status(self, name: str, *arguments: Any) -> int:
        """What a function answers: 0 on success."""
        return int(self.function(name)(*arguments))

    def call(self, name: str, *arguments: Any, doing: str = "") -> None:
        """Call a function; a DeviceError saying what was being done unless it answers success."""
        status = self.status(name, *arguments)
        if status:
            raise self.error(status, name, doing)

    def error(self, status: int, name: str, doing: str = "") -> DeviceError:
        """The error for a status other than 0."""
        reason = self.reason(status)
        return DeviceError(
            f"{self.name}: {doing or name}: {reason}", function=f"{self.prefix}{name}", library=self.path
        )

    def reason(self, status: int) -> str:
        """What the library says about a status."""
        text = self.function(self.explains)(status)
        return text.decode() if text else f"status {status}"

    def handle(self, ordinal: int) -> int:
        """The handle for a GPU, whose context must be current. It lives as long as the process."""
        if ordinal not in self._handles:
            handle = c_void_p()
            self.call("Create", byref(handle), doing=f"using GPU {ordinal}")
            self._handles[ordinal] = handle.value or 0
        return self._handles[ordinal]
