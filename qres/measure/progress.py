"""Progress of the measuring, counted in decodes."""

from __future__ import annotations

from qres.events import Listener


class DecodeProgress:
    """Counts decodes against the plan, and tells a listener."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._done = 0
        self.total = 0
        """Of the whole scan; nothing is told before it is known."""

    def working(self, model: str) -> None:
        """A model begins to work."""
        self.listener.working(model)

    def step(self, doing: str) -> None:
        """One decode is done."""
        self._done += 1
        if self.total:
            self.listener.step(min(self._done, self.total), self.total, doing)

    def resume(self, done: int) -> None:
        """Decodes of an earlier run count as done."""
        self._done += done
