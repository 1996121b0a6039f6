"""How work tells how it gets on: the listener that hears of it, and the events that cross the process border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Working:
    """One event: a model begins to work."""

    model: str


@dataclass(frozen=True)
class Stage:
    """One event: a part of the work with steps of its own begins."""

    title: str


@dataclass(frozen=True)
class Note:
    """One event: something the user should know now."""

    text: str


@dataclass(frozen=True)
class Progress:
    """One event: how much of the stage is done; of the measuring, in decodes."""

    done: int
    total: int
    doing: str


OnProgress = Callable[[int, int], None]


class Listener(Protocol):
    """Hears how a scan gets on; the command line draws it."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins; `total` counts its steps where that is known."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Progress within the stage."""

    def note(self, text: str) -> None:
        """Something the user may want to know now."""

    def warn(self, text: str) -> None:
        """Something the user must mind."""


def in_mib(listener: Listener) -> OnProgress:
    """A listener of bytes read that tells another in MiB."""
    return lambda done, total: listener.step(done // 2**20, total // 2**20, "MiB")
