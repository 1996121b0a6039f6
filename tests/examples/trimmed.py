"""A scan's result without what differs from one run or machine to the next, so that the repository can keep it."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from qres.records.result import Result
from tests.examples.levels import changed_level

SYSTEM, ELAPSED_S = "CPU : AVX2 = 1 |", 1.0
DIGITS = 8
"""Of every float. Six would do for reading, but differences and sums of rounded numbers are then off by more than the
millionth that tests allow them."""

_Value = TypeVar("_Value")


def trimmed(result: Result) -> Result:
    """The result with another clock, CPU and folder: files lie in `models`, numbers have DIGITS significant digits."""
    placed = replace(
        result,
        reference=replace(result.reference, path=_placed(result.reference.path)),
        settings=replace(result.settings, system=SYSTEM, elapsed_s=ELAPSED_S),
        levels=tuple(changed_level(level, path=_placed(level.file.path)) for level in result.levels),
        prediction=replace(result.prediction, elapsed_s=ELAPSED_S),
    )
    return rounded(placed)


def _placed(path: str) -> str:
    return f"models/{PurePath(path).name}"


def rounded(value: _Value) -> _Value:
    """The record with each float of it rounded, all the way down."""
    found: object = value
    if isinstance(value, float):
        found = float(f"{value:.{DIGITS}g}")
    elif isinstance(value, tuple):
        found = tuple(rounded(item) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = replace(
            value, **{field.name: rounded(getattr(value, field.name)) for field in dataclasses.fields(value)}
        )
    return found  # type: ignore[return-value]
