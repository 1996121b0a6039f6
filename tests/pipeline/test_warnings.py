"""Damage that does not come from the bits of the weights, in words, and when nothing is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qres.pipeline.warnings import warnings
from qres.records.result import Level
from tests.examples.result import example

RESULT = example()
LEVEL = RESULT.levels[0]
KLD = LEVEL.sensitivity.additivity.kld_level if LEVEL.sensitivity.additivity else None


def said(level: Level, floor: float | None = 1e-6) -> list[str]:
    """What is said of the level's damage."""
    found = warnings(RESULT.settings, [level], [], [], floor)
    return [text for text in found if "weights explain" in text or "times what is predicted" in text]


def changed(explained: float = 1.0, factor: float = 1.0) -> Level:
    """The level where the errors of its weights explain so much of its KLD, and predictions were off by that factor."""
    found = LEVEL.sensitivity
    assert found.additivity is not None
    assert found.calibration is not None
    assert KLD is not None
    units = tuple(replace(unit, kld=0.0) if unit.kind == "head" else unit for unit in found.units)
    return replace(
        LEVEL,
        sensitivity=replace(
            found,
            units=units,
            additivity=replace(found.additivity, kld_all_injected=explained * KLD),
            calibration=replace(found.calibration, factor=factor),
        ),
    )


def test_nothing_is_said_of_a_real_level() -> None:
    assert all(said(level) == [] for level in RESULT.levels)


@pytest.mark.parametrize("explained", [0.4, 0.01, 0.0])
def test_damage_that_the_weights_do_not_explain(explained: float) -> None:
    (text,) = said(changed(explained=explained, factor=1 / max(explained, 0.01)))
    assert f"explain a KLD of {explained * (KLD or 0):.3g}, {KLD:.3g} was measured" in text
    assert "does not come from the bits of its weights" in text


@pytest.mark.parametrize(("factor", "words"), [(2.5, "2.5 times"), (37.0, "37 times"), (0.3, "0.3 times")])
def test_a_factor_far_from_one(factor: float, words: str) -> None:
    (text,) = said(changed(factor=factor))
    assert f"its KLD is {words} what is predicted from its weights" in text


@pytest.mark.parametrize(("explained", "factor"), [(1.0, 1.9), (0.6, 1.0), (1.7, 0.6)])
def test_within_a_factor_of_two_nothing_is_said(explained: float, factor: float) -> None:
    assert said(changed(explained, factor)) == []


def test_near_the_noise_floor_nothing_is_said() -> None:
    level = changed(explained=0.1, factor=10)
    kld = level.output.kld_mean
    assert kld is not None
    assert said(level, floor=kld / 9) == []
    assert len(said(level, floor=kld / 11)) == 1
    assert len(said(level, floor=None)) == 1


def test_another_function_is_said_instead() -> None:
    level = replace(changed(explained=0.1, factor=10), differs=("a.b is 1 in the reference, 2 in the file",))
    found = warnings(RESULT.settings, [level], [], [], None)
    assert said(level) == []
    assert found[0].endswith(
        "does not compute the same function as the reference: a.b is 1 in the reference, 2 in the file."
    )
