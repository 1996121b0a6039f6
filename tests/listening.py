"""A listener that keeps what it hears."""

from __future__ import annotations

from collections.abc import Callable

from qres.events import Event


class Heard:
    """Every call, in order; `on_call` may raise to stop the work."""

    def __init__(self, on_call: Callable[[Event], None] = lambda _: None) -> None:
        self.calls: list[Event] = []
        self._on_call = on_call

    def _hear(self, call: str, *arguments: str | int) -> None:
        self.calls.append(Event(call, arguments))
        self._on_call(self.calls[-1])

    def stage(self, title: str) -> None:
        self._hear("stage", title)

    def step(self, done: int, total: int, doing: str = "") -> None:
        assert 0 <= done <= total, doing
        self._hear("step", done, total, doing)

    def working(self, model: str) -> None:
        self._hear("working", model)

    def note(self, text: str) -> None:
        self._hear("note", text)

    def warn(self, text: str) -> None:
        self._hear("warn", text)

    def texts(self, call: str) -> list[str]:
        """First arguments of all calls of one kind, such as `note`."""
        return [str(event.arguments[0]) for event in self.calls if event.call == call]
