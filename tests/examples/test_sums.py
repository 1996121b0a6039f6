"""The numbers of a real result hang together, by sums, sizes and statistics that are calculated here without qres.

What qres makes of measurements alone (verdict, devices, recipes) is made again from the record, and must be the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from scipy import stats

from qres.advice import devices, verdict
from qres.pipeline import usual_recipes
from qres.records.recipe import Recipe
from qres.records.result import Level
from tests.examples.result import example
from tests.examples.trimmed import DIGITS

EXAMPLE = example()
LEVELS = pytest.mark.parametrize("level", EXAMPLE.levels, ids=[level.name for level in EXAMPLE.levels])
RECIPES = pytest.mark.parametrize("one", EXAMPLE.recipes, ids=[recipe.budget for recipe in EXAMPLE.recipes])


# -- sizes


def bytes_of(shape: tuple[int, ...], type_name: str) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return math.prod(shape) // block_size * block_bytes


def padded(n_bytes: int) -> int:
    return n_bytes + -n_bytes % 32


def sizes(types: Mapping[str, str]) -> dict[str, int]:
    """Tensor -> its bytes."""
    return {tensor.name: bytes_of(tensor.shape, types[tensor.name]) for tensor in EXAMPLE.tensors}


def held(level: Level) -> dict[str, str]:
    """Tensor -> its type in the level's file."""
    return dict(zip((tensor.name for tensor in EXAMPLE.tensors), level.file.tensor_types, strict=True))


def planned(one: Recipe) -> dict[str, str]:
    return {tensor.name: tensor.type for tensor in one.tensors}


def header_bytes() -> int:
    """What every made file has beside its tensors."""
    (size,) = {level.file.bytes - sum(map(padded, sizes(held(level)).values())) for level in EXAMPLE.levels}
    return size


@LEVELS
def test_level_is_made_of_its_tensors(level: Level) -> None:
    by_type: Counter[str] = Counter()
    for tensor, size in sizes(held(level)).items():
        by_type[held(level)[tensor]] += size
    assert {share.type: share.bytes for share in level.file.types} == by_type
    assert level.file.bpw == pytest.approx(8 * by_type.total() / sum(math.prod(t.shape) for t in EXAMPLE.tensors))
    assert {row.weights_bytes for row in EXAMPLE.deployment if row.level == level.name} == {by_type.total()}
    assert level.file.tensor_types == next(rung.types for rung in EXAMPLE.ladder if rung.level == level.name)
    assert level.file.fallback_tensors == ()
    assert 0 < header_bytes() < 10_000


def test_reference_is_made_of_its_tensors() -> None:
    reference = EXAMPLE.reference
    assert {share.type: share.tensors for share in reference.types} == Counter(t.type for t in EXAMPLE.tensors)
    assert sum(share.bytes for share in reference.types) == sum(
        sizes({t.name: t.type for t in EXAMPLE.tensors}).values()
    )
    assert reference.bytes > sum(share.bytes for share in reference.types)


def test_tensors_that_levels_share_have_one_type_in_both() -> None:
    (row,) = EXAMPLE.shared
    a, b = (held(level) for level in EXAMPLE.levels)
    alike = {
        tensor.name: a[tensor.name]
        for tensor in EXAMPLE.tensors
        if tensor.type_16bit and a[tensor.name] == b[tensor.name]
    }
    assert (row.tensors, row.bytes) == (len(alike), sum(sizes(a)[name] for name in alike))
    assert row.of == sum(bool(tensor.type_16bit) for tensor in EXAMPLE.tensors)


# -- the stream and the output


@LEVELS
def test_stream_of_a_level_adds_up(level: Level) -> None:
    points = level.points
    assert math.fsum(point.ledger_share or 0.0 for point in points) == pytest.approx(1)
    for before, point in pairwise(points):
        assert before.drift_median
        assert point.drift_median
        assert point.drift_growth == pytest.approx(point.drift_median / before.drift_median)
        assert point.sqnr_db == pytest.approx(-20 * math.log10(point.drift_median))
    for row in EXAMPLE.stream:
        assert row.absmax
        assert row.f16_headroom == pytest.approx(65_504 / row.absmax)


@LEVELS
def test_every_scored_position_is_in_one_group_and_one_bin(level: Level) -> None:
    out = level.output
    assert out.tokens == out.chunks * (EXAMPLE.settings.n_ctx // 2 - 1) == EXAMPLE.settings.scored_tokens
    for groups in (out.by_position, out.by_confidence):
        assert sum(group.tokens for group in groups) == out.tokens
        total = math.fsum(group.tokens * (group.kld_mean or 0.0) for group in groups)
        assert out.kld_mean == pytest.approx(total / out.tokens)
    assert sum(out.kld_histogram.counts) == out.tokens
    assert len(out.kld_histogram.edges) == len(out.kld_histogram.counts) + 1
    assert out.ppl is not None
    assert out.ppl_reference is not None
    assert out.ln_ppl_ratio == pytest.approx(math.log(out.ppl) - math.log(out.ppl_reference), abs=10.0 ** (1 - DIGITS))


# -- units


@LEVELS
def test_predictions_of_units_are_sums_of_tensors_times_the_factor(level: Level) -> None:
    calibration = level.sensitivity.calibration
    assert calibration is not None
    for unit in level.sensitivity.units:
        parts = [row for row in EXAMPLE.prediction.tensors if row.unit == unit.unit]
        assert {row.tensor for row in parts} == set(unit.weights)
        sums = [one.predicted_kld for row in parts for one in row.types if one.type == held(level)[row.tensor]]
        assert len(sums) == len(parts)
        assert unit.predicted_kld == pytest.approx(calibration.factor * math.fsum(kld or 0.0 for kld in sums))
        assert unit.bytes_at_level == sum(sizes(held(level))[name] for name in unit.weights)
    total = math.fsum(unit.predicted_kld or 0.0 for unit in level.sensitivity.units)
    assert total == pytest.approx(calibration.measured_kld)
    assert total == pytest.approx(calibration.factor * calibration.predicted_kld)


@LEVELS
def test_trust_is_scipys(level: Level) -> None:
    found, units = level.sensitivity.trust, level.sensitivity.units
    assert found is not None
    pairs = [(math.log(unit.predicted_kld), math.log(unit.kld)) for unit in units if unit.predicted_kld and unit.kld]
    x, y = zip(*pairs, strict=True)
    assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found.slope == pytest.approx(stats.linregress(x, y).slope)
    assert found.units == len(pairs) == found.top + found.random + 1  # and the head
    off = {unit.unit: abs(a - b) for unit, (a, b) in zip(units, pairs, strict=True)}
    assert list(found.worst) == sorted(off, key=lambda name: -off[name])[:3]


@LEVELS
def test_rank_correlations_are_scipys(level: Level) -> None:
    found = level.sensitivity.rank_correlation
    assert found is not None
    branches = [unit for unit in level.sensitivity.units if unit.kind == "branch"]
    klds = [unit.kld for unit in branches]
    measures = {
        "branch_ratio": [unit.ratio for unit in branches],
        "drift": [unit.drift for unit in branches],
        "local_error": [unit.local_error for unit in branches],
        "injected_error": [unit.injected_error for unit in branches],
        "depth": [unit.layer for unit in branches],
    }
    for name, values in measures.items():
        assert getattr(found, name) == pytest.approx(stats.spearmanr(values, klds).statistic), name
    assert found.units == len(branches)


@LEVELS
def test_keep_list_is_of_its_units(level: Level) -> None:
    units = {unit.unit: unit for unit in level.sensitivity.units}
    known, check = level.sensitivity.additivity, level.sensitivity.keep_check
    assert known is not None
    assert known.kld_level is not None
    assert known.kld_sum_of_units == pytest.approx(math.fsum(unit.kld or 0.0 for unit in units.values()))
    for row in level.sensitivity.keep_16bit:
        assert row.kld_recovered == units[row.unit].kld
        assert row.gap_share == pytest.approx(row.kld_recovered / known.kld_level)
        assert row.bytes_added == units[row.unit].bytes_at_16bit - units[row.unit].bytes_at_level
    worth = [row for row in level.sensitivity.keep_16bit if row.worth_it]
    assert worth
    assert check is not None
    assert check.units == tuple(row.unit for row in worth if row.unit != "head")
    assert check.recovered_share == pytest.approx(1 - check.kld_without_units / check.kld_all_injected)
    assert check.bytes_added == sum(row.bytes_added for row in worth if row.unit != "head")


# -- recipes


def damages(types: Mapping[str, str]) -> dict[str, float]:
    """Tensor -> its raw prediction, straight from the rows of the prediction."""
    exact = {tensor.name for tensor in EXAMPLE.tensors if types[tensor.name] in (tensor.type, tensor.type_16bit)}
    sums = dict.fromkeys(types, 0.0)
    for row in EXAMPLE.prediction.tensors:
        if row.tensor not in exact:
            sums[row.tensor] += next(one.predicted_kld or 0.0 for one in row.types if one.type == types[row.tensor])
    return sums


def raw_damages(one: Recipe) -> dict[str, float]:
    """Tensor -> what the recipe says of it, not calibrated."""
    assert one.predicted is not None
    return {tensor.name: (tensor.predicted_kld or 0.0) / one.predicted.factor for tensor in one.tensors}


def proportions() -> dict[str, float]:
    """Tensor -> what recipes make of its rows in the prediction: the same at every type."""
    one = EXAMPLE.recipes[0]
    rows, own = damages(planned(one)), raw_damages(one)
    assert len([name for name in rows if rows[name]]) == 30  # every matrix is quantized there
    return {name: own[name] / rows[name] for name in rows if rows[name]}


def damage_of(types: Mapping[str, str]) -> float:
    """Raw prediction of a file."""
    known = proportions()
    return math.fsum(known[name] * damage for name, damage in damages(types).items() if damage)


def test_stock_is_the_ladder_by_size() -> None:
    names = [tensor.name for tensor in EXAMPLE.tensors]
    by_level = {rung.level: sum(sizes(dict(zip(names, rung.types, strict=True))).values()) for rung in EXAMPLE.ladder}
    assert {stock.level: stock.bytes for stock in EXAMPLE.stock} == by_level
    assert [stock.bytes for stock in EXAMPLE.stock] == sorted(by_level.values())
    klds = {stock.level: stock.predicted.kld for stock in EXAMPLE.stock if stock.predicted}
    assert set(klds) == set(by_level)
    for level in EXAMPLE.levels:
        assert klds[level.name] == pytest.approx(level.output.kld_mean)  # calibrated on them


@RECIPES
def test_recipe_adds_up(one: Recipe) -> None:
    assert [tensor.name for tensor in one.tensors] == [tensor.name for tensor in EXAMPLE.tensors]
    assert {tensor.name: tensor.bytes for tensor in one.tensors} == sizes(planned(one))
    assert one.bytes == sum(tensor.bytes for tensor in one.tensors)
    assert one.limit_bytes is not None
    assert 0.99 * one.limit_bytes < one.bytes <= one.limit_bytes
    assert one.predicted is not None
    assert one.predicted.raw_kld == pytest.approx(damage_of(planned(one)))
    assert one.predicted.kld == pytest.approx(one.predicted.raw_kld * one.predicted.factor)
    assert one.predicted.kld == pytest.approx(math.fsum(tensor.predicted_kld or 0.0 for tensor in one.tensors))
    assert one.predicted.low < one.predicted.kld < one.predicted.high
    rival = one.stock[0].predicted
    assert rival is not None
    assert one.predicted.kld < rival.kld


@RECIPES
def test_tensors_of_a_recipe_are_predicted_in_proportion_to_their_rows(one: Recipe) -> None:
    known = proportions()
    assert all(0.3 < value < 3 for value in known.values())
    own = raw_damages(one)
    for name, damage in damages(planned(one)).items():
        assert own[name] == pytest.approx(damage * known.get(name, 0.0)), name


def test_mixes_are_the_lower_edge() -> None:
    for smaller, larger in pairwise(EXAMPLE.mixes):
        assert (smaller.bytes < larger.bytes, smaller.kld > larger.kld) == (True, True)
    points = [(one.bytes, one.predicted) for one in EXAMPLE.stock]
    points += [(one.bytes, one.predicted) for one in EXAMPLE.recipes]
    for n_bytes, expected in points:
        assert expected is not None
        assert not [mix for mix in EXAMPLE.mixes if mix.bytes >= n_bytes and mix.kld > expected.kld * 1.0001]


@RECIPES
def test_verification_agrees_with_its_recipe(one: Recipe) -> None:
    found = one.verification
    assert found is not None
    assert one.built is not None
    file_bytes = sum(padded(tensor.bytes) for tensor in one.tensors) + header_bytes()
    assert (one.built.tensor_bytes, one.built.file_bytes) == (one.bytes, file_bytes)
    assert found.file == PurePath(one.built.file).name
    assert (found.predicted, found.recipe.bytes) == (one.predicted, one.bytes)
    assert found.tokens == found.chunks * (found.n_ctx // 2 - 1)
    assert [(level.name, level.bytes) for level in found.levels] == [(s.level, s.bytes) for s in one.stock]
    own = found.recipe.kld
    assert own is not None
    for level, pair in zip(found.levels, found.pairs, strict=True):
        assert level.name == pair.level
        assert level.kld is not None
        assert pair.kld_difference == pytest.approx(own - level.kld)
    assert one.predicted is not None
    assert found.inside == (one.predicted.low <= own <= one.predicted.high)
    rival = one.stock[0].predicted
    assert rival is not None
    assert found.predicted_here == pytest.approx((found.levels[0].kld or 0.0) * one.predicted.kld / rival.kld)


def test_recoveries_leave_what_they_say() -> None:
    names = [level.name for level in EXAMPLE.levels]
    assert {(row.level, row.share) for row in EXAMPLE.recoveries} == {(n, s) for n in names for s in (0.1, 0.25, 0.5)}
    for row in EXAMPLE.recoveries:
        assert row.layers_bytes is not None
        assert row.raised_bytes is not None
        assert row.free_bytes is not None
        assert row.free_bytes <= row.raised_bytes <= row.layers_bytes
        types = held(next(level for level in EXAMPLE.levels if level.name == row.level))
        layers = {name.removeprefix("layer ") for name in row.layers}
        exact = {t.name: t.type for t in EXAMPLE.tensors if t.name.removeprefix("blk.").split(".")[0] in layers}
        assert row.layers_bytes == sum(sizes(types | exact).values()) - sum(sizes(types).values())
        assert damage_of(types | exact) <= (1 - row.share) * damage_of(types) * 1.0001


# -- made again from the record


def test_verdict_and_devices_follow_from_what_was_measured() -> None:
    assert verdict.verdict(EXAMPLE.reference, EXAMPLE.levels, EXAMPLE.noise_floor) == EXAMPLE.verdict
    assert devices.device_advice(EXAMPLE.levels, EXAMPLE.deployment) == EXAMPLE.device_advice


def test_recipes_follow_from_what_was_predicted() -> None:
    bare: dict[str, Any] = dict.fromkeys(("mixes", "stock", "recoveries", "recipes"), ())
    again = usual_recipes.planned(dataclasses.replace(EXAMPLE, **bare))
    for part in ("mixes", "stock", "recoveries"):
        same(getattr(again, part), getattr(EXAMPLE, part), part)
    unbuilt = [dataclasses.replace(one, built=None, verification=None) for one in EXAMPLE.recipes]
    same(again.recipes, tuple(unbuilt), "recipes")


def same(new: object, old: object, path: str) -> None:
    """Equal, but for the digits that the record does not have."""
    if isinstance(old, float):
        assert new == pytest.approx(old), path
    elif isinstance(old, tuple) and isinstance(new, tuple):
        assert len(new) == len(old), path
        for i, (a, b) in enumerate(zip(new, old, strict=True)):
            same(a, b, f"{path}[{i}]")
    elif dataclasses.is_dataclass(old):
        assert type(new) is type(old), path
        for field in dataclasses.fields(old):
            same(getattr(new, field.name), getattr(old, field.name), f"{path}.{field.name}")
    else:
        assert new == old, path
