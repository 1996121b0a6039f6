"""How work tells how it gets on: one listener for every stage, on both sides of the process border.

What works in the worker process is given a `Remote`, which sends each call as an event; the parent repeats the call on
the listener that draws it. Nobody has to know on which side of the border the listener is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger("qres")
_log.addHandler(logging.NullHandler())  # silent in a program that does not ask for it


class Listener(Protocol):
    """Hears how work gets on."""

    def stage(self, title: str) -> None:
        """A part of the work with steps of its own begins."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """So many steps of the stage are done; of the measuring, a step is a decode."""

    def working(self, model: str) -> None:
        """A model begins to work: should the process die, it was this one."""

    def note(self, text: str) -> None:
        """Something the user may want to know now."""

    def warn(self, text: str) -> None:
        """Something the user must mind."""


class Logged:
    """A listener for programs: stages and notes go to the logger `qres` as information, warnings as such."""

    def stage(self, title: str) -> None:
        """Log the title."""
        _log.info("%s", title)

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Log the step, for those who debug."""
        _log.debug("%d of %d %s", done, total, doing)

    def working(self, model: str) -> None:
        """Log the model, for those who debug."""
        _log.debug("%s works", model)

    def note(self, text: str) -> None:
        """Log the text as information."""
        _log.info("%s", text)

    def warn(self, text: str) -> None:
        """Log the text as a warning."""
        _log.warning("%s", text)


@dataclass(frozen=True)
class Event:
    """One call of a listener, to be repeated elsewhere."""

    call: str
    """A method of `Listener`."""
    arguments: tuple[str | int, ...]

    def repeat(self, listener: Listener) -> None:
        """Make the same call on another listener."""
        getattr(listener, self.call)(*self.arguments)


class Remote:
    """A listener that sends every call as an `Event`."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send

    def stage(self, title: str) -> None:
        """Send the call."""
        self._send(Event("stage", (title,)))

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Send the call."""
        self._send(Event("step", (done, total, doing)))

    def working(self, model: str) -> None:
        """Send the call."""
        self._send(Event("working", (model,)))

    def note(self, text: str) -> None:
        """Send the call."""
        self._send(Event("note", (text,)))

    def warn(self, text: str) -> None:
        """Send the call."""
        self._send(Event("warn", (text,)))


OnProgress = Callable[[int, int], None]
"""Told (done, in all) by loops that know nothing of stages."""


def in_mib(listener: Listener) -> OnProgress:
    """For loops over bytes: tells a listener in MiB."""
    return lambda done, total: listener.step(done // 2**20, total // 2**20, "MiB")
