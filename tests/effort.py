"""How much work something is, counted instead of timed: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that a call runs, in whatever it calls as well; a comprehension's turns count one by one.

    What C does (a sort, a search in a string) counts nothing.
    """
    lines = 0

    def trace(_frame: FrameType, event: str, _arg: Any) -> Any:  # noqa: ANN401 - as sys.settrace wants it
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
