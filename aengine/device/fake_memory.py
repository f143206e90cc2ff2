"""Memory of the fake device: who read and wrote what, and which of that nothing puts in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aengine.device.fake import FakeDevice

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to one buffer, at least one a write, that nothing puts in order."""

    buffer: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write."""

    buffer: str
    who: str
    writes: bool
    past: int
    """Everything that precedes the access, itself included."""
    bit: int


class FakeBuffer(Generic[T]):
    """Memory of the fake device: a value whose every access is noted.

    Outside a running operation it is the host that reads or writes.
    """

    def __init__(self, device: FakeDevice, name: str, value: T) -> None:
        self._device = device
        self.name = name
        self._value = value

    def read(self) -> T:
        """The value."""
        self._device._note(self.name, writes=False)
        return self._value

    def write(self, value: T) -> None:
        """Replace the value."""
        self._device._note(self.name, writes=True)
        self._value = value


def unordered(accesses: Sequence[Access]) -> Sequence[Race]:
    """Pairs that touch the same buffer, at least one writing, and that nothing orders."""
    found: list[Race] = []
    for number, second in enumerate(accesses):
        for first in accesses[:number]:
            clash = first.buffer == second.buffer and (first.writes or second.writes)
            ordered = first.bit & second.past or second.bit & first.past
            if clash and not ordered:
                found.append(Race(first.buffer, first.who, second.who))
    return list(dict.fromkeys(found))
