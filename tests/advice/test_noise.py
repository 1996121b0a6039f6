"""When the reference against itself is noise, and when it is none."""

from __future__ import annotations

import math

import pytest

from qres.advice import noise
from qres.records.stream import NoiseFloor

SMALL = noise.floor(2e-7, 3e-5, (1e-5, None, 4e-5))


def test_small_floor_counts_as_measured() -> None:
    assert (SMALL.kld_mean, SMALL.drift_median, SMALL.drift_points) == (2e-7, 3e-5, (1e-5, None, 4e-5))
    assert (SMALL.measured_kld, SMALL.measured_drift) == (2e-7, 3e-5)
    assert (SMALL.reason, SMALL.drift_reason) == ("", "")


@pytest.mark.parametrize(
    ("kld", "counts", "words"),
    [
        (0.0, True, ""),
        (noise.MOST_KLD, True, ""),
        (noise.MOST_KLD * 1.01, False, "0.001 at most"),
        (8.8e36, False, "8.8e+36"),
        (math.inf, False, "no finite KLD"),
        (math.nan, False, "no finite KLD"),
        (None, False, "no finite KLD"),
    ],
)
def test_kld_floor(kld: float | None, counts: bool, words: str) -> None:
    found = noise.floor(kld, 3e-5, (1e-5,))
    assert found.kld_mean == (kld if counts else None)
    assert words in found.reason
    assert bool(found.reason) is not counts
    assert found.measured_kld == (kld if kld is not None and math.isfinite(kld) else None)
    assert (found.drift_median, found.drift_points, found.drift_reason) == (3e-5, (1e-5,), "")


@pytest.mark.parametrize(
    ("drift", "counts"),
    [(0.0, True), (1.0, True), (1.01, False), (math.inf, False), (math.nan, False), (None, False)],
)
def test_drift_floor(drift: float | None, counts: bool) -> None:
    found = noise.floor(1e-7, drift, (1e-5, math.nan, math.inf))
    assert found.drift_median == (drift if counts else None)
    assert found.drift_points == ((1e-5, None, None) if counts else ())
    assert bool(found.drift_reason) is not counts
    assert (found.kld_mean, found.reason) == (1e-7, "")


def test_floor_above_the_most_damaged_level_is_none() -> None:
    found = noise.beside(SMALL, [1e-7, 1.9e-7, None, math.nan], [1.0])
    assert found.kld_mean is None
    assert "2e-07, and no level differs from it by more than 1.9e-07" in found.reason
    assert found.measured_kld == 2e-7
    assert found.drift_median == 3e-5
    found = noise.beside(SMALL, [1.0], [2e-5, None, 2.9e-5])
    assert (found.drift_median, found.drift_points, found.kld_mean) == (None, (), 2e-7)
    assert "3e-05, and no level drifts from it by more than 2.9e-05" in found.drift_reason


@pytest.mark.parametrize(
    ("klds", "drifts"),
    [
        ([1e-9, 2e-7], [1e-6, 3e-5]),  # one level is as damaged as the floor is high
        ([0.0], [0.0]),  # an exact copy
        ([0.0, None], [None]),
        ([], []),
    ],
)
def test_floor_stays_beside(klds: list[float | None], drifts: list[float | None]) -> None:
    assert noise.beside(SMALL, klds, drifts) == SMALL


def test_floor_that_was_not_measured_keeps_its_reason() -> None:
    found = noise.none("a diffusion model")
    assert found == NoiseFloor(None, None, reason="a diffusion model", drift_reason="a diffusion model")
    assert noise.beside(found, [1.0], [1.0]) == found
