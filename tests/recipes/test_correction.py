"""Predictions made steadier and corrected: against the textbook's formula, and on made-up models that are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qres.recipes import correction
from qres.records.prediction import Calibration, TensorDamage, TypeDamage
from qres.records.result import Level, Result
from qres.records.units import Unit
from tests.examples.levels import changed_level
from tests.examples.result import example

WEIGHTS = 1000


def damage(layer: int, value: float, error: float = 0.2, role: str = "ffn up") -> TensorDamage:
    """A tensor of one role with two types, one of which does four times the damage."""
    types = tuple(
        TypeDamage(name, size, value * times, value * times * error)
        for name, size, times in (("Q4_K", 500, 4.0), ("Q5_K", 600, 1.0))
    )
    return TensorDamage(f"blk.{layer}.{role}", role, f"{layer}.ffn", layer, WEIGHTS, types)


def steadied(values: list[float], error: float = 0.2) -> list[float]:
    rows = [damage(i, value, error) for i, value in enumerate(values)]
    found = correction.steadied(rows)
    return [value * found[row.tensor, row.unit] for value, row in zip(values, rows, strict=True)]


def test_equal_predictions_stay() -> None:
    assert steadied([0.01] * 8) == pytest.approx([0.01] * 8)


def test_noise_is_drawn_towards_the_neighbours() -> None:
    """Of errors of a fifth a fifth goes, where neighbours differ by less than a tensor's own part may."""
    left = []
    for seed in range(20):
        truth = 0.01 * np.exp(np.linspace(0, 1, 24))
        noisy = truth * np.exp(np.random.default_rng(seed).normal(0, 0.2, 24))
        before, after = (np.log(np.array(values) / truth) for values in (noisy, steadied(noisy.tolist())))
        left.append(float(np.sqrt((after**2).mean() / (before**2).mean())))
    assert max(left) < 0.9
    assert float(np.mean(left)) == pytest.approx(0.79, abs=0.03)


def test_exact_predictions_stay() -> None:
    values = [0.01, 0.012, 0.009, 0.02, 0.011, 0.01]
    assert steadied(values, error=1e-6) == pytest.approx(values, rel=1e-6)


def test_outlier_beyond_its_error_keeps_most_of_its_figure() -> None:
    values = [0.01] * 5 + [0.2] + [0.01] * 6
    found = steadied(values)
    assert 0.14 < found[5] < 0.2
    assert found[4] == pytest.approx(0.01, rel=0.1)


def test_factor_is_the_same_for_all_types_and_needs_five_layers() -> None:
    rows = [damage(i, value) for i, value in enumerate((0.01, 0.03, 0.01, 0.02))]
    assert set(correction.steadied(rows).values()) == {1.0}
    assert correction.steadied(()) == {}


def test_roles_do_not_see_each_other() -> None:
    up = [damage(i, 0.01 * (1 + i % 2)) for i in range(8)]
    down = [damage(i, 5.0, role="ffn down") for i in range(8)]
    alone, together = correction.steadied(up), correction.steadied([*up, *down])
    assert all(together[key] == value for key, value in alone.items())


def test_expectation_is_the_textbooks() -> None:
    """Without outliers: mean + K (K + N)^-1 (y - mean), in plain numpy."""
    values, error = [0.01, 0.013, 0.011, 0.012, 0.01, 0.014], 0.3
    y = np.log(np.array(values) * 2 / WEIGHTS)  # the mean of both types' logarithms
    layer = np.arange(6.0)
    near = np.exp(-((layer[:, None] - layer) ** 2) / (2 * correction.ROLE_REACH**2))
    prior = correction.ROLE_LEVEL**2 + correction.ROLE_SMOOTH**2 * near + correction.ROLE_OWN**2 * np.eye(6)
    expected = np.median(y) + prior @ np.linalg.inv(prior + error**2 * np.eye(6)) @ (y - np.median(y))
    assert steadied(values, error) == pytest.approx((np.exp(expected) * WEIGHTS / 2).tolist())


# -- measured over predicted


def unit(layer: int, kld: float, predicted: float, method: str = "patched", error: float = 0.02) -> Unit:
    """A unit with both figures."""
    base = example_unit()
    return replace(
        base,
        unit=f"{layer}.ffn",
        layer=layer,
        kind="branch",
        branch="ffn",
        kld=kld,
        kld_se=kld * error,
        predicted_kld=predicted,
        predicted_se=predicted * error,
        method=method,
    )


def example_unit() -> Unit:
    return next(unit for level in example().levels for unit in level.sensitivity.units)


def scanned(*units: Unit, factor: float = 1.0, layers: int = 10) -> Result:
    """A result with one level that has these units."""
    result = example()
    level: Level = changed_level(result.levels[0], units=units, calibration=Calibration(factor, 1.0, None, factor))
    return replace(result, levels=(level,), reference=replace(result.reference, n_layer=layers))


def corrections(*units: Unit, factor: float = 1.0) -> dict[str, float]:
    return correction.corrections(scanned(*units, factor=factor), {})


@pytest.fixture(autouse=True)
def _without_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correction, "_steadied_units", lambda *_: {})


def test_units_without_both_figures_say_nothing() -> None:
    assert corrections(unit(1, 0.1, 0.05, method="not chosen")) == {}


def test_predictions_are_compared_as_calculated() -> None:
    """Calibrated ones are the level's factor larger."""
    plain, calibrated = corrections(unit(5, 0.02, 0.01)), corrections(unit(5, 0.02, 0.02), factor=2.0)
    assert plain["5.ffn"] == pytest.approx(calibrated["5.ffn"])
    assert 1.8 < plain["5.ffn"] < 2.0


def test_correction_reaches_neighbours_and_fades_to_the_common_part() -> None:
    rest = [unit(layer, 0.01, 0.01, method="not chosen") for layer in (1, 2, 9)]
    found = corrections(unit(0, 0.02, 0.01), *rest)
    assert found["0.ffn"] > found["1.ffn"] > found["2.ffn"] > found["9.ffn"] > 1.0
    common = correction.COMMON**2 / (correction.COMMON**2 + correction.SMOOTH**2 + correction.OWN**2)
    assert math.log(found["9.ffn"]) == pytest.approx(common * math.log(2), rel=0.05)


def test_uncertain_ratios_count_less() -> None:
    sure, unsure = corrections(unit(5, 0.02, 0.01)), corrections(unit(5, 0.02, 0.01, error=0.7))
    assert 1.0 < unsure["5.ffn"] < sure["5.ffn"]


def test_kinds_share_only_a_part() -> None:
    attention = replace(unit(5, 0.01, 0.01, method="not chosen"), unit="5.attention", branch="attention")
    other = replace(attention, unit="5.ffn.2", branch="ffn")
    found = corrections(unit(5, 0.02, 0.01), attention, other)
    assert found["5.ffn"] > found["5.ffn.2"] > found["5.attention"] > 1.0
