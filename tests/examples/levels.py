"""Levels of a result with other figures, wherever in the record these stand."""

from __future__ import annotations

import dataclasses
from typing import Any

from qres.records.files import LevelFile
from qres.records.result import Level
from qres.records.units import Sensitivity


def changed_level(level: Level, **changes: Any) -> Level:  # noqa: ANN401 - fields of Level and of its file and units
    """The level with other values of fields of its own, of its file, or of its sensitivity."""

    def of(kind: type) -> dict[str, Any]:
        return {field.name: changes.pop(field.name) for field in dataclasses.fields(kind) if field.name in changes}

    file = dataclasses.replace(level.file, **of(LevelFile))
    sensitivity = dataclasses.replace(level.sensitivity, **of(Sensitivity))
    return dataclasses.replace(level, file=changes.pop("file", file), sensitivity=sensitivity, **changes)
