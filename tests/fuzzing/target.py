"""A reader that is given damaged files, and what it must keep."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.fuzzing.choices import Choices

#: A file that begins like this is the rest of the fuzzer's bytes, as they are; others are edits of a real one.
AS_IT_IS = b"\0"


class Target(ABC):
    """A reader. It may accept a file or raise an mlc.Error, within a second, 64 MB and twice the file.

    name  of the target
    goal  runs of a full campaign
    longest_message  characters an error may have: what a file holds does not fill the screen
    """

    name: str
    goal: int
    longest_message = 4000

    def file(self, data: bytes) -> bytes:
        """The damaged file the fuzzer's bytes stand for."""
        if data[:1] == AS_IT_IS:
            return data[1:]
        return self.edited(Choices(data[1:]))

    @abstractmethod
    def edited(self, choices: Choices) -> bytes:
        """A real file with some edits."""

    @abstractmethod
    def originals(self) -> list[bytes]:
        """Real files, whole: what the fuzzer begins with."""

    @abstractmethod
    def read(self, file: bytes) -> None:
        """Give the file to the reader."""

    def state(self) -> object:
        """What reading must leave as it is, whether a file is accepted or not."""
        return None
