"""Levels of a result with other figures, wherever in the record these stand."""

from __future__ import annotations

import dataclasses
from typing import Any

from qres.records.files import LevelFile
from qres.records.result import Level
from qres.records.units import Sensitivity

NOT_PATCHED = "outside the default budget"


def changed_level(level: Level, **changes: Any) -> Level:  # noqa: ANN401 - fields of Level and of its file and units
    """The level with other values of fields of its own, of its file, or of its sensitivity."""

    def of(kind: type) -> dict[str, Any]:
        return {field.name: changes.pop(field.name) for field in dataclasses.fields(kind) if field.name in changes}

    file = dataclasses.replace(level.file, **of(LevelFile))
    sensitivity = dataclasses.replace(level.sensitivity, **of(Sensitivity))
    return dataclasses.replace(level, file=changes.pop("file", file), sensitivity=sensitivity, **changes)


def unpatched(level: Level, *units: str) -> Level:
    """The level with units that were not patched and have a prediction only, as where a model has many units."""
    rows = tuple(
        dataclasses.replace(unit, kld=None, kld_se=None, method=NOT_PATCHED) if unit.unit in units else unit
        for unit in level.sensitivity.units
    )
    return changed_level(level, units=rows)
